"""Colour distortions of views (DINO, iBOT, DINOv2, DeiT III): jitter, grey, blur, solarization.

The distortions run in Pillow. Therefore the results are bit-exact with torchvision and DINO's code
(2104.14294). DINOv2's code differs from DINO's code in two points:

- Blur: DINOv2 uses torchvision's blur with a kernel of 9 pixels. DINO and this module use Pillow's
  blur.
- Probability of blur in the first global view, the second global view and local views: 0, 0.9 and
  0.5 in DINOv2; 1, 0.1 and 0.5 in DINO. `config.dino.blur` sets these probabilities.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vit_jax.options.objective import THRESHOLD
from vit_jax.options.run import RunOptions

JITTER = ("brightness", "contrast", "saturation", "hue")
RADII = (0.1, 2.0)  # Range of the blur's std, in pixels.


@dataclasses.dataclass(frozen=True)
class ColourDistortion:
    """Colour distortion `(pixels, rng) -> pixels`: operations applied with given probabilities.

    The operations are applied in the order of the arguments: jitter, grey, blur, solarization.
    """

    # Strengths of four operations, which are applied in random order: brightness, contrast,
    # saturation and hue. With strength x, brightness, contrast and saturation are multiplied by
    # random factors from 1 - x (at least 0) to 1 + x. The hue is rotated by a random angle from -x
    # to x, in turns of the full colour circle. An operation with strength 0 is not applied.
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    jitter_probability: float = 0.8  # Probability of applying the four operations of the jitter.
    grey: float = 0.0  # Probability of conversion to greyscale.
    blur: float = 0.0  # Probability of Gaussian blur with a std of 0.1 to 2 pixels.
    solarize: float = 0.0  # Probability of inverting values of 128 and above.

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Returns distorted pixels, uint8 `[height, width, 3]`; the input is unchanged."""
        return distorted(pixels, self.draw(rng))

    def draw(self, rng: np.random.Generator) -> list[tuple[str, float]]:
        """Draws the operations to apply; returns (name, value) pairs in order of application."""
        drawn = []
        if rng.random() < self.jitter_probability:
            drawn.extend(draw_jitter(self.jitter, rng))
        if rng.random() < self.grey:
            drawn.append(("grey", 1.0))
        if rng.random() < self.blur:
            drawn.append(("blur", rng.uniform(*RADII)))
        if rng.random() < self.solarize:
            drawn.append(("solarize", THRESHOLD))
        return drawn


def draw_jitter(strengths: Sequence[float], rng: np.random.Generator) -> list[tuple[str, float]]:
    """Draws a factor, or the angle of the hue, for each jitter operation whose strength is not 0.

    Returns:
      Pairs (name, value) in random order. `strengths` are in the order of `JITTER`.
    """
    drawn = []
    for index in rng.permutation(len(strengths)):
        name, strength = JITTER[index], strengths[index]
        least, middle = (-strength, 0) if name == "hue" else (max(0, 1 - strength), 1)
        if strength:
            drawn.append((name, rng.uniform(least, middle + strength)))
    return drawn


def distorted(pixels: np.ndarray, drawn: Sequence[tuple[str, float]]) -> np.ndarray:
    """Applies a sequence of operations (name, value) to an image, uint8."""
    if not drawn:
        return pixels
    image = Image.fromarray(pixels)
    for name, value in drawn:
        image = OPERATIONS[name](image, value)
    return np.asarray(image)


def distortions(config: RunOptions) -> tuple[ColourDistortion, ColourDistortion, ColourDistortion]:
    """Returns DINO's distortions of the first global view, the second one, and the local views."""
    values = config.dino
    shared = tuple(values.jitter), values.jitter_probability, values.grey
    return tuple(ColourDistortion(*shared, values.blur[i], values.solarize[i]) for i in range(3))


def _turn_hue(image: Image.Image, turn: float) -> Image.Image:
    """Rotates the hue by a fraction of the colour circle, multiplied by 255 as in torchvision.

    Pillow stores hues in 256 levels, so a full turn would be 256 levels.
    """
    hues = [(hue + int(255 * turn)) % 256 for hue in range(256)]
    return image.convert("HSV").point([*hues, *range(256), *range(256)]).convert("RGB")


# The function of each operation, by name: (image, value) -> image.
OPERATIONS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "brightness": lambda x, factor: ImageEnhance.Brightness(x).enhance(factor),
    "contrast": lambda x, factor: ImageEnhance.Contrast(x).enhance(factor),
    "saturation": lambda x, factor: ImageEnhance.Color(x).enhance(factor),
    "hue": _turn_hue,
    "grey": lambda x, _: x.convert("L").convert("RGB"),
    "blur": lambda x, radius: x.filter(ImageFilter.GaussianBlur(radius)),
    "solarize": lambda x, threshold: ImageOps.solarize(x, int(threshold)),
}
