"""Warm start: the model of a run and its initial parameters, random or from a checkpoint."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from vit_jax.config import base_config, check_values, leaves, run_options
from vit_jax.data.class_names import match_classes, shortened
from vit_jax.errors import UserError
from vit_jax.interop.adapting import fit
from vit_jax.interop.checkpoint import Checkpoint, model_name, params_of, sketch
from vit_jax.interop.image_text import check_tokenizer, text_params
from vit_jax.interop.library import REGULARISATION
from vit_jax.interop.objective_files import ObjectiveParams, Shapes
from vit_jax.interop.open import open_checkpoint
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models import family_of, model_options, parse_name
from vit_jax.models.image_model import ImageModel
from vit_jax.options.data import INTERPOLATIONS
from vit_jax.options.model import ImageOptions
from vit_jax.options.option import options_of
from vit_jax.options.run import RunOptions
from vit_jax.parallel.sharding import path_name
from vit_jax.training.objectives import OBJECTIVES, abstract_objective, objective_of
from vit_jax.training.program import model_arguments

HANDED_IN = "handed_in"  # Value of `finetune.checkpoint` if a program passes the model.
_RANDOM_OBJECTIVE = "config.finetune.objective='new' starts at random ones"  # Advice in errors.


class Origin(NamedTuple):
    """The model of a run, and its initialization source: a checkpoint, or random initialization."""

    options: ImageOptions  # Options of the model.
    # Functions that read the model's parameters, by path. Empty: random initialization.
    sources: dict[str, Callable[[], np.ndarray]]
    notes: list[str]  # Description of the checkpoint and its changes, in lines.
    interpolation: str  # Interpolation of images.
    stored_objective: ObjectiveParams | None = None  # Objective parameters in the checkpoint.
    # Functions that read the objective's parameters, by the keys of a parameter in the nested dicts
    # (lists of modules have numbers as keys), and its state, by path.
    objective: dict[tuple[str | int, ...], Callable[[], np.ndarray]] = {}
    objective_state: dict[str, Callable[[], np.ndarray]] = {}

    @property
    def name(self) -> str:
        """Name of the model in its paper, such as `ViT-B/16`; empty: no such name."""
        return model_name(self.options)

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the model with random parameters."""
        return family_of(self.options).model(self.options, rngs=rngs)

    def read(self) -> dict:
        """Reads the checkpoint's parameters into host memory; empty: random initialization."""
        return _read(self.sources)

    def read_objective(self) -> dict:
        """Reads the objective's parameters into host memory; empty: random initialization."""
        return nnx.traversals.unflatten_mapping(
            {keys: np.asarray(read()) for keys, read in self.objective.items()}
        )

    def read_objective_state(self) -> dict:
        """Reads the objective's state from the checkpoint into host memory."""
        return _read(self.objective_state)


def _read(sources: dict[str, Callable[[], np.ndarray]]) -> dict:
    return nnx.traversals.unflatten_mapping(
        {tuple(path.split("/")): np.asarray(read()) for path, read in sources.items()}
    )


def has_resnet(config: RunOptions) -> bool:
    """Returns True if the run's model is a BiT or a hybrid; raises UserError if it is unknown."""
    if config.model.name:
        options = model_options(**model_arguments(config), num_classes=0)
    else:
        options = open_checkpoint(config.finetune.checkpoint).options
    return getattr(options, "resnet_blocks", None) is not None


