"""The model of a run and its first parameters: drawn from the seed, or those of a checkpoint."""

import inspect
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.config import base_config, check_values, leaves
from vit_jax.data.class_names import match_classes
from vit_jax.data.decode import INTERPOLATIONS
from vit_jax.errors import UserError
from vit_jax.interop.beside import ObjectiveParams, Shapes
from vit_jax.interop.checkpoint import (
    Checkpoint,
    complete,
    fit,
    model_name,
    params_of,
    sketch,
)
from vit_jax.interop.library import REGULARISATION
from vit_jax.models import family_of, model_factory, parse_name
from vit_jax.models.image_model import ImageModel
from vit_jax.options import Option, one_of, only_with, text, unless
from vit_jax.parallel.sharding import path_name
from vit_jax.runs.workdir import open_any
from vit_jax.training.objectives import OBJECTIVES, abstract_objective, objective_of
from vit_jax.training.program import model_arguments

OPTIONS = {
    "finetune.checkpoint": Option(
        None, text(), "Where the parameters come from: what `load_model` takes; None: random ones."
    ),
    "finetune.head": Option(
        "new",
        one_of("new", "kept", "probe"),
        "New, zeros; the checkpoint's, its classes matched by name; or that of a linear probe (LP-FT).",
        needs=only_with("finetune.checkpoint"),
        fits=lambda value, config: unless(
            value != "probe" or (config.objective.name == "classification" and config.loss.name == "softmax"),
            "new or kept, unless objective.name='classification' and loss.name='softmax'",
        ),
    ),
    "finetune.objective": Option(
        "kept",
        one_of("kept", "new"),
        "What the objective has beside the model, mae's decoder, dino's heads: the checkpoint's, or random.",
        needs=only_with("finetune.checkpoint"),
    ),
}


HANDED_IN = "handed_in"  # The `finetune.checkpoint` of a run whose model a program handed in.


class Origin(NamedTuple):
    """The model of a run, and where its first parameters come from."""

    model: type[nnx.Module]
    arguments: dict[str, Any]  # All of them.
    sources: dict[str, Callable[[], np.ndarray]]  # By path; empty: they are drawn from the seed.
    found: list[str]  # What the checkpoint was, and what became of it, in lines.
    interpolation: str  # Of images.
    beside: ObjectiveParams | None = None  # What the checkpoint has of an objective.
    objective: dict[str, Callable[[], np.ndarray]] = {}  # Of the run's objective, as `sources`.
    memory: dict[str, Callable[[], np.ndarray]] = {}  # Of what it remembers, by name.

    @property
    def name(self) -> str:
        """The paper's name of the model, if it has one."""
        return model_name(self.model, self.arguments)

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model with parameters drawn at random."""
        return self.model(**self.arguments, rngs=rngs)

    def read(self) -> dict:
        """The checkpoint's parameters, on the host; empty where there is none."""
        return _read(self.sources)

    def read_objective(self) -> dict:
        """Those of the run's objective, on the host; empty where they are drawn."""
        return _read(self.objective)

    def read_memory(self) -> dict:
        """The memories of the objective that the checkpoint has, on the host."""
        return _read(self.memory)


def _read(sources: dict[str, Callable[[], np.ndarray]]) -> dict:
    return nnx.traversals.unflatten_mapping(
        {tuple(path.split("/")): np.asarray(read()) for path, read in sources.items()}
    )


def has_resnet(config: ConfigDict) -> bool:
    """The config's model is a BiT or a hybrid, whether its name says so or the checkpoint.

    Raises:
      UserError: there is no such model or checkpoint, or it is damaged.
    """
    if config.model.name:
        build = model_factory(**model_arguments(config), num_classes=0)
        return complete(build.func, build.keywords).get("resnet_blocks") is not None
    return open_any(config.finetune.checkpoint).arguments.get("resnet_blocks") is not None


