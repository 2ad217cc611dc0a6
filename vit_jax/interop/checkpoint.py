"""`Checkpoint`, the common form of checkpoints of all formats; builds models from parameters."""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.interop.layout import Entry
from vit_jax.interop.objective_files import ObjectiveParams
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.models import abstract, family_of
from vit_jax.models.image_model import ImageModel, height_and_width
from vit_jax.models.model_card import parameter_shapes
from vit_jax.options.model import ImageOptions, Statistic

Kind = TypeVar("Kind", bound=nnx.Module)


class Checkpoint(NamedTuple):
    """A model in a checkpoint of any format; its parameters are read on demand.

    Attributes:
      place: file, folder or workdir of the checkpoint, for messages.
      library: title of the library that wrote the checkpoint.
      options: the arguments of the model.
      shapes: shape of each parameter by path.
      read: called with the path of a parameter; returns the parameter in vit_jax's layout.
      mapped: the mapping from parameters to the library's tensors; empty for a checkpoint of a
        training run.
      assumed: description of the settings that were assumed because the files do not contain them.
      preprocessing: preprocessing of images; None: the files do not contain it.
      class_names: names of all classes; empty: unknown.
      objective: parameters of a training objective that are stored with the model.
      step: training step; None: not a checkpoint of a training run.
      probabilities: a key of `PROBABILITIES`: `softmax` or `sigmoid`.
    """

    place: str
    library: str
    options: ImageOptions
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    mapped: list[Entry] = []
    assumed: str = ""
    preprocessing: Preprocessing | None = None
    class_names: tuple[str, ...] = ()
    objective: ObjectiveParams | None = None
    step: int | None = None
    probabilities: str = "softmax"

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the model by name."""
        return asdict(self.options)

    def describe(self) -> str:
        """Returns a description of the checkpoint in one line."""
        parameters = sum(int(np.prod(shape)) for shape in self.shapes.values())
        height, width = height_and_width(self.options.image_size)
        head = f"{n:,} classes" if (n := self.options.num_classes) else "no head"
        head += " with a sigmoid each" if n and self.probabilities == "sigmoid" else ""
        named = self.step is None or self.place.endswith(f"@{self.step}")
        step = "" if named else f", step {self.step:,}"
        return (
            f"{model_name(self.options)} of {self.library} ({self.place}{step}): "
            f"{parameters / 1e6:,.2f} M parameters, {height}x{width} pixels{self._statistics()}, "
            f"{head}"
            + (f", computes in {dtype}" if (dtype := self.options.dtype) != "float32" else "")
            + (f"; assumed: {self.assumed}" if self.assumed else "")
            + (f"; with {self.objective.words}" if self.objective else "")
        )

    def _statistics(self) -> str:
        """Describes the mean and std of pixels; returns "" if both are 0.5, the default."""
        mean, std = self.options.mean, self.options.std
        if mean == std == 0.5:
            return ""
        return f" with mean {_numbers(mean)} and std {_numbers(std)}"


def _numbers(value: Statistic) -> str:
    """Formats one number, or one number per channel, with four digits."""
    return " ".join(f"{x:.4g}" for x in (value if isinstance(value, tuple) else (value,)))


def all_names(names: Sequence, classes: int) -> tuple[str, ...]:
    """Returns a name for each class; classes without a name get their index as name.

    Returns:
      The names; () if `names` is empty or has more names than classes.
    """
    if not 0 < len(names) <= classes:
        return ()
    return (*map(str, names), *map(str, range(len(names), classes)))


@functools.lru_cache(maxsize=8)
def sketch(options: ImageOptions) -> ImageModel:
    """Returns a model with shapes in place of arrays."""
    return abstract(functools.partial(family_of(options).model, options))


def model_name(options: ImageOptions) -> str:
    """Returns the name of a model, such as `ViT-B/16`, or a description of its size."""
    return family_of(options).spell(asdict(options))


def fill(module: Kind, sources: dict[str, Callable[[], np.ndarray]]) -> Kind:
    """Returns a module with its parameters, which are read and copied to the first device.

    Args:
      module: a module with shapes in place of arrays.
      sources: maps the path of each parameter to a function that reads the parameter.
    """
    shapes = parameter_shapes(module)
    device = jax.local_devices()[0]
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        arrays = list(pool.map(lambda path: jax.device_put(sources[path](), device), shapes))
    flat = {tuple(path.split("/")): array for path, array in zip(shapes, arrays, strict=True)}
    return nnx.merge(nnx.graphdef(module), nnx.traversals.unflatten_mapping(flat))


def params_of(model: nnx.Module) -> dict[str, jax.Array]:
    """Returns a dict from the path of each of a model's parameters to its array."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): leaf[...] for path, leaf in flat}


def check_finite(values: np.ndarray, name: str) -> np.ndarray:
    """Returns the values; raises UserError if any value is NaN or infinite."""
    # jax.numpy checks a JAX array on the device of the array.
    library = np if isinstance(values, np.ndarray) else jnp
    flat = values.reshape(-1)
    # The dot product of the values with themselves needs one pass and no temporary arrays. The dot
    # product can overflow for finite values. If it is not finite, each value is checked.
    with np.errstate(over="ignore", invalid="ignore"):
        product = library.dot(flat, flat)
    if not np.isfinite(product) and not library.isfinite(flat).all():
        raise UserError(f"{name} contains values that are not finite (NaN or infinity)")
    return values
