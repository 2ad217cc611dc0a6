"""Automatic settings for fine-tuning on a custom data set, each with its reason.

The recipe is LP-FT (Kumar et al., 2022). First a linear probe is fitted, which initializes the
head. Then all layers are trained with AdamW, at a low learning rate with layer-wise decay. The
parameters with the best dev accuracy are kept, which may be those of the linear probe.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from vit_jax.config import value_at, with_values
from vit_jax.data.class_names import has_names, shortened
from vit_jax.data.sources import open_source
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.interop.adapting import fit
from vit_jax.interop.checkpoint import Checkpoint, sketch
from vit_jax.interop.open import open_checkpoint
from vit_jax.models import count_multiply_adds, family_of
from vit_jax.options.data import INTERPOLATIONS, TEST_CROPS
from vit_jax.options.run import RunOptions
from vit_jax.runs.choices.choice import Choice, Settings
from vit_jax.runs.choices.data_at import (
    DEV,
    DataAt,
    check_files,
    choices_of,
    data_at,
    find_groups,
    of_kind,
)
from vit_jax.runs.choices.device import available_seconds, flops_per_second, on_cpu
from vit_jax.runs.choices.image_sizes import largest_size, short_sides
from vit_jax.runs.choices.micro_batches import choose_micro_batches
from vit_jax.runs.splits import share

DEFAULT_CHECKPOINT = "hf://facebook/dinov2-small"
LARGE_CHECKPOINT = "hf://facebook/dinov2-base"  # For accelerators.
FEATURES = 0.3  # Maximum share of a run's time for one forward pass over all images.
BACKWARD = 3.2  # Duration of a training step, divided by the duration of a forward pass.
EVALUATIONS, FEWEST_EVALUATIONS = 8, 3
EVALUATED = 0.25  # Maximum duration of all dev evaluations, relative to training.
STARTS = 30.0  # Time for start, compilation and end of a run, in seconds.
FEWEST = 6  # Minimum number of images in total.
LEAST_STEPS = 8
# Rows of (limit, batch size) and of (limit, epochs). The first row applies whose limit exceeds the
# number of training images.
BATCHES = ((64, 8), (400, 16), (5000, 32), (50_000, 64), (math.inf, 256))
EPOCHS = ((200, 30), (1000, 20), (10_000, 12), (math.inf, 6))
# Rows of (limit, minimum area of a training crop). The first row applies whose limit exceeds the
# number of images per class.
SMALLEST_AREAS = ((200, 0.5), (1000, 0.25), (math.inf, 0.08))
# If at least this share of class names is a single letter or digit, images are not mirrored.
LETTERS = 0.8

T = TypeVar("T")


class Images(NamedTuple):
    """The training split, and the numbers of dev and test images."""

    train: Source
    dev: int
    test: int


def choose(settings: Settings) -> None:
    """Adds the automatic settings of a fine-tuning run to options with `data.path`.

    Raises:
      UserError: the data set or the checkpoint does not exist, there are too few images for all
        splits, or not even one image fits into memory.
    """
    user_keys = settings.user_keys
    data_set, choices = _data(settings.options, user_keys)
    settings.add(choices)
    images, choices = _splits(settings.options, user_keys, data_set)
    settings.add(choices)
    checkpoint, choices = _checkpoint(settings.options)
    settings.add(choices)
    settings.add(_images(settings.options, images, checkpoint))
    settings.add(_labels(images.train))
    settings.add(_length(settings.options, user_keys, images, checkpoint))
    settings.add(choose_micro_batches(settings.options, user_keys, least=1))


def _data(config: RunOptions, user_keys: Collection[str]) -> tuple[DataAt, list[Choice]]:
    """Returns the data set at `data.path`; recognizes its kind if `data.source` is not set."""
    data = config.data
    if not data.path:
        raise UserError("name the images: vit-jax finetune PHOTOS, or --config.data.path=PHOTOS")
    if "data.source" in user_keys:
        return of_kind(data.source, data.path), []
    data_set = data_at(data.path)
    return data_set, choices_of(data_set, data.path)


def _checkpoint(config: RunOptions) -> tuple[Checkpoint, list[Choice]]:
    """Returns the checkpoint to start from. By default, a published checkpoint is downloaded."""
    name = config.finetune.checkpoint
    if name is not None:
        return open_checkpoint(name), []
    name, reason = DEFAULT_CHECKPOINT, "DINOv2-S/14: small enough for a CPU"
    if not on_cpu():
        name, reason = LARGE_CHECKPOINT, "DINOv2-B/14: its features suit few images"
    return open_default(name, ", or hf://owner/name"), [Choice("finetune.checkpoint", name, reason)]


def open_default(name: str, others: str) -> Checkpoint:
    """Opens the default checkpoint; raises UserError with the advice `others` if it cannot."""
    try:
        return open_checkpoint(name)
    except UserError as error:
        raise UserError(
            f"no checkpoint is given, and the default cannot be fetched ({error}); give "
            f"--from=CHECKPOINT: a folder of timm or Transformers, a .npz, a workdir{others}"
        ) from error


def _splits(
    config: RunOptions, user_keys: Collection[str], data_set: DataAt
) -> tuple[Images, list[Choice]]:
    """Chooses the splits: the splits of the data set, or stratified slices of all its images."""
    keys = {"data.train_split", "data.dev_split", "data.test_split"} & {*user_keys}
    first = _first_split(config, keys, data_set)
    source = open_split(config, first)
    choices = (
        _whole(source, config.data.slices) if first == "all" else _parts(data_set.splits, first)
    )
    named = {one.key: one.value for one in choices}
    named |= {key: value_at(config, key) for key in keys}
    groups = _groups(config, user_keys, source, named)
    choices += groups
    config = with_values(config, named | {one.key: one.value for one in groups})
    _check_enough(config, source, first == "all")
    opened = {key: open_split(config, split) for key, split in named.items() if split}
    names = dict.fromkeys(split.partition("[")[0] for split in named.values() if split)
    check_files({name: source if name == first else open_split(config, name) for name in names})
    train = opened["data.train_split"]
    _check_apart(config, named, keys, train)
    counts = (len(opened.get(key, ())) for key in ("data.dev_split", "data.test_split"))
    return Images(train, *counts), choices


def _first_split(config: RunOptions, keys: Collection[str], data_set: DataAt) -> str:
    """Returns the name of the split to train on, or raises UserError if there is none."""
    if "data.train_split" in keys:
        return config.data.train_split.partition("[")[0]
    first = "all" if data_set.is_whole else "train"
    if first not in data_set.splits:
        likely = next((name for name in DEV if name in data_set.splits), data_set.splits[0])
        raise UserError(
            f"{config.data.path} has the splits {', '.join(data_set.splits)}, and none to train "
            f"on: choose one, as with --config.data.train_split='{likely}[:70%]'"
        )
    return first


def _groups(
    config: RunOptions, user_keys: Collection[str], source: Source, named: dict[str, str]
) -> list[Choice]:
    """Chooses `data.groups`, so that images of a group are in the same split.

    The result is empty if no split is a slice of the data set, if the file names contain no groups,
    or if the user has set `data.groups`.
    """
    sliced = any("[" in (split or "") for split in named.values())
    if not sliced or config.data.groups is not None or "data.groups" in user_keys:
        return []
    if (groups := find_groups(source)) is None:
        return []
    pattern, count = groups
    reason = (
        f"names show {count:,} groups, each of which is in one split; without groups: "
        "--group=none, or --config.data.groups=None"
    )
    return [Choice("data.groups", pattern, reason)]


def _check_apart(
    config: RunOptions, named: dict[str, str], user_splits: Collection[str], train: Source
) -> None:
    """Raises UserError if a split that the user has set shares images with an automatic split.

    `named` contains all splits by config key, and `user_splits` the keys that the user has set.
    """
    for one in sorted(user_splits):
        for other in sorted(named.keys() - user_splits):
            pair = (key.removeprefix("data.") for key in (one, other))
            if named[one] and named[other] and share(config, train, *pair):
                raise UserError(
                    f"{one}={named[one]!r} is given, and has images of {other}={named[other]!r}, "
                    "which was chosen: give all of "
                    f"{', '.join(f'--config.{key}' for key in sorted(named))}"
                )


def open_split(config: RunOptions, split: str) -> Source:
    """Opens a split of the config's data set."""
    data = config.data
    return open_source(
        data.source,
        split,
        path=data.path,
        label_key=data.label_key,
        only=data.classes,
        slices=data.slices,
        groups=data.groups if "[" in split else None,
    )


