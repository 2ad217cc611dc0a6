"""AugReg's RandAugment and colour jitter of cropped uint8 images, run by the decoding processes.

Other modules contain timm's RandAugment (timm_augment.py), DeiT III's 3-Augment (three_augment.py)
and the photometric distortions for segmentation (photometric.py). Mixup and CutMix run on the
accelerator (vit_jax/training/mixing.py).
"""

import dataclasses
import math
from collections.abc import Callable

import cv2
import numpy as np

from vit_jax.data.views import Augmentation
from vit_jax.errors import UserError, nearest
from vit_jax.options.data import LEVELS

GREY = 128  # Value of pixels that geometric operations move in from outside of the image.
LUMINANCE = (0.299, 0.587, 0.114)


def resolve(
    level: str, randaugment: tuple[int, float] | None = None, mixup: float | None = None
) -> tuple[tuple[int, float], float]:
    """Returns RandAugment's (layers, magnitude) and mixup's alpha.

    Args:
      level: AugReg's level, which defines the default values (2106.10270, section 3.4).
      randaugment: layers and magnitude; they replace the level's values.
      mixup: alpha; it replaces the level's value.

    Raises:
      UserError: the level does not exist.
    """
    if level not in LEVELS:
        raise UserError(
            f"unknown augmentation level {level!r} (augment.level); {nearest(level, LEVELS)}"
        )
    layers, magnitude, alpha = LEVELS[level]
    return (
        (layers, magnitude) if randaugment is None else tuple(randaugment),
        alpha if mixup is None else mixup,
    )


def host_augmentation(
    randaugment: tuple[int, float] = (0, 0),
    color_jitter: tuple[float, float, float] = (0.0, 0.0, 0.0),
    policy: Augmentation | None = None,
) -> Augmentation | None:
    """Combines augmentations to one function `(pixels, rng) -> pixels`, which can be pickled.

    Args:
      randaugment: number of operations and magnitude of AugReg's RandAugment.
      color_jitter: strengths of brightness, contrast and saturation.
      policy: an augmentation that is applied before RandAugment and colour jitter: timm's
        RandAugment, 3-Augment or a photometric distortion. None: no such augmentation.

    Returns:
      The function; None if no augmentation is enabled.
    """
    if not randaugment[0] and not any(color_jitter):
        return policy
    return _HostAugmentation(tuple(randaugment), tuple(color_jitter), policy)


@dataclasses.dataclass(frozen=True)
class _HostAugmentation:
    randaugment: tuple[int, float]
    color_jitter: tuple[float, float, float]
    policy: Augmentation | None

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if self.policy:
            pixels = self.policy(pixels, rng)
        pixels = randaugment(pixels, rng, *self.randaugment)
        return color_jitter(pixels, rng, *self.color_jitter)


def randaugment(
    pixels: np.ndarray, rng: np.random.Generator, layers: int, magnitude: float
) -> np.ndarray:
    """Applies `layers` random operations, one after the other (RandAugment, 1909.13719).

    The operations and their magnitudes are those of AugReg's TensorFlow code. Two bugs of this code
    are reproduced, because the published models were trained with them: the threshold of `solarize`
    is computed modulo 256, and the grey of `contrast` is 196 instead of the image's mean.

    Args:
      pixels: uint8 `[height, width, 3]`; not modified.
      magnitude: strength of all operations, usually from 0 to 10; larger values are allowed.

    Returns:
      uint8 `[height, width, 3]`.
    """
    operations = tuple(OPERATIONS.values())
    for _ in range(layers):
        pixels = operations[int(rng.random() * len(operations))](pixels, magnitude / 10, rng)
    return pixels


def color_jitter(
    pixels: np.ndarray,
    rng: np.random.Generator,
    brightness: float,
    contrast: float,
    saturation: float,
) -> np.ndarray:
    """Multiplies brightness, contrast and saturation by random factors, as in torchvision.

    The three operations are applied in random order. With strength x the factor is uniform in [1 -
    x, 1 + x].

    Args:
      pixels: uint8 `[height, width, 3]`; not modified.
      brightness, contrast, saturation: strength x of each operation; 0 disables it.
    """
    strengths = (brightness, contrast, saturation)
    if not any(strengths):
        return pixels
    changes = (adjust_brightness, adjust_contrast, adjust_saturation)
    for index in rng.permutation(3):
        if x := strengths[index]:
            pixels = changes[index](pixels, rng.uniform(max(0.0, 1 - x), 1 + x))
    return pixels


