"""Builds data, model, objective and training step from a config, for training and benchmarks."""

import dataclasses
import os
from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from vit_jax.config import check_fits, with_values
from vit_jax.data.balance import class_weights, single_labels
from vit_jax.data.photometric import PhotometricDistortion
from vit_jax.data.pipeline import SkipLog, training_batches
from vit_jax.data.preprocess import FixedCrop, TrainCrop
from vit_jax.data.randaugment import host_augmentation, resolve
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.data.three_augment import ThreeAugment
from vit_jax.data.timm_augment import RandPolicy
from vit_jax.data.views import View, ViewSpec, view_specs
from vit_jax.errors import UserError
from vit_jax.evaluation.in_training import TrainingSuites
from vit_jax.interop.checkpoint import all_names
from vit_jax.options.data import parse_rand_policy
from vit_jax.options.run import RunOptions
from vit_jax.parallel.mesh import check_batch, local_rows, make_mesh
from vit_jax.parallel.peers import Peers
from vit_jax.runs.api_overrides import ApiOverrides
from vit_jax.runs.device_feed import Feed
from vit_jax.runs.evaluator import test_crop
from vit_jax.runs.frozen_model import FrozenModel, open_frozen
from vit_jax.runs.splits import SPOKEN, Splits, open_splits
from vit_jax.runs.warm_start import Origin, find_origin, with_objective
from vit_jax.training.lora import objective_weights
from vit_jax.training.objectives import objective_of
from vit_jax.training.program import Program, make_program

SAMPLES, HANDED_IN_SAMPLES = 16, 256  # Number of examples that a split's fingerprint includes.


class Parts(NamedTuple):
    """Everything that a run needs before it has a workdir: data, model, objective, step."""

    # The run's config. Preprocessing options that were None have the checkpoint's values.
    config: RunOptions
    mesh: Mesh
    splits: Splits  # The opened splits of the data set.
    # Fingerprints of the splits, and of the data of evaluation suites, by name.
    data: dict[str, dict[str, int | str]]
    suites: TrainingSuites  # Evaluation suites, such as k-NN, with their data opened.
    num_classes: int  # Width of the model's head; 0: the model has no head.
    steps: int  # Number of training steps of the run.
    origin: Origin  # The model, and the source of the initial parameters of model and objective.
    # The objective's frozen model, such as a teacher; None: no frozen model.
    frozen: FrozenModel | None
    program: Program  # The training step, with the objective, the optimizer and the schedule.
    overrides: ApiOverrides  # The API overrides of the calling program.

    def program_of(self, config: RunOptions) -> Program:
        """Returns the program (training step) of a changed config."""
        options = with_classes_of(config, self.splits.train)
        names = all_names(learned_classes(options, self.splits.train), self.num_classes)
        origin = find_origin(options, self.num_classes, self.overrides.model, names)
        return make_program(
            options,
            num_classes=self.num_classes,
            steps=self.steps,
            mesh=make_mesh(options.mesh),
            build=origin.build,
            frozen=self.frozen and self.frozen.model,
        )


