"""timm's RandAugment, `rand-m9-mstd0.5-inc1` and its like: that of DeiT's and MAE's fine-tuning.

It differs from AugReg's (randaugment.py) in its operations, in what a level means to them, and in
that each operation is done with a probability. Pillow does them, so that the pixels are timm's to
the bit.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
HIGHEST = 10.0  # The highest level.


@dataclasses.dataclass(frozen=True)
class RandPolicy:
    """`(pixels, rng) -> pixels`: some operations, each drawn from all and done with a probability.

    Args:
      magnitude: mean of the level, from 0 to 10.
      layers: operations drawn for an image; the same one may come twice.
      probability: of each to be done.
      deviation: of the level, which is normal, then cut at 0 and 10.
      increasing: a higher level changes more, whatever the operation; else of posterising and
        solarising it changes less, and of colour, contrast, brightness and sharpness 5 is about no
        change.
      fill: colour of what a geometric operation leaves empty.
      resampling: of these operations, a key of `RESAMPLING`.
    """

    magnitude: float = 10.0
    layers: int = 2
    probability: float = 0.5
    deviation: float = 0.0
    increasing: bool = False
    fill: tuple[int, int, int] = (128, 128, 128)
    resampling: str = "bicubic"

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Augments uint8 `[height, width, 3]`, which is not written to, into an array of the same
        shape.
        """
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
        """Names of operations of which each may be done."""
        names = tuple(OPERATIONS)
        return [names[int(rng.random() * len(names))] for _ in range(self.layers)]

    def apply(self, name: str, image: Image.Image, level: float, sign: int) -> Image.Image:
        """Applies an operation at a level from 0 to 10; `sign`, 1 or -1, is the side of those with
        two.
        """
        return OPERATIONS[name](self, image, level / HIGHEST, sign)

    def _factor(self, strength: float, sign: int) -> float:
        """The factor of an enhancement: 1 changes nothing."""
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
        """Takes for output pixel (x, y) the input's at (a x + b y + c, d x + e y + f)."""
        return image.transform(
            image.size,
            Image.Transform.AFFINE,
            matrix,
            resample=RESAMPLING[self.resampling],
            fillcolor=self.fill,
        )

    def _translate(self, image: Image.Image, left: float, up: float) -> Image.Image:
        """Moves the image by shares of its sides."""
        return self._affine(image, 1, 0, left * image.width, 0, 1, up * image.height)

    def _rotate(self, image: Image.Image, degrees: float) -> Image.Image:
        return image.rotate(degrees, resample=RESAMPLING[self.resampling], fillcolor=self.fill)


def _posterize(image: Image.Image, bits: int) -> Image.Image:
    """Keeps the highest bits of each value; 0 makes a black image, as for MAE, where Pillow now
    refuses.
    """
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