# The functions below map pixels, uint8 [height, width, 3], to a new array of this shape and dtype.
# With a factor of 1 they do not change the image.


def adjust_brightness(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Interpolates from black (factor 0) to the image (factor 1); larger factors extrapolate."""
    return _linear(pixels, factor * np.eye(3), 0)


def adjust_contrast(pixels: np.ndarray, factor: float, grey: float | None = None) -> np.ndarray:
    """Interpolates from a grey (factor 0; default: the image's mean) to the image (factor 1)."""
    if grey is None:
        grey = round(np.dot(cv2.mean(pixels)[:3], LUMINANCE))
    return _linear(pixels, factor * np.eye(3), (1 - factor) * grey)


def adjust_saturation(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Interpolates from the image in greyscale (factor 0) to the image (factor 1)."""
    return _linear(pixels, factor * np.eye(3) + (1 - factor) * np.array([LUMINANCE] * 3), 0)


def adjust_sharpness(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Interpolates from the smoothed image (factor 0) to the image (factor 1).

    The smoothing kernel is [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13. Pixels at the border do not
    change.
    """
    # The kernel is 9/13 times the 3 x 3 mean plus 4/13 times the central pixel.
    sharp = cv2.addWeighted(
        pixels, (4 + 9 * factor) / 13, cv2.blur(pixels, (3, 3)), 9 * (1 - factor) / 13, 0
    )
    for rim in (np.s_[0], np.s_[-1], np.s_[:, 0], np.s_[:, -1]):
        sharp[rim] = pixels[rim]
    return sharp


def autocontrast(pixels: np.ndarray) -> np.ndarray:
    """Scales each channel linearly, from its minimum and maximum to 0 and 255."""
    low, high = np.array([cv2.minMaxLoc(channel)[:2] for channel in cv2.split(pixels)]).T
    flat = high == low
    scale = np.where(flat, 1, 255 / np.maximum(high - low, 1))
    return _linear(pixels, np.diag(scale), np.where(flat, 0, -low * scale))


def equalize(pixels: np.ndarray) -> np.ndarray:
    """Equalizes each channel's histogram, as Pillow does."""
    tables = np.empty((1, 256, 3), np.uint8)
    for channel in range(3):
        counts = cv2.calcHist([pixels], [channel], None, [256], [0, 256]).ravel().astype(int)
        step = (counts.sum() - counts[counts.nonzero()[0][-1]]) // 255
        below = np.cumsum(counts) - counts
        equal = np.minimum((below + step // 2) // step, 255) if step else np.arange(256)
        tables[0, :, channel] = equal
    return cv2.LUT(pixels, tables)


def posterize(pixels: np.ndarray, bits: int) -> np.ndarray:
    """Keeps the highest bits of each value and sets its other bits to 0.

    `bits` is clipped to 1 to 8, as in AugReg's code.
    """
    return pixels & np.uint8(256 - (1 << (8 - min(max(bits, 1), 8))))


def solarize(pixels: np.ndarray, threshold: int) -> np.ndarray:
    """Inverts values at or above the threshold (0..255)."""
    _, bright = cv2.threshold(pixels, threshold - 1, 255, cv2.THRESH_BINARY)
    bright ^= pixels
    return bright


def solarize_add(pixels: np.ndarray, addition: int) -> np.ndarray:
    """Adds `addition` to values below 128."""
    _, dark = cv2.threshold(pixels, 127, 255, cv2.THRESH_BINARY_INV)
    dark &= np.uint8(min(addition, 255))
    return cv2.add(pixels, dark, dst=dark)


def affine(pixels: np.ndarray, matrix: list[list[float]]) -> np.ndarray:
    """Warps the image: output pixel (x, y) is the input's pixel nearest to `matrix @ (x, y, 1)`.

    Pixels from outside the image are grey.
    """
    size, nearest_input = pixels.shape[1::-1], cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    transform, grey = np.array(matrix, float), (GREY,) * 3
    return cv2.warpAffine(pixels, transform, size, flags=nearest_input, borderValue=grey)


def rotate(pixels: np.ndarray, degrees: float) -> np.ndarray:
    """Rotates around the centre, counter-clockwise."""
    height, width, _ = pixels.shape
    x, y = (width - 1) / 2, (height - 1) / 2
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return affine(pixels, [[cos, -sin, x - cos * x + sin * y], [sin, cos, y - sin * x - cos * y]])


def translate(pixels: np.ndarray, right: int = 0, down: int = 0) -> np.ndarray:
    """Moves the image by whole pixels."""
    height, width, _ = pixels.shape
    right, down = min(max(right, -width), width), min(max(down, -height), height)
    moved = np.full_like(pixels, GREY)
    moved[max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)] = pixels[
        max(-down, 0) : height - max(down, 0), max(-right, 0) : width - max(right, 0)
    ]
    return moved


def cutout(pixels: np.ndarray, rng: np.random.Generator, radius: int) -> np.ndarray:
    """Fills a square with grey; its centre is a random pixel, and its side is twice the radius."""
    height, width, _ = pixels.shape
    y, x = int(rng.random() * height), int(rng.random() * width)
    cut = pixels.copy()
    cut[max(y - radius, 0) : y + radius, max(x - radius, 0) : x + radius] = GREY
    return cut


def _linear(pixels: np.ndarray, matrix: np.ndarray, offset: np.ndarray | float) -> np.ndarray:
    """Returns `matrix @ rgb + offset` of each pixel, rounded and clipped to uint8."""
    return cv2.transform(pixels, np.column_stack([matrix, np.broadcast_to(offset, 3)]))


def _sign(rng: np.random.Generator) -> int:
    return 1 if rng.random() < 0.5 else -1


def _pixels_of_224(side: int, pixels: float) -> int:
    """Converts a length in images of 224 x 224 pixels (AugReg's) to images of side `side`."""
    return round(pixels * side / 224)


# RandAugment's operations: (pixels, magnitude / 10, rng) -> pixels.
OPERATIONS: dict[str, Callable[[np.ndarray, float, np.random.Generator], np.ndarray]] = {
    "AutoContrast": lambda x, level, rng: autocontrast(x),
    "Equalize": lambda x, level, rng: equalize(x),
    "Invert": lambda x, level, rng: ~x,
    "Rotate": lambda x, level, rng: rotate(x, _sign(rng) * 30 * level),
    "Posterize": lambda x, level, rng: posterize(x, int(4 * level)),
    # TensorFlow's threshold is uint8: with magnitude 10, 256 becomes 0 (big_vision, issue 110).
    "Solarize": lambda x, level, rng: solarize(x, int(256 * level) % 256),
    "Color": lambda x, level, rng: adjust_saturation(x, 1.8 * level + 0.1),
    # 196 is 224 x 224 / 256: the TensorFlow code intended the mean, but used the number of pixels.
    "Contrast": lambda x, level, rng: adjust_contrast(x, 1.8 * level + 0.1, grey=196),
    "Brightness": lambda x, level, rng: adjust_brightness(x, 1.8 * level + 0.1),
    "Sharpness": lambda x, level, rng: adjust_sharpness(x, 1.8 * level + 0.1),
    "ShearX": lambda x, level, rng: affine(x, [[1, _sign(rng) * 0.3 * level, 0], [0, 1, 0]]),
    "ShearY": lambda x, level, rng: affine(x, [[1, 0, 0], [_sign(rng) * 0.3 * level, 1, 0]]),
    "TranslateX": lambda x, level, rng: translate(
        x, right=_sign(rng) * _pixels_of_224(x.shape[1], 100 * level)
    ),
    "TranslateY": lambda x, level, rng: translate(
        x, down=_sign(rng) * _pixels_of_224(x.shape[0], 100 * level)
    ),
    "Cutout": lambda x, level, rng: cutout(x, rng, _pixels_of_224(min(x.shape[:2]), 40 * level)),
    "SolarizeAdd": lambda x, level, rng: solarize_add(x, int(110 * level)),
}
