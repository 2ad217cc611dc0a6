"""Crops: choose a rectangle of an image and resize it to the model's size.

The rectangle depends only on the image's height and width. It is chosen first, and then only its
pixels are decoded and resized. Therefore the paper's "resize, then crop" is as fast as the crop
alone. `vit_jax.data.decode` defines the interpolations and backgrounds.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vit_jax.data.decode import PILLOW, Box, Jpeg, Pixels, before_resize, open_image
from vit_jax.data.placement import Placement
from vit_jax.errors import UserError
from vit_jax.options.data import BORDER

# Colour of the padding: ImageNet's mean colour, which becomes 0 by normalization.
PADDING = 124, 116, 104
REDRAWS = 10  # Maximum number of crops that are drawn again, as in mmsegmentation's `RandomCrop`.


@dataclasses.dataclass(frozen=True)
class TrainCrop:
    """A random crop of `size` by `size` pixels.

    Kinds:

    - `inception`: takes a random rectangle of the image, drawn as in TensorFlow (the paper,
      appendix B.1; AugReg, BiT, big_vision). `area` is the range of the rectangle's share of the
      image, and `aspect` is the range of the rectangle's aspect ratio, width over height.
    - `random_resized`: takes a random rectangle with the same two ranges, drawn as in torchvision
      (MAE, DeiT).
    - `square`: resizes the image to `resize` by `resize` pixels, ignoring its aspect ratio, and
      takes a random crop (BiT, and the paper's fine-tuning: `resize` 448, `size` 384).
    - `short_side`: resizes the short side to `resize`, keeping the aspect ratio, and takes a random
      crop.
    - `simple_random`: resizes the short side to `size`, pads each side with four mirrored pixels,
      and takes a random crop (DeiT III's "simple random crop").
    - `scale_jitter`: resizes the short side to `size` times a random factor in `scale`, and takes a
      random crop, padded at the right and at the bottom (mmsegmentation's `RandomResize`,
      `RandomCrop` and padding).
    - `large_scale_jitter`: resizes the long side to `size` times a random factor in `scale`, and
      takes a random crop, padded in the same way (detectron2's `ResizeScale`; 2012.07177).
    - `none`: resizes the whole image to `size`, ignoring its aspect ratio (BiT, for tasks where a
      crop changes the label).

    Attributes:
      accepts: called with the `Placement` of a `scale_jitter` or `large_scale_jitter` crop. If it
        returns False, another crop of the same resized image is drawn, up to `REDRAWS` times. None:
        all crops are accepted.
    """

    size: int
    kind: str = "inception"
    area: tuple[float, float] = (0.05, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    resize: int = 0
    mode: str = "fast"
    interpolation: str = "bilinear"
    background: str = "white"
    scale: tuple[float, float] = (0.5, 2.0)
    accepts: Callable[[Placement], bool] | None = None

    def __call__(
        self,
        image: bytes | np.ndarray | Jpeg | Pixels,
        rng: np.random.Generator,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns a random crop, uint8 `[size, size, 3]`; with `out` it is written into this array.

        Raises:
          Unreadable: see `vit_jax.data.decode`.
        """
        opened = self.open(image)
        height, width = opened.height, opened.width
        out = np.empty((self.size, self.size, 3), np.uint8) if out is None else out
        if self.kind == "simple_random":
            self._crop_with_border(opened, rng, out)
            return out
        if self._resizes_first:
            resized, corner = self._corner(height, width, rng)
            opened.crop_resized(resized, corner, out, self.interpolation)
            return out
        return draw_placed(opened, self.place(height, width, rng), self.interpolation, out)

    def place(self, height: int, width: int, rng: np.random.Generator) -> Placement:
        """Draws the placement of a random crop; `__call__` with an equal `rng` draws the same crop.

        Raises:
          UserError: crops of the kind `simple_random` contain mirrored pixels, and have no
            placement.
        """
        size = self.size, self.size
        if self.kind == "simple_random":
            raise UserError(
                "data.crop='simple_random' mirrors the borders of images, which masks, boxes and "
                "depth maps cannot follow: use another crop, such as 'scale_jitter'"
            )
        if self.pads:
            whole = self.size / (min if self.kind == "scale_jitter" else max)(height, width)
            factor = whole * (self.scale[0] + rng.random() * (self.scale[1] - self.scale[0]))
            for _ in range(1 + REDRAWS):
                placement = _jittered(height, width, self.size, factor, rng.random(2).tolist())
                if self.accepts is None or self.accepts(placement):
                    break
            return placement
        if self._resizes_first:
            box = before_resize(*self._corner(height, width, rng), size, height, width)
        elif self.kind in ("square", "short_side"):
            x, y = rng.random(2).tolist()
            box = part_box(height, width, self.kind, self.resize, self.size, x, y)
        elif self.kind == "inception":
            box = inception_box(rng, height, width, self.area, self.aspect)
        elif self.kind == "random_resized":
            box = random_resized_box(rng, height, width, self.area, self.aspect)
        else:
            box = Box(0, 0, width, height)
        return Placement(box, size, size, (height, width))

    @property
    def pads(self) -> bool:
        """Whether a crop is padded if the resized image is smaller than the crop."""
        return self.kind in ("scale_jitter", "large_scale_jitter")

    @property
    def _resizes_first(self) -> bool:
        """True: the whole image is resized, then cropped. False: only a rectangle is resized."""
        return self.kind in ("square", "short_side") and self.interpolation in PILLOW

    def _corner(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the size of the resized image, and the random top and left edges of the crop."""
        x, y = rng.random(2).tolist()
        rows, columns = resized_sides(height, width, self.kind, self.resize, self.size)
        top, left = int(y * (rows - self.size + 1)), int(x * (columns - self.size + 1))
        return (rows, columns), (top, left)

    def _crop_with_border(
        self, opened: Jpeg | Pixels, rng: np.random.Generator, out: np.ndarray
    ) -> None:
        """Writes a `simple_random` crop, with its mirrored border, into `out`."""
        sides = resized_sides(opened.height, opened.width, "short_side", self.size, self.size)
        draws = rng.random(2).tolist()
        (top, bottom, *rows), (left, right, *columns) = (
            _bordered(side, self.size, draw) for side, draw in zip(sides, draws, strict=True)
        )
        inner = np.empty((bottom - top, right - left, 3), np.uint8)
        if self.interpolation in PILLOW:
            opened.crop_resized(sides, (top, left), inner, self.interpolation)
        else:
            y, x = opened.height / sides[0], opened.width / sides[1]
            left, top = int(left * x), int(top * y)
            box = Box(left, top, max(round(right * x), left + 1), max(round(bottom * y), top + 1))
            opened.crop(box, inner, self.interpolation)
        out[:] = np.pad(inner, (rows, columns, (0, 0)), "reflect")

    def open(
        self, image: bytes | np.ndarray | Jpeg | Pixels, several: bool = False
    ) -> Jpeg | Pixels:
        """Returns the opened image; with `several` it is decoded once for all crops."""
        return open_image(image, self.mode, self.background, several)


@dataclasses.dataclass(frozen=True)
class TestCrop:
    """A crop for evaluation: resizes the image to `resize` and takes the centre of size `size`.

    Kinds:

    - `short_side`: resizes the short side and keeps the aspect ratio (pre-training; timm's
      `center`, Transformers' `shortest_edge`).
    - `square`: resizes both sides, ignoring the aspect ratio (timm's `squash`; few-shot evaluation:
      `resize` 256, `size` 224). If `resize` equals `size`, the crop is the whole image
      (fine-tuning).
    - `fit`: resizes the whole image to fit into `size`, and pads it at the right and at the bottom.

    `size` may be a pair of height and width. `resize` then corresponds to the smaller number of the
    pair. For example, with `size` (224, 448) and `resize` 256, a `short_side` crop resizes the
    image to cover 256 x 512 pixels, and takes the central 224 x 448 pixels.

    With Pillow's interpolations and the mode `exact`, the result equals Pillow's resize of the
    whole image followed by a crop. The sides of the resized image are rounded as in torchvision, or
    as in timm if the crop is not square.

    Attributes:
      resize: size of the resized image in pixels. It may be a fraction, such as 224 / 0.9; each
        side is then truncated to whole pixels, as in timm.
      half: how the position of the crop is rounded if it ends in .5. `even`: to the even number, as
        in torchvision and timm. `down`: to the lower number, as in Transformers.

    Raises:
      UserError: `resize` is less than `size`.
    """

    __test__ = False  # Not a test class for pytest.

    size: int | tuple[int, int]
    kind: str = "short_side"
    resize: float = 256
    mode: str = "fast"
    interpolation: str = "bilinear"
    background: str = "white"
    half: str = "even"

    def __post_init__(self):
        if self.resize < min(sides(self.size)):
            raise UserError(
                f"a crop of {min(sides(self.size))} pixels cannot be taken of an image resized to "
                f"{self.resize:g}: images are not padded"
            )

    def __call__(
        self, image: bytes | np.ndarray | Jpeg | Pixels, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the crop, uint8 `[height, width, 3]`; with `out` it is written into this array.

        Raises:
          Unreadable: see `vit_jax.data.decode`.
        """
        opened = open_image(image, self.mode, self.background)
        height, width = opened.height, opened.width
        out = np.empty((*sides(self.size), 3), np.uint8) if out is None else out
        if self._resizes_first:
            resized, corner = self._corner(height, width)
            opened.crop_resized(resized, corner, out, self.interpolation)
            return out
        return draw_placed(opened, self.place(height, width), self.interpolation, out)

    def place(self, height: int, width: int) -> Placement:
        """Returns the placement of the crop in an image of this height and width in pixels."""
        size = sides(self.size)
        if self.kind == "fit":
            factor = min(size[0] / height, size[1] / width)
            rows, columns = max(1, round(height * factor)), max(1, round(width * factor))
            shown = min(rows, size[0]), min(columns, size[1])
            return Placement(Box(0, 0, width, height), shown, size, (height, width))
        if self._resizes_first:
            box = before_resize(*self._corner(height, width), size, height, width)
        else:
            box = part_box(height, width, self.kind, self.resize, self.size, 0.5, 0.5)
        return Placement(box, size, size, (height, width))

    @property
    def _resizes_first(self) -> bool:
        """True: the whole image is resized, then cropped. False: only a rectangle is resized."""
        return self.kind != "fit" and self.interpolation in PILLOW

    def _corner(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the size of the resized image, and the top and left edges of the crop."""
        resized = resized_sides(height, width, self.kind, self.resize, self.size)
        middle, size = round if self.half == "even" else int, sides(self.size)
        return resized, (middle((resized[0] - size[0]) / 2), middle((resized[1] - size[1]) / 2))

    def __str__(self):
        height, width = sides(self.size)
        if self.kind == "fit":
            return f"all of the image within {height}x{width}, padded, {self.interpolation}"
        if self.kind == "square" and self.resize == min(height, width):
            return f"all of the image to {height}x{width}, {self.interpolation}"
        if height == width:
            resized = "both sides" if self.kind == "square" else "the short side"
            resized += f" to {int(self.resize)}"
        else:
            rows, columns = resized_sides(1, 1, "square", self.resize, self.size)
            resized = "all of the image to" if self.kind == "square" else "the image to cover"
            resized += f" {rows}x{columns}"
        return f"{resized}, the centre {height}x{width}, {self.interpolation}"


class FixedCrop(NamedTuple):
    """An evaluation crop with the interface of `TrainCrop`; the argument `rng` is not used."""

    crop: TestCrop

    @property
    def pads(self) -> bool:
        """Whether a crop is padded if its aspect ratio differs from the image's."""
        return self.crop.kind == "fit"

    def __call__(
        self, image: bytes | np.ndarray, rng: np.random.Generator, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the crop, `[height, width, 3]`; otherwise like `TrainCrop.__call__`."""
        return self.crop(image, out)

    def place(self, height: int, width: int, rng: np.random.Generator) -> Placement:
        """Returns the placement of the crop."""
        return self.crop.place(height, width)

    def open(
        self, image: bytes | np.ndarray | Jpeg | Pixels, several: bool = False
    ) -> Jpeg | Pixels:
        """Returns the opened image; with `several` it is decoded once for all crops."""
        return open_image(image, self.crop.mode, self.crop.background, several)


def draw_placed(
    opened: Jpeg | Pixels, placement: Placement, interpolation: str, out: np.ndarray
) -> np.ndarray:
    """Resizes a placement's rectangle, pads it, and writes it into `out`, `[height, width, 3]`."""
    height, width = placement.shown
    if (height, width) == out.shape[:2]:
        opened.crop(placement.box, out, interpolation)
        return out
    shown = np.empty((height, width, 3), np.uint8)
    opened.crop(placement.box, shown, interpolation)
    out[:] = PADDING
    out[:height, :width] = shown
    return out


def _jittered(height: int, width: int, size: int, factor: float, draws: list[float]) -> Placement:
    """Returns the placement of a random crop of an image that is first resized by `factor`.

    `draws` are two random numbers in [0, 1), for the top and the left edge of the crop.
    """
    spans, shown = [], []
    for side, draw in zip((height, width), draws, strict=True):
        resized = max(1, round(side * factor))
        cropped = min(resized, size)
        start = int(draw * (resized - cropped + 1))
        first = round(start * side / resized)
        spans.append((first, max(first + 1, round((start + cropped) * side / resized))))
        shown.append(cropped)
    (top, bottom), (left, right) = spans
    box = Box(left, top, right, bottom)
    return Placement(box, (shown[0], shown[1]), (size, size), (height, width))


def sides(size: int | tuple[int, int]) -> tuple[int, int]:
    """Returns a size as (height, width); 224 becomes (224, 224)."""
    return (size, size) if isinstance(size, int) else size


def _bordered(side: int, size: int, draw: float) -> tuple[int, int, int, int]:
    """Returns the position of a random crop along one side of an image with a mirrored border.

    The result is start and end of the crop's part within the image, in pixels of the image, and the
    numbers of padding pixels before and after it. `draw` is a random number in [0, 1). With 0, the
    crop starts with the padding before the image.
    """
    start = int(draw * (side + 2 * BORDER - size + 1)) - BORDER
    end = start + size
    return max(start, 0), min(end, side), max(-start, 0), max(end - side, 0)


def inception_box(
    rng: np.random.Generator,
    height: int,
    width: int,
    area: tuple[float, float] = (0.05, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """Draws a random rectangle like TensorFlow's `sample_distorted_bounding_box` without objects.

    First, the aspect ratio is drawn from a uniform distribution. The minimum and the maximum area
    then correspond to a minimum and a maximum height, and the height is drawn uniformly between
    them. If rounding makes the area too small or too large, one row is added or removed. As in
    TensorFlow, only rectangles of the image's full height contain the image's last row, and only
    rectangles of its full width contain its last column. After a hundred invalid draws the
    rectangle is the whole image.

    Source: tensorflow/core/kernels/image/sample_distorted_bounding_box_op.cc.
    """
    least, most = area[0] * height * width, area[1] * height * width
    for _ in range(100):
        # A single call draws all four numbers, because most of its time is overhead of the call.
        aspect_draw, height_draw, top_draw, left_draw = rng.random(4).tolist()
        ratio = aspect[0] + aspect_draw * (aspect[1] - aspect[0])
        highest = round(math.sqrt(most / ratio))
        if round(highest * ratio) > width:
            highest = int((width + 0.5 - 1e-7) / ratio)
        highest = min(highest, height)
        h = min(round(math.sqrt(least / ratio)), highest)
        h += int(height_draw * (highest - h + 1))
        w = round(h * ratio)
        if h * w < least:
            h += 1
            w = round(h * ratio)
        if h * w > most:
            h -= 1
            w = round(h * ratio)
        if least <= h * w <= most and 0 < w <= width and 0 < h <= height:
            top, left = int(top_draw * (height - h)), int(left_draw * (width - w))
            return Box(left, top, left + w, top + h)
    return Box(0, 0, width, height)


def random_resized_box(
    rng: np.random.Generator,
    height: int,
    width: int,
    area: tuple[float, float] = (0.05, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """Draws a random rectangle like torchvision's `RandomResizedCrop`.

    The area and the logarithm of the aspect ratio are uniform. If ten rectangles do not fit into
    the image, the result is the largest centred rectangle with an allowed aspect ratio.
    """
    for _ in range(10):
        # A single call draws all four numbers, because most of its time is overhead of the call.
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
    """Converts the rectangle of a crop to coordinates of the image before the resize.

    Args:
      height, width: size of the original image in pixels.
      kind: kind of the resize: `square` or `short_side`.
      resize: size of the resized image in pixels.
      size: height and width of the crop in pixels; a single number is used for both.
      x, y: relative position of the crop from left (0) to right (1) and from top (0) to bottom (1).
    """
    rows, columns = sides(size)
    share, w, h = min(rows, columns) / resize, width, height
    if kind == "short_side":
        w, h = min(width, height * columns / rows), min(height, width * rows / columns)
    w, h = max(1, round(w * share)), max(1, round(h * share))
    left, top = round(x * (width - w)), round(y * (height - h))
    return Box(left, top, left + w, top + h)


def resized_sides(
    height: int, width: int, kind: str, resize: float, size: int | tuple[int, int]
) -> tuple[int, int]:
    """Returns the image's height and width after a resize of kind `square` or `short_side`.

    If `size` is square, height and width are rounded as in torchvision's `Resize`. Otherwise, they
    are rounded as in timm's `ResizeKeepRatio`.
    """
    rows, columns = (int(resize * side / min(sides(size))) for side in sides(size))
    if kind == "square":
        return rows, columns
    if rows == columns:
        return max(rows, int(rows * height / width)), max(rows, int(rows * width / height))
    ratio = min(height / rows, width / columns)
    return round(height / ratio), round(width / ratio)