def find_origin(
    config: ConfigDict, num_classes: int, model: ImageModel | None = None, class_names: Sequence[str] = ()
) -> Origin:
    """The model that a config means, for data of so many classes; or that a program hands in.

    A checkpoint says itself what its model is, and how images are resized. A new head is zeros, or as the
    config's `model.head_deviation` says, without the hidden layer of pre-training; position embeddings are
    resized to the images (paper, section 3.2). A kept head's classes are matched with the data's by name.

    Args:
      class_names: of the run's head, by number.

    Raises:
      UserError: there is no such checkpoint, it is damaged, or is not of the model that the config names; its
        head is kept and has other classes than the data.
    """
    values = config.finetune
    if values.checkpoint == HANDED_IN:
        return _handed_in_origin(config, num_classes, model, class_names)
    wanted = model_arguments(config) | {"num_classes": num_classes}
    named = None
    if config.model.name:
        build = model_factory(**wanted)
        named = build.func, complete(build.func, build.keywords)
        if values.checkpoint is None:
            return Origin(*named, {}, [], config.data.interpolation or "bilinear")
    checkpoint = open_any(values.checkpoint, config.data.image_size)
    own = checkpoint.arguments
    loose = {key: named[1][key] for key in family_of(checkpoint.model).loose if named and key in named[1]}
    if named:
        _check_name(config, named, checkpoint, own | loose)
    if values.head == "kept" and own["num_classes"] != num_classes:
        raise UserError(
            f"config.finetune.head='kept', but {values.checkpoint} has {own['num_classes']:,} classes and "
            f"the data {num_classes:,}; give --config.finetune.head=new"
        )
    del wanted["name"]
    wanted = loose | wanted
    defaults = {name: value for name, value in _training_defaults(checkpoint.model).items() if name in own}
    wanted = defaults | wanted
    arguments, sources, done = fit(checkpoint, wanted, new_head=values.head != "kept", seed=config.seed)
    found = [checkpoint.describe(), *done.describe()]
    if left := [name for name in sorted(REGULARISATION & own.keys()) if arguments[name] != own[name]]:
        was = ", ".join(f"{name}={own[name]}" for name in left)
        found.append(f"regularised by config.model, not as the checkpoint's run was ({was})")
    if values.head == "kept" and class_names:
        remedy = "config.finetune.head='new' starts at a new head"
        sources, notes = matched_head(sources, checkpoint, class_names, "the checkpoint", remedy)
        found += notes
    seen = _interpolation(config, checkpoint)
    return Origin(checkpoint.model, arguments, sources, found, seen, checkpoint.objective)


def _training_defaults(model: type[ImageModel]) -> dict[str, Any]:
    """The defaults of a model's arguments that no later run takes over: regularisation, the head's start."""
    parameters = inspect.signature(model.__init__).parameters
    names = REGULARISATION | {"head_bias", "head_deviation"}
    return {name: parameters[name].default for name in names & parameters.keys()}


def with_objective(origin: Origin, config: ConfigDict, own: dict, memory: dict) -> Origin:
    """The origin with the reading of what a run's objective starts from, and a line that says it.

    Args:
      own, memory: the objective's parameters, nested, and what it remembers, as shapes.

    Raises:
      UserError: the checkpoint's are made by other values than the config's, or do not fit.
    """
    if not own or not origin.sources:
        return origin
    name, found, kept = config.objective.name, origin.beside, config.finetune.objective == "kept"
    if not kept or found is None or found.name != name:
        why = ", as the checkpoint gives none" if kept else ""
        return origin._replace(found=[*origin.found, f"new: {name}'s own parameters, random{why}"])
    others = {key: x for key, x in found.values.items() if config.objective[key] not in (None, x)}
    place, remedy = config.finetune.checkpoint, "config.finetune.objective='new' starts at random ones"
    kind = objective_of(config)
    if wrong := [f"config.objective.{key}={x!r}" for key, x in others.items() if key in kind.made_by]:
        raise UserError(f"{place} has parameters of {name} for {' '.join(wrong)}: set that, or {remedy}")
    there = {path.split("/")[0] for path in found.shapes()} if found.shapes else set(own)
    fresh = [part for part in own if part not in there and part in kind.optional]
    spare = [part for part in there if part not in own]
    if spare and (own.keys() & set(kind.optional) or not set(spare) <= set(kind.optional)):
        raise UserError(f"{place} has {name}'s {' and '.join(sorted(spare))}, and the run has none; {remedy}")
    shapes = {path: shape for path, shape in _shapes(own).items() if path.split("/")[0] not in fresh}
    held = {key: x for key, x in found.memory.items() if key in kind.carried and key in memory}
    try:
        sources = found.sources(shapes)
        for key, tensor in held.items():
            if tensor.shape != memory[key].shape:
                was, wanted = list(tensor.shape), list(memory[key].shape)
                raise UserError(f"{place} has {name}'s {key} as {was}, but the objective has {wanted}")
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error
    lines = [f"kept: {found._replace(memory=held).count(shapes)}"]
    if others:
        lines[0] += f", trained with {', '.join(f'{key}={x!r}' for key, x in others.items())}"
    lines += [f"new: {name}'s {part}, which the checkpoint has not" for part in fresh]
    lines += [f"dropped: {name}'s {part}, which the run has not" for part in sorted(spare)]
    memory = {key: tensor.read for key, tensor in held.items()}
    return origin._replace(found=[*origin.found, *lines], objective=sources, memory=memory)


def objective_shapes(found: ObjectiveParams, model: type, arguments: dict) -> Shapes:
    """Shapes by path of what a checkpoint has of an objective, beside a model with all these arguments.

    Raises:
      UserError: it is made by values that no objective has, or does not fit the model.
    """
    if found.shapes:
        return found.shapes()
    config = base_config()
    made_by = {f"objective.{key}": found.values[key] for key in OBJECTIVES[found.name].made_by}
    made_by["objective.name"] = found.name
    check_values(dict(leaves(config)) | made_by)
    config.update_from_flattened_dict(made_by)
    own = nnx.state(abstract_objective(config, sketch(model, arguments)))
    return _shapes(nnx.to_pure_dict(own))


def _shapes(params: dict) -> Shapes:
    return {path_name(path): x.shape for path, x in jax.tree.leaves_with_path(params)}


