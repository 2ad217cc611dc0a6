"""The data set at a path: its kind and its splits, recognised by what lies there."""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.data.sources import SOURCES
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.csv_list import lists_files
from vit_jax.data.sources.folder import folders_in
from vit_jax.data.sources.folder_rules import is_ignored, split_name, why_left_out
from vit_jax.data.sources.tfds import tfds_builder
from vit_jax.errors import UserError, as_text
from vit_jax.runs.workdir import CONFIG, MANIFEST

DEV = ("dev", "val", "valid", "validation")  # Names of a split to choose by, the likeliest first.
# Endings of the names of images that show one thing several times, and starts of those of one origin.
VIEW = r"(?:view|frame|crop|aug|augmented|copy|rot|rotated|flip|slice|patch|tile|shot|scan|page)"
ORIGIN = r"(?:patient|subject|participant|person|video|clip|session|case)"
GROUPS = (
    (rf"^(.*?)(?:[-_ ]{VIEW}[-_ ]?\d*)?\.\w+$", rf"[-_ ]{VIEW}[-_ ]?\d*\.\w+$"),
    (rf"({ORIGIN}[-_ ]?\d+)", rf"{ORIGIN}[-_ ]?\d+"),
)
GROUPED = 0.9  # The share of names that must show a group.
MOST_NAMES = 100_000


class DataAt(NamedTuple):
    """A data set that was recognised.

    Attributes:
      kind: the value of `data.source`.
      path: of `data.path`.
      splits: names of its splits; `all` where it has none.
      words: description for the user.
    """

    kind: str
    path: str
    splits: tuple[str, ...]
    words: str

    @property
    def is_whole(self) -> bool:
        """True where there are no splits, which are then cut."""
        return self.splits == ("all",)


def data_at(path: str) -> DataAt:
    """Recognises the data set at a path: a folder, a CSV, a TFDS data set or `KIND:PATH`.

    Raises:
      UserError: there is nothing, nothing that is known, or two readings are possible.
    """
    kind, _, rest = path.partition(":")
    if kind in SOURCES and not os.path.exists(path) and not path.startswith(f"{kind}://"):
        return of_kind(kind, rest)
    if "://" in path:
        return DataAt("folder", path, ("train", "test"), "a folder in a bucket, with train and test")
    if not os.path.exists(path):
        raise UserError(
            f"there is no {path}: give a folder with a folder of images for each class, a CSV with "
            "file,label, or tfds:NAME"
        )
    if path.lower().endswith(".csv"):
        return of_kind("csv", path)
    if not os.path.isdir(path):
        raise UserError(
            f"{path} is no folder and no CSV: give a folder with a folder of images for each class"
        )
    check_no_run(path)
    if os.path.isfile(os.path.join(path, "dataset_info.json")):
        return of_kind("tfds", path)
    folders = [os.path.basename(folder) for folder in folders_in(path)]
    folders = [name for name in folders if not is_ignored(name)]
    return _with_lists(path, folders) or _of_folders(path, folders)


def check_no_run(path: str) -> None:
    """Raises UserError where a path is the workdir of a run, which has a model and no images."""
    if all(os.path.isfile(os.path.join(path, name)) for name in (CONFIG, MANIFEST)):
        raise UserError(
            f"{path} is the workdir of a run: give the images in its place, and --from={path} to start "
            "from its model"
        )


def of_kind(kind: str, path: str) -> DataAt:
    """Returns the data set at a path whose kind is known.

    Raises:
      UserError: there is none, or two readings are possible.
    """
    if kind == "tfds":
        splits = tuple(tfds_builder(path).info.splits)
        return DataAt(kind, path, splits, "a prepared TFDS data set")
    if kind == "folder" and os.path.isdir(path):
        folders = [os.path.basename(folder) for folder in folders_in(path)]
        return _of_folders(path, [name for name in folders if not is_ignored(name)])
    splits = ("all",) if SOURCES[kind].is_whole(path) else ("train", "test")
    return DataAt(kind, path, splits, "a CSV of files and labels" if kind == "csv" else f"{kind} data set")


