"""Stores parameters of a training objective, such as a decoder, in two files.

The files are in the folder of a model in another library's format. Other libraries ignore them.

`objective.json` contains the objective's name, the values of `config.objective` that determine its
parameters, and arguments of the model that libraries' files do not contain (`MODEL_VALUES`).
`objective.safetensors` contains the parameters under vit_jax's parameter paths, and the objective's
state as `state/...`.
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.tensor_files import (
    Tensor,
    check_float,
    open_tensors,
    without_prefix,
    write_safetensors,
)
from vit_jax.small_files import read_small

WORDS, TENSORS = "objective.json", "objective.safetensors"
# Model arguments in `objective.json`. Other libraries' files do not contain `position_resize`,
# which changes the outputs for images of other sizes.
MODEL_VALUES = ("position_resize",)
MASK = "mask"  # Stands for any objective whose only parameter is a mask token.
_STATE = "state/"

Shapes = dict[str, tuple[int, ...]]  # Shapes of parameters by vit_jax's paths.


class ObjectiveParams(NamedTuple):
    """Parameters of a training objective in a checkpoint, which are read on demand.

    Attributes:
      name: name of the objective, or `MASK`.
      values: values of `config.objective` that the checkpoint contains.
      sources: called with a dictionary from each parameter's path to its expected shape. Returns a
        dictionary from each path to a function that reads the parameter. Raises UserError if the
        checkpoint's shapes differ from the expected shapes.
      shapes: returns the shapes of all parameters by path; None: `values` determine the shapes.
      state: the objective's state, such as a codebook, by name. Nested state has a path as name,
        such as `statistics/norm/mean`.
      class_names: names of the classes that the objective's head predicts; empty: no such head.
      model_values: arguments of the model (`MODEL_VALUES`) that replace those of the model's files.
    """

    name: str
    values: dict[str, Any]
    sources: Callable[[Shapes], dict[str, Callable[[], np.ndarray]]]
    shapes: Callable[[], Shapes] | None = None
    state: dict[str, Tensor] = {}
    class_names: tuple[str, ...] = ()
    model_values: dict[str, Any] = {}

    @property
    def words(self) -> str:
        """Description of the parameters for messages, such as "mae's own parameters"."""
        return (
            "the token of masked patches" if self.name == MASK else f"{self.name}'s own parameters"
        )

    def count(self, shapes: Shapes) -> str:
        """Describes the number of scalar parameters and the names of the arrays in the state."""
        state = f", with {' and '.join(sorted(self.state))}" if self.state else ""
        return f"{self.words}, {sum(map(math.prod, shapes.values())):,}{state}"


def check_shapes(place: str, name: str, shapes: Shapes, expected: Shapes) -> None:
    """Raises UserError if a parameter of an objective is missing or has an unexpected shape."""
    for path, shape in expected.items():
        if shapes.get(path) != tuple(shape):
            was = (
                f"has {name}'s {path} as {list(shapes[path])}"
                if path in shapes
                else f"lacks {name}'s {path}"
            )
            raise UserError(f"{place} {was}, but the objective has {list(shape)}")


def open_objective_files(
    folder: Path, finite: Callable[[np.ndarray, str], np.ndarray]
) -> ObjectiveParams | None:
    """Opens the files of a training objective in a model's folder.

    Args:
      folder: the folder of the model.
      finite: called with values and their name; returns the values, or raises UserError if a value
        is NaN or infinite.

    Returns:
      The parameters; None if there is no `objective.json`, or `folder` is not a folder.

    Raises:
      UserError: the files are damaged.
    """
    words = folder / WORDS
    if not words.is_file():
        return None
    try:
        content = json.loads(read_small(words))
        name = str(content["name"])
        values = {
            key: tuple(x) if isinstance(x, list) else x for key, x in content["values"].items()
        }
        model_values = dict(content.get("model", {}))
        if unknown := sorted(model_values.keys() - set(MODEL_VALUES)):
            raise ValueError(f"unknown arguments of the model: {', '.join(unknown)}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{words} does not describe an objective ({type(error).__name__}: {error})"
        ) from error
    tensors = open_tensors(folder / TENSORS)
    for path, tensor in tensors.items():
        check_float(folder / TENSORS, path, tensor.dtype)

    def read(path: str) -> np.ndarray:
        return finite(tensors[path].read(), f"{folder}: {name}'s {path}")

    shapes_by_path = {
        path: tensor.shape for path, tensor in tensors.items() if not path.startswith(_STATE)
    }

    def sources(shapes: Shapes) -> dict[str, Callable[[], np.ndarray]]:
        check_shapes(str(folder), name, shapes_by_path, shapes)
        return {path: functools.partial(read, path) for path in shapes}

    state = {
        path: tensor._replace(read=functools.partial(read, _STATE + path))
        for path, tensor in without_prefix(tensors, _STATE).items()
    }
    return ObjectiveParams(
        name, values, sources, lambda: shapes_by_path, state, model_values=model_values
    )


def write_objective_files(
    folder: Path,
    name: str,
    values: dict[str, Any],
    params: dict[str, np.ndarray],
    state: dict[str, np.ndarray],
    model_values: dict[str, Any] | None = None,
) -> None:
    """Writes an objective's parameters, state and config values into a model's folder.

    Of the model's arguments, `model_values`, only those in `MODEL_VALUES` are written.
    """
    arrays = params | {_STATE + key: array for key, array in state.items()}
    write_safetensors(folder / TENSORS, {path: np.asarray(array) for path, array in arrays.items()})
    content: dict[str, Any] = dict(name=name, values=values)
    if kept := {key: x for key, x in (model_values or {}).items() if key in MODEL_VALUES}:
        content["model"] = kept
    (folder / WORDS).write_text(json.dumps(content, indent=2) + "\n")
