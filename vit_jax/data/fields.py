"""Fields: further values of an example besides its image and labels, such as captions and masks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.placement import Placement
from vit_jax.errors import UserError, as_text

TEXT = "text"  # Captions of an image: one or several strings.
MASK = "mask"  # Class of each pixel, int `[height, width]`; `IGNORED` if the class is unknown.
BOXES = "boxes"  # `Boxes`, the objects of an image.
INSTANCES = "instances"  # `Boxes`, the objects of an image with their masks.
DEPTH = "depth"  # Depth of each pixel in metres, float32 `[height, width]`; 0: unknown.
IGNORED = 255  # Mask value of pixels that training and evaluation ignore.
BACKGROUND = "background"  # Class name of pixels that belong to no object.
CAPTION_KEYS = ("caption", "captions", "text")  # Usual column names of captions, the default first.


class Boxes(NamedTuple):
    """The objects of an image."""

    corners: np.ndarray  # Left, top, right and bottom in pixels, float32 `[objects, 4]`.
    labels: np.ndarray  # Class of each object, int32 `[objects]`.
    # True for the pixels of each object, bool `[objects, height, width]`; None: unknown.
    masks: np.ndarray | None = None
    # True for the box of a group of objects, bool `[objects]`; None: there are no groups.
    crowd: np.ndarray | None = None
    # Height and width of the image in the annotations; None: unknown.
    size: tuple[int, int] | None = None
    # Area of each object in pixels in the annotations, float64 `[objects]`. COCO's metrics classify
    # objects as small, medium or large by these areas. None: the metrics use the area of the masks
    # or boxes.
    areas: np.ndarray | None = None


class Field(NamedTuple):
    """A batch entry that a training objective requests in addition to views of the image."""

    name: str  # Key of the values in `Source.fields_of` and of the entry in the batch.
    shape: tuple[int, ...]  # Shape of the entry for one example.
    dtype: Any  # Dtype of the entry.
    # Function that converts an example's value to an array of this shape. It is called as
    # `encode(value, rng)`, with `rng=None` in evaluation. For `spatial` fields it is called as
    # `encode(value, placement)`, with the `Placement` of the first view.
    encode: Callable[[Any, np.random.Generator | None], np.ndarray]
    # Short text that identifies the behaviour of `encode`. A run resumes only if this text is
    # unchanged.
    identity: str = ""
    # Kind of an entry that is cropped and flipped together with the image. `map`: an array
    # `[height, width, ...]`. `boxes`: an array `[..., 4 or more]`, whose last axis starts with
    # left, top, right and bottom in pixels. Empty: the entry is independent of the crop.
    spatial: str = ""
    # For `spatial` fields: called as `accepts(value, placement)`. If it returns False, training
    # draws another crop, up to ten times. None: all crops are accepted.
    accepts: Callable[[Any, Placement], bool] | None = None


def caption_keys(key: str) -> tuple[str, ...]:
    """Returns the names that a caption column may have, given the option `data.caption_key`."""
    return CAPTION_KEYS if key == CAPTION_KEYS[0] else (key,)


def draw_caption(captions: Sequence[str], rng: np.random.Generator | None) -> str:
    """Returns a random caption of an image; without `rng` the first caption."""
    return captions[0 if rng is None or len(captions) == 1 else int(rng.integers(len(captions)))]


def check_captions(captions: Sequence[str], place: str) -> tuple[str, ...]:
    """Removes surrounding spaces and duplicates from the captions of an image.

    Raises:
      UserError: there is no caption, a caption is empty, or it is not a string of valid UTF-8.
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
