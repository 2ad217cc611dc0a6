"""Decodes files with one value per pixel: class masks and depth maps."""

import io

import numpy as np
from PIL import Image

from vit_jax.data.decode import FORMATS
from vit_jax.errors import UserError

MASK_SUFFIXES = (".png",)
DEPTH_SUFFIXES = (".png", ".npy")


def decode_mask(content: bytes) -> np.ndarray:
    """Returns the values of a mask, uint8 or uint16 `[height, width]`.

    They are the indices of a PNG file with a palette, or the levels of a grey one with 1 to 16
    bits.

    Raises:
      UserError: the file is a colour image, has another format, or is damaged.
    """
    opened = _opened(content)
    if opened.format != "PNG":
        lossy = ", and its compression changes classes" if opened.format == "JPEG" else ""
        raise UserError(f"a mask of the format {opened.format} is unsupported{lossy}: save a PNG")
    values = values_of(opened)
    # Byte 24 of a PNG file contains the number of bits per value.
    if opened.mode == "L" and (levels := 2 ** content[24] - 1) < 255:
        values = values // (255 // levels)  # Pillow scales 2 and 4 bits to 8.
    return values


def palette_of(content: bytes) -> dict[int, tuple[int, ...]]:
    """Returns the colour of each index of a PNG mask's palette; {} for a mask without a palette.

    Raises:
      UserError: the file is not an image.
    """
    opened = _opened(content)
    levels = opened.getpalette() if opened.mode == "P" else None
    return dict(enumerate(zip(*[iter(levels or ())] * 3, strict=True)))


def values_of(mask: Image.Image) -> np.ndarray:
    """Returns the palette indices or grey levels of an image, uint8 or uint16 `[height, width]`.

    Raises:
      UserError: the image has colours without a palette, or is damaged.
    """
    if mask.mode not in ("P", "L", "1", "I", "I;16"):
        raise UserError(
            f"a mask in colour ({mask.mode}) without a palette has no classes: save the class of "
            "each pixel, as with PIL.Image.fromarray(classes.astype('uint8'))"
        )
    return _pixels(mask).astype(np.uint16 if mask.mode.startswith("I") else np.uint8)


def decode_depth(content: bytes, scale: float) -> np.ndarray:
    """Returns a depth map in metres, float32 `[height, width]`; 0 means an unknown depth.

    Args:
      content: a 16-bit grey PNG file or a NumPy file (.npy). Floats are depths in metres; negative
        numbers, infinity and NaN mean an unknown depth.
      scale: factor from integer values to metres.

    Raises:
      UserError: the file has another format, or is damaged.
    """
    if content.startswith(b"\x93NUMPY"):
        try:
            values = np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise UserError(f"the array cannot be read: {error}") from error
    else:
        opened = _opened(content)
        if not opened.mode.startswith("I"):
            raise UserError(
                f"a depth map must be a grey PNG of 16 bits or a .npy in metres, not a "
                f"{opened.format} of the mode {opened.mode}"
            )
        values = _pixels(opened)
    if values.ndim != 2 or values.dtype.kind not in "fiu":
        raise UserError(
            f"a depth map must be an array [height, width] of numbers, not {list(values.shape)} of "
            f"{values.dtype}"
        )
    metres = values.astype(np.float32) * (1 if values.dtype.kind == "f" else scale)
    return np.where(np.isfinite(metres) & (metres > 0), metres, 0).astype(np.float32)


def _opened(content: bytes) -> Image.Image:
    """Opens an image with Pillow without decoding its pixels."""
    try:
        return Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # Pillow's parsers raise errors of any type.
        raise UserError(f"it is not one of the formats {', '.join(FORMATS)}") from error


def _pixels(opened: Image.Image) -> np.ndarray:
    try:
        return np.asarray(opened)
    except Exception as error:  # Pillow's parsers raise errors of any type.
        raise UserError(f"it cannot be decoded: {error}") from error


def run_lengths(mask: np.ndarray) -> dict[str, list[int]]:
    """Returns a mask, bool `[height, width]`, in COCO's uncompressed run-length encoding.

    The result contains `size`, `[height, width]`, and `counts`, the lengths of the runs of equal
    pixels, column by column. The first one is of zeros; it is 0 if the first pixel is 1.
    """
    pixels = mask.T.reshape(-1)
    edges = np.flatnonzero(np.diff(pixels)) + 1
    counts = np.diff(np.concatenate([[0], edges, [pixels.size]])).tolist()
    return dict(size=[*mask.shape], counts=[0, *counts] if pixels[:1].any() else counts)
