"""The frozen model of a run, which its objective learns from: found, compared, and read."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import fit, sketch
from vit_jax.models.image_model import ImageModel
from vit_jax.parallel.sharding import path_name
from vit_jax.runs.warm_start import fingerprint_of
from vit_jax.runs.workdir import open_any
from vit_jax.training.objectives import objective_of

# Nearly all parameters of a transformer. The head's are used as they are, a BiT's are standardised first.
ROUNDED = re.compile(r"(^|/)(attention|mlp)/(?!bias_mlp/).*kernel$")


class FrozenModel(NamedTuple):
    """A frozen model, of which nothing is read yet.

    Attributes:
      model: with shapes in place of arrays, in the types in which they are kept.
      sources: reads each parameter, by path.
      found: what it is, in lines.
    """

    model: ImageModel
    sources: dict[str, Callable[[], Any]]
    found: list[str]

    def read(self) -> dict:
        """Its parameters, on the host."""
        return nnx.traversals.unflatten_mapping({tuple(path.split("/")): x for path, x in self._read_each()})

    def fingerprint(self) -> str:
        """A checksum of its parameters, which are read for it one by one."""
        return fingerprint_of(self._read_each())

    def _read_each(self) -> Iterator[tuple[str, np.ndarray]]:
        for path, like in jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(self.model))):
            name = path_name(path)
            yield name, np.asarray(self.sources[name]()).astype(like.dtype)


def open_frozen(config: ConfigDict, class_names: Sequence[str] = ()) -> FrozenModel | None:
    """The frozen model that the config's objective asks for; None where it asks for none.

    Args:
      class_names: of the data.

    Raises:
      UserError: there is no such checkpoint, it is damaged, does not fit, or orders its classes otherwise; or
        a teacher is named that the objective does not ask for.
    """
    wanted = objective_of(config).learns_from(config)
    if wanted is None:
        if config.objective.teacher is not None:
            raise UserError(
                f"config.objective.teacher is {config.objective.teacher!r}, but "
                f"config.objective.name={config.objective.name!r} learns from no teacher; leave it out, or "
                "take config.objective.name='distillation'"
            )
        return None
    try:
        checkpoint = open_any(wanted.source, wanted.changes.get("image_size"))
        arguments, sources, done = fit(checkpoint, dict(wanted.changes))
    except UserError as error:
        raise UserError(f"config.objective.teacher={wanted.source!r}: {error}") from error
    theirs, ours = checkpoint.class_names, tuple(class_names)
    if theirs != ours and sorted(theirs) == sorted(ours):
        wrong = next(number for number, name in enumerate(ours) if theirs[number] != name)
        raise UserError(
            f"config.objective.teacher={wanted.source!r} has the data's classes in another order: its class "
            f"{wrong} is {theirs[wrong]!r}, and the data's is {ours[wrong]!r}"
        )
    model = sketch(checkpoint.model, arguments)
    if config.objective.teacher_dtype == "bfloat16":
        model = _halved(model)
    return FrozenModel(model, sources, [checkpoint.describe(), *done.describe()])


def frozen_shapes(config: ConfigDict) -> ImageModel | None:
    """The frozen model with shapes in place of arrays, which a program is made with; None: there is none."""
    frozen = open_frozen(config)
    return None if frozen is None else frozen.model


def _halved(model: ImageModel) -> ImageModel:
    """The abstract model with bfloat16 kernels where it rounds them at each use: it computes the same."""
    graphdef, params = nnx.split(model)

    def halved(path, x):
        return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if ROUNDED.search(path_name(path)) else x.dtype)

    return nnx.merge(graphdef, jax.tree.map_with_path(halved, nnx.to_pure_dict(params)))
