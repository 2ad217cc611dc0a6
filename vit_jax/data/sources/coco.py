"""Images with boxes and masks of objects from a COCO file; pycocotools decodes the masks."""

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.dense_fields import TOLERANCE, check_size, check_upright
from vit_jax.data.fields import BACKGROUND, BOXES, IGNORED, INSTANCES, MASK, Boxes
from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.folder import file_sizes, read_file
from vit_jax.data.sources.folder_rules import check_no_text_labels, split_name
from vit_jax.data.sources.kind import SourceKind, SourceOptions
from vit_jax.data.sources.pairs import folder_of, readable_samples, shortened, split_of
from vit_jax.data.sources.slices import groups_by_path, shuffled
from vit_jax.errors import UserError, as_text

IN_SPLIT = "_annotations.coco.json"  # Name of Roboflow's COCO file in the folder of a split.
EMPTY = "boxes without area"
FORM = 'COCO\'s form is {"images": [...], "annotations": [...], "categories": [...]}'


@dataclasses.dataclass(frozen=True)
class Coco(Source):
    """Images with objects, in the order of a COCO file."""

    file: str  # The COCO file.
    root: str  # Folder of the images; it ends with a slash.
    files: tuple[str, ...]  # Paths of the images, relative to the root.
    shapes: np.ndarray  # Height and width of each image, int64 `[images, 2]`.
    # Index of each image's first object in `objects`, followed by the total number of objects,
    # int64 `[images + 1]`.
    starts: np.ndarray
    objects: Boxes  # Corners, labels, crowds and areas of the objects of all images.
    class_names: tuple[str, ...]
    fields: tuple[str, ...]  # The requested fields: some of `boxes`, `instances` and `mask`.
    # COCO's `segmentation` of each object; empty if only boxes are requested.
    segmentations: tuple[Any, ...] = ()
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    annotated: bool = True  # The objects are used. False: only the images are.

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = read_file(self.root + self.files[index])
        if self.annotated:
            check_upright(image, self.describe(index), f"its objects in {self.file}")
        return Example(image, ())

    def describe(self, index):
        return as_text(self.root + self.files[index])

    def labels_of(self, index):
        return ()

    def fields_of(self, index):
        boxes = self._boxes(index)
        if {INSTANCES, MASK} & {*self.fields}:
            boxes = boxes._replace(masks=self._masks(index))
        values: dict[str, Any] = {BOXES: boxes, INSTANCES: boxes}
        if MASK in self.fields:
            values[MASK] = self._mask(index, boxes)
        return {name: values[name] for name in self.fields}

    def known_fields(self, indices=None):
        chosen = range(len(self)) if indices is None else indices
        for corners, labels, _, crowd, _, areas in map(self._boxes, chosen):
            yield b"".join(x.tobytes() for x in (corners, labels, crowd, areas))

    def stored_files(self, indices=None):
        files = self.files if indices is None else [self.files[index] for index in indices]
        yield os.path.basename(self.file), os.path.getsize(self.file)
        sizes = file_sizes(self.root, [self.root + file for file in files])
        yield from zip(files, sizes, strict=True)

    def groups(self, key):
        return groups_by_path(self.files, key)

    def fair_order(self):
        return shuffled(len(self))

    def _boxes(self, index: int) -> Boxes:
        part = slice(self.starts[index], self.starts[index + 1])
        corners, labels, _, crowd, _, areas = self.objects
        height, width = self.shapes[index].tolist()
        return Boxes(corners[part], labels[part], None, crowd[part], (height, width), areas[part])

    def check_sizes(self) -> None:
        """Compares a sample of image sizes with the COCO file; raises UserError if they differ."""
        for index, image in readable_samples(self):
            height, width = self.shapes[index].tolist()
            check_size((height, width), (image.height, image.width), self.describe(index))

    def _masks(self, index: int) -> np.ndarray:
        """Returns the pixels of each object, bool `[objects, height, width]`."""
        height, width = self.shapes[index].tolist()
        objects = self.segmentations[self.starts[index] : self.starts[index + 1]]
        masks = [_pixels(one, height, width, self.describe(index)) for one in objects]
        return np.array(masks, bool).reshape(-1, height, width)

    def _mask(self, index: int, boxes: Boxes) -> np.ndarray:
        """Returns the class of each pixel, uint8 `[height, width]`; crowds are `IGNORED`.

        Smaller objects are in front of larger ones.
        """
        result = np.zeros(self.shapes[index], np.uint8)
        areas = boxes.masks.sum((1, 2))
        for number in np.argsort(-areas, kind="stable").tolist():
            result[boxes.masks[number]] = IGNORED if boxes.crowd[number] else boxes.labels[number]
        return result


