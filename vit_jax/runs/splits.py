"""The splits of a run: training, model selection and test."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.balance import note_of
from vit_jax.data.class_names import alike, shortened
from vit_jax.data.sources import SOURCES, open_handed_in, open_source
from vit_jax.data.sources.base import (
    Source,
    Subset,
    before_selection,
    check_fields,
    check_labelled,
    lacking,
)
from vit_jax.data.sources.slices import overlap
from vit_jax.errors import UserError
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives import objective_of

MANY = 10**9  # If a split's number of images is unknown, this number is assumed for percentages.


SPOKEN = {"train": "training", "dev": "dev", "test": "test"}


class Splits(NamedTuple):
    """The opened data splits of a run."""

    train: Source  # Split to train on.
    # Split for evaluations during training and for model selection; None: `test` is used.
    dev: Source | None
    test: Source  # Split for the final evaluation.

    @property
    def named(self) -> dict[str, Source]:
        """Opened splits by name: `train`, `test` and, if it exists, `dev`."""
        return {name: source for name, source in self._asdict().items() if source is not None}

    @property
    def chosen_by(self) -> str:
        """Name of the split for model selection: `dev`, or `test` without a dev split."""
        return "test" if self.dev is None else "dev"


def open_splits(
    config: RunOptions, data: Mapping[str, Any] | None = None, groups: Sequence | None = None
) -> Splits:
    """Opens the splits of a config. All splits have the class indices of the training split.

    Args:
      data: API override: a data set by split, in place of the config's data set.
      groups: API override: the group of each example of `train`, in place of
        `config.data.groups`.

    Raises:
      UserError: a split does not exist, is empty or cannot be read. Or the split for model
        selection shares images with the training or test split.
    """
    values = config.data
    arguments = dict(
        path=values.path,
        label_key=values.label_key,
        num_classes=values.num_classes,
        parts=values.parts or (),
        weights=values.weights,
        image_size=values.image_size,
        only=values.classes,
        fields=tuple(field.name for field in objective_of(config.objective.name).fields(config)),
        caption_key=values.caption_key,
        depth_scale=values.depth_scale,
        labels=objective_of(config.objective.name).labels,
        each_labelled=objective_of(config.objective.name).needs_a_label(config),
        slices=values.slices,
        groups=values.groups if groups is None else groups,
    )
    opened = (
        partial(open_handed_in, data) if data is not None else partial(open_source, values.source)
    )
    train = opened(values.train_split, **arguments)
    for key in ("train_split", "test_split") if values.dev_split is not None else ():
        if share(config, train, "dev_split", key):
            raise UserError(
                f"config.data.dev_split is {values.dev_split!r}, and config.data.{key} has images "
                f"of it: {values[key]!r}; give another, or --config.data.dev_split=None"
            )
    named = dict(class_names=train.class_names, **arguments)
    dev = opened(values.dev_split, **named) if values.dev_split is not None else None
    splits = Splits(train, dev, opened(values.test_split, **named))
    for name, source in splits.named.items():
        check_fields(source, arguments["fields"], SPOKEN[name])
    if arguments["each_labelled"]:
        for name, source in splits.named.items():
            check_labelled(source, SPOKEN[name])
    return splits


def share(config: RunOptions, train: Source, one: str, other: str) -> bool:
    """Returns True if two splits of the config's data share images; False for synthetic data.

    `one` and `other` are names of options, such as `train_split` and `dev_split`.
    """
    if SOURCES[config.data.source].made_up:
        return False
    opened, _ = before_selection(train)
    images = len(opened.source) if isinstance(opened, Subset) else MANY
    return overlap(getattr(config.data, one), getattr(config.data, other), images)


def notes(config: RunOptions, splits: Splits, groups: Sequence | None = None) -> list[str]:
    """Returns notes on unexpected properties of splits; `groups`: API override for `train`."""
    lines = [
        line for name, source in splits.named.items() for line in lacking(SPOKEN[name], source)
    ]
    if shared := splits.train.shared_classes:
        lines.append(
            f"note: several of data.parts have the classes {shortened(shared)}: each name is one "
            "class, with the images of all of them"
        )
    if objective_of(config.objective.name).labels:
        lines += _notes_on_labels(config, splits)
    if share(config, splits.train, "train_split", "test_split"):
        lines.append("note: the test images are trained on, some of them or all")
    lines += _note_on_crop(config)
    if config.data.groups is None and groups is None:
        lines += _note_on_sample(config, splits.train)
    if config.checkpoint.keep_best and splits.dev is None:
        lines.append(
            "note: checkpoint.keep_best chooses by the test images, so that their figures are "
            "too good; config.data.dev_split selects other images for it"
        )
    return lines


def _notes_on_labels(config: RunOptions, splits: Splits) -> list[str]:
    """Returns notes on similar class names, several labels of an image, and unequal classes."""
    lines, train = [], splits.train
    pairs = [" and ".join(map(ascii, group)) for group in alike(train.class_names)]
    if pairs:
        lines.append(f"note: classes with similar names: {shortened(pairs)}; each is a class")
    if "accuracy" in objective_of(config.objective.name).metrics:
        for name, source in splits.named.items():
            lines += _notes_on_label_counts(config, SPOKEN[name], source)
    uncorrected = config.data.balance == config.loss.class_weights == "none"
    if uncorrected and (unequal := note_of(train)):
        lines.append(unequal)
    return lines


def _notes_on_label_counts(config: RunOptions, images: str, source: Source) -> list[str]:
    """Returns notes on images with several labels, which share the target, and without a label.

    `images` is an adjective for the notes, such as "training".
    """
    if (table := source.known_labels()) is None:
        return []
    lines, counts = [], (table >= 0).sum(axis=1)
    all_images = f"{len(table):,} {images} images have"
    several, unlabelled = np.flatnonzero(counts > 1), np.count_nonzero(counts == 0)
    if config.loss.name == "softmax" and len(several):
        # Distillation compares distributions, and has no other loss.
        other = config.objective.name != "distillation"
        lines.append(
            f"note: {len(several):,} of {all_images} several labels, such as "
            f"{source.describe(int(several[0]))}: they share the target equally; correct "
            f"contradictory labels{', or give --config.loss.name=sigmoid' if other else ''}"
        )
    if unlabelled:
        lines.append(
            f"note: {unlabelled:,} of {all_images} no label: every class counts as wrong for "
            f"them, so the accuracy is at most {1 - unlabelled / len(table):.2%}"
        )
    return lines


def _note_on_crop(config: RunOptions) -> list[str]:
    """Returns a note if the evaluation crop is less than half of the resized image's side.

    This happens if `data.image_size` is reduced and `data.test_resize` is not.
    """
    data = config.data
    size, resized = data.image_size, data.test_resize
    if data.test_crop == "fit" or 2 * size >= resized:
        return []
    return [
        f"note: evaluation uses only the central {size} of {resized} pixels, "
        f"{(size / resized) ** 2:.0%} of a square image: data.test_resize={round(size * 8 / 7)} "
        f"crops 7/8 of the side, data.test_resize={size} uses the whole side"
    ]


def _note_on_sample(config: RunOptions, train: Source) -> list[str]:
    """Returns a note if the training split is a random sample of a data set in memory.

    A user may expect that a slice such as `train[:80%]` consists of the first rows of the data set
    that a program passed. By default, slices are stratified random samples.
    """
    if config.data.source != "handed_in" or config.data.slices != "stratified":
        return []
    opened, _ = before_selection(train)
    if not isinstance(opened, Subset):
        return []
    return [
        f"note: {config.data.train_split} is a sample of the {len(opened.source):,} "
        "examples, not a range of rows: data.slices='in_order' takes rows, and groups=... "
        "or data.groups keeps near-duplicates in one slice"
    ]
