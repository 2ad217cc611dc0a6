"""Batch entries that are cropped together with the image: masks, boxes and depth maps."""

import functools

import numpy as np

from vit_jax.data.decode import hidden_orientation
from vit_jax.data.fields import BOXES, DEPTH, IGNORED, INSTANCES, MASK, Boxes, Field
from vit_jax.data.placement import Placement
from vit_jax.errors import UserError

MIN_VISIBLE = 0.1  # Minimum share of a box's area that must be in the crop.
MIN_SIDE = 1.0  # Minimum width and height of a box in the crop, in pixels.
TOLERANCE = 1.0  # Pixels by which boxes may exceed their image, due to rounding.
NO_OBJECT = -1  # Class of the rows that pad a batch's boxes.
CROWD = -2  # A crowd of class k has the class CROWD - k in a batch.


def mask_field(size: int, cat_max_ratio: float = 1.0) -> Field:
    """Returns the batch field `mask`: the class of each pixel, uint8 `[size, size]`.

    Masks are resized with nearest-neighbour interpolation. Padding has the value `IGNORED`.

    Args:
      size: height and width of the crop in pixels.
      cat_max_ratio: maximum share of a class in the labelled pixels of a crop, as in
        mmsegmentation's `RandomCrop`. A crop is drawn again if a class reaches this share, or if
        the crop contains only one class. 1: crops are never drawn again.
    """
    encode = functools.partial(_encode_map, fill=IGNORED, dtype=np.uint8)
    accepts = functools.partial(_has_classes, most=cat_max_ratio) if cat_max_ratio < 1 else None
    return Field(MASK, (size, size), np.uint8, encode, f"nearest, {size} pixels", "map", accepts)


def depth_field(size: int) -> Field:
    """Returns the batch field `depth`: the depth of each pixel in metres, float32 `[size, size]`.

    Unknown depths and padding are 0. Maps are resized with nearest-neighbour interpolation.
    """
    encode = functools.partial(_encode_map, fill=0, dtype=np.float32)
    return Field(DEPTH, (size, size), np.float32, encode, f"nearest, {size} pixels", "map")


def boxes_field(size: int, most: int) -> Field:
    """Returns the batch field `boxes`: the objects in the crop, float32 `[most, 5]`.

    A row contains left, top, right and bottom in pixels of the crop, and the class. Rows without an
    object are 0 with class -1. A crowd (COCO's box of a group of objects) of class k has the class
    -2 - k. A crowd is not an object, but COCO's metrics do not count predictions in it as false
    positives. Boxes are clipped to the crop. A box is removed if less than a tenth of its area is
    in the crop, or if its clipped width or height is less than a pixel. If there are more than
    `most` boxes, objects are kept before crowds, and large boxes before small boxes.

    Args:
      size: height and width of the crop in pixels.
      most: maximum number of boxes.
    """
    encode = functools.partial(_encode_boxes, most=most)
    identity = f"{most} boxes and crowds, {MIN_VISIBLE:g} visible, {size} pixels"
    return Field(BOXES, (most, 5), np.float32, encode, identity, "boxes")


def instances_field(size: int, most: int) -> Field:
    """Returns the batch field `instances`: the object of each pixel, uint8 `[size, size]`.

    The value is the object's row in the field `boxes`. Pixels without an object have the value
    `IGNORED`. Where objects overlap, the smaller object is in front.

    Args:
      size: height and width of the crop in pixels.
      most: maximum number of boxes in the field `boxes`; no more than `IGNORED`.
    """
    encode = functools.partial(_encode_instances, most=most)
    identity = f"masks of {most} objects, nearest, {size} pixels"
    return Field(INSTANCES, (size, size), np.uint8, encode, identity, "map")


def _encode_map(values: np.ndarray, placement: Placement, fill: float, dtype: type) -> np.ndarray:
    return placement.place_map(values, fill, np.empty(placement.size, dtype))


def _has_classes(mask: np.ndarray, placement: Placement, most: float) -> bool:
    """Returns True if a crop contains several classes, and none covers a share `most` or more.

    The shares are relative to the crop's labelled pixels.
    """
    if mask.shape != placement.image:
        return True  # The field's `encode` raises the error.
    crop = _encode_map(mask, placement, IGNORED, np.uint8)
    counts = np.bincount(crop.reshape(-1), minlength=IGNORED)[:IGNORED]
    return np.count_nonzero(counts) > 1 and counts.max() < most * counts.sum()


def _encode_boxes(boxes: Boxes, placement: Placement, most: int) -> np.ndarray:
    placed, chosen = _place_objects(boxes, placement, most)
    labels = boxes.labels[chosen]
    if boxes.crowd is not None:
        labels = np.where(boxes.crowd[chosen], CROWD - labels, labels)
    out = np.zeros((most, 5), np.float32)
    out[:, 4] = NO_OBJECT
    out[: len(chosen), :4], out[: len(chosen), 4] = placed, labels
    return out


