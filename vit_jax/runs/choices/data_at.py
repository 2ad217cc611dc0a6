"""Recognition of the data set at a path: its kind and its splits."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.data.sources import SOURCES
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.csv_list import LISTS, lists_files, rows_of_splits, split_files
from vit_jax.data.sources.folder import folders_in
from vit_jax.data.sources.folder_rules import check_no_maps, is_ignored, split_name, why_left_out
from vit_jax.data.sources.tfds import tfds_builder
from vit_jax.errors import UserError, as_text
from vit_jax.paths import is_workdir
from vit_jax.runs.choices.choice import Choice

DEV = ("dev", "val", "valid", "validation")  # Names of a dev split, the most likely first.
# Patterns in file names that show which images belong to one group. Images of the same object
# differ in a suffix. Images with the same origin, such as a patient, have the same prefix.
VIEW = r"(?:view|frame|crop|aug|augmented|copy|rot|rotated|flip|slice|patch|tile|shot|scan|page)"
ORIGIN = r"(?:patient|subject|participant|person|video|clip|session|case)"
GROUPS = (
    (rf"^(.*?)(?:[-_ ]{VIEW}[-_ ]?\d*)?\.\w+$", rf"[-_ ]{VIEW}[-_ ]?\d*\.\w+$"),
    (rf"({ORIGIN}[-_ ]?\d+)", rf"{ORIGIN}[-_ ]?\d+"),
)
GROUPED = 0.9  # Groups are used if at least this share of the file names contains a group.
# Minimum number of groups of each class: one for training, model selection and test each.
FEWEST_GROUPS = 3
MOST_NAMES = 100_000
SHOWN = 3  # Number of files that an error message names.


class DataAt(NamedTuple):
    """A data set whose kind and splits were recognized."""

    kind: str  # Value for `data.source`.
    path: str  # Value for `data.path`.
    splits: tuple[str, ...]  # Names of the splits; `all` if the data set has no splits.
    words: str  # Description for the user.

    @property
    def is_whole(self) -> bool:
        """True if the data set has no splits. Runs then use slices of the whole data set."""
        return self.splits == ("all",)


def data_at(path: str) -> DataAt:
    """Recognizes the data set at a path: a folder, a CSV, a TFDS data set or `KIND:PATH`.

    Raises:
      UserError: the path does not exist, its format is unknown, or the layout is ambiguous.
    """
    kind, _, rest = path.partition(":")
    if kind in SOURCES and not os.path.exists(path) and not path.startswith(f"{kind}://"):
        return of_kind(kind, rest)
    if "://" in path:
        return DataAt(
            "folder", path, ("train", "test"), "a folder in a bucket, with train and test"
        )
    if not os.path.exists(path):
        raise UserError(
            f"there is no {path}: give a folder with a folder of images for each class, a CSV with "
            "file,label, or tfds:NAME"
        )
    if path.lower().endswith(LISTS):
        return of_kind("csv", path)
    if not os.path.isdir(path):
        raise UserError(
            f"{path} is neither a folder nor a CSV: give a folder with a folder of images "
            "for each class"
        )
    check_no_run(path)
    if os.path.isfile(os.path.join(path, "dataset_info.json")):
        return of_kind("tfds", path)
    folders = folders_of_images(path)
    return _with_lists(path, folders) or _of_folders(path, folders)


def choices_of(data_set: DataAt, path: str) -> list[Choice]:
    """Returns the settings of `data.source` and, if it is not `path`, of `data.path`."""
    choices = [Choice("data.source", data_set.kind, data_set.words)]
    if data_set.path != path:
        choices.append(Choice("data.path", data_set.path, "the data set there"))
    return choices


def folders_of_images(path: str) -> list[str]:
    """Returns the names of the folders in a folder, without ignored ones (such as hidden ones)."""
    return [name for name in map(os.path.basename, folders_in(path)) if not is_ignored(name)]


def check_no_run(path: str) -> None:
    """Raises UserError if a path is the workdir of a run instead of a data set."""
    if is_workdir(path):
        raise UserError(
            f"{path} is the workdir of a run: give the images in its place, and --from={path} to "
            "start from its model"
        )


def of_kind(kind: str, path: str) -> DataAt:
    """Recognizes the splits of the data set at a path. Its kind (`data.source`) is known.

    Raises:
      UserError: the path contains no data set of this kind, or its layout is ambiguous.
    """
    if kind == "tfds":
        splits = tuple(tfds_builder(path).info.splits)
        return DataAt(kind, path, splits, "a prepared TFDS data set")
    if kind == "folder" and os.path.isdir(path):
        return _of_folders(path, folders_of_images(path))
    if kind == "csv":
        return _of_csv(path)
    splits = ("all",) if SOURCES[kind].is_whole(path) else ("train", "test")
    return DataAt(kind, path, splits, f"{kind} data set")


def _of_csv(path: str) -> DataAt:
    """Returns the data set of a CSV, or of a folder of CSVs."""
    words, splits = "a CSV of files and labels", tuple(split_files(path))
    if os.path.isdir(path):
        return DataAt("csv", path, splits or ("train", "test"), "CSVs of files and labels")
    rows = rows_of_splits(path)
    if rows is not None:
        counts = (f"{count:,} of {name or 'no split'}" for name, count in rows.items())
        words += f"; its column split has {', '.join(counts)}"
    return DataAt("csv", path, splits or ("all",), words)


def _with_lists(path: str, folders: Sequence[str]) -> DataAt | None:
    """Returns the data set of the CSVs in a folder; None: the folder has no CSVs that list images.

    Args:
      folders: names of the folders in `path`. If some of them are names of splits, such as `train`,
        CSVs whose file names are not names of splits are ignored.
    """
    if splits := tuple(split_files(path)):
        return DataAt("csv", path, splits, "CSVs of files and labels")
    if any(map(split_name, folders)):
        return None
    lists = sorted(name for name in os.listdir(path) if name.lower().endswith(LISTS))
    listing = [name for name in lists if lists_files(os.path.join(path, name))]
    if len(listing) == 1:
        return of_kind("csv", os.path.join(path, listing[0]))
    if listing:
        shown = " or ".join(os.path.join(path, name) for name in listing[:SHOWN])
        raise UserError(f"{path} has {len(listing)} lists of images: give {shown}")
    return None


def _of_folders(path: str, folders: Sequence[str]) -> DataAt:
    """Returns the data set of a folder that contains folders.

    The inner folders are classes or splits, or a single folder that contains the data set.
    """
    images = sum(not why_left_out(name) for name in os.listdir(path))
    if not folders:
        raise UserError(_no_folders(path, images))
    if split := folder_of_splits(path, folders):
        return split
    if len(folders) == 1 and not images:  # Unpacked archives often contain a single folder.
        inner = os.path.join(path, folders[0])
        if folders_in(inner) and not _has_images(inner):
            return data_at(inner)
    _check_no_splits(path, folders)
    return DataAt("folder", path, ("all",), f"{len(folders)} folders of classes")


def _check_no_splits(path: str, folders: Sequence[str]) -> None:
    """Raises UserError if the folders of a data set could be splits instead of classes.

    This is the case if the folders contain no images directly, and all contain the same two or more
    folders. None of `folders` is the name of a split.
    """
    check_no_maps(path, folders)
    places = [os.path.join(path, name) for name in folders]
    inner = {tuple(sorted(folders_of_images(place))) for place in places}
    classes = next(iter(inner))
    alike = len(folders) > 1 and len(inner) == 1 and len(classes) > 1
    if alike and not any(map(_has_images, places)):
        raise UserError(
            f"{path} can be read in two ways: as the classes {', '.join(folders[:10])}, or as "
            f"splits of these names with the classes {', '.join(classes[:10])}; for classes, move "
            f"them into {path}/train, for splits, name them train, val and test"
        )


def _no_folders(path: str, images: int) -> str:
    """Returns the error message for a folder with images, but without folders of classes."""
    if not images:
        return (
            f"{path} has no images: give a folder with a folder of images for each class, or "
            "a CSV with file,label"
        )
    return (
        f"{path} has {images:,} images and no folders of classes: move the images of each "
        f"class into a folder {os.path.join(path, 'CLASS')}; without labels, vit-jax pretrain "
        f"{path} trains on them"
    )


def folder_of_splits(path: str, folders: Sequence[str]) -> DataAt | None:
    """Returns the data set of a folder that contains folders of splits, such as `train`.

    Other folders are ignored. The result is None if no folder is named like a split.

    Raises:
      UserError: a single folder has the name of a split, and other folders contain images, so the
        folder could also be a class.
    """
    named = [name for name in folders if split_name(name)]
    others = [name for name in folders if not split_name(name)]
    if not named:
        return None
    if len(named) == 1 and any(_has_images(os.path.join(path, name)) for name in others):
        raise UserError(
            f"{path} can be read in two ways, as the split {named[0]} or as classes "
            f"({', '.join(folders[:10])}): if {named[0]} is a class, rename it, such as to "
            f"{named[0]}_class; if it is a split, move {', '.join(others[:10])} away"
        )
    splits = tuple(split_name(name) or "" for name in named)
    without = f", without {', '.join(others[:10])}" if others else ""
    return DataAt("folder", path, splits, f"folders of classes in {', '.join(splits)}{without}")


def _has_images(folder: str) -> bool:
    return any(not why_left_out(name) for name in os.listdir(folder))


def check_files(splits: Mapping[str, Source]) -> None:
    """Raises UserError if lists of images, in splits by name, contain missing files."""
    listed: dict[str, tuple[int, str]] = {}  # (size, split) by file name.
    for split, source in splits.items():
        for name, size in source.stored_files() or ():
            listed.setdefault(name, (size, split))
    missing = [(name, split) for name, (size, split) in listed.items() if size < 0]
    if missing:
        counts = Counter(split for _, split in missing)
        of_splits = ", ".join(f"{count:,} of {split}" for split, count in counts.items())
        names = ", ".join(as_text(name) for name, _ in missing[:SHOWN])
        raise UserError(
            f"{len(missing):,} of {len(listed):,} files that are listed do not exist "
            f"({of_splits}), such as {names}: fix their paths, relative to the folder of the "
            "CSV, or remove their rows"
        )


def find_groups(source: Source, names: Sequence[str] | None = None) -> tuple[str, int] | None:
    """Recognizes groups of images, such as photos of the same object, by file names.

    Args:
      names: names of the images; None: the names of the source's files.

    Returns:
      The value for `data.groups` and the number of groups. None: the names contain no groups, or a
      class has images of too few groups.
    """
    labels = None
    if names is None:
        files = source.stored_files(range(min(len(source), MOST_NAMES))) or ()
        names, labels = [name for name, _ in files], source.known_labels()
    for pattern, shown in GROUPS:
        groups = _groups_in(names, pattern, shown)
        count = len({*groups})
        if 3 <= count <= 0.7 * len(names) and _divides_classes(groups, labels):
            return pattern, count
    return None


def _groups_in(names: Sequence[str], pattern: str, shown: str) -> list[str]:
    """Returns the group of each file name by a pattern; [] if too few names contain a group.

    For example, `(patient[0-9]+)` finds the group `patient7` in `patient7_left.png`.

    Args:
      pattern: regular expression whose first capturing group is the group.
      shown: regular expression that matches only names that contain a group.
    """
    matches = [match for name in names if (match := re.search(pattern, name))]
    showing = sum(bool(re.search(shown, name)) for name in names)
    if len(matches) < len(names) or showing < GROUPED * len(names):
        return []
    return [match[1] for match in matches]


def _divides_classes(groups: Sequence[str], labels: np.ndarray | None) -> bool:
    """Returns True if each class has images of several groups, so that each split has each class.

    Args:
      groups: group of each image, for the first images of the data set.
      labels: labels of all images of the data set, `[images, labels]`. None: the labels are
        unknown, and the result is True.
    """
    if labels is None:
        return True
    rows = labels[: len(groups)].tolist()
    pairs = {(row[0], group) for row, group in zip(rows, groups, strict=True)}
    counts = Counter(label for label, _ in pairs)
    return min(counts.values()) >= FEWEST_GROUPS