class Listed(NamedTuple):
    """A COCO file and the folders that may contain its images."""

    file: str
    folders: tuple[str, ...]


def open_coco(split: str, options: SourceOptions) -> Coco:
    """Opens a split of a COCO data set.

    If the field `mask` is required, `background` is added as the first class.

    Raises:
      UserError: the split does not exist, the file is not a COCO file, an image does not exist, or
        a box exceeds its image.
    """
    if options.only:
        raise UserError("data.classes is unsupported with COCO files")
    bare = re.sub(r"\d+$", "", split)  # train2017 becomes train.
    listed = split_of(options.path, splits_at(options.path), split, bare)
    content = _read(listed.file)
    try:
        source = _source(listed, content, options)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{listed.file}: {type(error).__name__}: {error}; {FORM}") from error
    source.check_sizes()
    return source


def splits_at(path: str) -> dict[str, Listed]:
    """Returns the COCO file of each split in a folder. If `path` is a file, its split is `all`.

    Raises:
      UserError: there is no COCO file, or a split has several COCO files.
    """
    if path.lower().endswith(".json"):
        folder = os.path.join(os.path.dirname(path), "")
        return {"all": Listed(path, (folder, f"{folder}images/", f"{folder}../images/"))}
    root = folder_of(path)
    splits: dict[str, Listed] = {}
    files = {file: _stem(file) for file in _json_files(root)}
    for file, stem in files.items():
        if (split := split_name(stem)) is None:
            continue
        bare = re.sub(r"\d+$", "", split)  # train2017 becomes train.
        if bare in splits:
            raise UserError(
                f"{path} has two COCO files of the split {bare}: {splits[bare].file} and {file}; "
                "give one of them (data.path), with slices of the split 'all'"
            )
        splits[bare] = _listed_in(root, file, stem, f"images/{split}", split)
    if splits:
        return splits
    if len(files) == 1:
        return {"all": _listed_in(root, *files.popitem())}
    for folder in ("labels", "train/labels"):  # Those of YOLO.
        check_no_text_labels(os.path.join(root, folder))
    raise UserError(
        f"{path} has no COCO files of splits (data.path), such as annotations/instances_train.json "
        f"or train/{IN_SPLIT}; there are: {', '.join([*files][:5]) or 'none'}"
    )


def _stem(file: str) -> str:
    """Returns the possible name of a COCO file's split, such as `train2017`, from the file's path.

    Examples are `annotations/instances_train2017.json` or `train2017/_annotations.coco.json`.
    """
    folder, name = os.path.split(file)
    stem = os.path.basename(folder) if name == IN_SPLIT else os.path.splitext(name)[0]
    return stem.removeprefix("instances_")


def _listed_in(root: str, file: str, stem: str, *folders: str) -> Listed:
    """Returns a COCO file with the folders that may contain its images, the most likely first.

    The folders are named after `stem`, such as `train2017`, or are `folders` of `root`.
    """
    inner = (stem, f"images/{stem}", *folders, "images", "")
    own = os.path.join(os.path.dirname(file), "")
    return Listed(file, (own, *(os.path.join(root, one, "") for one in inner)))


def _json_files(root: str) -> list[str]:
    """Returns the JSON files in the usual locations of COCO files below `root`."""
    folders = [root, os.path.join(root, "annotations")]
    files = [
        os.path.join(folder, name)
        for folder in folders
        if os.path.isdir(folder)
        for name in sorted(os.listdir(folder))
        if name.lower().endswith(".json") and not re.match("captions_|person_|image_info_", name)
    ]
    inner = [os.path.join(root, name, IN_SPLIT) for name in sorted(os.listdir(root))]
    return files + [file for file in inner if os.path.isfile(file)]


def _read(file: str) -> Mapping[str, Any]:
    try:
        content = json.loads(read_file(file))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror} (data.path)") from error
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict) or not {"images", "annotations", "categories"} <= {*content}:
        raise UserError(f"{file} is no COCO file of objects: {FORM}")
    if not content["images"]:
        raise UserError(f"{file} lists no images")
    for key in ("images", "categories"):
        _check_ids(file, key, content[key])
    return content


def _check_ids(file: str, key: str, entries: Sequence[Mapping]) -> None:
    """Raises UserError if entries have the same id: the last one would get the objects of all."""
    counts = Counter(one["id"] for one in entries if isinstance(one, Mapping) and "id" in one)
    if repeated := [number for number, count in counts.items() if count > 1]:
        raise UserError(
            f"{file}: {len(repeated):,} ids occur several times in {key!r}, such as "
            f"{repeated[0]!r}: give each entry an id of its own, and change the annotations' ids "
            "accordingly"
        )