def find_origin(
    config: RunOptions,
    num_classes: int,
    model: ImageModel | None = None,
    class_names: Sequence[str] = (),
) -> Origin:
    """Returns the model of a run and its initialization source: a checkpoint or random numbers.

    A checkpoint also determines the model's arguments and the interpolation of images. The
    checkpoint's model is adapted to the run:

    - A new head has no hidden layer. It is initialized with zeros, or at random with the std
      `model.head_std`.
    - If the checkpoint's head is kept, its classes are matched with the data's classes by name.
    - Position embeddings are resized to the image size (ViT paper, section 3.2).

    Raises:
      UserError: the checkpoint does not exist, is damaged or contains another model than the
        config's. Or its head is kept and has other classes than the data.
    """
    if config.finetune.checkpoint == HANDED_IN:
        return _handed_in_origin(config, num_classes, model, class_names)
    arguments = model_arguments(config) | {"num_classes": num_classes}
    named = model_options(**arguments) if config.model.name else None
    if named and config.finetune.checkpoint is None:
        return Origin(named, {}, [], config.data.interpolation or "bilinear")
    checkpoint = open_checkpoint(config.finetune.checkpoint, config.data.image_size)
    loose = _loose_arguments(config, named, checkpoint) if named else {}
    del arguments["name"]
    return _checkpoint_origin(config, checkpoint, loose | arguments, class_names)


def _loose_arguments(
    config: RunOptions, named: ImageOptions, checkpoint: Checkpoint
) -> dict[str, Any]:
    """Returns the model arguments that may differ from the checkpoint's (`Family.loose`).

    Only arguments that the model name implies are compared. For example, `ViT-B/16` only implies
    the sizes and the patch size, so it may name a BEiT checkpoint.

    Raises:
      UserError: other arguments differ, so the checkpoint contains another model.
    """
    names = family_of(checkpoint.options).loose
    loose = {key: getattr(named, key) for key in names if hasattr(named, key)}
    options = replace(checkpoint.options, **loose)
    implied = {key: getattr(named, key) for key in parse_name(config.model.name)[1]}
    name, same_type = model_name(options), type(named) is type(options)
    expected = model_name(replace(options, **implied) if same_type else named)
    if expected != name:
        raise UserError(
            f"config.model.name means {expected}, but {config.finetune.checkpoint} is {name}; "
            "leave it empty to take the checkpoint's"
        )
    return loose


def _checkpoint_origin(
    config: RunOptions,
    checkpoint: Checkpoint,
    arguments: dict[str, Any],
    class_names: Sequence[str],
) -> Origin:
    """Returns the warm start from a checkpoint. The checkpoint's model is adapted to the run."""
    kept_head, num_classes = config.finetune.head == "kept", arguments["num_classes"]
    stored = checkpoint.arguments
    if kept_head and stored["num_classes"] != num_classes:
        raise UserError(
            f"config.finetune.head='kept', but {config.finetune.checkpoint} has "
            f"{stored['num_classes']:,} classes and the data {num_classes:,}; give "
            "--config.finetune.head=new"
        )
    arguments = _training_defaults(checkpoint.options) | arguments
    options, sources, done = fit(checkpoint, arguments, new_head=not kept_head, seed=config.seed)
    lines = [checkpoint.describe(), *done.describe(), *_regularisation_note(options, stored)]
    if kept_head and class_names:
        remedy = "config.finetune.head='new' starts at a new head"
        sources, notes = matched_head(sources, checkpoint, class_names, "the checkpoint", remedy)
        lines += notes
    interpolation = _interpolation(config, checkpoint)
    stored_objective = checkpoint.objective
    if stored_objective is None and config.objective.name == "contrastive":
        stored_objective = text_params(Path(checkpoint.place))
        if stored_objective is None and config.contrastive.text_frozen:
            raise UserError(
                f"{config.finetune.checkpoint} has no text tower, and a random one would be frozen "
                "(contrastive.text_frozen): give a checkpoint of both towers"
            )
    return Origin(options, sources, lines, interpolation, stored_objective)


def _regularisation_note(options: ImageOptions, stored: dict[str, Any]) -> list[str]:
    """Returns a note if regularization, such as dropout, differs from the checkpoint's training."""
    names = sorted(REGULARISATION & stored.keys())
    changed = [name for name in names if getattr(options, name) != stored[name]]
    if not changed:
        return []
    before = ", ".join(f"{name}={stored[name]}" for name in changed)
    return [f"regularized by config.model, not as the checkpoint's run was ({before})"]


