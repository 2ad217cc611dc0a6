"""Rules for image folders: names of splits, skipped folders and files, and the layout.

The rules apply to all code that reads image folders: the data source `folder`, the command
`prepare`, and commands with image paths as arguments.
"""

import mimetypes
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from vit_jax.data.decode import SUFFIXES
from vit_jax.errors import UserError

IMAGE_SUFFIXES = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
# Folders created by operating systems, archives, notebooks and network disks, in lower case.
SYSTEM_FOLDERS = {
    "__macosx",
    "__pycache__",
    "@eadir",
    "#recycle",
    "$recycle.bin",
    "lost+found",
    "system volume information",
}
SPLIT = re.compile(
    r"(train|training|trn|val|valid|validation|dev|test|testing|tst)"
    r"([-_ ]?(set|split|data|images?)|\d+)?",
    re.IGNORECASE,
)
SYNONYMS = {"training": "train", "trn": "train", "testing": "test", "tst": "test"}
# Names of folders with images, and with their masks or depth maps; the most likely first.
IMAGE_FOLDERS = ("images", "image", "imgs", "img")
MASK_FOLDERS = ("masks", "mask", "annotations", "labels", "segmentation")
DEPTH_FOLDERS = ("depth", "depths", "depth_maps")
UNSUPPORTED = " (unsupported format)"
APPLE_DOUBLE = "AppleDouble files (._*)"
IGNORED_FOLDER = "files in hidden or system folders"
OUTSIDE = "images outside the folders of classes"


def split_name(folder: str) -> str | None:
    """Returns the split that a folder's name denotes; None if the name does not denote a split.

    For example, `Train` and `training_set` stand for `train`. `val`, `valid`, `validation` and
    `dev` stand for themselves. Case is ignored.
    """
    if not (named := SPLIT.fullmatch(folder)):
        return None
    word, rest = named[1].lower(), named[2] or ""
    return SYNONYMS.get(word, word) + (rest if rest.isdecimal() else "")


def is_ignored(folder: str) -> bool:
    """Returns True for a hidden folder or one in `SYSTEM_FOLDERS`; its images are skipped."""
    return (
        folder.startswith(".") and folder not in (".", "..")
    ) or folder.lower() in SYSTEM_FOLDERS


def why_left_out(path: str) -> str | None:
    """Returns the reason why a file below an image folder is skipped; None: it is not skipped.

    The reason is a text that can follow a number, such as ".txt files" in "20 .txt files". `path`
    is relative to the folder, with `/` as the separator.
    """
    if reason := of_system(path):
        return reason
    suffix = os.path.splitext(path)[1].lower()
    if suffix in IMAGE_SUFFIXES:
        return None
    if (mimetypes.guess_type(f"x{suffix}", strict=False)[0] or "").startswith("image/"):
        return f"{suffix} images{UNSUPPORTED}"
    return f"{suffix} files" if 1 < len(suffix) <= 12 else "files without an image's suffix"


def of_system(path: str) -> str | None:
    """Returns the reason for skipping a file made by an operating system; None for other files."""
    *folders, name = path.split("/")
    if any(map(is_ignored, folders)):
        return IGNORED_FOLDER
    return APPLE_DOUBLE if name.startswith("._") else None


def is_unsupported(reason: str) -> bool:
    """Returns True if a result of `why_left_out` means that the image format is unsupported."""
    return reason.endswith(UNSUPPORTED)


def sort_out(paths: Iterable[str]) -> tuple[list[str], Counter[str]]:
    """Returns the image files among `paths`, and the number of skipped files by reason."""
    images, left_out = [], Counter()
    for path in paths:
        if reason := why_left_out(path):
            left_out[reason] += 1
        else:
            images.append(path)
    return images, left_out


def in_words(left_out: Mapping[str, int], most: int = 5) -> str:
    """Formats the numbers of skipped files: `20 .tif images (...), 3 .txt files`, largest first."""
    ordered = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in ordered[most:])
    words = [f"{count:,} {reason}" for reason, count in ordered[:most]]
    return ", ".join(words + ([f"{rest:,} other files"] if rest else []))


def check_no_maps(where: str, folders: Collection[str]) -> None:
    """Raises UserError if folders are images with masks or depth maps, by their names."""
    images, masks, depths = (
        [name for name in folders if name.lower() in names]
        for names in (IMAGE_FOLDERS, MASK_FOLDERS, DEPTH_FOLDERS)
    )
    if images and masks:
        check_no_text_labels(os.path.join(where, masks[0]))
    if images and (maps := masks or depths):
        of_masks, of_depths = ("masks", "segment", "masks"), ("depth maps", "depth", "depth")
        kind, config, source = of_masks if masks else of_depths
        raise UserError(
            f"{where} has images with {kind} by the names of its folders {images[0]} and "
            f"{maps[0]}, and no classes: vit-jax train --config={config} "
            f"--config.data.source={source} trains on them; if they are classes, rename them"
        )


