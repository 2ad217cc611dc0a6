"""The data set at a path: its kind and its splits, recognised by what lies there."""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.data.sources import SOURCES
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.folder import FOLDER, folders_in
from vit_jax.data.sources.folder_rules import is_ignored, split_name, why_left_out
from vit_jax.errors import UserError

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
      words: what it is.
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
      UserError: there is nothing, or nothing that is known.
    """
    kind, _, rest = path.partition(":")
    if kind in SOURCES and not os.path.exists(path) and not path.startswith(f"{kind}://"):
        whole = SOURCES[kind].is_whole(rest)
        return DataAt(kind, rest, ("all",) if whole else ("train", "test"), f"{kind} data set {rest}")
    if "://" in path:
        return DataAt("folder", path, ("train", "test"), "a folder in a bucket, with train and test")
    if not os.path.exists(path):
        raise UserError(
            f"there is no {path}: give a folder with a folder of images for each class, a CSV with "
            "file,label, or tfds:NAME"
        )
    if path.lower().endswith(".csv"):
        whole = SOURCES["csv"].is_whole(path)
        splits = ("all",) if whole else ("train", "test")
        return DataAt("csv", path, splits, "a CSV of files and labels")
    if not os.path.isdir(path):
        raise UserError(
            f"{path} is no folder and no CSV: give a folder with a folder of images for each class"
        )
    if os.path.isfile(os.path.join(path, "dataset_info.json")):
        return DataAt("tfds", path, _splits_of_tfds(path), "a prepared TFDS data set")
    lists = sorted(name for name in os.listdir(path) if name.lower().endswith(".csv"))
    named = [split_name(name[: -len(".csv")]) for name in lists]
    if any(named):
        return DataAt("csv", path, tuple(filter(None, named)), "CSVs of files and labels")
    folders = [os.path.basename(folder) for folder in folders_in(path)]
    folders = [name for name in folders if not is_ignored(name)]
    if len(lists) == 1 and not (named := [*filter(split_name, folders)]):
        return data_at(os.path.join(path, lists[0]))
    if not folders:
        images = sum(not why_left_out(name) for name in os.listdir(path))
        raise UserError(
            f"{path} has {images:,} images and no folders of classes: move the images of each class into a "
            f"folder {os.path.join(path, 'CLASS')}; without labels, vit-jax pretrain {path} trains on them"
        )
    if FOLDER.is_whole(path):
        return DataAt("folder", path, ("all",), f"{len(folders)} folders of classes")
    splits = tuple(name for folder in folders if (name := split_name(folder)))
    return DataAt("folder", path, splits, f"folders of classes in {', '.join(splits)}")


def _splits_of_tfds(path: str) -> tuple[str, ...]:
    import json

    with open(os.path.join(path, "dataset_info.json"), encoding="utf-8") as file:
        info = json.load(file)
    return tuple(split["name"] for split in info.get("splits", ()))


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
