"""Photometric distortions of segmentation recipes: mmsegmentation, DINOv3 and EoMT.

Brightness, contrast, saturation and hue are distorted, each with probability 0.5. The order is
brightness, contrast, saturation, hue for half of the images, and brightness, saturation, hue,
contrast for the other half. The variants of the three recipes differ in how they compute the
distortions and in the range of the hue.

Sources: `PhotoMetricDistortion` of mmsegmentation's mmseg/datasets/transforms/transforms.py and of
dinov3/eval/segmentation/transforms.py, and `Transforms.color_jitter` of EoMT's
datasets/transforms.py.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np

from vit_jax.data.randaugment import adjust_brightness, adjust_contrast, adjust_saturation

PROBABILITY = 0.5  # Probability of each distortion.
HUES = 180  # Number of levels of OpenCV's hue.
VALUES = np.arange(256, dtype=np.float32)  # All values of a channel.

Operation = Callable[[np.ndarray, float], np.ndarray]


class Variant(NamedTuple):
    """The distortions of a recipe: functions of uint8 pixels and a strength in [-1, 1)."""

    brightness: Operation
    contrast: Operation
    saturation: Operation
    hue: Operation


@dataclasses.dataclass(frozen=True)
class PhotometricDistortion:
    """Photometric distortion `(pixels, rng) -> pixels`."""

    variant: str  # A key of `VARIANTS`.

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Returns distorted pixels, uint8 `[height, width, 3]`; the input is unchanged."""
        for name, strength in self.draw(rng):
            pixels = getattr(VARIANTS[self.variant], name)(pixels, strength)
        return pixels

    def draw(self, rng: np.random.Generator) -> list[tuple[str, float]]:
        """Draws the distortions to apply; returns their names and strengths, in order."""
        names = list(Variant._fields)
        if rng.random() < 0.5:
            names.append(names.pop(names.index("contrast")))
        return [(name, rng.uniform(-1, 1)) for name in names if rng.random() < PROBABILITY]


# The functions below map pixels, uint8 [height, width, 3], to a new array of this shape and dtype.


def turn_hue(pixels: np.ndarray, turn: float) -> np.ndarray:
    """Rotates the hue by a fraction of the circle, rounded to one of OpenCV's 180 levels."""
    return _mapped_in_hsv(pixels, hues=(VALUES + round(HUES * turn)) % HUES)


def _mapped_in_hsv(
    pixels: np.ndarray, hues: np.ndarray = VALUES, saturations: np.ndarray = VALUES
) -> np.ndarray:
    """Applies lookup tables of 256 values to hue and saturation in OpenCV's 8-bit HSV."""
    table = np.stack([hues, saturations, VALUES], axis=-1).astype(np.uint8)
    hsv = cv2.LUT(cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV), table[None])
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)


def _linear(factor: float = 1.0, addition: float = 0.0) -> np.ndarray:
    """Returns the lookup table of `factor * level + addition`, truncated and clipped to uint8."""
    return (VALUES * factor + addition).clip(0, 255).astype(np.uint8)


def _lighten(pixels: np.ndarray, strength: float) -> np.ndarray:
    return cv2.LUT(pixels, _linear(addition=32 * strength))


def _scale(pixels: np.ndarray, strength: float) -> np.ndarray:
    return cv2.LUT(pixels, _linear(1 + 0.5 * strength))


VARIANTS = {
    "mmsegmentation": Variant(
        _lighten,
        _scale,
        lambda pixels, strength: _mapped_in_hsv(pixels, saturations=_linear(1 + 0.5 * strength)),
        # The hue is shifted by a whole number of OpenCV's 180 levels, from -18 to 17.
        lambda pixels, strength: turn_hue(pixels, np.floor(18 * strength) / HUES),
    ),
    "dinov3": Variant(
        _lighten,
        _scale,
        lambda pixels, strength: adjust_saturation(pixels, 1 + 0.5 * strength),
        lambda pixels, strength: turn_hue(pixels, 0.5 * strength),
    ),
    "eomt": Variant(
        lambda pixels, strength: adjust_brightness(pixels, 1 + 32 / 255 * strength),
        lambda pixels, strength: adjust_contrast(pixels, 1 + 0.5 * strength),
        lambda pixels, strength: adjust_saturation(pixels, 1 + 0.5 * strength),
        lambda pixels, strength: turn_hue(pixels, 18 / 360 * strength),
    ),
}
