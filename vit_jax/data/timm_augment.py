"""RandAugment as in timm, such as `rand-m9-mstd0.5-inc1` (fine-tuning of DeiT and MAE).

timm's RandAugment differs from AugReg's (randaugment.py) in the operations, in their strength at a
level and in their probability. The operations are Pillow's, so the results are bit-exact with timm.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
HIGHEST = 10.0  # Maximum level (strength) of an operation.


@dataclasses.dataclass(frozen=True)
class RandPolicy:
    """RandAugment policy, `(pixels, rng) -> pixels`: random operations, each with a probability."""

    magnitude: float = 10.0  # Mean of an operation's level, from 0 to 10.
    layers: int = 2  # Number of operations that are drawn for an image, with replacement.
    probability: float = 0.5  # Probability that a drawn operation is applied.
    # Std of the level. The level is drawn from a normal distribution and clipped to [0, 10].
    deviation: float = 0.0
    # True: all operations have a stronger effect at higher levels. False: posterize and solarize
    # have a weaker effect at higher levels. Colour, contrast, brightness and sharpness are then
    # decreased at levels below 5, unchanged at level 5, and increased at levels above 5.
    increasing: bool = False
    fill: tuple[int, int, int] = (128, 128, 128)  # Fill colour of geometric operations.
    resampling: str = "bicubic"  # Interpolation of geometric operations, a key of `RESAMPLING`.

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Returns augmented pixels, uint8 `[height, width, 3]`; the input is unchanged."""
        chosen = [name for name in self.draw(rng) if rng.random() < self.probability]
        if not chosen:
            return pixels
        image = Image.fromarray(pixels)
        for name in chosen:
            level = self.magnitude
            if self.deviation:
                level = rng.normal(level, self.deviation)
            sign = 1 if rng.random() < 0.5 else -1
            image = self.apply(name, image, min(max(level, 0.0), HIGHEST), sign)
        return np.asarray(image)

    def draw(self, rng: np.random.Generator) -> list[str]:
        """Draws the names of `layers` operations; `__call__` applies each with `probability`."""
        names = tuple(OPERATIONS)
        return [names[int(rng.random() * len(names))] for _ in range(self.layers)]

    def apply(self, name: str, image: Image.Image, level: float, sign: int) -> Image.Image:
        """Applies an operation at a level from 0 to 10. Its direction is `sign`, 1 or -1."""
        return OPERATIONS[name](self, image, level / HIGHEST, sign)

    def _factor(self, strength: float, sign: int) -> float:
        """Returns the factor of a Pillow enhancement, such as contrast; 1 has no effect."""
        return max(0.1, 1 + sign * 0.9 * strength) if self.increasing else 0.1 + 1.8 * strength

    def _enhance(self, kind: type, image: Image.Image, strength: float, sign: int) -> Image.Image:
        return kind(image).enhance(self._factor(strength, sign))

    def _posterize(self, image: Image.Image, strength: float) -> Image.Image:
        bits = int(4 * strength)
        return _posterize(image, 4 - bits if self.increasing else bits)

    def _solarize(self, image: Image.Image, strength: float) -> Image.Image:
        threshold = int(256 * strength)
        return ImageOps.solarize(image, 256 - threshold if self.increasing else threshold)

    def _affine(self, image: Image.Image, *matrix: float) -> Image.Image:
        """Warps the image: output pixel (x, y) is the input at (a x + b y + c, d x + e y + f)."""
        kind, resample = Image.Transform.AFFINE, RESAMPLING[self.resampling]
        return image.transform(image.size, kind, matrix, resample=resample, fillcolor=self.fill)

    def _translate(self, image: Image.Image, left: float, up: float) -> Image.Image:
        """Translates the image left and up by fractions of its sides."""
        return self._affine(image, 1, 0, left * image.width, 0, 1, up * image.height)

    def _rotate(self, image: Image.Image, degrees: float) -> Image.Image:
        return image.rotate(degrees, resample=RESAMPLING[self.resampling], fillcolor=self.fill)


def _posterize(image: Image.Image, bits: int) -> Image.Image:
    """Keeps the highest bits of each value. 0 bits, which Pillow rejects, make the image black."""
    return image.point(3 * [value & 256 - (1 << 8 - bits) for value in range(256)])


def _solarize_add(image: Image.Image, addition: int) -> Image.Image:
    table = [min(255, value + addition) if value < 128 else value for value in range(256)]
    return image.point(3 * table)


# Operations by timm's names: (policy, image, level / 10, sign) -> image.
OPERATIONS: dict[str, Callable[[RandPolicy, Image.Image, float, int], Image.Image]] = {
    "AutoContrast": lambda policy, x, level, sign: ImageOps.autocontrast(x),
    "Equalize": lambda policy, x, level, sign: ImageOps.equalize(x),
    "Invert": lambda policy, x, level, sign: ImageOps.invert(x),
    "Rotate": lambda policy, x, level, sign: policy._rotate(x, sign * 30 * level),
    "Posterize": lambda policy, x, level, sign: policy._posterize(x, level),
    "Solarize": lambda policy, x, level, sign: policy._solarize(x, level),
    "SolarizeAdd": lambda policy, x, level, sign: _solarize_add(x, int(110 * level)),
    "Color": lambda policy, x, level, sign: policy._enhance(ImageEnhance.Color, x, level, sign),
    "Contrast": lambda policy, x, level, sign: policy._enhance(
        ImageEnhance.Contrast, x, level, sign
    ),
    "Brightness": lambda policy, x, level, sign: policy._enhance(
        ImageEnhance.Brightness, x, level, sign
    ),
    "Sharpness": lambda policy, x, level, sign: policy._enhance(
        ImageEnhance.Sharpness, x, level, sign
    ),
    "ShearX": lambda policy, x, level, sign: policy._affine(x, 1, sign * 0.3 * level, 0, 0, 1, 0),
    "ShearY": lambda policy, x, level, sign: policy._affine(x, 1, 0, 0, sign * 0.3 * level, 1, 0),
    "TranslateX": lambda policy, x, level, sign: policy._translate(x, sign * 0.45 * level, 0),
    "TranslateY": lambda policy, x, level, sign: policy._translate(x, 0, sign * 0.45 * level),
}
