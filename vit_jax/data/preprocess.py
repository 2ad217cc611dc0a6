"""From an encoded image to uint8 pixels of the model's size."""

import io
import math

import numpy as np
from PIL import Image, ImageOps

Image.MAX_IMAGE_PIXELS = 178_956_970  # A larger one is refused, not decoded.


class Unreadable(Exception):
    """The bytes are not an image that can be decoded whole."""


def decode(image: bytes | np.ndarray) -> Image.Image:
    """Opens an encoded image (or wraps decoded pixels) as RGB.

    Raises:
      Unreadable: not an image, cut short, or absurdly large.
    """
    if isinstance(image, np.ndarray):
        return Image.fromarray(image)
    try:
        opened = Image.open(io.BytesIO(image))
        if opened.mode.startswith("I"):  # 16-bit grey, which convert() would clip at 255.
            return Image.fromarray((np.asarray(opened) / 257).round().astype(np.uint8)).convert("RGB")
        upright = ImageOps.exif_transpose(opened) if opened.getexif() else opened
        return upright.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, EOFError) as error:
        raise Unreadable(str(error)) from error


def inception_crop_box(
    rng: np.random.Generator,
    height: int,
    width: int,
    area: tuple[float, float] = (0.05, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[int, int, int, int]:
    """A random rectangle (left, top, right, bottom): share of the area and aspect ratio at random.

    Ten draws are tried for one that fits; failing these, the largest centred one of a legal
    aspect ratio is taken.
    """
    for _ in range(10):
        # One call for all four numbers: a call costs more than its numbers.
        area_draw, aspect_draw, left_draw, top_draw = rng.random(4).tolist()
        target = (area[0] + area_draw * (area[1] - area[0])) * height * width
        ratio = aspect[0] * (aspect[1] / aspect[0]) ** aspect_draw
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(left_draw * (width - w + 1)), int(top_draw * (height - h + 1))
            return left, top, left + w, top + h
    w = min(width, max(1, int(height * aspect[1])))
    h = min(height, max(1, int(width / aspect[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def random_crop(
    image: Image.Image,
    rng: np.random.Generator,
    size: int,
    area: tuple[float, float] = (0.05, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
    flip: bool = True,
) -> np.ndarray:
    """Inception crop to `[size, size, 3]` uint8, mirrored half of the time (paper, appendix B.1)."""
    box = inception_crop_box(rng, image.height, image.width, area, aspect)
    pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return pixels[:, ::-1] if flip and rng.random() < 0.5 else pixels


def central_crop(image: Image.Image, size: int, resize: int) -> np.ndarray:
    """Short side to `resize`, then the central `[size, size, 3]`; the aspect ratio is kept."""
    scale = min(image.height, image.width) / resize
    side = size * scale
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
