"""From an encoded image to the pixels of a rectangle of it, at no more detail than is needed.

A JPEG is decoded by `_jpeg` (libjpeg-turbo): only its rectangle, and at 1/2, 1/4 or 1/8 of its size
where that still covers what is asked for. Everything else is decoded whole by Pillow: other formats,
odd JPEGs (CMYK, turned by EXIF, damaged), and all of them where `exact` is asked for or the
extension was not built.
"""

import io
import re
import warnings
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

try:
    from vit_jax.data import _jpeg
except ImportError:  # No compiler, or no libjpeg-turbo, when vit_jax was installed.
    _jpeg = None

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # Not EPS, which starts a program, nor TIFF, which prints.
MAX_PIXELS = 178_956_970  # A larger image is refused, not decoded.
MAX_SCANS = 200  # Of a JPEG: each costs a pass over the whole image.
SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")  # Its head: length, components.

cv2.setNumThreads(0)  # Images are small and many: processes share the cores, not threads.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow warns above it and refuses above its double.
warnings.filterwarnings("ignore", module=r"PIL\.")  # Once a worker, naming no file; the pipeline names them.


class Unreadable(Exception):
    """The bytes are not an image that can be decoded whole."""


class Box(NamedTuple):
    """A rectangle in pixels, with its right and bottom edges outside."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def width(self) -> int:
        return self.right - self.left


def is_fast() -> bool:
    """Whether JPEGs are decoded by rectangles here: `_jpeg` was built when vit_jax was installed."""
    return _jpeg is not None


def decode(image: bytes | np.ndarray) -> np.ndarray:
    """The whole image, upright, as RGB uint8 `[height, width, 3]`.

    Raises:
      Unreadable: not an image, cut short, or absurdly large.
    """
    if isinstance(image, np.ndarray):
        return image
    try:
        opened = Image.open(io.BytesIO(image), formats=FORMATS)
        _check_size(opened.height, opened.width)
        if image.startswith(b"\xff\xd8") and len(SCAN.findall(image)) > MAX_SCANS:
            raise Unreadable(f"a JPEG of more than {MAX_SCANS} scans")
        opened.load()
        if opened.mode.startswith("I"):  # 16-bit grey, which convert() would clip at 255.
            grey = (np.asarray(opened, np.float32) / 257).round().clip(0, 255).astype(np.uint8)
            pixels = np.repeat(grey[..., None], 3, axis=-1)
        else:
            pixels = np.asarray(opened.convert("RGB"))
        return _upright(pixels, _turn(opened))
    except Unreadable:
        raise
    except Exception as error:  # Pillow's parsers raise whatever the bytes provoke.
        raise Unreadable(str(error)) from error


def open_image(image: bytes | np.ndarray, mode: str = "fast") -> "Jpeg | Pixels":
    """An image that knows its `height` and `width`, upright, and decodes any rectangle of it.

    Args:
      image: encoded, or RGB uint8 `[height, width, 3]`.
      mode: `fast`, or `exact` to decode all of it with Pillow, whatever is asked for.

    Raises:
      Unreadable: see `decode`. Damage that the header doesn't show is found by `region`.
    """
    if mode == "fast" and _jpeg is not None and isinstance(image, bytes):
        # Without the marker of its end a JPEG is cut short, which a rectangle may not show.
        header = _jpeg.size(image) if image.endswith(b"\xff\xd9") else None
        if header is not None:
            return Jpeg(image, *header)
    return Pixels(decode(image))


class Pixels:
    """A decoded image."""

    def __init__(self, pixels: np.ndarray):
        self.height, self.width = pixels.shape[:2]
        self._pixels = pixels

    def region(self, box: Box, size: int | tuple[int, int]) -> np.ndarray:
        """The rectangle `box`, uint8, halved as often as it still measures `size`, or height and width."""
        shrink = _shrink(box, size)
        left, top, right, bottom = _snap(box, shrink, self.height, self.width)
        pixels = self._pixels[top * shrink : bottom * shrink, left * shrink : right * shrink]
        return _average(pixels, shrink)

    def crop(self, box: Box, out: np.ndarray) -> None:
        """The rectangle `box`, resized bilinearly (without smoothing) into `out`, `[height, width, 3]`."""
        resize(self.region(box, out.shape[:2]), out)


class Jpeg:
    """An encoded JPEG, of which only what is asked for is decoded."""

    def __init__(self, data: bytes, height: int, width: int, tagged: bool):
        _check_size(height, width)
        self._data, self._stored = data, (height, width)
        self._turn = _turn_of(data) if tagged else TURNS[1]
        self.height, self.width = (width, height) if self._turn.swap else (height, width)

    def region(self, box: Box, size: int | tuple[int, int]) -> np.ndarray:
        """As `Pixels.region`; halved by the JPEG's own transform, up to 1/8, and then by area.

        Raises:
          Unreadable: the JPEG is damaged.
        """
        shrink = _shrink(box, size)
        by_area = max(1, shrink // 8)
        left, top, right, bottom = self._place(box, shrink, by_area)
        found = _jpeg.decode(self._data, left, top, right, bottom, shrink // by_area)
        if found is None:  # Pillow may know better, and has the last word.
            return Pixels(decode(self._data)).region(box, size)
        rows, stride, start = found
        pixels = np.frombuffer(rows, np.uint8).reshape(bottom - top, stride, 3)
        return _average(_upright(pixels[:, start : start + right - left], self._turn), by_area)

    def crop(self, box: Box, out: np.ndarray) -> None:
        """As `Pixels.crop`; squares of rows as they are decoded, which differs by 1 at most by rounding."""
        height, width = out.shape[:2]
        shrink = _shrink(box, (height, width))
        if shrink > 8 or height != width or not _jpeg.HAS_CROP:
            return resize(self.region(box, (height, width)), out)
        turned = self._turn is not TURNS[1]
        into = np.empty_like(out) if turned else out
        if not _jpeg.crop(self._data, *self._place(box, shrink, 1), shrink, height, into):
            return Pixels(decode(self._data)).crop(box, out)
        if turned:
            out[:] = _upright(into, self._turn)

    def _place(self, box: Box, shrink: int, by_area: int) -> tuple[int, int, int, int]:
        """Where a rectangle lies in the stored image, shrunk but for what is left to averaging."""
        turn, (height, width) = self._turn, self._stored
        left, top, right, bottom = box
        if turn.swap:
            left, top, right, bottom = top, left, bottom, right
        if turn.flip_x:
            left, right = width - right, width - left
        if turn.flip_y:
            top, bottom = height - bottom, height - top
        if shrink == 1:
            return left, top, right, bottom
        snapped = _snap(Box(left, top, right, bottom), shrink, height, width)
        return tuple(edge * by_area for edge in snapped)


class Turn(NamedTuple):
    """How an image is stored: mirrored along its axes, and these exchanged (in this order)."""

    swap: bool
    flip_x: bool
    flip_y: bool


# By EXIF's orientation. An unknown one is taken for upright, as Pillow does.
TURNS = {
    1: Turn(False, False, False),
    2: Turn(False, True, False),
    3: Turn(False, True, True),
    4: Turn(False, False, True),
    5: Turn(True, False, False),
    6: Turn(True, False, True),
    7: Turn(True, True, True),
    8: Turn(True, True, False),
}


def _shrink(box: Box, size: int | tuple[int, int]) -> int:
    """The largest power of two by which a rectangle can be divided and still measure `size`."""
    height, width = (size, size) if isinstance(size, int) else size
    times = min(box.height // height, box.width // width)
    return 1 << max(0, times.bit_length() - 1)


def _snap(box: Box, shrink: int, height: int, width: int) -> Box:
    """A rectangle of a `height` x `width` image in cells of `shrink` pixels, rounded to whole ones."""
    left, top, right, bottom = ((edge + shrink // 2) // shrink for edge in box)
    right = min(max(right, 1), width // shrink)
    bottom = min(max(bottom, 1), height // shrink)
    return Box(min(left, right - 1), min(top, bottom - 1), right, bottom)


def _average(pixels: np.ndarray, shrink: int) -> np.ndarray:
    """The means of cells of `shrink` pixels each way."""
    if shrink == 1:
        return pixels
    height, width = (side // shrink for side in pixels.shape[:2])
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)


def _check_size(height: int, width: int):
    if height * width > MAX_PIXELS:
        raise Unreadable(f"{width}x{height} pixels")


def _turn_of(jpeg: bytes) -> Turn:
    try:
        return _turn(Image.open(io.BytesIO(jpeg), formats=("JPEG",)))
    except Exception:
        return TURNS[1]


def _turn(opened: Image.Image) -> Turn:
    try:
        return TURNS.get(opened.getexif().get(0x0112), TURNS[1])
    except Exception:  # Damaged EXIF makes no image unreadable.
        return TURNS[1]


def _upright(pixels: np.ndarray, turn: Turn) -> np.ndarray:
    """The pixels of an image that is stored turned."""
    if turn.flip_x:
        pixels = pixels[:, ::-1]
    if turn.flip_y:
        pixels = pixels[::-1]
    return pixels.swapaxes(0, 1) if turn.swap else pixels


def resize(pixels: np.ndarray, out: np.ndarray) -> None:
    """Bilinear, without smoothing, into uint8 `[height, width, 3]`: as the paper's code does it."""
    cv2.resize(pixels, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)
