"""Opens and reads the frozen model of a run's objective, such as a teacher."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.interop.adapting import fit
from vit_jax.interop.checkpoint import Checkpoint, sketch
from vit_jax.interop.objective_files import check_shapes
from vit_jax.interop.open import open_checkpoint
from vit_jax.models import abstract
from vit_jax.options.model import ImageOptions
from vit_jax.options.run import RunOptions
from vit_jax.parallel.sharding import path_name
from vit_jax.runs.warm_start import fingerprint_of, matched_head, objective_shapes
from vit_jax.training.objectives import objective_of
from vit_jax.training.objectives.frozen import RANDOM, TeacherSpec, WithHeads

# Paths of the kernels of attention and MLP, which are nearly all parameters of a Transformer. These
# kernels can be stored in bfloat16. Kernels of heads cannot, because heads compute in full
# precision. Kernels of a BiT cannot, because they are standardized before they are rounded.
ROUNDED = re.compile(r"(^|/)(attention|mlp)/(?!bias_mlp/).*kernel$")


class FrozenModel(NamedTuple):
    """Frozen model whose parameters have not been read yet."""

    # An `ImageModel`, or a `WithHeads` (an `ImageModel` and its objective's heads). It has shapes
    # and dtypes in place of arrays. `read` converts each parameter to its dtype here.
    model: nnx.Module
    sources: dict[str, Callable[[], Any]]  # Functions that read the parameters, by path.
    notes: list[str]  # Lines that describe the model.

    def read(self) -> dict:
        """Reads the parameters into host memory, and returns them."""
        return nnx.traversals.unflatten_mapping(
            {tuple(path.split("/")): x for path, x in self._read_each()}
        )

    def fingerprint(self) -> str:
        """Returns a checksum of the parameters. They are read one by one, to save memory."""
        return fingerprint_of(self._read_each())

    def _read_each(self) -> Iterator[tuple[str, np.ndarray]]:
        for path, like in jax.tree.leaves_with_path(_params(self.model)):
            name = path_name(path)
            yield name, np.asarray(self.sources[name]()).astype(like.dtype)


def open_frozen(config: RunOptions, class_names: Sequence[str] = ()) -> FrozenModel | None:
    """Returns the frozen model of the config's objective; None if the objective has no teacher.

    Args:
      class_names: names of the classes of the run's head, by index; empty if the run learns no
        classes.

    Raises:
      UserError: the checkpoint does not exist, is damaged, is incompatible with the run, lacks the
        required heads or has other classes. Or the config has a teacher, but the objective does not
        use one.
    """
    spec = objective_of(config.objective.name).teacher_spec(config)
    if spec is None:
        if config.objective.teacher is not None:
            raise UserError(
                f"config.objective.teacher is {config.objective.teacher!r}, but "
                f"config.objective.name={config.objective.name!r} uses no teacher; remove "
                "it, or use config.objective.name='distillation'"
            )
        return None
    if spec.source == RANDOM:
        return _random_frozen(config, class_names)
    try:
        checkpoint = open_checkpoint(spec.source, spec.changes.get("image_size"))
        options, sources, done = fit(checkpoint, dict(spec.changes))
    except UserError as error:
        raise UserError(f"config.objective.teacher={spec.source!r}: {error}") from error
    notes = []
    if spec.objective is None and options.num_classes == len(class_names) > 0:
        place = f"config.objective.teacher={spec.source!r}"
        remedy = "use a teacher with these classes"
        sources, notes = matched_head(sources, checkpoint, class_names, place, remedy)
        if checkpoint.probabilities == "sigmoid":
            notes += [
                "note: the teacher has a sigmoid of each class; here its logits take a softmax"
            ]
    model = sketch(options)
    if spec.make_heads is not None:
        model, sources = _with_heads(spec, checkpoint, options, model, sources)
    if config.objective.teacher_dtype == "bfloat16":
        model = _halved(model)
    return FrozenModel(model, sources, [checkpoint.describe(), *done.describe(), *notes])


def _random_frozen(config: RunOptions, class_names: Sequence[str]) -> FrozenModel:
    """Returns a small untrained model for `teacher='random'`, equal in all processes."""
    num_classes = len(class_names) or config.data.num_classes or 0
    model = objective_of(config.objective.name).random_teacher(config, num_classes, nnx.Rngs(0))
    params = jax.tree.leaves_with_path(_params(model))
    sources = {path_name(path): partial(np.asarray, x) for path, x in params}
    notes = [
        "config.objective.teacher='random': a small untrained model, which is for smoke tests alone"
    ]
    return FrozenModel(abstract(lambda *, rngs: model), sources, notes)


def _with_heads(
    spec: TeacherSpec,
    checkpoint: Checkpoint,
    options: ImageOptions,
    model: nnx.Module,
    sources: dict[str, Callable],
) -> tuple[WithHeads, dict[str, Callable]]:
    """Adds the heads of the checkpoint's objective to a frozen model.

    Returns:
      The model with heads, and functions that read its parameters, by path.

    Raises:
      UserError: the checkpoint has no parameters of the objective `spec.objective`.
    """
    start, objective = f"config.objective.teacher={spec.source!r}", checkpoint.objective
    if objective is None or objective.name != spec.objective:
        raise UserError(
            f"{start} has no heads of {spec.objective}: use a workdir of such a run, or a "
            "folder that vit_jax.convert wrote with them"
        )
    try:
        state = {name: tensor.shape for name, tensor in objective.state.items()}
        there = objective_shapes(objective, options) | state
        heads = abstract(partial(spec.make_heads, objective.values, there))
        shapes = {path_name(path): x.shape for path, x in jax.tree.leaves_with_path(_params(heads))}
        check_shapes(spec.source, objective.name, there, shapes)
        head_sources = objective.sources(
            {path: shape for path, shape in shapes.items() if path not in state}
        )
        head_sources |= {name: objective.state[name].read for name in state if name in shapes}
    except UserError as error:
        raise UserError(f"{start}: {error}") from error
    sources = {f"model/{path}": read for path, read in sources.items()}
    return WithHeads(model, heads), sources | {
        f"heads/{path}": read for path, read in head_sources.items()
    }


def _params(module: nnx.Module) -> dict:
    return nnx.to_pure_dict(nnx.state(module))


def frozen_shapes(config: RunOptions) -> nnx.Module | None:
    """Returns the frozen model with shapes in place of arrays; None: no frozen model."""
    frozen = open_frozen(config)
    return None if frozen is None else frozen.model


def _halved(model: nnx.Module) -> nnx.Module:
    """Returns the abstract model with attention and MLP kernels in bfloat16, to save memory.

    The model rounds these kernels to bfloat16 in each use anyway, so its outputs do not change.
    """
    graphdef, params = nnx.split(model)

    def halved(path, x):
        return jax.ShapeDtypeStruct(
            x.shape, jnp.bfloat16 if ROUNDED.search(path_name(path)) else x.dtype
        )

    return nnx.merge(graphdef, jax.tree.map_with_path(halved, nnx.to_pure_dict(params)))