def _whole(source: Source, slices: str) -> list[Choice]:
    """Chooses slices of a data set without splits; `slices` is `data.slices`."""
    images = len(source)
    how = {
        "stratified": "with the share of each class",
        "in_order": "in their order",
        "hashed": "by the hashes of their paths",
    }[slices]
    train, dev = next(
        shares
        for most, *shares in ((60, 60, 80), (10_000, 70, 85), (math.inf, 80, 90))
        if images < most
    )
    return splits_of(
        (f"all[:{train}%]", f"{train} % of {images:,} images, {how}"),
        (f"all[{train}%:{dev}%]", f"{dev - train} % to choose by"),
        (f"all[{dev}%:]", f"{100 - dev} % that are looked at for the report alone"),
    )


def _parts(names: Collection[str], first: str) -> list[Choice]:
    """Chooses train (from `first`), dev and test splits for data that may lack the other two."""
    dev = next((name for name in DEV if name in names and name != first), None)
    test = "test" if "test" in names and first != "test" else dev
    same = "as the data set has it"
    if dev and "test" in names:
        values = (first, same), (dev, f"{same}: to choose by"), ("test", same)
    elif test:
        values = (
            (f"{first}[:85%]", "the data set has no third split to choose by"),
            (f"{first}[85%:]", "15 % of the training images, to choose by"),
            (test, same),
        )
    else:
        values = (
            (f"{first}[:70%]", f"the data set has no other split than {first}"),
            (f"{first}[70%:85%]", "to choose by"),
            (f"{first}[85%:]", "that are looked at for the report alone"),
        )
    return splits_of(*values)


