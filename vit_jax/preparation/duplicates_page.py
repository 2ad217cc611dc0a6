"""HTML page and CSV of the near-duplicates in image folders."""

import glob
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.image_files import ImageFiles, find_images
from vit_jax.data.sources.csv_list import TooManyCells, open_csv, split_files
from vit_jax.data.sources.folder_rules import split_name
from vit_jax.data.sources.kind import SourceOptions
from vit_jax.errors import UserError, as_text
from vit_jax.inspection.html_page import render, write_text
from vit_jax.preparation.curation_page import Figure, figure
from vit_jax.preparation.duplicate_search import find_pairs, groups, look
from vit_jax.progress import Progress
from vit_jax.small_files import read_small
from vit_jax.spreadsheet import file_cell, write_csv

PAGE, TABLE = "duplicates.html", "duplicates.csv"
SHOWN = 60  # Maximum number of groups of each kind on the page.
SIDE_BY_SIDE = 8  # Maximum number of images of a group on the page.
# Kinds of groups, the most serious first, with their headings.
KINDS = {
    "in several splits": "In several splits: accuracy on the test images is too high",
    "of several classes": "Of several classes: a label may be wrong",
    "in one split and class": "In one split and one class",
}


class Place(NamedTuple):
    """The split and the class of an image, according to its path; empty: unknown."""

    split: str
    label: str


class Group(NamedTuple):
    """A group of near-duplicates."""

    kind: str  # A key of `KINDS`, such as near-duplicates in two splits.
    images: list[int]  # Indices of the images in the source.
    similar_to: list[int]  # For each image, the index of the most similar other image.
    similarity: list[float]  # For each image, the similarity to the image in `similar_to`.


class Duplicates(NamedTuple):
    """Near-duplicates in image folders, and the number of unreadable images."""

    source: ImageFiles
    places: list[Place]
    groups: list[Group]
    unreadable: int

    def __str__(self):
        images, count = sum(len(group.images) for group in self.groups), len(self.groups)
        if not count:
            return f"none of {len(self.source):,} images is a near-duplicate of another"
        found = f"{images:,} of {len(self.source):,} images are near-duplicates of others"
        return f"{found}, in {count:,} group{'s' if count > 1 else ''}"


def find_duplicates(
    folders: Sequence[str], similarity: float, log: Callable[[str], None]
) -> Duplicates:
    """Finds the near-duplicates among all images in folders.

    Args:
      folders: one or several folders of images. Inner folders with names such as `train` are
        splits. If there are several folders, images in different folders are in different splits.
        CSVs that list images are supported, too. Their splits are defined by the column `split`, or
        by file names such as train.csv.
      similarity: minimum similarity of near-duplicates, as in `find_pairs`.

    Raises:
      UserError: a folder or CSV does not exist, is a prepared data set, or has no images.
    """
    for folder in folders:
        _check(folder)
    source, places = _collect(folders)
    for line in source.note():
        log(line)
    seen = look(source, on_progress=Progress("reading", len(source), "images", log))
    pairs, count = find_pairs(seen, similarity), len(seen.indices)
    nearest = _nearest(pairs)
    made = []
    for members in groups(pairs, count):
        images = seen.indices[members].tolist()
        kind = _kind([places[image] for image in images])
        others, similarities = zip(*(nearest[place] for place in members.tolist()), strict=True)
        similar_to = [int(seen.indices[other]) for other in others]
        made.append(Group(kind, images, similar_to, list(similarities)))
    kinds = [*KINDS]
    made.sort(key=lambda group: (kinds.index(group.kind), -max(group.similarity), group.images))
    return Duplicates(source, places, made, len(source) - count)


def _collect(folders: Sequence[str]) -> tuple[ImageFiles, list[Place]]:
    """Returns the images in folders or CSVs, with their splits and classes."""
    images, places, left_out = [], [], Counter()
    for folder in folders:
        is_list = os.path.isfile(folder) or split_files(folder)
        part, part_places = _listed(folder) if is_list else _in_folder(folder)
        images += [(part.path(index), None) for index in range(len(part))]
        left_out += part.left_out
        # Splits of the same name in different folders are distinguished.
        above = [as_text(folder)] if len(folders) > 1 else []
        for split, label in part_places:
            places.append(Place("/".join(above + [split] * bool(split)), label))
    return ImageFiles(images, left_out), places


def _nearest(pairs: np.ndarray) -> dict[int, tuple[int, float]]:
    """Returns, by the index of an image, the index and the similarity of its most similar image.

    `pairs` must be in descending order of similarity. The indices are those of the arrays in
    `Looks`.
    """
    nearest = {}
    for first, second, value in pairs.tolist():
        nearest.setdefault(first, (second, value))
        nearest.setdefault(second, (first, value))
    return nearest


