"""Sets `data.source` and the splits automatically, if the user only sets `data.path`."""

import os
from collections.abc import Callable, Collection

from ml_collections import ConfigDict

from vit_jax.config import run_options, value_at
from vit_jax.data.sources import SOURCES
from vit_jax.data.sources.slices import overlap
from vit_jax.errors import UserError
from vit_jax.options.run import RunOptions
from vit_jax.runs.choices.choice import Choice, in_words
from vit_jax.runs.choices.data_at import (
    DEV,
    DataAt,
    choices_of,
    data_at,
    folder_of_splits,
    folders_of_images,
)
from vit_jax.runs.splits import MANY
from vit_jax.training.objectives import objective_of

KINDS = ("digits", "folder", "csv", "tfds")  # Values of `data.source` that may be replaced.
WITH_LAYOUTS = tuple(name for name, kind in SOURCES.items() if kind.layout_at)


def recognise(
    config: ConfigDict, user_keys: Collection[str], log: Callable[[str], None] = print
) -> None:
    """Sets `data.source` and the splits according to the data at `data.path`.

    If the user has set `data.source`, the source is not changed. The splits are then recognized
    only for sources whose files may have several layouts, each with its own splits. If the data at
    a path are not recognized, the config stays unchanged, and opening the data later raises the
    error.

    Raises:
      UserError: a split that the user has set shares images with an automatic split.
    """
    chosen = WITH_LAYOUTS if "data.source" in user_keys else (*KINDS, *WITH_LAYOUTS)
    if "data.path" not in user_keys or config.data.source not in chosen:
        return
    if config.auto != "none":  # The automatic settings (`settle`) recognize the data themselves.
        return
    options = run_options(config)
    data_set = _data_set(options)
    if data_set is None:
        return
    fixed = {*user_keys} - {"data.path"}
    choices = [one for one in _choices(options, data_set) if one.key not in fixed]
    for line in ("the data set at data.path:", *in_words(choices, ())) if choices else ():
        log(line)
    config.update_from_flattened_dict({one.key: one.value for one in choices})
    _check_apart(run_options(config), [one.key for one in choices])


def _data_set(config: RunOptions) -> DataAt | None:
    """Recognizes the data set at `data.path`; None: it cannot be recognized."""
    kind, path = config.data.source, config.data.path
    has_rows = objective_of(config.objective.name).labels or config.data.source == "csv"
    try:
        if layout_at := SOURCES[kind].layout_at:
            words, splits = layout_at(path)
            return DataAt(kind, path, tuple(splits), words)
        return data_at(path) if has_rows else _unlabelled(path)
    except UserError:
        return None


def _check_apart(config: RunOptions, chosen: Collection[str]) -> None:
    """Raises UserError if a split that the user has set shares images with an automatic split."""
    data = config.data
    splits = [key for key in chosen if key in ("data.train_split", "data.test_split")]
    if len(splits) == 1 and overlap(data.train_split, data.test_split, MANY):
        raise UserError(
            f"data.train_split={data.train_split!r} and data.test_split={data.test_split!r} have "
            f"images in common, and --config.{splits[0]} was chosen: give both"
        )


def _choices(config: RunOptions, data_set: DataAt) -> list[Choice]:
    """Returns the changes of the config's source, path and splits that the data set requires."""
    choices = choices_of(data_set, config.data.path)
    choices = [one for one in choices if one.value != value_at(config, one.key)]
    named = {split.partition("[")[0] for split in (config.data.train_split, config.data.test_split)}
    first = "all" if data_set.is_whole else "train"
    if named <= {*data_set.splits} or first not in data_set.splits:
        return choices
    test = next((name for name in ("test", *DEV) if name in data_set.splits), None)
    train = first if test else f"{first}[:80%]"
    reason = "as the data set has it" if test else "it has no other split"
    return [
        *choices,
        Choice("data.train_split", train, reason),
        Choice("data.test_split", test or f"{first}[80%:]", reason),
    ]


def _unlabelled(path: str) -> DataAt:
    """Recognizes a folder with images for training without labels, and its splits.

    The images may be in inner folders of any depth. Other data, such as a CSV, are recognized like
    a labelled data set.
    """
    if not os.path.isdir(path) or os.path.isfile(os.path.join(path, "dataset_info.json")):
        return data_at(path)
    whole = DataAt("folder", path, ("all",), "a folder of images")
    return folder_of_splits(path, folders_of_images(path)) or whole
