"""Colours of classes and of depths."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from vit_jax.errors import as_text

COLOURS = 256
OPACITY = 0.6  # Opacity of class colours on an image.


def voc_palette() -> np.ndarray:
    """Returns the colours of VOC's masks, uint8 `[256, 3]`: class 0 is black, 255 nearly white.

    Bits 0, 1 and 2 of a class index become the highest bits of red, green and blue, bits 3, 4 and 5
    the second-highest bits, and so on (the VOC development kit's `VOClabelcolormap.m`).
    """
    classes = np.arange(COLOURS)
    palette = np.zeros((COLOURS, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            palette[:, channel] |= ((classes >> channel & 1) << (7 - bit)).astype(np.uint8)
        classes = classes >> 3
    return palette


def class_legend(
    labels: Iterable[int], class_names: Sequence[str], background: bool = True
) -> dict[str, str]:
    """Returns the colour of each class, such as `#800000`, by class name, for a legend in HTML.

    Args:
      labels: indices of the classes in the legend.
      class_names: names of all classes.
      background: class 0 is the background, in black. False: there is no background, and the
        colours are from `object_colour`.
    """
    return {
        as_text(str(class_names[label])): "#"
        + (voc_palette()[label] if background else object_colour(label)).tobytes().hex()
        for label in labels
    }


def object_colour(label: int) -> np.ndarray:
    """Returns the colour of an object class, uint8 `[3]`; no class is black."""
    return voc_palette()[1 + label % 255]


def coloured(image: Any, mask: Any, palette: Any) -> Any:
    """Blends an image with the colours of its pixels' classes; pixels of class 0 do not change.

    Args:
      image: pixels from 0 to 255, `[..., height, width, 3]`, a NumPy or JAX array.
      mask: class of each pixel, `[..., height, width]`.
      palette: colour of each class, float32 `[256, 3]`, an array of the same library as `image`.

    Returns:
      Floats from 0 to 255, not rounded.
    """
    share = OPACITY * (mask > 0)[..., None]
    return (1 - share) * image + share * palette[mask]


@functools.cache
def depth_palette() -> np.ndarray:
    """Returns the colours of depths from far to near, uint8 `[256, 3]`: black to light yellow."""
    import cv2

    levels = np.arange(COLOURS, dtype=np.uint8)
    return cv2.applyColorMap(levels, cv2.COLORMAP_INFERNO).reshape(COLOURS, 3)[:, ::-1]


def depth_legend() -> dict[str, str]:
    """Returns the legend of depth images: a dictionary from a description to a colour for HTML.

    The dictionary contains the colours of the nearest and of the farthest depth.
    """
    far, near = ("#" + depth_palette()[level].tobytes().hex() for level in (0, -1))
    return {"nearest place of the image": near, "farthest": far}


def coloured_depth(depth: Any, nearest: Any, farthest: Any) -> Any:
    """Converts depths to colours, linearly in inverse depth; near pixels are light.

    Args:
      depth: depth of each pixel in metres, `[..., height, width]`.
      nearest, farthest: depths with the lightest and the darkest colour, one number each or arrays
        that broadcast to `depth`.

    Returns:
      Floats from 0 to 255, `[..., height, width, 3]`.
    """
    near, far, inverse = (1 / jnp.maximum(x, 1e-6) for x in (nearest, farthest, depth))
    share = jnp.clip((inverse - far) / jnp.maximum(near - far, 1e-6), 0, 1)
    levels = jnp.round(share * (COLOURS - 1)).astype(jnp.int32)
    return jnp.asarray(depth_palette(), jnp.float32)[levels]