def _check_name(config: ConfigDict, named: tuple[type, dict], checkpoint: Checkpoint, own: dict) -> None:
    """Raises UserError where a checkpoint, by its own arguments, is not what the config's name says.

    A name says no more than its own arguments: of a BEiT, `ViT-B/16` says size and patch.
    """
    model, wanted = named
    said = {key: wanted[key] for key in parse_name(config.model.name)[1]}
    name = model_name(checkpoint.model, own)
    meant = model_name(model, own | said if model is checkpoint.model else wanted)
    if meant != name:
        raise UserError(
            f"config.model.name means {meant}, but {config.finetune.checkpoint} is {name}; "
            "leave it empty to take the checkpoint's"
        )


def matched_head(
    sources: dict[str, Callable[[], np.ndarray]],
    checkpoint: Checkpoint,
    class_names: Sequence[str],
    place: str,
    remedy: str,
) -> tuple[dict[str, Callable[[], np.ndarray]], list[str]]:
    """A checkpoint's parameters with those of its head in the order of the data's classes, and notes on it.

    Args:
      sources: by path.
      class_names: of the run's head, by number.
      place: the checkpoint's name for messages; remedy: the advice if it has other classes.

    Raises:
      UserError: some of its classes are the data's at other numbers, and others are not.
    """
    try:
        match = match_classes(checkpoint.class_names, class_names, place)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error
    if match.reordered:
        sources = sources | {
            path: partial(_reordered, read, match.order)
            for path, read in sources.items()
            if path.startswith(("head/", "distillation_head/"))
        }
    return sources, [f"note: {match.note}"] if match.note else []


def _reordered(read: Callable[[], np.ndarray], order: np.ndarray) -> np.ndarray:
    """A parameter of a head, whose last axis is of classes, in another order of these."""
    return np.asarray(read())[..., order]


def _handed_in_origin(
    config: ConfigDict, num_classes: int, model: ImageModel | None, class_names: Sequence[str]
) -> Origin:
    """The start from a model that a program hands in: its head is kept, and how it is regularised."""
    if model is None:
        raise UserError(
            f"the model of this run was handed in by a program (finetune.checkpoint is {HANDED_IN!r}): go on "
            "from there, with vit_jax.train and the same model"
        )
    checkpoint = _checkpoint_of(model)
    if (classes := checkpoint.arguments["num_classes"]) != num_classes:
        raise UserError(
            f"the model that is handed in has {classes:,} classes, and the run {num_classes:,}; hand in "
            f"load_model(..., num_classes={num_classes}) or create_model(..., num_classes={num_classes})"
        )
    wanted = {name: value for name, value in model_arguments(config).items() if name != "name"}
    arguments, sources, done = fit(checkpoint, wanted)
    found = [checkpoint.describe(), *done.describe()]
    defaults = _training_defaults(checkpoint.model)
    if kept := [
        name for name in sorted(REGULARISATION & defaults.keys()) if arguments[name] != defaults[name]
    ]:
        found.append(
            "regularised as it is handed in: " + ", ".join(f"{name}={arguments[name]}" for name in kept)
        )
    if class_names:
        remedy = "give config.finetune.checkpoint in place of a model, which starts at a new head"
        sources, notes = matched_head(sources, checkpoint, class_names, "the model that is handed in", remedy)
        found += notes
    return Origin(checkpoint.model, arguments, sources, found, _interpolation(config, checkpoint))


def _checkpoint_of(model: ImageModel) -> Checkpoint:
    """A model in the memory as a checkpoint, with its parameters as they are now."""
    if not isinstance(model, ImageModel) or model.about is None:
        raise UserError(
            f"model is a {type(model).__name__}, and must be of vit_jax.load_model or create_model"
        )
    params = params_of(model)
    return Checkpoint(
        "handed in",
        "the calling program",
        type(model),
        complete(type(model), model.about.arguments),
        {path: tuple(x.shape) for path, x in params.items()},
        lambda path: np.array(params[path]),  # A copy: the first step gives away the memory of its own.
        preprocessing=model.about.preprocessing,
        class_names=model.about.class_names,
        probabilities=model.about.probabilities,
    )


def fingerprint_of(params: Iterable[tuple[str, Any]]) -> str:
    """A checksum of parameters and their paths, in this order, for the same ones and no others."""
    total = 0
    for path, x in params:
        values = np.ascontiguousarray(x).view(np.uint8)  # NumPy gives no buffer of bfloat16.
        total = zlib.crc32(values, zlib.crc32(path.encode(), total))
    return f"{total:08x}"


def _interpolation(config: ConfigDict, checkpoint: Checkpoint) -> str:
    """The config's, or what the checkpoint says, or the paper's.

    Raises:
      UserError: what the checkpoint says is not done here.
    """
    if config.data.interpolation or checkpoint.preprocessing is None:
        return config.data.interpolation or "bilinear"
    said = checkpoint.preprocessing.interpolation
    if said not in INTERPOLATIONS:
        raise UserError(
            f"the preprocessing of {checkpoint.place} says {said}, which is not done here: give "
            f"config.data.interpolation, one of {', '.join(INTERPOLATIONS)}"
        )
    return said
