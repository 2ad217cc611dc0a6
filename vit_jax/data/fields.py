"""Fields: values of each example other than its image and labels, such as captions and masks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.placement import Placement
from vit_jax.errors import UserError, as_text

TEXT = "text"  # Captions of an image: one or several strings.
MASK = "mask"  # Class of each pixel, int `[height, width]`; `IGNORED` where it is unknown.
BOXES = "boxes"  # `Boxes`, the objects of an image.
INSTANCES = "instances"  # `Boxes` with masks.
DEPTH = "depth"  # Metres, float32 `[height, width]`; 0 where it is unknown.
IGNORED = 255  # Mask value of pixels that training and evaluation ignore.
BACKGROUND = "background"  # Class name of pixels that belong to no object.
CAPTION_KEYS = ("caption", "captions", "text")  # Names of captions; the first is the default.


class Boxes(NamedTuple):
    """The objects of an image.

    Attributes:
      corners: left, top, right and bottom in pixels, float32 `[objects, 4]`.
      labels: class of each object, int32 `[objects]`.
      masks: pixels of each object, bool `[objects, height, width]`; None: unknown.
      crowd: True for the box of a group of objects, bool `[objects]`; None: there are no groups.
      size: height and width of the image according to the annotations; None: unknown.
      areas: area of each object in pixels according to the annotations, float64 `[objects]`, by
        which COCO's metrics classify objects as small, medium or large. None: use the area of the
        masks or boxes.
    """

    corners: np.ndarray
    labels: np.ndarray
    masks: np.ndarray | None = None
    crowd: np.ndarray | None = None
    size: tuple[int, int] | None = None
    areas: np.ndarray | None = None


class Field(NamedTuple):
    """An entry of a batch that an objective requests in addition to the views of the image.

    Attributes:
      name: key in `Source.fields_of` and in the batch.
      shape: shape of one example's entry.
      dtype: type of the entry.
      encode: `(value, rng) -> array` of this shape; `rng` is None in evaluation. For `spatial`
        fields: `(value, placement) -> array`, with the `Placement` of the first view.
      identity: short value that changes with `encode`; a run resumes only if it is the same.
      spatial: kind of an entry that is cropped and flipped with the image: `map`, `[height, width,
        ...]`, or `boxes`, `[..., 4 or more]` that start with left, top, right and bottom in pixels.
      accepts: for `spatial` fields: `(value, placement) -> bool`. Training draws another crop if it
        returns False, up to ten times. None: all crops are accepted.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    encode: Callable[[Any, np.random.Generator | None], np.ndarray]
    identity: str = ""
    spatial: str = ""
    accepts: Callable[[Any, Placement], bool] | None = None


def caption_keys(key: str) -> tuple[str, ...]:
    """Returns the names that captions may have for a value of `data.caption_key`."""
    return CAPTION_KEYS if key == CAPTION_KEYS[0] else (key,)


def draw_caption(captions: Sequence[str], rng: np.random.Generator | None) -> str:
    """Returns a random caption of an image, or the first one if `rng` is None."""
    return captions[0 if rng is None or len(captions) == 1 else int(rng.integers(len(captions)))]


def check_captions(captions: Sequence[str], place: str) -> tuple[str, ...]:
    """Returns the captions without surrounding spaces and duplicates.

    Args:
      place: description of the image, for errors.

    Raises:
      UserError: there is no caption, one is empty, or one is not a string of valid UTF-8.
    """
    for caption in captions:
        if not isinstance(caption, str):
            raise UserError(f"a caption of {place} has type {type(caption).__name__}, not str")
        if not caption.strip():
            raise UserError(f"{place} has an empty caption: write one, or remove the row")
        if any("\ud800" <= character <= "\udfff" for character in caption):
            raise UserError(
                f"{place} has a caption that is not valid UTF-8: {as_text(caption[:60])}; save the "
                "captions in UTF-8"
            )
    if not captions:
        raise UserError(f"{place} has no caption: write one, or remove the image")
    return tuple(dict.fromkeys(caption.strip() for caption in captions))
