"""Images and maps as data URLs, which a page contains."""

import io

import cv2
import numpy as np

from vit_jax.inspection.html_page import inline

# Pixels: an image with sides of at most this size is stored losslessly and drawn unsmoothed.
SMALL = 64


def image_address(pixels: np.ndarray, most_side: int = 320) -> str:
    """Returns the data URL of an image `[height, width, 3]`, reduced to `most_side` pixels."""
    from PIL import Image

    if max(pixels.shape) <= SMALL:
        return inline(png(Image.fromarray(pixels)))
    made, encoded = Image.fromarray(pixels), io.BytesIO()
    made.thumbnail((most_side, most_side))
    made.save(encoded, "JPEG", quality=88)
    return inline(encoded.getvalue(), "jpeg")


def colours_address(colours: np.ndarray) -> str:
    """Returns the data URL of a picture of colours in 0 ... 1, `[rows, columns, 3]`."""
    from PIL import Image

    return inline(png(Image.fromarray((255 * colours).round().astype(np.uint8))))


def heat_address(weights: np.ndarray) -> str:
    """Returns the data URL of a heat map of `[rows, columns]`, relative to its largest value.

    It has a pixel for each patch; the browser enlarges and smooths them.
    """
    return levels_address(levels(weights))


def levels(weights: np.ndarray) -> np.ndarray:
    """Quantizes maps `[..., rows, columns]` to uint8: 255 is each map's largest value."""
    largest = np.maximum(weights.max(axis=(-2, -1), keepdims=True), 1e-12)
    return (255 * np.clip(weights / largest, 0, 1)).round().astype(np.uint8)


def levels_address(pixels: np.ndarray) -> str:
    """Returns the data URL of a PNG whose palette draws the `levels` 0 ... 255 as heat.

    The palette is matplotlib's inferno; its opacity is the square root of the level's share.
    """
    from PIL import Image

    heat = cv2.applyColorMap(np.arange(256, dtype=np.uint8), cv2.COLORMAP_INFERNO)[0, :, ::-1]
    opacity = (255 * np.sqrt(np.arange(256) / 255)).round().astype(np.uint8)
    made = Image.fromarray(pixels)
    made.putpalette(heat.tobytes())
    return inline(png(made, transparency=opacity.tobytes()))


def png(image, **options) -> bytes:
    """Returns an image of Pillow as a PNG file."""
    encoded = io.BytesIO()
    image.save(encoded, "PNG", **options)
    return encoded.getvalue()