def check_no_text_labels(folder: str) -> None:
    """Raises UserError if a local folder contains text files instead of masks, as YOLO's labels do.

    Only the first inner folder with files is read. A `classes.txt` may be next to masks.
    """
    for inner, _, names in os.walk(folder):
        files = {name.lower() for name in names if not of_system(name)} - {"classes.txt"}
        files -= {name for name in files if name.endswith(".cache")}  # Those of Ultralytics.
        if files and all(name.endswith(".txt") for name in files):
            raise UserError(
                f"{inner} has text files such as {min(files)}, as YOLO's labels, which are "
                "unsupported. Supported: COCO files, such as annotations/instances_train.json or "
                "train/_annotations.coco.json. Export or convert the labels to COCO, then train "
                "with vit-jax train --config=detect --config.data.path=FOLDER"
            )
        if files:
            return


def check_classes(where: str, folders: Collection[str]) -> None:
    """Raises UserError if the subfolders of a folder may be splits instead of classes.

    For example, a subfolder `train` may be the split `train` or the class `train`. Subfolders
    `images` and `masks` contain images and their masks, and are no classes either.
    """
    check_no_maps(where, folders)
    splits = sorted(filter(split_name, folders))
    if not splits:
        return
    others = sorted({*folders} - {*splits})
    if not others:
        raise UserError(
            f"{where} has splits, not classes: {', '.join(splits)}; name one of them "
            f"(data.train_split={splits[-1]})"
        )
    raise UserError(
        f"{where} can be read in two ways: as the splits {_listed(splits)} with other folders "
        f"next to them ({_listed(others)}), or as the classes {_listed([*others, *splits])}; for "
        f"splits, name one of them (data.train_split={splits[-1]}), for classes, list them in "
        "data.classes"
    )


class Entry(NamedTuple):
    """A folder in the root of a data set."""

    name: str
    folders: tuple[str, ...]  # Names of the subfolders that are not ignored.
    has_images: bool  # The folder itself contains images, not only its subfolders.


class Layout(NamedTuple):
    """Meaning of the folders in a data set's root: they are splits or classes."""

    # The folder of each split, by the split's name; None: the folders are classes.
    splits: dict[str, str] | None
    others: tuple[str, ...] = ()  # Names of folders that are neither splits nor classes.


def layout(root: str, entries: Collection[Entry]) -> Layout:
    """Determines if the folders in a data set's root are classes, or splits with classes in them.

    Raises:
      UserError: the folders may be classes as well as splits, or two folders are the same split.
    """
    named = [entry for entry in entries if split_name(entry.name)]
    others = [entry for entry in entries if not split_name(entry.name)]
    if not named:
        _check_classes(root, entries)
        return Layout(None)
    if len(named) == 1:
        _check_split(root, named[0], entries)
    splits = {}
    for entry in named:
        if (name := split_name(entry.name)) in splits:
            raise UserError(
                f"{root} has two folders of the split {name}: {splits[name]} and {entry.name}"
            )
        splits[name] = entry.name
    return Layout(splits, tuple(entry.name for entry in others))


def _check_split(root: str, split: Entry, entries: Collection[Entry]) -> None:
    """Raises UserError if the only folder with the name of a split may also be a class.

    It may be one if other folders directly contain images: `test` next to `cat` and `dog`.
    """
    others = [entry for entry in entries if entry != split]
    if any(entry.has_images for entry in others):
        names, other_names = _listed(_names(entries)), _listed(_names(others))
        raise UserError(
            f"{root} can be read in two ways: as the split {split.name!r} with other folders next "
            f"to it ({other_names}), or as the classes {names}; for the split, move the others "
            f"away, for classes, move all of them into {root}/train"
        )


def _names(entries: Collection[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def _check_classes(root: str, entries: Collection[Entry]) -> None:
    """Raises UserError if folders may be splits, although none has the name of a split.

    They may be splits if they have subfolders and do not directly contain images. Folders with
    images and with their masks or depth maps are an error, too.
    """
    check_no_maps(root, _names(entries))
    if split_name(os.path.basename(os.path.abspath(root))):
        return
    inner = {folder for entry in entries if not entry.has_images for folder in entry.folders}
    if inner:
        classes, folders = _listed(_names(entries)), _listed(sorted(inner))
        raise UserError(
            f"{root} can be read in two ways: as the classes {classes}, or as splits of these "
            f"names with the classes {folders}; for classes, move them into {root}/train, for "
            "splits, name them train, val and test"
        )


def _listed(names: Collection[str], most: int = 10) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join([*names][:most]) + more
