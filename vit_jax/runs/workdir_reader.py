"""Reads the model of a run from its workdir, as a `Checkpoint`."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
from etils import epath
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, all_names, sketch
from vit_jax.interop.objective_files import ObjectiveParams, Shapes, check_shapes
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models import read_options
from vit_jax.models.model_card import parameter_shapes
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
    try:
        options = read_options(manifest["model"])
    except UserError as error:
        raise UserError(
            f"{shown(workdir)}/{MANIFEST} is damaged: {error}; restore a copy of it"
        ) from error
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


def _load_params(
    workdir: Path, config: RunOptions, manifest: dict, shapes: Shapes, which: str
) -> tuple[dict, int]:
    """Loads the parameters that evaluations use, such as an EMA, nested, and their step."""
    params, folder = _abstract(shapes), checkpoints_of(workdir)
    if handed_in := manifest.get("objective"):
        evaluated = handed_in["eval_params"]
    else:
        evaluated = objective_of(config.objective.name).eval_params(config)
    if evaluated:  # The evaluated parameters are part of the state, such as an EMA.
        items = load_items(folder, {evaluated: params}, which)
        return items[evaluated], items["step"]
    items = load_items(folder, {"params": params}, which)
    if config.finetune.train == "lora":
        # The item also contains the objective's own parameters, if there are any.
        items |= _Arrays(folder, items["step"]).load("extra")
    return effective({"extra": {}} | items), items["step"]


class _Arrays:
    """The arrays of a run's checkpoint.

    A checkpoint consists of items, such as `params`. The path of an array is the name of its item,
    followed by the path within the item.
    """

    def __init__(self, folder: Path | epath.Path, step: int):
        self._folder, self._step = folder, step

    @functools.cached_property
    def shapes(self) -> Shapes:
        # The path of an item that is a single array consists of the item's name.
        return {
            f"{item}/{path}".rstrip("/"): shape
            for item, shapes in item_shapes(self._folder, self._step).items()
            for path, shape in shapes.items()
        }

    def load(self, item: str) -> dict:
        """Loads an item as float32 arrays; returns a dict with the item's name as the key."""
        shapes = {path: x for path, x in self.shapes.items() if path.split("/")[0] == item}
        return load_items(self._folder, _abstract(shapes), str(self._step))

    def read(self, path: str) -> np.ndarray:
        return np.asarray(_at(self.load(path.split("/")[0]), path))


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
    """Returns the objective's parameters, loaded on use; None: no run can start from them."""
    kind, name = objective_of(config.objective.name), config.objective.name
    if not kind.made_by:
        return None
    section = getattr(config, kind.section)
    declared = options_of(type(section))
    # Operational values, such as a tokenizer's folder, depend on the machine. They are skipped.
    values = {
        key: value
        for key, value in dataclasses.asdict(section).items()
        if (key in kind.made_by or value is not None) and not declared[key].operational
    }
    arrays = _Arrays(checkpoints_of(workdir), step)
    averaged = kind.own_eval_params(config)
    start = f"{averaged}/" if averaged else "extra/objective/"

    def stored_shapes() -> Shapes:
        of_objective = (path for path in arrays.shapes if path.startswith(start))
        return {path.removeprefix(start): arrays.shapes[path] for path in of_objective}

    def sources(shapes: Shapes) -> dict[str, Callable[[], jax.Array]]:
        check_shapes(shown(workdir), name, stored_shapes(), shapes)
        items = arrays.load(start.split("/")[0])
        return {path: functools.partial(_at, items, start + path) for path in shapes}

    state = {
        path: Tensor(shape, "float32", functools.partial(arrays.read, path))
        for item in kind.carried
        for path, shape in arrays.shapes.items()
        if path.split("/")[0] == item
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
