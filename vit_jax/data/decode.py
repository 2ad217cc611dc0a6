"""Decodes a rectangle of an encoded image, at the lowest sufficient resolution.

`_jpeg` (libjpeg-turbo) decodes only the rectangle of a JPEG, at 1/2, 1/4 or 1/8 of its size if that
is at least the requested size. Pillow decodes all other images as a whole: other formats, unusual
JPEGs (CMYK, damaged), and all images in the mode `exact` or without the `_jpeg` extension.

A rectangle is resized by one of `INTERPOLATIONS`. `bilinear` interpolates the nearest four pixels,
as in TensorFlow; an image that is at least twice too large is halved first, repeatedly. The others
average over the area of each output pixel: `bilinear_antialias`, `bicubic` and `lanczos` with
Pillow's filters, `area` as in OpenCV.
"""

import io
import math
import re
import warnings
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from vit_jax.options.data import BACKGROUNDS

try:
    from vit_jax.data import _jpeg
except ImportError:  # No compiler, or no libjpeg-turbo, when vit_jax was installed.
    _jpeg = None

# Supported formats by Pillow's names, with their file suffixes. EPS is unsupported because Pillow
# starts a program to read it, TIFF because its reader prints messages.
SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".pjpeg", ".pjp"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp", ".dib"),
}
FORMATS = tuple(SUFFIXES)
MAX_PIXELS = 178_956_970  # A larger image is rejected, not decoded.
# Pixels. Of a resized image with more (a very long one), only a part is computed.
MAX_RESIZED = 1 << 24
MAX_SCANS = 200  # Scans of a JPEG: each costs a pass over the whole image.
# The header of a scan: its length and the number of its components.
SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")
# Pillow's interpolations, each with the radius of its filter in pixels of the result.
PILLOW = {
    "bilinear_antialias": (Image.Resampling.BILINEAR, 1),
    "bicubic": (Image.Resampling.BICUBIC, 2),
    "lanczos": (Image.Resampling.LANCZOS, 3),
}
# Averaging interpolations decode a JPEG at no less than this multiple of the requested size. At 1,
# the averaging by the JPEG decoder is visible (docs/measurements.md). `area` needs 4, because it
# reads whole decoded pixels.
DETAIL = dict.fromkeys(PILLOW, 2) | {"area": 4}

cv2.setNumThreads(0)  # Images are small and many: processes share the cores, not threads.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow warns above it and raises above its double.
# Pillow's warnings come once per worker and name no file; the pipeline names the files.
warnings.filterwarnings("ignore", module=r"PIL\.")


class Unreadable(Exception):
    """Error for bytes that cannot be decoded completely as an image."""