def splits_of(*values: tuple[str, str]) -> list[Choice]:
    """Returns the settings of train, dev and test split, given a value and a reason for each."""
    keys = ("data.train_split", "data.dev_split", "data.test_split")
    return [Choice(key, *value) for key, value in zip(keys, values, strict=True)]


def _check_enough(config: RunOptions, source: Source, whole: bool) -> None:
    """Raises UserError for too few images, a single class, or a class with a single image.

    Args:
      whole: True: train, dev and test splits are all slices of `source`. False: the data set has
        splits of its own.
    """
    path, table = config.data.path, source.known_labels()
    if whole and len(source) < FEWEST:
        raise UserError(
            f"{path} has {len(source)} images in all, and fine-tuning needs {FEWEST} at least, to "
            "train on, to choose by and to test; add images"
        )
    if table is None or table.shape[1] > 1:
        return
    counts = np.bincount(table[table >= 0], minlength=len(source.class_names))
    if np.count_nonzero(counts) == 1 and (table >= 0).all():
        name = source.class_names[int(np.argmax(counts))]
        raise UserError(
            f"{path} has images of one class, {name!r}, and a classifier needs two or more: add a "
            f"folder, or rows, for each other class; without labels, vit-jax pretrain {path} "
            "trains on them"
        )
    if whole:
        _check_no_single(path, source.class_names, counts)


def _check_no_single(path: str, class_names: Sequence[str], counts: np.ndarray) -> None:
    """Raises UserError if a class has a single image, which cannot be in two splits."""
    single = [class_names[label] for label in np.flatnonzero(counts == 1)]
    if not single:
        return
    others = [name for name, count in zip(class_names, counts, strict=True) if count > 1]
    remedy = ""
    if 2 <= len(others) <= 8:
        remedy = f', or leave it out: --config.data.classes="{tuple(others)}"'
    raise UserError(
        f"{path} has 1 image of the class {shortened(single)}, which cannot be both learned "
        f"and tested: add images{remedy}"
    )


def _images(config: RunOptions, images: Images, checkpoint: Checkpoint) -> list[Choice]:
    """Chooses the image size, the training crop and the evaluation transform."""
    size, reason = _image_size(config, images, checkpoint)
    preprocessing = checkpoint.preprocessing
    share, kind, crop_reason = 7 / 8, "short_side", "as the checkpoint's preprocessing"
    if preprocessing and preprocessing.kind in TEST_CROPS:
        share, kind = preprocessing.share, preprocessing.kind
    elif preprocessing:
        crop_reason = f"the checkpoint's is unsupported: {preprocessing.kind}"
    sides = short_sides(images.train)
    per_class = len(images.train) / max(1, len(images.train.class_names))
    choices = [
        Choice("data.image_size", size, f"{reason}; the images' shorter sides are {sides}"),
        Choice("data.test_crop", kind, crop_reason),
        Choice("data.test_resize", round(size / share), "the same"),
        Choice(
            "data.crop_area",
            (_first(SMALLEST_AREAS, per_class), 1.0),
            f"{per_class:,.0f} images a class: the fewer, the more of an image",
        ),
    ]
    if preprocessing and preprocessing.interpolation not in INTERPOLATIONS:
        choices.append(Choice("data.interpolation", "bilinear", "the checkpoint's is unsupported"))
    return choices


