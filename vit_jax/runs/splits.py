"""The splits of a run: what it trains on, what it chooses by, and what it reports."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from vit_jax.data.balance import note_of
from vit_jax.data.class_names import shortened
from vit_jax.data.sources import SOURCES, open_handed_in, open_source
from vit_jax.data.sources.base import Source, Subset, check_labelled, lacking
from vit_jax.data.sources.slices import overlap
from vit_jax.errors import UserError
from vit_jax.options import SPLIT, Option, either, number, one_of, only_with, several, text, unless, whole
from vit_jax.training.objectives import objective_of

MANY = 10**9  # Images of a split whose size is not known, for the shares that are cut out of it.
SPLIT_KEYS = "train_split", "dev_split", "test_split"


def _slice_missing(config: ConfigDict) -> str:
    slices = any("[" in (config.data[key] or "") for key in SPLIT_KEYS)
    return unless(slices, "a split that is a slice, such as data.train_split='train[:90%]'")


SPOKEN = {"train": "training", "dev": "dev", "test": "test"}

OPTIONS = {
    "data.source": Option(
        "digits", text(r"\w+"), "Kind of data: digits, folder, tfds or another of vit_jax/data/sources."
    ),
    "data.path": Option(
        "",
        text(),
        "The folder, a CSV, TFDS's `name` or `name:data_dir`, a pattern of files.",
        needs=lambda config: only_with("data.source", *_with_path())(config),
    ),
    "data.parts": Option(
        None,
        several(text()),
        "Parts of a mixture: ('tfds:imagenet2012', 'folder:/data/pets').",
        needs=only_with("data.source", "mixture"),
    ),
    "data.weights": Option(
        None,
        several(number(above=0)),
        "Shares of a mixture's parts; None: every image counts the same.",
        needs=only_with("data.source", "mixture"),
    ),
    "data.train_split": Option("train", SPLIT, "The images to train on."),
    "data.dev_split": Option(
        None, SPLIT, "Images to evaluate on and choose by during training; None: the test images."
    ),
    "data.test_split": Option(
        "test", SPLIT, "The images to evaluate on: at the end alone, with a dev_split."
    ),
    "data.slices": Option(
        "stratified",
        one_of("stratified", "in_order"),
        "What train[:90%] takes: a sample with its share of each class, or images in the source's order.",
        needs=_slice_missing,
    ),
    "data.groups": Option(
        None,
        text(),
        "Keeps images of a group in one slice: a regular expression of the path, or a column.",
        needs=_slice_missing,
    ),
    "data.label_key": Option(
        "label",
        text(),
        "The TFDS feature, or a CSV's column, with the label or labels.",
        needs=only_with("data.source", "csv", "tfds", "array_record", "mixture", "handed_in"),
    ),
    "data.classes": Option(
        None, several(either(text(), whole(0)), least=1), "Only images of these classes, by name; None: all."
    ),
}


def _with_path() -> list[str]:
    return [kind.name for kind in SOURCES.values() if kind.path]


class Splits(NamedTuple):
    """The sources of a run.

    Attributes:
      dev: what is evaluated while training goes on, and chosen by; None: `test` is.
    """

    train: Source
    dev: Source | None
    test: Source

    @property
    def named(self) -> dict[str, Source]:
        """Those that there are, by their names in metrics and figures."""
        return {name: source for name, source in self._asdict().items() if source is not None}

    @property
    def chosen_by(self) -> str:
        """The name of the split that chooses among checkpoints."""
        return "test" if self.dev is None else "dev"


def open_splits(
    config: ConfigDict, data: Mapping[str, Any] | None = None, groups: Sequence | None = None
) -> Splits:
    """The sources that a config names; classes have the numbers of the training split.

    Args:
      data: what a program hands in, by split, in place of the data set that the config names.
      groups: of each example of `train` that is handed in, in place of `config.data.groups`.

    Raises:
      UserError: one does not exist, is empty or cannot be read; what chooses is trained on or reported.
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
        labels=objective_of(config).labels,
        each_labelled=objective_of(config).needs_a_label(config),
        slices=values.slices,
        groups=values.groups if groups is None else groups,
    )
    opened = partial(open_handed_in, data) if data is not None else partial(open_source, values.source)
    train = opened(values.train_split, **arguments)
    for key in ("train_split", "test_split") if values.dev_split is not None else ():
        if share(config, train, "dev_split", key):
            raise UserError(
                f"config.data.dev_split is {values.dev_split!r}, and config.data.{key} has images of it: "
                f"{values[key]!r}; give another, or --config.data.dev_split=None"
            )
    named = dict(class_names=train.class_names, **arguments)
    dev = opened(values.dev_split, **named) if values.dev_split is not None else None
    splits = Splits(train, dev, opened(values.test_split, **named))
    if arguments["each_labelled"]:
        for name, source in splits.named.items():
            check_labelled(source, SPOKEN[name])
    return splits


def share(config: ConfigDict, train: Source, one: str, other: str) -> bool:
    """True where two splits of `config.data` have images in common, where that matters."""
    if SOURCES[config.data.source].made_up:
        return False
    images = len(train.source) if isinstance(train, Subset) else MANY
    return overlap(config.data[one], config.data[other], images)


def notes(config: ConfigDict, splits: Splits, groups: Sequence | None = None) -> list[str]:
    """Returns notes on unexpected properties of a run's splits.

    Args:
      groups: as of `open_splits`.
    """
    lines = [line for name, source in splits.named.items() for line in lacking(SPOKEN[name], source)]
    if shared := splits.train.shared_classes:
        lines.append(
            f"note: several of data.parts have the classes {shortened(shared)}: each name is one class, "
            "with the images of all of them"
        )
    uncorrected = config.data.balance == config.loss.class_weights == "none"
    if objective_of(config).labels and uncorrected and (unequal := note_of(splits.train)):
        lines.append(unequal)
    if share(config, splits.train, "train_split", "test_split"):
        lines.append("note: the test images are trained on, some of them or all")
    sampled = isinstance(splits.train, Subset) and config.data.slices == "stratified"
    if config.data.source == "handed_in" and sampled and config.data.groups is None and groups is None:
        lines.append(
            f"note: {config.data.train_split} is a sample of the {len(splits.train.source):,} examples, and "
            "no range of rows: data.slices='in_order' takes rows, and groups=... or data.groups keeps "
            "near-duplicates in one slice"
        )
    if config.checkpoint.keep_best and splits.dev is None:
        lines.append(
            "note: checkpoint.keep_best chooses by the test images, so that their figures are too good; "
            "config.data.dev_split names others to choose by"
        )
    return lines