def why_unreadable(error: Unreadable | OSError) -> str:
    """Returns the reason for an image's read error, in one line."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split()) or type(error).__name__


class Box(NamedTuple):
    """A rectangle in pixels; its right and bottom edges are exclusive.

    Fractional edges are supported only by Pillow's interpolations.
    """

    left: float
    top: float
    right: float
    bottom: float

    @property
    def height(self) -> float:
        """Pixels from top to bottom."""
        return self.bottom - self.top

    @property
    def width(self) -> float:
        """Pixels from left to right."""
        return self.right - self.left

    def scaled(self, factor: float) -> "Box":
        """Returns the rectangle in an image scaled by `factor`."""
        return Box(*(edge * factor for edge in self))

    def within(self, outer: "Box") -> "Box":
        """Returns the rectangle relative to the top left corner of another one."""
        left, top = outer.left, outer.top
        return Box(self.left - left, self.top - top, self.right - left, self.bottom - top)


def is_fast() -> bool:
    """Returns True if `_jpeg`, which decodes only the cropped rectangle of a JPEG, was built."""
    return _jpeg is not None


def decode(image: bytes | np.ndarray, background: str = "white") -> np.ndarray:
    """Returns the whole image, upright, as RGB uint8 `[height, width, 3]`.

    Args:
      image: an encoded image, or pixels, which are returned as they are.
      background: colour behind a transparent image, one of `BACKGROUNDS`; `none` ignores the
        transparency and returns the stored colours.

    Raises:
      Unreadable: not an image, cut short, or too large.
    """
    if isinstance(image, np.ndarray):
        return image
    try:
        opened = Image.open(io.BytesIO(image), formats=FORMATS)
        _check_size(opened.height, opened.width)
        if image.startswith(b"\xff\xd8") and len(SCAN.findall(image)) > MAX_SCANS:
            raise Unreadable(f"a JPEG of more than {MAX_SCANS} scans")
        opened.load()
        shade = BACKGROUNDS[background]
        if opened.mode.startswith("I"):
            pixels = _grey_pixels(opened, shade)
        elif shade is not None and opened.has_transparency_data and not has_idle_alpha(opened):
            pixels = np.asarray(_on(shade, opened, image))
        else:
            pixels = np.asarray(opened.convert("RGB"))
        return _upright(pixels, _turn(opened))
    except Unreadable:
        raise
    except UnidentifiedImageError:  # Its message contains only a memory address.
        raise Unreadable(f"not one of the formats {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's parsers raise errors of any type.
        raise Unreadable(str(error)) from error


def _grey_pixels(opened: Image.Image, shade: int | None) -> np.ndarray:
    """Returns a 16-bit grey image as RGB uint8; Pillow's convert() would clip it at 255."""
    levels = np.asarray(opened, np.float32)
    grey = eight_bits(levels)
    if shade is not None and "transparency" in opened.info:
        grey[levels == opened.info["transparency"]] = shade
    return np.repeat(grey[..., None], 3, axis=-1)


def eight_bits(levels: np.ndarray) -> np.ndarray:
    """Returns 16-bit levels, from 0 to 65,535, as uint8."""
    return (levels / 257).round().clip(0, 255).astype(np.uint8)


def has_idle_alpha(opened: Image.Image) -> bool:
    """Returns True for a BMP with alpha 0 everywhere: many programs do not use this channel."""
    return (
        opened.format == "BMP"
        and opened.mode == "RGBA"
        and opened.getchannel("A").getextrema() == (0, 0)
    )