def _check(path: str) -> None:
    """Raises UserError if a path is neither a folder of images nor a CSV that lists images."""
    if prepared := _prepared(path):
        raise UserError(f"{path} is a prepared data set: give {prepared}")
    if not os.path.isdir(path) and not (path.lower().endswith(".csv") and os.path.isfile(path)):
        raise UserError(
            f"{path} is no folder and no CSV: give one or several folders of images, or CSVs with "
            "file,label"
        )


def _prepared(path: str) -> str:
    """Returns a hint for an error message if a path is a prepared TFDS data set, else "".

    Near-duplicates cannot be searched in a prepared data set. The hint describes the images from
    which it was prepared.
    """
    images = "a folder or a CSV of image files, such as it was prepared from"
    if path.startswith("tfds:") and not os.path.exists(path):
        return images
    # The path may be the folder of a data set's version, the folder of a data set, or the folder
    # `--out` of `prepare`.
    levels = "", "*", os.path.join("*", "*")
    patterns = (os.path.join(glob.escape(path), level, "dataset_info.json") for level in levels)
    infos = (info for pattern in patterns for info in glob.glob(pattern))
    if not (info := next(infos, None)):
        return ""
    found = os.path.dirname(info)
    try:
        source = json.loads(read_small(os.path.join(found, "prepared.json")))["settings"]["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return images
    return f"{source}, which it was prepared from" if os.path.exists(source) else images


def _in_folder(folder: str) -> tuple[ImageFiles, list[Place]]:
    images = find_images([folder])
    return images, [place_of(images.path(index), folder) for index in range(len(images))]


def _listed(path: str) -> tuple[ImageFiles, list[Place]]:
    """Lists the images in CSVs, with their splits and classes, one split after another."""
    images, places, left_out = [], [], Counter()
    for split in split_files(path):
        try:
            listed = open_csv(split, SourceOptions(path))
        except TooManyCells:
            raise
        except UserError:  # The CSV has no labels, which are optional.
            listed = open_csv(split, SourceOptions(path, label_key=None, labels=False))
        for index, file in enumerate(listed.files):
            images.append((os.path.join(listed.root, file), None))
            names = [listed.class_names[label] for label in listed.labels_of(index)]
            places.append(Place("" if split == "all" else as_text(split), ", ".join(names)))
        left_out += listed.left_out
    return ImageFiles(images, left_out), places


def place_of(path: str, folder: str) -> Place:
    """Returns the split and the class of an image, according to the folders in its path.

    Args:
      path: path of the image in `folder` or in its inner folders.
    """
    inside = os.path.relpath(path, folder).split(os.sep)[:-1]
    split = split_name(inside[0]) if inside else None
    classes = inside[1:] if split else inside
    return Place(split or "", as_text(classes[0]) if classes else "")


def _kind(places: Sequence[Place]) -> str:
    """Returns the most serious kind of near-duplicates that fits the places of a group's images."""
    splits, classes, within = KINDS
    if len({place.split for place in places}) > 1:
        return splits
    return classes if len({place.label for place in places}) > 1 else within


def write_duplicates(duplicates: Duplicates, out: Path, similarity: float) -> None:
    """Writes `duplicates.csv`, with a row for each image of each group, and `duplicates.html`."""
    source, places = duplicates.source, duplicates.places

    def cell(image: int) -> str:
        return file_cell(source.describe(image))

    rows = (
        (number, kind, *places[image], cell(image), cell(other), round(value, 4))
        for number, (kind, *members) in enumerate(duplicates.groups, 1)
        for image, other, value in zip(*members, strict=True)
    )
    header = ("group", "kind", "split", "class", "file", "similar_to", "similarity")
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / TABLE, header, rows)
    kinds = Counter(group.kind for group in duplicates.groups)
    facts = {"images": f"{len(source):,}", "could not be read": f"{duplicates.unreadable:,}"}
    facts |= {f"groups {kind}": f"{kinds[kind]:,}" for kind in KINDS}
    facts["lowest similarity of near-duplicates"] = f"{similarity:g}"
    sections = []
    for kind, heading in KINDS.items():
        chosen = [group for group in duplicates.groups if group.kind == kind]
        more = f"{TABLE} has {len(chosen) - SHOWN:,} more." if len(chosen) > SHOWN else ""
        sections.append((heading, [_group(group, duplicates) for group in chosen[:SHOWN]], more))
    page = render("duplicates.html", title=str(duplicates), facts=facts, sections=sections)
    write_text(out / PAGE, page)


def _group(group: Group, duplicates: Duplicates) -> tuple[list[Figure], str]:
    """Returns figures of a group's first images, and a note with the number of images not shown."""
    figures = []
    for image, value in list(zip(group.images, group.similarity, strict=True))[:SIDE_BY_SIDE]:
        words = ", ".join(filter(None, (*duplicates.places[image], f"{value:.3f}")))
        figures.append(figure(duplicates.source, image, words))
    more = len(group.images) - len(figures)
    return figures, f"and {more:,} more" if more else ""
