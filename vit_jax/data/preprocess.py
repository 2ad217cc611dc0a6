"""Crops: which rectangle of an image is seen, and its pixels at the model's size.

All of them keep to one form: a rectangle is chosen from the image's height and width alone, then
decoded and resized bilinearly. So the paper's "resize, then crop" costs no more than the crop.
"""

import dataclasses
import math

import numpy as np

from vit_jax.data.decode import Box, open_image

CROPS = ("inception", "square", "short_side", "none")
TEST_CROPS = ("short_side", "square")


@dataclasses.dataclass(frozen=True)
class TrainCrop:
    """A random crop to `size`.

    `inception`: a share `area` of the image of an aspect ratio `aspect` (paper, appendix B.1; width
    over height). `square`: the image squeezed to `resize`, and `size` of it (BiT, and the paper's
    fine-tuning: 448 and 384). `short_side`: the same with the aspect ratio kept. `none`: all of the
    image, squeezed (BiT's for tasks where a crop changes the label).
    """

    size: int
    kind: str = "inception"
    area: tuple[float, float] = (0.05, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    resize: int = 0
    mode: str = "fast"

    def __call__(
        self, image: bytes | np.ndarray, rng: np.random.Generator, out: np.ndarray | None = None
    ) -> np.ndarray:
        """uint8 `[size, size, 3]`, in `out` if given.

        Raises:
          Unreadable: see `vit_jax.data.decode`.
        """
        opened = open_image(image, self.mode)
        height, width = opened.height, opened.width
        if self.kind == "inception":
            box = inception_box(rng, height, width, self.area, self.aspect)
        elif self.kind == "none":
            box = Box(0, 0, width, height)
        else:
            box = part_box(height, width, self.kind, self.resize, self.size, *rng.random(2).tolist())
        out = np.empty((self.size, self.size, 3), np.uint8) if out is None else out
        opened.crop(box, out)
        return out


@dataclasses.dataclass(frozen=True)
class TestCrop:
    """The centre of the image at `size`, after a resize to `resize`.

    `short_side`: of its short side, the aspect ratio kept (pre-training). `square`: of both sides
    (few-shot evaluation: 256 and 224; fine-tuning, where `resize` is `size`: all of the image). `size`
    may be a height and a width: their aspect ratio is then the crop's (`short_side`), and `resize` is
    of their smaller one.
    """

    __test__ = False  # Of images, not a test: for pytest.

    size: int | tuple[int, int]
    kind: str = "short_side"
    resize: int = 256
    mode: str = "fast"

    def __call__(self, image: bytes | np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """uint8 `[height, width, 3]`, in `out` if given; raises `Unreadable`."""
        opened = open_image(image, self.mode)
        box = part_box(opened.height, opened.width, self.kind, self.resize, self.size, 0.5, 0.5)
        out = np.empty((*sides(self.size), 3), np.uint8) if out is None else out
        opened.crop(box, out)
        return out


def sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Height and width; one number is both."""
    return (size, size) if isinstance(size, int) else size


def inception_box(
    rng: np.random.Generator,
    height: int,
    width: int,
    area: tuple[float, float] = (0.05, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """A random rectangle: share of the area and aspect ratio at random.

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
            return Box(left, top, left + w, top + h)
    w = min(width, max(1, int(height * aspect[1])))
    h = min(height, max(1, int(width / aspect[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return Box(left, top, left + w, top + h)


def part_box(
    height: int, width: int, kind: str, resize: int, size: int | tuple[int, int], x: float, y: float
) -> Box:
    """What a crop to `size` sees of an image that was resized to `resize` (`square`, `short_side`).

    Args:
      x, y: where the crop lies between left and right and between top and bottom, from 0 to 1.
    """
    rows, columns = sides(size)
    share, w, h = min(rows, columns) / resize, width, height
    if kind == "short_side":
        w, h = min(width, height * columns / rows), min(height, width * rows / columns)
    w, h = max(1, round(w * share)), max(1, round(h * share))
    left, top = round(x * (width - w)), round(y * (height - h))
    return Box(left, top, left + w, top + h)