def _on(shade: int, opened: Image.Image, encoded: bytes) -> Image.Image:
    """Returns a transparent image in RGB, on a background of one grey level."""
    rgba, key = opened.convert("RGBA"), opened.info.get("transparency")
    # Pillow scales the levels to 8 bits, but not the transparent level (the key).
    depth = encoded[24] if opened.format == "PNG" else 8
    if opened.mode == "L" and depth < 8:
        rgba.putalpha(opened.point(lambda level: 255 * (level != key * 255 // (2**depth - 1))))
    elif opened.mode == "RGB" and depth == 16:
        # Pillow keeps only 8 bits, so other colours may become equal to the key.
        alpha = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_UNCHANGED)[..., 3]
        rgba.putalpha(Image.fromarray((alpha >> 8).astype(np.uint8)))
    result = Image.new("RGB", opened.size, (shade, shade, shade))
    result.paste(rgba, mask=rgba.getchannel("A"))
    return result


def open_image(
    image: "bytes | np.ndarray | Jpeg | Pixels",
    mode: str = "fast",
    background: str = "white",
    several: bool = False,
) -> "Jpeg | Pixels":
    """Opens an image; the result has its upright `height` and `width`, and decodes rectangles.

    Args:
      image: encoded, or RGB uint8 `[height, width, 3]`; an opened image is returned as it is.
      mode: `fast`, or `exact` to always decode all of it with Pillow.
      background: see `decode`.
      several: many rectangles will be read, so the whole image is decoded once.

    Raises:
      Unreadable: see `decode`. Damage after the header is detected only by `region`.
    """
    if isinstance(image, Jpeg | Pixels):
        return image
    if mode == "fast" and _jpeg is not None and isinstance(image, bytes):
        # A JPEG without an end marker is cut short. Decoding a rectangle may not detect this.
        header = _jpeg.size(image) if image.endswith(b"\xff\xd9") else None
        if header is not None:
            return (WholeJpeg if several else Jpeg)(image, *header)
    return Pixels(decode(image, background))


class Pixels:
    """A decoded image."""

    def __init__(self, pixels: np.ndarray):
        self.height, self.width = pixels.shape[:2]
        self._pixels = pixels

    def region(self, box: Box, size: int | tuple[int, int]) -> np.ndarray:
        """Returns the rectangle `box`, uint8, halved as often as `size` allows.

        Args:
          size: minimum height and width of the result; a single number is both.
        """
        shrink = _shrink(box, size)
        left, top, right, bottom = _snap(box, shrink, self.height, self.width)
        pixels = self._pixels[top * shrink : bottom * shrink, left * shrink : right * shrink]
        return _average(pixels, shrink)

    def crop(self, box: Box, out: np.ndarray, interpolation: str = "bilinear") -> None:
        """Writes the rectangle `box` into `out`, `[height, width, 3]`, resized.

        Pixels around the rectangle have no influence.
        """
        if interpolation == "bilinear":
            return resize(self.region(box, out.shape[:2]), out)
        left, top, right, bottom = box
        resample(self._pixels[top:bottom, left:right], out, interpolation)

    def crop_resized(
        self, sides: tuple[int, int], corner: tuple[int, int], out: np.ndarray, interpolation: str
    ) -> None:
        """Resizes the whole image by Pillow and writes a crop into `out`, `[height, width, 3]`.

        Args:
          sides: height and width of the whole image after the resize.
          corner: top and left of the crop in the resized image.
        """
        top, left, height, width = *corner, *out.shape[:2]
        if math.prod(sides) <= MAX_RESIZED:
            image = Image.fromarray(self._pixels).resize(sides[::-1], PILLOW[interpolation][0])
            out[:] = np.asarray(image.crop((left, top, left + width, top + height)))
            return
        box = before_resize(sides, corner, out.shape, self.height, self.width)
        outer = _around(box, out.shape, interpolation, self.height, self.width)
        pixels = self._pixels[outer.top : outer.bottom, outer.left : outer.right]
        resample(pixels, out, interpolation, box.within(outer))


class Jpeg:
    """An encoded JPEG that decodes only the requested rectangle."""

    _resizes_rows = _jpeg is not None and _jpeg.HAS_CROP

    def __init__(self, data: bytes, height: int, width: int, tagged: bool):
        _check_size(height, width)
        self._data, self._stored = data, (height, width)
        self._turn = _turn_of(data) if tagged else TURNS[1]
        self.height, self.width = (width, height) if self._turn.swap else (height, width)

    def region(self, box: Box, size: int | tuple[int, int]) -> np.ndarray:
        """Implements `Pixels.region`; the JPEG decoder halves down to 1/8, the rest is averaged.

        Raises:
          Unreadable: the JPEG is damaged.
        """
        shrink = _shrink(box, size)
        by_area = max(1, shrink // 8)
        left, top, right, bottom = self._place(box, shrink, by_area)
        pixels = self._decoded(Box(left, top, right, bottom), shrink // by_area)
        if pixels is None:  # Pillow may still decode it, or raises Unreadable.
            return Pixels(decode(self._data)).region(box, size)
        return _average(_upright(pixels, self._turn), by_area)

    def crop(self, box: Box, out: np.ndarray, interpolation: str = "bilinear") -> None:
        """Implements `Pixels.crop`.

        Bilinear crops to a square are resized while their rows are decoded; values differ by at
        most 1 (rounding). All others are resized from a JPEG decoded at `DETAIL` times the size or
        more.
        """
        if interpolation != "bilinear":
            if not self._crop_averaged(box, out, interpolation, beside=False):
                Pixels(decode(self._data)).crop(box, out, interpolation)
            return
        height, width = out.shape[:2]
        shrink = _shrink(box, (height, width))
        if shrink > 8 or height != width or not self._resizes_rows:
            return resize(self.region(box, (height, width)), out)
        turned = self._turn is not TURNS[1]
        into = np.empty_like(out) if turned else out
        if not _jpeg.crop(self._data, *self._place(box, shrink, 1), shrink, height, into):
            return Pixels(decode(self._data)).crop(box, out)
        if turned:
            out[:] = _upright(into, self._turn)

    def crop_resized(
        self, sides: tuple[int, int], corner: tuple[int, int], out: np.ndarray, interpolation: str
    ) -> None:
        """Implements `Pixels.crop_resized`, from a JPEG of at least `DETAIL` times the size."""
        box = before_resize(sides, corner, out.shape, self.height, self.width)
        if not self._crop_averaged(box, out, interpolation, beside=True):
            Pixels(decode(self._data)).crop_resized(sides, corner, out, interpolation)

    def _crop_averaged(self, box: Box, out: np.ndarray, interpolation: str, beside: bool) -> bool:
        """Resizes a rectangle; returns False if the JPEG is damaged."""
        turn, (height, width) = self._turn, self._stored
        into = np.empty((*(out.shape[1::-1] if turn.swap else out.shape[:2]), 3), np.uint8)
        detail = DETAIL[interpolation]
        shrink = min(8, _shrink(box, (detail * out.shape[0], detail * out.shape[1])))
        place = self._as_stored(box).scaled(1 / shrink)
        if interpolation == "area":
            place = Box(*map(round, place))
        # The last row and column may cover less than `shrink` pixels.
        outer = _around(
            place,
            into.shape,
            interpolation if beside else None,
            -(-height // shrink),
            -(-width // shrink),
        )
        pixels = self._decoded(outer, shrink)
        if pixels is None:
            return False
        resample(pixels, into, interpolation, place.within(outer))
        out[:] = _upright(into, turn)
        return True

    def _decoded(self, place: Box, shrink: int) -> np.ndarray | None:
        """Returns a rectangle's pixels in the stored image, shrunk; None if the JPEG is damaged."""
        decoded = _jpeg.decode(self._data, *place, shrink)
        if decoded is None:
            return None
        rows, stride, start = decoded
        pixels = np.frombuffer(rows, np.uint8).reshape(place.height, stride, 3)
        return pixels[:, start : start + place.width]

    def _as_stored(self, box: Box) -> Box:
        """Returns a rectangle's position in the stored image."""
        turn, (height, width) = self._turn, self._stored
        left, top, right, bottom = box
        if turn.swap:
            left, top, right, bottom = top, left, bottom, right
        if turn.flip_x:
            left, right = width - right, width - left
        if turn.flip_y:
            top, bottom = height - bottom, height - top
        return Box(left, top, right, bottom)

    def _place(self, box: Box, shrink: int, by_area: int) -> tuple[int, int, int, int]:
        """Returns a rectangle's position in the stored image, shrunk by `shrink // by_area`."""
        stored = self._as_stored(box)
        if shrink == 1:
            return stored
        return tuple(edge * by_area for edge in _snap(stored, shrink, *self._stored))


class WholeJpeg(Jpeg):
    """An encoded JPEG for many rectangles: the whole image is decoded once per scale.

    The pixels equal those of `Jpeg`, except that bilinear squares are rounded differently.
    """

    _resizes_rows = False

    def __init__(self, data: bytes, height: int, width: int, tagged: bool):
        super().__init__(data, height, width, tagged)
        self._sizes: dict[int, np.ndarray | None] = {}

    def _decoded(self, place: Box, shrink: int) -> np.ndarray | None:
        if shrink not in self._sizes:
            height, width = (-(-side // shrink) for side in self._stored)
            self._sizes[shrink] = super()._decoded(Box(0, 0, width, height), shrink)
        whole = self._sizes[shrink]
        return None if whole is None else whole[place.top : place.bottom, place.left : place.right]


class Turn(NamedTuple):
    """Orientation of a stored image: its axes mirrored, then swapped."""

    swap: bool
    flip_x: bool
    flip_y: bool


# Turns by EXIF orientation. An unknown one is treated as upright, as in Pillow.
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
    """Returns the largest power of two by which a rectangle can shrink and still have `size`."""
    height, width = (size, size) if isinstance(size, int) else size
    times = int(min(box.height // height, box.width // width))
    return 1 << max(0, times.bit_length() - 1)


def _snap(box: Box, shrink: int, height: int, width: int) -> Box:
    """Returns a rectangle in units of cells of `shrink` pixels, rounded to whole cells.

    Args:
      height: height of the whole image, in pixels.
      width: width of the whole image, in pixels.
    """
    left, top, right, bottom = ((edge + shrink // 2) // shrink for edge in box)
    right = min(max(right, 1), width // shrink)
    bottom = min(max(bottom, 1), height // shrink)
    return Box(min(left, right - 1), min(top, bottom - 1), right, bottom)


def before_resize(
    sides: tuple[int, int], corner: tuple[int, int], size: tuple[int, ...], height: int, width: int
) -> Box:
    """Maps a crop of a resized image to coordinates before the resize.

    Args:
      sides: height and width after the resize.
      corner: top and left of the crop after the resize.
      size: height and width of the crop.
      height: height of the image before the resize, in pixels.
      width: width of the image before the resize, in pixels.
    """
    y, x, (top, left) = height / sides[0], width / sides[1], corner
    return Box(left * x, top * y, (left + size[1]) * x, (top + size[0]) * y)


def _around(
    box: Box, size: tuple[int, ...], interpolation: str | None, height: int, width: int
) -> Box:
    """Returns the rectangle of whole pixels that a resized rectangle depends on.

    Args:
      size: height and width of the result.
      interpolation: a key of `PILLOW`, whose filter reads pixels beyond the rectangle; None for an
        interpolation that does not.
      height: height of the image, in pixels.
      width: width of the image, in pixels.
    """
    reach = PILLOW[interpolation][1] if interpolation else 0
    x, y = (reach * max(1.0, side) for side in (box.width / size[1], box.height / size[0]))
    left, top = math.floor(box.left - x), math.floor(box.top - y)
    right, bottom = math.ceil(box.right + x), math.ceil(box.bottom + y)
    return Box(max(left, 0), max(top, 0), min(right, width), min(bottom, height))


def _average(pixels: np.ndarray, shrink: int) -> np.ndarray:
    """Returns the means of cells of `shrink` x `shrink` pixels."""
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
    except Exception:  # An image with damaged EXIF is still readable.
        return TURNS[1]


def _upright(pixels: np.ndarray, turn: Turn) -> np.ndarray:
    """Returns the pixels of a stored image, turned upright."""
    if turn.flip_x:
        pixels = pixels[:, ::-1]
    if turn.flip_y:
        pixels = pixels[::-1]
    return pixels.swapaxes(0, 1) if turn.swap else pixels


def resize(pixels: np.ndarray, out: np.ndarray) -> None:
    """Resizes into uint8 `[height, width, 3]`, bilinear without antialiasing (the paper's code)."""
    cv2.resize(pixels, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)


def resample(
    pixels: np.ndarray, out: np.ndarray, interpolation: str, box: Box | None = None
) -> None:
    """Resizes uint8 `[height, width, 3]` into uint8 `out` with an averaging interpolation.

    Args:
      box: only this rectangle is resized; Pillow's filters also read the pixels around it.
    """
    if interpolation == "area":
        return _resize_area(pixels, out)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    if box:  # Rounding may have put its edges outside.
        box = box.left, box.top, min(box.right, image.width), min(box.bottom, image.height)
    out[:] = np.asarray(image.resize(out.shape[1::-1], PILLOW[interpolation][0], box=box))


def _resize_area(pixels: np.ndarray, out: np.ndarray) -> None:
    """Averages over the area of each output pixel.

    OpenCV averages only if no side grows, so growing sides are resized in a second step.
    """
    height, width = (min(sides) for sides in zip(pixels.shape, out.shape[:2], strict=False))
    if (height, width) != out.shape[:2]:
        pixels = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
    cv2.resize(pixels, out.shape[1::-1], dst=out, interpolation=cv2.INTER_AREA)
