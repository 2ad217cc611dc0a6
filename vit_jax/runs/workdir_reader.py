"""Reads the model of a run from its workdir, as a `Checkpoint`."""

import dataclasses
import functools
import operator
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, all_names, sketch
from vit_jax.interop.objective_files import ObjectiveParams, Shapes, check_shapes
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models import read_options
from vit_jax.models.model_card import parameter_shapes
from vit_jax.options.model import ImageOptions
from vit_jax.options.option import options_of
from vit_jax.options.run import RunOptions
from vit_jax.paths import CONFIG, MANIFEST, is_url
from vit_jax.runs.bucket import checkpoints_of, shown
from vit_jax.runs.checkpoints import item_shapes, load_items
from vit_jax.runs.workdir import check_name, place_of, saved_run
from vit_jax.training.lora import effective
from vit_jax.training.objectives import objective_of
from vit_jax.training.objectives.classification import probabilities_of


def open_workdir(source: str | Path) -> Checkpoint:
    """Opens a checkpoint of a run. Only files of the workdir are read.

    Args:
      source: `WORKDIR` for the newest checkpoint, `WORKDIR@STEP`, or `WORKDIR@best` for the
        checkpoint with the best metrics on the split for model selection. `WORKDIR` is a folder or
        a URL in a bucket.

    Raises:
      UserError: the workdir contains no run, or the checkpoint does not exist or is damaged.
    """
    workdir, which = place_of(source)
    saved = saved_run(workdir)
    if saved is None:
        hint = ""
        if is_url(source):
            hint = "; buckets are supported for workdirs only: copy other checkpoints into a folder"
        raise UserError(f"no run in {shown(workdir)}: it has no {CONFIG}{hint}")
    check_name(workdir)
    config, manifest = saved.config, saved.manifest
    options = _options_of(manifest, f"{shown(workdir)}/{MANIFEST}")
    shapes = parameter_shapes(sketch(options))
    params, step = _load_params(workdir, config, manifest, shapes, which)
    # If the manifest has the entry `objective`, a program passed an objective class to the run. The
    # registry `OBJECTIVES` does not contain this class.
    handed_in = "objective" in manifest

    return Checkpoint(
        f"{shown(workdir)}{which and '@' + which}",
        "a run",
        options,
        shapes,
        functools.partial(_at, params),
        preprocessing=_preprocessing(config, manifest),
        class_names=all_names(manifest["class_names"], options.num_classes),
        objective=None if handed_in else _objective_params(workdir, config, manifest, step),
        step=step,
        probabilities=probabilities_of(config),
    )


def _options_of(manifest: dict, place: str) -> ImageOptions:
    """Returns the options of the model that a manifest describes."""
    try:
        return read_options(manifest["model"])
    except UserError as error:
        raise UserError(f"{place} is damaged: {error}; restore a copy of it") from error


def _load_params(
    workdir: Path, config: RunOptions, manifest: dict, shapes: Shapes, which: str
) -> tuple[dict, int]:
    """Loads the parameters of a run's model that evaluations use, such as an EMA.

    Returns:
      The parameters, nested, and their step.
    """
    params, folder = _abstract(shapes), checkpoints_of(workdir)
    handed_in = manifest.get("objective")
    evaluated = (
        handed_in["eval_params"]
        if handed_in
        else objective_of(config.objective.name).eval_params(config)
    )
    if evaluated:  # The evaluated parameters are part of the state, such as an EMA.
        items = load_items(folder, {evaluated: params}, which)
        return items[evaluated], items["step"]
    items = load_items(folder, {"params": params}, which)
    if config.finetune.train == "lora":
        # The item also contains the objective's own parameters, if there are any.
        extra = _abstract(item_shapes(folder, items["step"])["extra"])
        items |= load_items(folder, {"extra": extra}, str(items["step"]))
    return effective({"extra": {}} | items), items["step"]


def _abstract(shapes: Shapes) -> dict:
    """Converts shapes by path to nested float32 `ShapeDtypeStruct`s on the first device."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = {
        tuple(path.split("/")): jax.ShapeDtypeStruct(shape, "float32", sharding=device)
        for path, shape in shapes.items()
    }
    return nnx.traversals.unflatten_mapping(like)


def _at(params: dict, path: str) -> jax.Array:
    return functools.reduce(operator.getitem, path.split("/"), params)


def _objective_params(
    workdir: Path, config: RunOptions, manifest: dict, step: int
) -> ObjectiveParams | None:
    """Returns the objective's parameters at a step. The arrays are only loaded when they are used.

    Returns:
      None if other runs cannot start from parameters of this objective.
    """
    kind, name = objective_of(config.objective.name), config.objective.name
    if not kind.made_by:
        return None
    averaged = kind.own_eval_params(config)
    section = getattr(config, kind.section)
    declared = options_of(type(section))
    # Operational values, such as a tokenizer's folder, depend on the machine. They are skipped.
    values = {
        key: value
        for key, value in dataclasses.asdict(section).items()
        if (key in kind.made_by or value is not None) and not declared[key].operational
    }

    folder = checkpoints_of(workdir)
    saved = functools.cache(lambda: item_shapes(folder, step))

    def load(item, like):
        return load_items(folder, {item: like}, str(step))[item]

    def stored_shapes():
        if averaged:
            return saved().get(averaged, {})
        start = "objective/"
        extra = saved().get("extra", {}).items()
        return {path.removeprefix(start): shape for path, shape in extra if path.startswith(start)}

    def sources(shapes):
        check_shapes(shown(workdir), name, stored_shapes(), shapes)
        if averaged:
            params = load(averaged, _abstract(stored_shapes()))
        else:
            params = load("extra", _abstract(saved()["extra"]))["objective"]
        return {path: functools.partial(_at, params, path) for path in shapes}

    def state_of(item):
        # For an item that is a single array, the path is empty, and the key is only the item's
        # name.
        return {
            f"{item}/{path}".rstrip("/"): shape for path, shape in saved().get(item, {}).items()
        }

    def load_array(item, path):
        return np.asarray(_at({item: load(item, _abstract(state_of(item))[item])}, path))

    state = {
        path: Tensor(shape, "float32", functools.partial(load_array, item, path))
        for item in kind.carried
        for path, shape in state_of(item).items()
    }
    names = manifest["class_names"] if kind.own_classes else ()
    classes = all_names(names, config.data.num_classes or len(names))
    return ObjectiveParams(name, values, sources, stored_shapes, state, classes)


def _preprocessing(config: RunOptions, manifest: dict) -> Preprocessing:
    """Returns the preprocessing of a run's test images."""
    data = config.data
    share = Fraction(data.image_size, data.test_resize)
    configured = data.test_interpolation or data.interpolation
    interpolation = configured or manifest.get("interpolation", "bilinear")
    return Preprocessing(
        data.test_crop, share, interpolation, background=data.background, mode=data.decode
    )