def _image_size(config: RunOptions, images: Images, checkpoint: Checkpoint) -> tuple[int, str]:
    """Returns the image size (side in pixels), and the reason."""
    patch = checkpoint.arguments.get("patch_size") or 32
    patch = max(patch) if isinstance(patch, tuple) else patch
    native = min(checkpoint.arguments["image_size"])
    if family_of(checkpoint.options).fixed_size:
        return native, "the checkpoint's, whose model takes no other"
    most = native if native <= 288 or checkpoint.preprocessing is None else 224
    largest = max(patch, most // patch * patch)
    seconds = available_seconds(config)
    count = len(images.train) + images.dev + 2 * images.test

    def fits(size: int) -> bool:  # A forward pass over all images takes little of the time.
        return count * _forward_seconds(checkpoint, size) <= FEATURES * seconds

    step = patch if patch >= 14 else 2 * patch
    return largest_size(largest, step, 6 * patch, patch, seconds and seconds / 60, fits)


def _forward_seconds(checkpoint: Checkpoint, size: int) -> float:
    options, _, _ = fit(checkpoint, {"image_size": size, "num_classes": 2}, new_head=True)
    return 2 * count_multiply_adds(sketch(options)) / flops_per_second()


def _labels(train: Source) -> list[Choice]:
    """Chooses the loss, the head's initialization and mirroring, which depend on the classes."""
    names = train.class_names
    baseline = "the linear probe on the same images, which is the baseline"
    choices = [Choice("finetune.head", "probe", baseline)]
    if train.max_labels > 1:
        choices = [
            Choice("loss.name", "sigmoid", _several_labels(train)),
            Choice("finetune.head", "new", "a linear probe is of one label an image"),
        ]
    letters = [name for name in names if len(name) == 1]
    if len(letters) >= LETTERS * len(names) and (has_names(names) or len(names) == 10):
        choices.append(Choice("data.flip", False, "the classes are letters or digits"))
    return choices


def _several_labels(train: Source) -> str:
    """Returns a text on images with several labels, so that contradictory labels are noticed."""
    text, table = f"an image may have {train.max_labels} labels", train.known_labels()
    several = [] if table is None else np.flatnonzero((table >= 0).sum(axis=1) > 1)
    if not len(several):
        return text
    example = train.describe(int(several[0]))
    return f"{text}: {len(several):,} of {len(table):,} have several, such as {example}"


def _length(
    config: RunOptions, user_keys: Collection[str], images: Images, checkpoint: Checkpoint
) -> list[Choice]:
    """Chooses batch size, steps, evaluation interval and learning rate."""
    count = len(images.train)
    batch = min(count, config.batch_size if "batch_size" in user_keys else _first(BATCHES, count))
    epochs = config.epochs or _first(EPOCHS, count)
    steps = config.steps or max(LEAST_STEPS, math.ceil(epochs * count / batch))
    reason = f"{epochs:g} passes over {count:,} images"
    seconds, evaluations, stopping = available_seconds(config), EVALUATIONS, []
    if seconds is not None and not (config.steps or config.epochs):
        forward = _forward_seconds(checkpoint, config.data.image_size)
        # Time left for training and dev evaluations. The unit is the duration of a forward pass of
        # one image.
        left = (0.85 * seconds - STARTS) / forward - count - images.dev - 2 * images.test
        if left < BACKWARD * steps * batch + evaluations * images.dev:
            affordable = int(EVALUATED * left / max(1, images.dev))
            evaluations = min(EVALUATIONS, max(FEWEST_EVALUATIONS, affordable))
            possible = int((left - evaluations * images.dev) / (BACKWARD * batch))
            steps = min(steps, max(LEAST_STEPS, possible))
            reason = (
                f"{steps * batch / count:.1f} passes over {count:,} images, in {seconds / 60:g} "
                "minutes"
            )
            stopping = [Choice("early_stopping", evaluations + 1, "never, as the time is short")]
    every = max(1, round(steps / evaluations))
    every = config.evaluate_every if "evaluate_every" in user_keys else every
    rate = float(f"{5e-5 * math.sqrt(batch / 32 * min(1, steps / 100)):.2g}")
    return [
        *stopping,
        Choice("batch_size", batch, f"{count:,} images to train on"),
        *([] if config.epochs else [Choice("steps", steps, reason)]),
        Choice(
            "optimizer.learning_rate", rate, "of AdamW from a probe, by the root of batch and steps"
        ),
        Choice(
            "optimizer.warmup_steps",
            math.ceil(steps / 10) if steps > 1 else 0,
            "a tenth of the steps",
        ),
        Choice("evaluate_every", every, f"{math.ceil(steps / every)} evaluations on the dev split"),
        Choice("checkpoint.every", every, "with each evaluation"),
        Choice("log_every", max(1, every // 4), "four lines between evaluations"),
    ]


def _first(table: Sequence[tuple[float, T]], count: float) -> T:
    """Looks up `count` in a table of (limit, value): the first value with a limit above `count`."""
    return next(value for most, value in table if count < most)