def _training_defaults(options: ImageOptions) -> dict[str, Any]:
    """Returns defaults of the model arguments that a run does not take from a checkpoint."""
    declared = options_of(type(options))
    names = REGULARISATION | {"head_bias", "head_std"}
    return {name: declared[name].default for name in names & declared.keys()}


def with_objective(
    origin: Origin, config: RunOptions, params: dict, state: dict, class_names: Sequence[str] = ()
) -> Origin:
    """Returns a copy of `origin` that also defines the initial parameters of the objective.

    These are the objective's parameters in the checkpoint, or random parameters. A line of
    `Origin.notes` describes which of the two are used.

    Args:
      params: shapes of the parameters of the run's objective, nested.
      state: shapes of the state of the run's objective, by name.

    Raises:
      UserError: the run cannot use the objective's parameters in the checkpoint. Checkpoint and run
        differ in the shapes of these parameters or of the state, in an option that determines
        shapes, in the tokenizer (`contrastive`), in modules that must not be dropped, or in the
        indices of the same classes.
    """
    if not params or not origin.sources:
        return origin
    name, stored = config.objective.name, origin.stored_objective
    kept = config.finetune.objective == "kept"
    if not kept or stored is None or stored.name != name:
        why = ", as the checkpoint gives none" if kept else ""
        return origin._replace(notes=[*origin.notes, f"new: {name}'s own parameters, random{why}"])
    if name == "contrastive":
        check_tokenizer(str(config.finetune.checkpoint), stored, config.contrastive)
    notes = _class_notes(config, stored, class_names)
    origin = origin._replace(notes=[*origin.notes, *notes])
    return _with_kept_objective(origin, config, stored, params, state)


def _class_notes(
    config: RunOptions, stored: ObjectiveParams, class_names: Sequence[str]
) -> list[str]:
    """Returns notes on different class names; raises UserError for different indices."""
    if len(stored.class_names) != len(class_names):  # Without classes, or other shapes.
        return []
    place = str(config.finetune.checkpoint)
    remedy = f"number the data's classes like the checkpoint's, or {_RANDOM_OBJECTIVE}"
    try:
        match = match_classes(stored.class_names, class_names, place)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error
    if match.reordered:
        raise UserError(
            f"{place} has the data's classes in another order, {shortened(stored.class_names)}, "
            f"and the data {shortened(class_names)}; {remedy}"
        )
    return [f"note: {match.note}"] if match.note else []


def _with_kept_objective(
    origin: Origin, config: RunOptions, stored: ObjectiveParams, params: dict, state: dict
) -> Origin:
    """Returns a copy of `origin` that also reads the objective's parameters from the checkpoint.

    State items that the objective carries over (`Objective.carried`) are also read.
    """
    name, changed_options = stored.name, _changed_options(config, stored)
    new, dropped = _differing_parts(config, stored, params)
    shapes = {path: shape for path, shape in _shapes(params).items() if _top(path) not in new}
    try:
        sources = stored.sources(shapes)
        tensors = _carried(config, stored, _shapes(state))
    except UserError as error:
        raise UserError(f"{error}; {_RANDOM_OBJECTIVE}") from error
    lines = [f"kept: {stored._replace(state=tensors).count(shapes)}"]
    if changed_options:
        lines[0] += f", trained with {', '.join(f'{k}={x!r}' for k, x in changed_options.items())}"
    lines += [f"new: {name}'s {part}, which the checkpoint lacks" for part in new]
    lines += [f"dropped: {name}'s {part}, which the run lacks" for part in dropped]
    keys = _keys(params)
    return origin._replace(
        notes=[*origin.notes, *lines],
        objective={keys[path]: read for path, read in sources.items()},
        objective_state={key: tensor.read for key, tensor in tensors.items()},
    )


