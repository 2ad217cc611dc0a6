"""Class maps as images: palettes, PNG files with a palette, and overlays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vit_jax.inspection.page_images import image_address
from vit_jax.models.dense.palette import coloured, voc_palette


def palette_image(mask: np.ndarray) -> Image.Image:
    """Converts a class map to an image with VOC's palette; the pixel values are class indices.

    Args:
      mask: class of each pixel, uint8 `[height, width]`.
    """
    image = Image.fromarray(mask)
    image.putpalette(voc_palette().tobytes())
    return image


def overlay(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Draws the colours of the classes over an image; returns uint8 `[height, width, 3]`.

    `mask` is the class of each pixel, uint8 `[height, width]`.
    """
    return coloured(image, mask, voc_palette().astype(np.float32)).round().astype(np.uint8)


class Segments:
    """Content of `segments.html`: images with an overlay of class colours, and a legend."""

    def __init__(self, class_names: Sequence[str]):
        self._class_names, self._seen = class_names, set()
        self._figures: list[dict[str, Any]] = []

    def __len__(self):
        return len(self._figures)

    def add(self, name: str, image: np.ndarray, masks: Sequence[np.ndarray], caption: str) -> None:
        """Adds an image, uint8 `[height, width, 3]`, with its path and a caption.

        Each of the class maps, uint8 `[height, width]`, is shown as a separate overlay.
        """
        for mask in masks:
            self._seen |= {*np.unique(mask).tolist()}
        pictures = [image, *(overlay(image, mask) for mask in masks)]
        addresses = [*map(image_address, pictures)]
        self._figures.append(dict(name=name, pictures=addresses, caption=caption))

    def values(self, note: str) -> dict[str, Any]:
        """Returns the variables of `segments.html`; the page starts with the text `note`."""
        legend = {}
        for label in sorted(self._seen):
            known = label < len(self._class_names)
            name = self._class_names[label] if known else "unknown"
            legend[name] = "#" + voc_palette()[label].tobytes().hex()
        return dict(figures=self._figures, legend=legend, note=note)
