"""Images and maps as data URLs, for embedding in a page."""

import io

import cv2
import numpy as np

from vit_jax.inspection.html_page import inline

# Images with sides up to this number of pixels are stored losslessly and drawn without smoothing.
SMALL = 64


def image_address(pixels: np.ndarray, most_side: int = 320) -> str:
    """Returns an image `[height, width, 3]` as a data URL.

    An image with sides of at most `SMALL` pixels is encoded as PNG. Other images are encoded as
    JPEG, and reduced if a side is longer than `most_side` pixels.
    """
    from PIL import Image

    if max(pixels.shape) <= SMALL:
        return inline(png(Image.fromarray(pixels)))
    made, encoded = Image.fromarray(pixels), io.BytesIO()
    made.thumbnail((most_side, most_side))
    made.save(encoded, "JPEG", quality=88)
    return inline(encoded.getvalue(), "jpeg")


def colours_address(colours: np.ndarray) -> str:
    """Returns an image of colours in 0 ... 1, `[rows, columns, 3]`, as a data URL."""
    from PIL import Image

    return inline(png(Image.fromarray((255 * colours).round().astype(np.uint8))))


def heat_address(weights: np.ndarray) -> str:
    """Returns the heat map of patch weights `[rows, columns]` as a data URL.

    The largest weight has the brightest colour. The image has one pixel per patch; the browser
    enlarges and smooths it.
    """
    return levels_address(levels(weights))


def levels(weights: np.ndarray) -> np.ndarray:
    """Quantizes maps `[..., rows, columns]` to uint8; each map's largest value becomes 255."""
    largest = np.maximum(weights.max(axis=(-2, -1), keepdims=True), 1e-12)
    return (255 * np.clip(weights / largest, 0, 1)).round().astype(np.uint8)


def levels_address(pixels: np.ndarray) -> str:
    """Returns the output of `levels`, 0 ... 255, as a data URL of a heat map.

    The colours are matplotlib's palette inferno, with an opacity of sqrt(level / 255).
    """
    from PIL import Image

    heat = cv2.applyColorMap(np.arange(256, dtype=np.uint8), cv2.COLORMAP_INFERNO)[0, :, ::-1]
    opacity = (255 * np.sqrt(np.arange(256) / 255)).round().astype(np.uint8)
    made = Image.fromarray(pixels)
    made.putpalette(heat.tobytes())
    return inline(png(made, transparency=opacity.tobytes()))


def png(image, **options) -> bytes:
    """Encodes a Pillow image as PNG."""
    encoded = io.BytesIO()
    image.save(encoded, "PNG", **options)
    return encoded.getvalue()