def _carried(config: RunOptions, stored: ObjectiveParams, shapes: Shapes) -> dict[str, Tensor]:
    """Returns the state items in the checkpoint that the objective carries over.

    Raises:
      UserError: their shapes differ from those in the run.
    """
    carried = objective_of(config.objective.name).carried
    found = {
        path: x for path, x in stored.state.items() if _top(path) in carried and path in shapes
    }
    for path, tensor in found.items():
        if tensor.shape != shapes[path]:
            raise UserError(
                f"{config.finetune.checkpoint} has {config.objective.name}'s {path} as "
                f"{list(tensor.shape)}, but the objective has {list(shapes[path])}"
            )
    return found


def _keys(params: dict) -> dict[str, tuple[str | int, ...]]:
    """Returns the keys of each parameter in nested dicts, by its path."""
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    return {path_name(path): tuple(key.key for key in path) for path in paths}


def _changed_options(config: RunOptions, stored: ObjectiveParams) -> dict[str, Any]:
    """Returns the stored options that differ; raises UserError if they determine shapes."""
    kind = objective_of(config.objective.name)
    options = getattr(config, kind.section, None)
    changed = {
        key: x for key, x in stored.values.items() if getattr(options, key, None) not in (None, x)
    }
    shaping = [
        f"config.{kind.section}.{key}={x!r}" for key, x in changed.items() if key in kind.made_by
    ]
    if shaping:
        raise UserError(
            f"{config.finetune.checkpoint} has parameters of {stored.name} for "
            f"{' '.join(shaping)}: set that, or {_RANDOM_OBJECTIVE}"
        )
    return changed


def _differing_parts(
    config: RunOptions, stored: ObjectiveParams, params: dict
) -> tuple[list[str], list[str]]:
    """Compares an objective's optional modules, such as a caption decoder.

    Returns:
      Names of the modules that only the run has, and names of those that only the checkpoint has.

    Raises:
      UserError: only the checkpoint has a module that must not be dropped.
    """
    optional = set(objective_of(config.objective.name).optional)
    parts = {_top(path) for path in stored.shapes()} if stored.shapes else set(params)
    new = [part for part in params if part not in parts and part in optional]
    dropped = sorted(parts - params.keys())
    if dropped and (params.keys() & optional or not optional.issuperset(dropped)):
        raise UserError(
            f"{config.finetune.checkpoint} has {stored.name}'s {' and '.join(dropped)}, and the "
            f"run has none; {_RANDOM_OBJECTIVE}"
        )
    return new, dropped


def _top(path: str) -> str:
    """Returns the first component of a parameter's path, such as `head` of `head/kernel`."""
    return path.split("/")[0]


def objective_shapes(objective: ObjectiveParams, options: ImageOptions) -> Shapes:
    """Returns the shapes of an objective's parameters in a checkpoint, by path.

    Raises:
      UserError: the objective's options are invalid or incompatible with the model.
    """
    if objective.shapes:
        return objective.shapes()
    config, kind = base_config(), OBJECTIVES[objective.name]
    made_by = {f"{kind.section}.{key}": objective.values[key] for key in kind.made_by}
    made_by["objective.name"] = objective.name
    check_values(dict(leaves(config)) | made_by)
    config.update_from_flattened_dict(made_by)
    objective_params = nnx.state(abstract_objective(run_options(config), sketch(options)))
    return _shapes(nnx.to_pure_dict(objective_params))


def _shapes(params: dict) -> Shapes:
    return {path_name(path): x.shape for path, x in jax.tree.leaves_with_path(params)}


def matched_head(
    sources: dict[str, Callable[[], np.ndarray]],
    checkpoint: Checkpoint,
    class_names: Sequence[str],
    place: str,
    remedy: str,
) -> tuple[dict[str, Callable[[], np.ndarray]], list[str]]:
    """Reorders the outputs of a checkpoint's head to the class indices of the data.

    Returns:
      Functions that read the parameters, by path, and notes on the reordering.

    Raises:
      UserError: the head and the data have some classes in common, but not all of them, and their
        indices differ.
    """
    try:
        match = match_classes(checkpoint.class_names, class_names, place)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from error
    if match.reordered:
        heads = family_of(checkpoint.options).adaptation.heads
        sources = sources | {
            path: partial(_reordered, read, match.order)
            for path, read in sources.items()
            if path.startswith(heads)
        }
    return sources, [f"note: {match.note}"] if match.note else []


