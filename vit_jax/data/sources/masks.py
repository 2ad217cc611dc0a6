"""Images with masks: plain folders, and the layouts of VOC, ADE20K and Cityscapes."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from vit_jax.data.fields import IGNORED, MASK
from vit_jax.data.map_files import MASK_SUFFIXES, decode_mask, palette_of
from vit_jax.data.sources.base import naming, spread
from vit_jax.data.sources.folder import read_file
from vit_jax.data.sources.folder_rules import MASK_FOLDERS
from vit_jax.data.sources.kind import SourceKind, SourceOptions
from vit_jax.data.sources.pairs import (
    SAMPLES,
    Pairs,
    Split,
    find_pairs,
    find_splits,
    folder_of,
    split_of,
)
from vit_jax.errors import UserError, as_text

CLASSES_FILE = "classes.txt"
ADE_CLASSES, ADE_NAMES = 150, "objectInfo150.txt"
VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat"),
    *("chair", "cow", "diningtable", "dog", "horse", "motorbike", "person", "pottedplant"),
    *("sheep", "sofa", "train", "tvmonitor"),
)
# The mask value (id) of each class that the Cityscapes benchmark evaluates, in the order of
# trainIds.
CITYSCAPES_IDS = {
    **{"road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17},
    **{"traffic light": 19, "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23},
    **{"person": 24, "rider": 25, "car": 26, "truck": 27, "bus": 28, "train": 31},
    **{"motorcycle": 32, "bicycle": 33},
}
REMEDY = f"name all classes, a line for each, in {CLASSES_FILE}"  # End of an error message.
INVALID = -1  # Class of mask values that must not occur.


class Layout(NamedTuple):
    """The files, classes and values of the masks in a folder."""

    words: str  # Description of the layout for the user.
    splits: dict[str, Split]  # The files of each split.
    # Names of the classes; empty: the folder does not contain names.
    class_names: tuple[str, ...] = ()
    # Class index, `IGNORED` or `INVALID` for each mask value. None: mask values are class indices.
    classes: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Masks(Pairs):
    """Images with masks.

    Attributes:
      classes: class index, `IGNORED` or `INVALID` for each mask value, int16 `[values]`.
    """

    fields = (MASK,)
    classes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int16))
    numbered: bool = False
    recognized: str = ""

    def fields_of(self, index):
        with naming(self.describe_map(index)):
            values = decode_mask(self.read_map(index))
            return {MASK: classes_of(values, self.classes, len(self.class_names), REMEDY)}

    def known_fields(self, indices=None):
        return (self.classes.tobytes(),)


def open_masks(split: str, options: SourceOptions) -> Masks:
    """Opens a split of images with masks.

    The first of these that exists defines the classes:

    - the classes of the training split (`options.class_names`)
    - the layout of the folder, or its `classes.txt`
    - `data.num_classes`
    - the values in all masks, which are read for this purpose

    Raises:
      UserError: the folder has an unsupported layout, the split does not exist, an image has no
        mask, an image and its mask differ in size, or the classes are unknown.
    """
    if options.only:
        raise UserError("data.classes is unsupported with masks: their pixels have classes")
    root = folder_of(options.path)
    layout = layout_of(root)
    found = split_of(options.path, layout.splits, split)
    images, maps, left_out = find_pairs(root, found, MASK_SUFFIXES, "mask")
    names = options.class_names or layout.class_names
    numbered = not layout.class_names
    if not names:
        number = options.num_classes or class_count(_values_in(root, maps), root, REMEDY)
        names = tuple(map(str, range(number)))
    if len(names) > IGNORED:
        raise UserError(
            f"{options.path} has {len(names):,} classes, and at most {IGNORED} are supported"
        )
    classes = as_they_are(len(names)) if layout.classes is None else layout.classes
    pairs = tuple(images), tuple(maps), dict(left_out)
    annotated = bool(options.fields)
    source = Masks(root, *pairs, names, classes, numbered, layout.words, annotated=annotated)
    source.check_sizes(MASK)
    check_palettes(source)
    if layout.classes is None and len(names) == 2:
        check_two_classes(_values_in(root, maps), root)
    return source


def layout_of(root: str) -> Layout:
    """Returns the layout of a folder.

    Raises:
      UserError: the folder has no folders of images and masks.
    """
    for recognize in (_voc, _cityscapes, _ade, _own):
        if (layout := recognize(root)) is not None:
            return layout
    raise UserError(
        f"{root} has no images with masks (data.path): put them into {root}images and "
        f"{root}masks, with the same names, or give a folder of VOC, ADE20K or Cityscapes"
    )


def _voc(root: str) -> Layout | None:
    lists = os.path.join(root, "ImageSets", "Segmentation")
    if not os.path.isdir(lists):
        return None
    folders = "JPEGImages", "SegmentationClass"
    splits = {
        os.path.splitext(name)[0]: Split(*folders, listed=f"ImageSets/Segmentation/{name}")
        for name in sorted(os.listdir(lists))
        if name.endswith(".txt")
    }
    words = f"VOC: {len(VOC_CLASSES)} classes with background"
    return Layout(words, splits, VOC_CLASSES, as_they_are(len(VOC_CLASSES)))


def _cityscapes(root: str) -> Layout | None:
    if not all(os.path.isdir(os.path.join(root, name)) for name in ("leftImg8bit", "gtFine")):
        return None
    folder = os.path.join(root, "gtFine")
    splits = {
        split: Split(f"leftImg8bit/{split}", f"gtFine/{split}", "_leftImg8bit", "_gtFine_labelIds")
        for split in sorted(os.listdir(folder))
        if os.path.isdir(os.path.join(root, "leftImg8bit", split))
    }
    names = tuple(CITYSCAPES_IDS)
    words = f"Cityscapes: the {len(names)} classes of its benchmark, others ignored"
    below = os.walk(folder, followlinks=True)
    if any(name.endswith("_gtFine_labelIds.png") for _, _, names in below for name in names):
        classes = np.full(IGNORED + 1, IGNORED, np.int16)
        classes[list(CITYSCAPES_IDS.values())] = range(len(names))
    else:  # Read the files that Cityscapes' scripts write.
        end = "_gtFine_labelTrainIds"
        splits = {split: one._replace(map_end=end) for split, one in splits.items()}
        classes = as_they_are(len(names))
    return Layout(words, splits, names, classes)


def _ade(root: str) -> Layout | None:
    """Returns the layout of ADE20K's benchmark, or None if the folder has another layout.

    ADE20K is recognized by its list of classes or by its file names. Pixels with the mask value 0
    have an unknown class, and pixels of class k have the value k + 1.
    """
    file = os.path.join(root, ADE_NAMES)
    first = os.path.join(root, "annotations", "training", "ADE_train_00000001.png")
    if not (os.path.isfile(file) or os.path.isfile(first)):
        return None
    splits = find_splits(root, ("annotations",))
    names = tuple(map(str, range(1, ADE_CLASSES + 1)))
    if os.path.isfile(file):
        rows = [line.rstrip().split("\t") for line in _lines(file)[1:]]
        names = tuple(row[-1].split(",")[0] for row in rows)
    classes = np.full(IGNORED + 1, INVALID, np.int16)
    classes[[0, IGNORED]] = IGNORED
    classes[1 : len(names) + 1] = range(len(names))
    return Layout(f"ADE20K: {len(names)} classes, 0 ignored", splits, names, classes)


def _own(root: str) -> Layout | None:
    splits = find_splits(root, MASK_FOLDERS)
    if not splits:
        return None
    file = os.path.join(root, CLASSES_FILE)
    names = _class_names(file) if os.path.isfile(file) else ()
    known = f"{len(names)} classes of {CLASSES_FILE}" if names else "values of masks are classes"
    return Layout(f"folders of images and masks: {known}", splits, names)


def _class_names(file: str) -> tuple[str, ...]:
    """Reads class names from a file, one per line, in the order of their indices.

    Raises:
      UserError: the file has no names, a line before the last name is empty, or a name occurs
        twice.
    """
    names = tuple("\n".join(line.strip() for line in _lines(file)).rstrip("\n").split("\n"))
    if "" in names or len({*names}) < len(names):
        raise UserError(f"{file} must have a line for each class, from 0, each with another name")
    return names


def _lines(file: str) -> list[str]:
    try:
        with open(file, encoding="utf-8-sig") as lines:
            return lines.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error


def as_they_are(number: int) -> np.ndarray:
    """Returns the class of each mask value, if mask values are class indices or `IGNORED`.

    Args:
      number: number of classes. Values from `number` to `IGNORED` - 1 are `INVALID`.
    """
    classes = np.full(IGNORED + 1, INVALID, np.int16)
    classes[:number], classes[IGNORED] = range(number), IGNORED
    return classes


def classes_of(values: np.ndarray, classes: np.ndarray, number: int, remedy: str) -> np.ndarray:
    """Converts the values of a mask to class indices or `IGNORED`, uint8 `[height, width]`.

    Args:
      values: values of a mask, integers `[height, width]`.
      classes: class index, `IGNORED` or `INVALID` for each value.
      number: number of classes.
      remedy: how the user can define more classes, for errors.

    Raises:
      UserError: the class of a value is `INVALID`.
    """
    result = classes[np.minimum(values, len(classes) - 1)]
    beyond = (result == INVALID) | (values >= len(classes))
    if beyond.any():
        wrong, counts = np.unique(values[beyond], return_counts=True)
        shown = ", ".join(
            f"{value} ({count:,} pixels)" for value, count in zip(wrong[:5], counts, strict=False)
        )
        more, valid = " ..." if len(wrong) > 5 else "", (classes >= 0) & (classes != IGNORED)
        first, last = np.flatnonzero(valid)[[0, -1]]
        raise UserError(
            f"{shown}{more} beyond the {number} classes, which are {first} to {last}, and "
            f"{IGNORED} for unknown pixels: correct the mask, or {remedy}"
        )
    return result.astype(np.uint8)


def _values_in(root: str, maps: Sequence[str]) -> Iterator[np.ndarray]:
    """Reads masks, and yields the distinct values in each of them."""

    def present(name: str) -> np.ndarray:
        try:
            return np.unique(decode_mask(read_file(root + name)))
        except (UserError, OSError) as error:
            raise UserError(f"{as_text(root + name)}: {error}") from error

    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(present, maps)


def check_two_classes(present: Iterable[Iterable[int]], where: str) -> None:
    """Raises UserError if all masks contain only 0 and 255 (`IGNORED`), but class 1 is expected.

    Such masks probably use 255 for the foreground, which training would ignore. `present` yields
    the values in each mask; masks after the first one with other values are not read.
    """
    found: set[int] = set()
    for values in present:
        found.update(map(int, values))
        if not found <= {0, IGNORED}:
            return
    if found == {0, IGNORED}:
        raise UserError(
            f"the masks of {where} have the values 0 and {IGNORED} only, and {IGNORED} is the "
            "value of unknown pixels, which do not count: save the foreground as 1"
        )


def check_palettes(source: Masks) -> None:
    """Raises UserError if a sampled mask has the colours of another mask in a different order.

    Programs that create a palette for each image number the same classes differently in each file.
    """
    # For each colour: an index that has the colour in a mask, and the number of this mask.
    known: dict[tuple[int, ...], tuple[int, int]] = {}
    for number in spread(len(source), SAMPLES):
        try:
            content = source.read_map(number)
            palette, values = palette_of(content), decode_mask(content)
        except UserError:  # Ignored: the pipeline reports it when it reads this mask.
            continue
        used = {index: palette[index] for index in np.unique(values).tolist() if index in palette}
        for index, colour in used.items():
            before, other = known.setdefault(colour, (index, number))
            # Several indices may have the same colour, such as black where a palette has no colour.
            if before != index and palette.get(before, colour) != colour:
                raise UserError(
                    f"the colour {colour} has the index {before} in {source.describe_map(other)} "
                    f"and {index} in {source.describe_map(number)}; these indices are the classes: "
                    "save all masks with one palette"
                )


def class_count(present: Iterable[np.ndarray], where: str, remedy: str) -> int:
    """Returns the number of classes, determined from the values in each mask (`present`).

    Raises:
      UserError: the values besides `IGNORED` are not 0, 1, 2, ..., or only one value occurs.
    """
    found = set().union(*(found.tolist() for found in present))
    check_two_classes([found], where)
    values = sorted(found - {IGNORED})
    if len(values) > 1 and values == [*range(len(values))]:
        return len(values)
    shown = ", ".join(map(str, values[:8])) + (" ..." if len(values) > 8 else "")
    raise UserError(
        f"the masks of {where} have the values {shown}, and {IGNORED} for unknown pixels: number "
        f"the classes 0, 1, 2, ..., or {remedy}"
    )


MASKS = SourceKind(
    "masks",
    "images with masks, for segmentation",
    open_masks,
    path="a folder with images and masks of the same names, or of VOC, ADE20K or Cityscapes",
    layout_at=lambda path: layout_of(folder_of(path))[:2],
)