def _check_files(file: str, images: Sequence[Mapping], files: Sequence[str]) -> None:
    """Raises UserError if two images have the same file: each has only some of its objects."""
    first: dict[str, int] = {}
    for index, name in enumerate(files):
        if (other := first.setdefault(os.path.normpath(name), index)) != index:
            raise UserError(
                f"{file} lists {as_text(name)} under two ids, {images[other]['id']!r} and "
                f"{images[index]['id']!r}: give the annotations of both one image_id, and remove "
                "the other image; different images need different file names"
            )


def _source(listed: Listed, content: Mapping[str, Any], options: SourceOptions) -> Coco:
    """Returns the source for the content of a COCO file."""
    images = content["images"]
    files = tuple(str(image["file_name"]) for image in images)
    _check_files(listed.file, images, files)
    shapes = np.array([(image["height"], image["width"]) for image in images], np.int64)
    fields = tuple(name for name in (BOXES, INSTANCES, MASK) if name in options.fields) or (BOXES,)
    names, number = _classes(listed.file, content, MASK in fields, options.class_names)
    annotations, place = _in_order(listed.file, content)
    boxes = _boxes(listed.file, annotations, number)
    most = shapes[place][:, [1, 0, 1, 0]]
    _check_within(listed.file, boxes.corners, most, [files[index] for index in place])
    corners = boxes.corners.clip(0, most)
    valid = np.flatnonzero((corners[:, 2:] > corners[:, :2]).all(1))
    removed = len(corners) - len(valid)
    return Coco(
        listed.file,
        _folder_of_images(listed, files),
        files,
        shapes,
        np.searchsorted(place[valid], np.arange(len(files) + 1)),
        boxes._replace(
            corners=corners[valid].astype(np.float32),
            labels=boxes.labels[valid],
            crowd=boxes.crowd[valid],
            areas=boxes.areas[valid],
        ),
        names,
        fields,
        _segmentations(listed.file, annotations, valid) if {INSTANCES, MASK} & {*fields} else (),
        {EMPTY: removed} if removed else {},
        annotated=bool(options.fields),
    )


def _boxes(file: str, annotations: Sequence[Mapping], number: Mapping[int, int]) -> Boxes:
    """Converts COCO's annotations to `Boxes`.

    Args:
      number: class index by category id.

    Raises:
      UserError: an annotation has an unknown category.
    """
    if unknown := {one["category_id"] for one in annotations} - {*number}:
        raise UserError(f"{file} has objects of no category: {sorted(unknown)[:5]}")
    boxes = np.array([_bbox(file, one) for one in annotations], np.float64).reshape(-1, 4)
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    labels = np.array([number[one["category_id"]] for one in annotations], np.int32)
    crowd = np.array([bool(int(one.get("iscrowd") or 0)) for one in annotations], bool)
    box_areas = boxes[:, 2:].prod(axis=1).tolist()
    stated = [one.get("area") for one in annotations]
    areas = [box if area is None else area for area, box in zip(stated, box_areas, strict=True)]
    return Boxes(corners, labels, None, crowd, None, np.array(areas, np.float64))


def _bbox(file: str, annotation: Mapping) -> Sequence[float]:
    """Returns the box of an annotation; raises UserError if it does not have four numbers."""
    bbox = annotation["bbox"]
    if not isinstance(bbox, list) or len(bbox) != 4:
        raise UserError(
            f"{file}: the annotation {annotation.get('id')!r} has the bbox {bbox!r:.60}: a bbox is "
            "[left, top, width, height] in pixels"
        )
    return bbox


def _in_order(file: str, content: Mapping[str, Any]) -> tuple[list[Mapping], np.ndarray]:
    """Sorts annotations by image; returns the annotations and the image index of each of them."""
    index = {image["id"]: number for number, image in enumerate(content["images"])}
    annotations = content["annotations"]
    if others := [one for one in annotations if one["image_id"] not in index]:
        raise UserError(
            f"{file}: {len(others):,} of {len(annotations):,} objects are of images that it does "
            f"not list, such as image_id {others[0]['image_id']}"
        )
    place = np.array([index[one["image_id"]] for one in annotations], np.int64)
    order = np.argsort(place, kind="stable")
    return [annotations[number] for number in order], place[order]