def _reordered(read: Callable[[], np.ndarray], order: np.ndarray) -> np.ndarray:
    """Reorders the last axis (classes) of a head's parameter by the indices `order`."""
    return np.asarray(read())[..., order]


def _handed_in_origin(
    config: RunOptions, num_classes: int, model: ImageModel | None, class_names: Sequence[str]
) -> Origin:
    """Returns the warm start from a passed model, whose head and regularization are kept."""
    if model is None:
        raise UserError(
            "the model of this run was passed by a program (finetune.checkpoint is "
            f"{HANDED_IN!r}): resume it there, with vit_jax.train and the same model"
        )
    checkpoint = _checkpoint_of(model)
    if (classes := checkpoint.options.num_classes) != num_classes:
        raise UserError(
            f"the model passed has {classes:,} classes, and the run {num_classes:,}; "
            f"pass load_model(..., num_classes={num_classes}) or create_model(..., "
            f"num_classes={num_classes})"
        )
    arguments = {name: x for name, x in model_arguments(config).items() if name != "name"}
    options, sources, done = fit(checkpoint, arguments)
    lines = [checkpoint.describe(), *done.describe()]
    defaults = _training_defaults(options)
    if kept := [
        name
        for name in sorted(REGULARISATION & defaults.keys())
        if getattr(options, name) != defaults[name]
    ]:
        lines.append(
            "regularized as it is passed: "
            + ", ".join(f"{name}={getattr(options, name)}" for name in kept)
        )
    if class_names:
        remedy = "give config.finetune.checkpoint in place of a model, which starts at a new head"
        sources, notes = matched_head(sources, checkpoint, class_names, "the model passed", remedy)
        lines += notes
    return Origin(options, sources, lines, _interpolation(config, checkpoint))


def _checkpoint_of(model: ImageModel) -> Checkpoint:
    """Returns a `Checkpoint` with the current parameters of a model in memory."""
    if not isinstance(model, ImageModel) or model.about is None:
        raise UserError(
            f"model is a {type(model).__name__}, and must be of vit_jax.load_model or create_model"
        )
    params = params_of(model)
    return Checkpoint(
        "handed in",
        "the calling program",
        model.options,
        {path: tuple(x.shape) for path, x in params.items()},
        # The parameters are copied, because the first training step donates their buffers.
        lambda path: np.array(params[path]),
        preprocessing=model.about.preprocessing,
        class_names=model.about.class_names,
        probabilities=model.about.probabilities,
    )


def fingerprint_of(params: Iterable[tuple[str, Any]]) -> str:
    """Returns a checksum of parameters and their paths, which depends on the parameters' order."""
    total = 0
    for path, x in params:
        values = np.ascontiguousarray(x).view(np.uint8)  # zlib cannot read bfloat16 arrays.
        total = zlib.crc32(values, zlib.crc32(path.encode(), total))
    return f"{total:08x}"


def _interpolation(config: RunOptions, checkpoint: Checkpoint) -> str:
    """Returns the interpolation of config or checkpoint, else bilinear (as in the paper)."""
    if config.data.interpolation or checkpoint.preprocessing is None:
        return config.data.interpolation or "bilinear"
    interpolation = checkpoint.preprocessing.interpolation
    if interpolation not in INTERPOLATIONS:
        raise UserError(
            f"the preprocessing of {checkpoint.place} has interpolation {interpolation}, which is "
            f"unsupported: give config.data.interpolation, one of {', '.join(INTERPOLATIONS)}"
        )
    return interpolation