def _encode_instances(boxes: Boxes, placement: Placement, most: int) -> np.ndarray:
    if boxes.masks is None:
        raise UserError("the objects have no masks")
    _, chosen = _place_objects(boxes, placement, most)
    rows = np.full(placement.image, IGNORED, np.uint8)
    areas = boxes.masks[chosen].sum((1, 2))
    for row in np.argsort(-areas, kind="stable").tolist():
        rows[boxes.masks[chosen[row]]] = row
    return _encode_map(rows, placement, IGNORED, np.uint8)


def _place_objects(boxes: Boxes, placement: Placement, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Clips boxes to a crop, and removes those that are hardly visible in it.

    Of more than `most` boxes, objects are kept before crowds, and large boxes before small ones.
    Returns the remaining boxes in pixels of the crop, `[n, 4]`, and their indices in `boxes`.

    Raises:
      UserError: a box exceeds the image or has no area, or the image's size in the annotations is
        wrong.
    """
    height, width = placement.image
    if boxes.size is not None:
        check_size(boxes.size, (height, width), "the image")
    check_corners(boxes.corners, height, width)
    placed = placement.place_boxes(boxes.corners)
    sides = placed[:, 2:] - placed[:, :2]
    visible = sides.prod(1) / _scale(placement) / _areas(boxes.corners)
    kept = (visible >= MIN_VISIBLE) & (sides >= MIN_SIDE).all(1)
    chosen = np.flatnonzero(kept)
    crowd = np.zeros(len(kept), bool) if boxes.crowd is None else boxes.crowd
    order = np.lexsort((-sides[chosen].prod(1), crowd[chosen]))
    chosen = np.sort(chosen[order[:most]])
    return placed[chosen], chosen


def check_size(annotated: tuple[int, int], actual: tuple[int, int], image: str) -> None:
    """Raises UserError if an image's actual and annotated (height, width) differ."""
    if annotated != actual:
        (height, width), (rows, columns) = annotated, actual
        raise UserError(
            f"{image} has {columns}x{rows} pixels, and its annotations are of {width}x{height}: "
            "scale the annotations, and save images upright, without an EXIF rotation"
        )


def check_upright(image: bytes, where: str, annotations: str) -> None:
    """Raises UserError if an encoded image is turned by EXIF and keeps its size.

    Images are turned upright. If a turn changes the size, annotations of the stored pixels have
    another size, which `check_size` and `Placement` detect. `annotations` is a description for the
    error.
    """
    if orientation := hidden_orientation(image):
        raise UserError(
            f"{where} has the EXIF orientation {orientation}, and {annotations} may fit the "
            "upright or the stored pixels: save the image without EXIF, upright "
            "(PIL.ImageOps.exif_transpose) or as stored, such that they fit"
        )


def boxes_of(rows: np.ndarray) -> Boxes:
    """Converts a value of the batch field `boxes`, `[most, 5]`, back to the image's `Boxes`."""
    rows = rows[rows[:, 4] != NO_OBJECT]
    labels = rows[:, 4].astype(np.int32)
    crowd = labels <= CROWD
    return Boxes(rows[:, :4], np.where(crowd, CROWD - labels, labels), None, crowd)


def check_corners(corners: np.ndarray, height: int, width: int) -> None:
    """Raises UserError for boxes without area, and for boxes that exceed their image.

    A box may exceed it by one pixel, because annotations are rounded. `corners` are the left, top,
    right and bottom edges in pixels, `[boxes, 4]`.
    """
    if (empty := _areas(corners) <= 0).any():
        raise UserError(
            f"the box {_shown(corners[empty][0])} has no area: its right must be greater than its "
            "left, and its bottom than its top; correct it, or remove it"
        )
    most = np.array([width, height, width, height]) + TOLERANCE
    if (outside := ((corners < -TOLERANCE) | (corners > most)).any(1)).any():
        raise UserError(
            f"the box {_shown(corners[outside][0])} (left, top, right, bottom) is not within the "
            f"image of {width}x{height} pixels: boxes are in pixels of the original image"
        )


def _areas(corners: np.ndarray) -> np.ndarray:
    return (corners[:, 2:] - corners[:, :2]).clip(0).prod(1)


def _scale(placement: Placement) -> float:
    """Returns the factor by which the resize of a crop multiplies areas."""
    box, (height, width) = placement.box, placement.shown
    return height * width / ((box.right - box.left) * (box.bottom - box.top))


def _shown(corners: np.ndarray) -> str:
    return f"({', '.join(f'{edge:g}' for edge in corners.tolist())})"