def _classes(
    file: str, content: Mapping[str, Any], masks: bool, class_names: Sequence[str] | None
) -> tuple[tuple[str, ...], dict[int, int]]:
    """Returns the class names, and the class index by category id.

    If `masks` is True, the first class is the background. `class_names` are the classes of the
    training data. None: the file is the training data, and defines the classes.

    Raises:
      UserError: the training data lack a class of this file, or there are too many classes.
    """
    categories = sorted(content["categories"], key=lambda category: category["id"])
    category_names = [BACKGROUND] * masks + [str(one["name"]) for one in categories]
    names = tuple(class_names or dict.fromkeys(category_names))
    if unknown := [name for name in category_names if name not in names]:
        raise UserError(f"{file} has classes that training lacks: {', '.join(unknown[:20])}")
    if len(names) > IGNORED and masks:
        raise UserError(f"{file} has {len(names)} classes, and masks of at most {IGNORED} are read")
    return names, {one["id"]: names.index(str(one["name"])) for one in categories}


def _check_within(file: str, corners: np.ndarray, most: np.ndarray, images: list[str]) -> None:
    """Raises UserError if boxes are no pixels, or if a box exceeds its image by over one pixel.

    A smaller excess can be due to rounding. If all edges are in the first pixel, they are fractions
    of the image's sides. `corners` and `most` (width, height, width, height) are `[boxes, 4]`.
    """
    if len(corners) and np.nanmax(corners) <= 1 < most.min():
        raise UserError(
            f"{file}: all {len(corners):,} boxes are within one pixel, as if they were fractions "
            "of the image's sides: a bbox is [left, top, width, height] in pixels"
        )
    outside = ((corners < -TOLERANCE) | (corners > most + TOLERANCE)).any(1)
    if not outside.any():
        return
    first = int(outside.argmax())
    left, top, right, bottom = corners[first].tolist()
    width, height = most[first, :2].tolist()
    raise UserError(
        f"{file}: {outside.sum():,} of {len(corners):,} boxes are not within their image, such as "
        f"[{left:g}, {top:g}, {right - left:g}, {bottom - top:g}] of {as_text(images[first])}, "
        f"which has {width}x{height} pixels: a bbox is [left, top, width, height] in pixels"
    )


def _folder_of_images(listed: Listed, files: Sequence[str]) -> str:
    """Returns the folder that contains all images; raises UserError if there is none."""
    root = next((one for one in listed.folders if os.path.exists(one + files[0])), None)
    if root is None:
        where = ", ".join(dict.fromkeys(listed.folders))
        raise UserError(f"{listed.file} lists {as_text(files[0])}, which is in none of: {where}")
    sizes = file_sizes(root, [root + file for file in files])
    if missing := [file for file, size in zip(files, sizes, strict=True) if size < 0]:
        raise UserError(
            f"{len(missing):,} of {len(files):,} images of {listed.file} do not exist in {root}: "
            f"{shortened(missing)}; copy them, or remove them from the file"
        )
    return root


def _segmentations(
    file: str, annotations: Sequence[Mapping], valid: np.ndarray
) -> tuple[list | dict, ...]:
    """Returns the COCO segmentation of each object: polygons, or a run-length encoding.

    `valid` are the indices of the annotations to use.

    Raises:
      UserError: an annotation has no segmentation, or pycocotools is not installed.
    """
    try:
        import pycocotools.mask  # noqa: F401
    except ImportError as error:
        raise UserError("masks of COCO files need pycocotools: pip install pycocotools") from error
    segmentations = tuple(annotations[number].get("segmentation") or None for number in valid)
    if lacking := sum(one is None for one in segmentations):
        raise UserError(
            f"{file}: {lacking:,} of {len(segmentations):,} objects have no segmentation, which "
            "masks need; the file has boxes only"
        )
    return segmentations


def _pixels(segmentation: list | dict, height: int, width: int, image: str) -> np.ndarray:
    """Decodes the mask of an object, bool `[height, width]`.

    `segmentation` is polygons, or a run-length encoding as a list or as compressed text.
    """
    from pycocotools import mask

    try:
        if isinstance(segmentation, list):
            runs = mask.merge(mask.frPyObjects(segmentation, height, width))
        elif isinstance(segmentation["counts"], list):
            runs = mask.frPyObjects(segmentation, height, width)
        else:
            runs = segmentation
        pixels = mask.decode(runs).astype(bool)
    except Exception as error:  # pycocotools' C code may raise any error.
        raise UserError(f"{image}: a segmentation cannot be read: {error}") from error
    if pixels.shape != (height, width):
        rows, columns = pixels.shape
        raise UserError(
            f"{image} has {width}x{height} pixels in the COCO file, and a segmentation of "
            f"{columns}x{rows}: correct its size"
        )
    return pixels


COCO = SourceKind(
    "coco",
    "images with the objects of COCO files, for detection and segmentation",
    open_coco,
    path="a folder with COCO's annotations/instances_train2017.json and train2017/, with "
    f"train/{IN_SPLIT}, or a COCO file",
    layout_at=lambda path: ("COCO files of objects", splits_at(path)),
)