def assemble(
    config: RunOptions,
    peers: Peers | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    overrides: ApiOverrides | None = None,
    steps: int | None = None,
) -> Parts:
    """Builds a run's data, model, objective and training step from a checked config.

    Args:
      peers: the run's processes. The data of all processes are compared and must be equal. None:
        only this process.
      on_phase: callback that receives the name of each phase that may take long.
      overrides: API overrides, which replace values of the config.

    Raises:
      UserError: the config is incompatible with the devices or the data, or its checkpoint cannot
        be read.
    """
    peers, overrides = peers or Peers(), overrides or ApiOverrides()
    on_phase("finding the devices")
    mesh = make_mesh(config.mesh)
    check_batch(mesh, config.batch_size, config.micro_batches)
    on_phase("looking through the data sets")
    splits = open_splits(config, overrides.data, overrides.groups)
    config = with_classes_of(config, splits.train)
    samples = HANDED_IN_SAMPLES if overrides.data is not None else SAMPLES
    fields = {
        f"encoding of {field.name}": field.identity
        for field in objective_of(config.objective.name).fields(config)
    }
    data = {name: fingerprint(source, samples) | fields for name, source in splits.named.items()}
    if peers.count > 1:
        for name, found in data.items():
            peers.agree(f"the {SPOKEN[name]} data", found)
    num_classes = class_count(config, splits.train)
    steps = steps or step_count(config, len(splits.train))
    on_phase("opening the checkpoint to start from")
    names = all_names(learned_classes(config, splits.train), num_classes)
    origin = find_origin(config, num_classes, overrides.model, names)
    frozen = open_frozen(config, names)
    seen = with_images_of(config, origin)
    on_phase("looking through the data sets of evaluation suites")
    suites = TrainingSuites(seen, mesh, test_crop(seen), peers, names)
    on_phase("making the program")
    program = make_program(
        config,
        num_classes=num_classes,
        steps=steps,
        mesh=mesh,
        build=origin.build,
        frozen=frozen and frozen.model,
        class_weights=_class_weights(config, splits.train),
    )
    origin = with_objective(
        origin,
        config,
        objective_weights(program.state),
        program.state["objective_state"],
        all_names(learned_classes(config, splits.train), config.data.num_classes or 0),
    )
    data |= suites.fingerprints
    return Parts(
        seen, mesh, splits, data, suites, num_classes, steps, origin, frozen, program, overrides
    )


def _class_weights(config: RunOptions, train: Source) -> tuple[float, ...]:
    """Returns the weight of each class in the loss; empty: all weights are 1."""
    if config.data.balance != "none":
        single_labels(train, "data.balance")
    if (kind := config.loss.class_weights) == "none":
        return ()
    return class_weights(single_labels(train, "loss.class_weights"), kind)


def class_count(config: RunOptions, source: Source) -> int:
    """Returns the width of the model's head: the number of classes, or `Objective.outputs`.

    Raises:
      UserError: `config.data.num_classes` is less than the data set's number of classes, or all
        images have the same class.
    """
    if not objective_of(config.objective.name).labels:
        return objective_of(config.objective.name).outputs(config)
    _check_several_classes(config, source)
    return _data_classes(config, source)


def _data_classes(config: RunOptions, source: Source) -> int:
    """Returns `config.data.num_classes`; if it is None, the data set's number of classes."""
    found, num_classes = len(source.class_names), config.data.num_classes
    if num_classes is not None and num_classes < found:
        raise UserError(f"data.num_classes is {num_classes}, but the data set has {found} classes")
    return num_classes or found


def with_classes_of(config: RunOptions, source: Source) -> RunOptions:
    """Returns the config with `data.num_classes` set, if the objective has its own class head.

    If `data.num_classes` is None, it becomes the data set's number of classes.
    """
    if not objective_of(config.objective.name).own_classes:
        return config
    return with_values(config, {"data.num_classes": _data_classes(config, source)})


def _check_several_classes(config: RunOptions, source: Source) -> None:
    """Raises UserError if all training images have the same class: the accuracy would be 100 %.

    With binary losses, a single class is allowed if some images do not have it.
    """
    present = [name for name in source.class_names if name not in source.empty_classes]
    if len(present) != 1:
        return
    known = source.known_labels()
    if config.loss.name != "softmax" and (known is None or (known < 0).all(axis=1).any()):
        return
    inner = ""
    if config.data.source == "folder" and config.data.classes is None:
        split = config.data.train_split.split("[")[0].removesuffix("all")
        inner = (
            f"; if the folders in {present[0]!r} are the classes, name it in the splits, such as "
            f"data.train_split={os.path.join(split, present[0])}"
        )
    raise UserError(
        f"the training images are all of the class {present[0]!r}, and a classifier needs two or "
        f"more{inner}"
    )


def learned_classes(config: RunOptions, source: Source) -> tuple[str, ...]:
    """Returns the names of the classes that a run learns; empty for objectives without classes."""
    kind = objective_of(config.objective.name)
    return tuple(source.class_names) if kind.labels or kind.own_classes else ()


def step_count(config: RunOptions, images: int) -> int:
    """Returns the run's number of steps: `config.steps`, or the whole batches in all epochs.

    Raises:
      UserError: all epochs together have fewer images than one batch.
    """
    steps = config.steps or int(config.epochs * images / config.batch_size)
    if steps < 1:
        raise UserError(
            f"{config.epochs:g} epochs of {images} images are less than one batch of "
            f"{config.batch_size}; lower batch_size or raise epochs"
        )
    return steps