def _with_lists(path: str, folders: Sequence[str]) -> DataAt | None:
    """The CSVs of a folder, where they list its images; None where its folders are the classes."""
    lists = sorted(name for name in os.listdir(path) if name.lower().endswith(".csv"))
    if named := [name for name in lists if split_name(name[: -len(".csv")])]:
        splits = tuple(split_name(name[: -len(".csv")]) or "" for name in named)
        return DataAt("csv", path, splits, "CSVs of files and labels")
    if any(map(split_name, folders)):
        return None
    listing = [name for name in lists if lists_files(os.path.join(path, name))]
    if len(listing) == 1:
        return of_kind("csv", os.path.join(path, listing[0]))
    if listing:
        raise UserError(f"{path} has {len(listing)} lists of images: give {_one_of(path, listing)}")
    return None


def _of_folders(path: str, folders: Sequence[str]) -> DataAt:
    """Returns the data set with these folders: classes, splits, or one folder that contains all others."""
    images = sum(not why_left_out(name) for name in os.listdir(path))
    if not folders:
        if not images:
            raise UserError(
                f"{path} has no images: give a folder with a folder of images for each class, or a CSV "
                "with file,label"
            )
        raise UserError(
            f"{path} has {images:,} images and no folders of classes: move the images of each class into a "
            f"folder {os.path.join(path, 'CLASS')}; without labels, vit-jax pretrain {path} trains on them"
        )
    named = [name for name in folders if split_name(name)]
    others = [name for name in folders if not split_name(name)]
    if len(named) == 1 and any(_has_images(os.path.join(path, name)) for name in others):
        raise UserError(
            f"{path} can be read in two ways, as the split {named[0]} or as classes "
            f"({', '.join(folders[:10])}): if {named[0]} is a class, rename it, such as to "
            f"{named[0]}_class; if it is a split, move {', '.join(others[:10])} away"
        )
    if not named and len(folders) == 1 and not images:  # As archives are unpacked.
        inner = os.path.join(path, folders[0])
        if folders_in(inner) and not _has_images(inner):
            return data_at(inner)
    if not named:
        return DataAt("folder", path, ("all",), f"{len(folders)} folders of classes")
    splits = tuple(split_name(name) or "" for name in named)
    words = f"folders of classes in {', '.join(splits)}"
    return DataAt("folder", path, splits, words + (f", without {', '.join(others[:10])}" if others else ""))


def _has_images(folder: str) -> bool:
    return any(not why_left_out(name) for name in os.listdir(folder))


def _one_of(path: str, names: Sequence[str]) -> str:
    return " or ".join(os.path.join(path, name) for name in names[:3])


def check_files(source: Source) -> None:
    """Raises UserError where files do not exist that a list names; those of a folder do."""
    missing = [name for name, size in source.stored_files() or () if size < 0]
    if missing:
        raise UserError(
            f"{len(missing):,} of {len(source):,} files that are listed do not exist, such as "
            f"{as_text(missing[0])}: mend their paths, which are from the folder of the CSV, or remove "
            "their rows"
        )


def find_groups(source: Source, names: Sequence[str] | None = None) -> tuple[str, int] | None:
    """Returns the `data.groups` that the names of images show, and the number of groups; None for none.

    Args:
      names: of the images; by default those of the source's files.
    """
    if names is None:
        files = source.stored_files(range(min(len(source), MOST_NAMES)))
        names = [name for name, _ in files] if files else []
    for pattern, shown in GROUPS:
        found = [re.search(pattern, name) for name in names]
        if not names or not all(found):
            continue
        if sum(bool(re.search(shown, name)) for name in names) < GROUPED * len(names):
            continue
        groups = {match[1] for match in found}
        if 3 <= len(groups) <= 0.7 * len(names):
            return pattern, len(groups)
    return None
