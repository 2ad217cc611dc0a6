"""Class maps as images: palettes, PNG files with a palette, and overlays."""

import numpy as np
from PIL import Image

COLOURS = 256
OPACITY = 0.6  # Of the classes' colours on an image.


def voc_palette() -> np.ndarray:
    """Returns the colours of VOC's masks, uint8 `[256, 3]`: class 0 is black, 255 nearly white.

    The bits of a class are spread over the highest bits of red, green and blue (the VOC development
    kit's `VOClabelcolormap.m`).
    """
    classes = np.arange(COLOURS)
    palette = np.zeros((COLOURS, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            palette[:, channel] |= ((classes >> channel & 1) << (7 - bit)).astype(np.uint8)
        classes = classes >> 3
    return palette


def palette_image(mask: np.ndarray) -> Image.Image:
    """Returns a class map as an image whose pixels are the classes, with VOC's palette.

    Args:
      mask: class of each pixel, uint8 `[height, width]`.
    """
    image = Image.fromarray(mask)
    image.putpalette(voc_palette().tobytes())
    return image


def overlay(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns an image under the colours of its classes; class 0, which is black, is not coloured.

    Args:
      image: uint8 `[height, width, 3]`.
      mask: class of each pixel, uint8 `[height, width]`.
    """
    coloured = mask[..., None] > 0
    mixed = (1 - OPACITY) * image + OPACITY * voc_palette()[mask]
    return np.where(coloured, mixed.round(), image).astype(np.uint8)


def hexadecimal(label: int) -> str:
    """Returns the colour of a class for a page, such as `#800000`."""
    return "#" + voc_palette()[label].tobytes().hex()
