"""Parameters that an objective of training has beside a model, in two files that other libraries pass over.

In the model's folder `objective.json` names the objective and the values of `config.objective` that its
parameters were made by; `objective.safetensors` holds the parameters by our paths, and what it remembers as
`memory/...`.
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.tensor_files import Tensor, check_float, open_tensors, write_safetensors
from vit_jax.small_files import read_small

WORDS, TENSORS = "objective.json", "objective.safetensors"
MASK = "mask"  # In place of an objective's name, where there is the token of masked patches alone.
_MEMORY = "memory/"

Shapes = dict[str, tuple[int, ...]]  # By our path.


class ObjectiveParams(NamedTuple):
    """Parameters somewhere that an objective of training has beside a model's.

    Attributes:
      name: of the objective, or `MASK`.
      values: of `config.objective`, as far as the checkpoint says them.
      sources: turns shapes by our path into the reading of each parameter. It raises UserError where they are
        others.
      shapes: those of all of them; None: they follow from the values.
      memory: what the objective remembers, by name.
    """

    name: str
    values: dict[str, Any]
    sources: Callable[[Shapes], dict[str, Callable[[], np.ndarray]]]
    shapes: Callable[[], Shapes] | None = None
    memory: dict[str, Tensor] = {}

    @property
    def words(self) -> str:
        """The parameters, in words."""
        return "the token of masked patches" if self.name == MASK else f"{self.name}'s own parameters"

    def count(self, shapes: Shapes) -> str:
        """The parameters, their number, and what the objective remembers, in words."""
        remembered = f", with {' and '.join(sorted(self.memory))}" if self.memory else ""
        return f"{self.words}, {sum(map(math.prod, shapes.values())):,}{remembered}"


def check_shapes(place: str, name: str, own: Shapes, wanted: Shapes) -> None:
    """Raises UserError unless what is wanted of an objective is there, and in these shapes."""
    for path, shape in wanted.items():
        if own.get(path) != tuple(shape):
            was = f"has {name}'s {path} as {list(own[path])}" if path in own else f"lacks {name}'s {path}"
            raise UserError(f"{place} {was}, but the objective has {list(shape)}")


def open_beside(folder: Path, finite: Callable[[np.ndarray, str], np.ndarray]) -> ObjectiveParams | None:
    """The parameters of an objective in a folder; None where it has none.

    Args:
      finite: gives values back, and raises UserError with these words for such as are not finite.

    Raises:
      UserError: the files are damaged.
    """
    words = folder / WORDS
    if not words.is_file():
        return None
    try:
        said = json.loads(read_small(words))
        name = str(said["name"])
        values = {key: tuple(x) if isinstance(x, list) else x for key, x in said["values"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{words} does not describe an objective ({type(error).__name__}: {error})"
        ) from error
    tensors = open_tensors(folder / TENSORS)
    for path, tensor in tensors.items():
        check_float(folder / TENSORS, path, tensor.dtype)

    def read(path: str) -> np.ndarray:
        return finite(tensors[path].read(), f"{folder}: {name}'s {path}")

    own = {path: tensor.shape for path, tensor in tensors.items() if not path.startswith(_MEMORY)}

    def sources(shapes: Shapes) -> dict[str, Callable[[], np.ndarray]]:
        check_shapes(str(folder), name, own, shapes)
        return {path: functools.partial(read, path) for path in shapes}

    memory = {
        path.removeprefix(_MEMORY): tensor._replace(read=functools.partial(read, path))
        for path, tensor in tensors.items()
        if path.startswith(_MEMORY)
    }
    return ObjectiveParams(name, values, sources, lambda: own, memory)


def write_beside(
    folder: Path,
    name: str,
    values: dict[str, Any],
    own: dict[str, np.ndarray],
    memory: dict[str, np.ndarray],
) -> None:
    """Writes an objective's parameters, what they were made by, and what it remembers, beside a model."""
    arrays = own | {_MEMORY + key: array for key, array in memory.items()}
    write_safetensors(folder / TENSORS, {path: np.asarray(array) for path, array in arrays.items()})
    (folder / WORDS).write_text(json.dumps(dict(name=name, values=values), indent=2) + "\n")