def with_images_of(config: RunOptions, origin: Origin) -> RunOptions:
    """Returns the config with the interpolation and the mean of the checkpoint to start from.

    A value that the config sets itself is kept.
    """
    mean = origin.options.mean
    mean = mean if isinstance(mean, tuple) else (mean,)
    return with_values(config, {"data.interpolation": origin.interpolation, "model.mean": mean})


def train_crop(config: RunOptions) -> TrainCrop:
    """Returns the training transform (a random crop) of a config."""
    data = config.data
    return TrainCrop(
        size=data.image_size,
        kind=data.crop,
        area=data.crop_area,
        aspect=data.crop_aspect,
        resize=data.crop_resize or 0,
        mode=data.decode,
        interpolation=data.interpolation or "bilinear",
        background=data.background,
        scale=data.crop_scale,
    )


def training_views(config: RunOptions) -> tuple[ViewSpec, ...]:
    """Returns the objective's views of a training image, with sizes and transforms."""
    views, crop = objective_of(config.objective.name).views(config), train_crop(config)

    def crop_of(size: int, **values) -> TrainCrop:
        return dataclasses.replace(crop, size=size, **values)

    return view_specs(views, crop_of, config.data.image_size, image_augmentation(config))


def evaluation_views(config: RunOptions) -> tuple[ViewSpec, ...]:
    """Returns the objective's views of a test image, with sizes and transforms.

    If all views of the objective show the same rectangle of an image, each view is the test crop,
    resized to the view's size. If the views show different rectangles, the rectangles are drawn at
    random as in training. The random numbers depend on the image's index. An empty result means a
    single view, the test crop.
    """
    views = objective_of(config.objective.name).views(config)
    first, *others = (view for view in views if not view.training_only)
    if first.count or any(view.count or view.same_rectangle_as != first.name for view in others):
        return training_views(config)
    crop, size = test_crop(config), config.data.image_size

    def shown(view: View) -> ViewSpec:
        view_size = view.size or size
        resized = dataclasses.replace(crop, size=view_size, resize=crop.resize * view_size / size)
        return ViewSpec(view.name, view_size, FixedCrop(resized))

    return tuple(map(shown, (first, *others))) if others else ()


def image_augmentation(config: RunOptions) -> Callable | None:
    """Returns the augmentation of a decoded crop, `(pixels, rng) -> pixels`; None: no augmentation.

    Raises:
      UserError: timm's RandAugment does not support the interpolation of the crops.
    """
    values = config.augment
    layers_magnitude, _ = resolve(values.level, values.randaugment, values.mixup)
    policy = None
    if values.policy:
        check_fits(config, "augment.policy")
        check_fits(config, "data.interpolation")  # The interpolation may come from a checkpoint.
        resampling = "bicubic" if config.data.interpolation == "bicubic" else "bilinear"
        mean = tuple(config.model.mean or (0.5,))
        fill = tuple(min(255, round(255 * x)) for x in (mean if len(mean) > 1 else 3 * mean))
        policy = RandPolicy(**parse_rand_policy(values.policy), fill=fill, resampling=resampling)
    elif values.three_augment is not None:
        policy = ThreeAugment(values.three_augment)
    elif values.photometric is not None:
        policy = PhotometricDistortion(values.photometric)
    return host_augmentation(layers_magnitude, values.color_jitter, policy)


def open_feed(
    config: RunOptions, source: Source, first_step: int, log: Callable[[str], None], mesh: Mesh
) -> Feed:
    """Returns an iterator of batches on the devices, from the one after `first_step` steps."""
    batches = training_batches(
        source,
        seed=config.seed,
        batch_size=config.batch_size,
        first_step=first_step,
        views=training_views(config),
        fields=objective_of(config.objective.name).fields(config),
        repeats=config.data.repeats,
        balance=config.data.balance,
        workers=config.data.workers,
        threads=config.data.threads,
        rows=local_rows(mesh, config.batch_size),
    )
    skipped = SkipLog(source, config.data.max_unreadable, log)
    return Feed(batches, skipped.check, mesh)
