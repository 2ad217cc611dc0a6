"""Decodes a rectangle of an encoded image, at the lowest sufficient resolution.

`_jpeg` (libjpeg-turbo) decodes only the requested rectangle of a JPEG. It decodes at 1/2, 1/4 or
1/8 of the JPEG's size if the result is still at least as large as requested. In four cases Pillow
decodes the whole image instead: the image is not a JPEG, the JPEG is unusual (CMYK, damaged), the
mode is `exact`, or the extension `_jpeg` is not installed.

A rectangle is resized by one of `INTERPOLATIONS`. `bilinear` interpolates between the nearest four
pixels, as in TensorFlow. A rectangle of at least twice the requested size is first halved by
averaging, once or several times, until it is less than twice as large. All other interpolations
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

# Supported formats by Pillow's names, with their file suffixes. Two formats are unsupported: EPS,
# because Pillow starts a program to read it, and TIFF, because Pillow's reader prints messages.
SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".pjpeg", ".pjp"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp", ".dib"),
}
FORMATS = tuple(SUFFIXES)
MAX_PIXELS = 178_956_970  # A larger image is rejected, not decoded.
# If the whole resized image would have more pixels than this, only its crop is computed.
MAX_RESIZED = 1 << 24
# A JPEG with more scans than this is rejected, because each scan costs a pass over the whole image.
MAX_SCANS = 200
# Matches the header of a JPEG scan: the header's length and the number of colour components.
SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")
# Pillow's interpolations, each with the radius of its filter in pixels of the result.
PILLOW = {
    "bilinear_antialias": (Image.Resampling.BILINEAR, 1),
    "bicubic": (Image.Resampling.BICUBIC, 2),
    "lanczos": (Image.Resampling.LANCZOS, 3),
}
# Averaging interpolations decode a JPEG at this multiple of the requested size or more. At a
# multiple of 1, artefacts of the JPEG decoder's averaging would be visible (docs/measurements.md).
# `area` needs a multiple of 4, because it reads whole decoded pixels only.
DETAIL = dict.fromkeys(PILLOW, 2) | {"area": 4}

cv2.setNumThreads(0)  # One thread per image: images are small, and processes share the cores.
Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2  # Pillow raises an error above twice this value.
# Pillow's warnings are ignored, because they do not contain the file's name. The pipeline reports
# unreadable files with their names.
warnings.filterwarnings("ignore", module=r"PIL\.")


class Unreadable(Exception):
    """Error for bytes that cannot be decoded completely as an image."""


def why_unreadable(error: Unreadable | OSError) -> str:
    """Returns the reason for an image's read error, in one line."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split()) or type(error).__name__


class Box(NamedTuple):
    """A rectangle in pixels; the pixels at `right` and `bottom` are outside of it.

    Only Pillow's interpolations support edges that are not whole numbers.
    """

    left: float
    top: float
    right: float
    bottom: float

    @property
    def height(self) -> float:
        """Height in pixels."""
        return self.bottom - self.top

    @property
    def width(self) -> float:
        """Width in pixels."""
        return self.right - self.left

    def scaled(self, factor: float) -> "Box":
        """Returns the coordinates of this rectangle in an image that is enlarged by `factor`."""
        return Box(*(edge * factor for edge in self))

    def within(self, outer: "Box") -> "Box":
        """Returns this rectangle's coordinates relative to the top left corner of `outer`."""
        left, top = outer.left, outer.top
        return Box(self.left - left, self.top - top, self.right - left, self.bottom - top)


def is_fast() -> bool:
    """Returns True if the extension `_jpeg` for fast JPEG decoding was built."""
    return _jpeg is not None


def decode(image: bytes | np.ndarray, background: str = "white") -> np.ndarray:
    """Returns the whole image, upright, as RGB uint8 `[height, width, 3]`.

    Args:
      image: an encoded image; or an array of pixels, which is returned unchanged.
      background: colour behind a transparent image, one of `BACKGROUNDS`; `none` ignores the
        transparency and returns the stored colours.

    Raises:
      Unreadable: the content is not an image, is cut short, or has too many pixels.
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
    except UnidentifiedImageError:  # Pillow's message contains only a memory address.
        raise Unreadable(f"not one of the formats {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's parsers raise errors of any type.
        raise Unreadable(str(error)) from error


def _grey_pixels(opened: Image.Image, shade: int | None) -> np.ndarray:
    """Scales a 16-bit grey image to RGB uint8; Pillow's convert() would clip values above 255."""
    levels = np.asarray(opened, np.float32)
    grey = eight_bits(levels)
    if shade is not None and "transparency" in opened.info:
        grey[levels == opened.info["transparency"]] = shade
    return np.repeat(grey[..., None], 3, axis=-1)


def eight_bits(levels: np.ndarray) -> np.ndarray:
    """Scales 16-bit levels, from 0 to 65,535, to uint8."""
    return (levels / 257).round().clip(0, 255).astype(np.uint8)


def has_idle_alpha(opened: Image.Image) -> bool:
    """Returns True for a BMP with alpha 0 everywhere, written by a program that ignores alpha."""
    return (
        opened.format == "BMP"
        and opened.mode == "RGBA"
        and opened.getchannel("A").getextrema() == (0, 0)
    )


def _on(shade: int, opened: Image.Image, encoded: bytes) -> Image.Image:
    """Draws a transparent image on a background with the grey level `shade`; returns RGB."""
    rgba, key = opened.convert("RGBA"), opened.info.get("transparency")
    # `key` is the transparent colour. Pillow scales the grey levels of pixels to 8 bits, but does
    # not scale `key`. Therefore `key` is scaled here.
    depth = encoded[24] if opened.format == "PNG" else 8
    if opened.mode == "L" and depth < 8:
        rgba.putalpha(opened.point(lambda level: 255 * (level != key * 255 // (2**depth - 1))))
    elif opened.mode == "RGB" and depth == 16:
        # Pillow reduces colours from 16 to 8 bits, and an opaque colour may then become equal to
        # `key`. Therefore OpenCV reads the transparency.
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
    """Opens an image without decoding it; the methods of the result decode rectangles.

    `height` and `width` of the result are the size of the upright image.

    Args:
      image: an encoded image, or RGB uint8 `[height, width, 3]`. An opened image is returned
        unchanged.
      mode: `fast`, or `exact`: always decode the whole image with Pillow.
      background: colour behind a transparent image, one of `BACKGROUNDS`.
      several: True: the whole image is decoded once, because many rectangles will be read.

    Raises:
      Unreadable: the content is not an image, is cut short, or has too many pixels. Damage after
        the header of a JPEG is detected later, when a rectangle is decoded.
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
        """Returns the pixels of `box`, uint8 `[height, width, 3]`, possibly at a lower resolution.

        Height and width are halved repeatedly, as long as the result is at least as large as
        `size`. A single number is the minimum of both height and width.
        """
        shrink = _shrink(box, size)
        left, top, right, bottom = _snap(box, shrink, self.height, self.width)
        pixels = self._pixels[top * shrink : bottom * shrink, left * shrink : right * shrink]
        return _average(pixels, shrink)

    def crop(self, box: Box, out: np.ndarray, interpolation: str = "bilinear") -> None:
        """Resizes the rectangle `box` and writes it into `out`, uint8 `[height, width, 3]`.

        Pixels outside of the rectangle do not influence the result.
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
    """An encoded JPEG, of which only the requested rectangles are decoded."""

    _resizes_rows = _jpeg is not None and _jpeg.HAS_CROP

    def __init__(self, data: bytes, height: int, width: int, tagged: bool):
        _check_size(height, width)
        self._data, self._stored = data, (height, width)
        self._turn = _turn_of(data) if tagged else TURNS[1]
        self.height, self.width = (width, height) if self._turn.swap else (height, width)

    def region(self, box: Box, size: int | tuple[int, int]) -> np.ndarray:
        """Implements `Pixels.region`: returns the pixels of `box`, possibly reduced.

        The JPEG decoder reduces height and width by a factor of up to 8. If a larger factor is
        required, the decoded pixels are averaged afterwards.

        Raises:
          Unreadable: the JPEG is damaged.
        """
        shrink = _shrink(box, size)
        by_area = max(1, shrink // 8)
        left, top, right, bottom = self._place(box, shrink, by_area)
        pixels = self._decoded(Box(left, top, right, bottom), shrink // by_area)
        if pixels is None:  # Pillow may be able to decode the JPEG; otherwise it raises Unreadable.
            return Pixels(decode(self._data)).region(box, size)
        return _average(_upright(pixels, self._turn), by_area)

    def crop(self, box: Box, out: np.ndarray, interpolation: str = "bilinear") -> None:
        """Implements `Pixels.crop`: resizes the rectangle `box` and writes it into `out`.

        With `bilinear`, a square `out` is written row by row during decoding. The values then
        differ by at most 1 from the result of `Pixels.crop`, due to rounding. With any other
        interpolation, the JPEG is decoded at `DETAIL` times the size of `out` or more, and the
        decoded pixels are resized.
        """
        if interpolation != "bilinear":
            if not self._crop_averaged(box, out, interpolation, reads_outside=False):
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
        """Implements `Pixels.crop_resized`: writes a crop of the resized image into `out`.

        The JPEG is decoded at `DETAIL` times the required resolution or more, and then resized.
        """
        box = before_resize(sides, corner, out.shape, self.height, self.width)
        if not self._crop_averaged(box, out, interpolation, reads_outside=True):
            Pixels(decode(self._data)).crop_resized(sides, corner, out, interpolation)

    def _crop_averaged(
        self, box: Box, out: np.ndarray, interpolation: str, reads_outside: bool
    ) -> bool:
        """Decodes a rectangle, and resizes it with an averaging interpolation, such as `bicubic`.

        Args:
          reads_outside: True: pixels around the rectangle influence its border, as if the whole
            image had been resized and then cropped. False: only pixels of the rectangle are used.

        Returns:
          False if the JPEG is damaged.
        """
        turn, (height, width) = self._turn, self._stored
        into = np.empty((*(out.shape[1::-1] if turn.swap else out.shape[:2]), 3), np.uint8)
        detail = DETAIL[interpolation]
        shrink = min(8, _shrink(box, (detail * out.shape[0], detail * out.shape[1])))
        place = self._as_stored(box).scaled(1 / shrink)
        if interpolation == "area":
            place = Box(*map(round, place))
        # If a side is not a multiple of `shrink`, the side of the decoded image is rounded up.
        sides = -(-height // shrink), -(-width // shrink)
        outer = _around(place, into.shape, interpolation if reads_outside else None, *sides)
        pixels = self._decoded(outer, shrink)
        if pixels is None:
            return False
        resample(pixels, into, interpolation, place.within(outer))
        out[:] = _upright(into, turn)
        return True

    def _decoded(self, place: Box, shrink: int) -> np.ndarray | None:
        """Decodes a rectangle at 1 / `shrink` of the stored size; None: the JPEG is damaged."""
        decoded = _jpeg.decode(self._data, *place, shrink)
        if decoded is None:
            return None
        rows, stride, start = decoded
        pixels = np.frombuffer(rows, np.uint8).reshape(place.height, stride, 3)
        return pixels[:, start : start + place.width]

    def _as_stored(self, box: Box) -> Box:
        """Converts coordinates in the upright image to coordinates in the stored (turned) image."""
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
        """Converts a rectangle of the upright image to pixels of the decoded image.

        The JPEG decoder reduces the stored image by the factor `shrink // by_area`, and averaging
        then reduces the decoded image by `by_area`. Edges are rounded to multiples of `shrink`.
        """
        stored = self._as_stored(box)
        if shrink == 1:
            return stored
        return tuple(edge * by_area for edge in _snap(stored, shrink, *self._stored))


class WholeJpeg(Jpeg):
    """An encoded JPEG for many rectangles: decodes the whole image instead of each rectangle.

    The image is decoded at most once at each of the sizes 1/1, 1/2, 1/4 and 1/8. The pixels equal
    those of `Jpeg`; only bilinear crops to a square are rounded differently.
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
    """Flips and swap of the axes that turn a stored image upright; the flips come first."""

    swap: bool
    flip_x: bool
    flip_y: bool


ORIENTATION = 0x0112  # EXIF tag.
# Starts of the types and contents of a PNG's chunks that may contain an orientation.
PNG_METADATA = (b"eXIf", b"zTXtRaw profile type exif", b"tEXtRaw profile", b"iTXtXML:com.adobe.xmp")
# The turn for each EXIF orientation. With an unknown orientation an image counts as upright, as in
# Pillow.
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
    """Returns the largest power of two by which the sides of `box` can be divided.

    The quotients must be at least `size`. The result is 1 if `box` is smaller than `size`.
    """
    height, width = (size, size) if isinstance(size, int) else size
    times = int(min(box.height // height, box.width // width))
    return 1 << max(0, times.bit_length() - 1)


def _snap(box: Box, shrink: int, height: int, width: int) -> Box:
    """Converts a rectangle of an image to whole pixels of the image reduced by the factor `shrink`.

    Halves are rounded up. The result has at least one row and one column, and does not exceed the
    whole pixels of the reduced image.
    """
    left, top, right, bottom = ((edge + shrink // 2) // shrink for edge in box)
    right = min(max(right, 1), width // shrink)
    bottom = min(max(bottom, 1), height // shrink)
    return Box(min(left, right - 1), min(top, bottom - 1), right, bottom)


def before_resize(
    sides: tuple[int, int], corner: tuple[int, int], size: tuple[int, ...], height: int, width: int
) -> Box:
    """Converts the rectangle of a crop to coordinates of the image before the resize.

    Args:
      sides: height and width of the image after the resize; `height` and `width` are those before.
      corner, size: top and left edge of the crop in the resized image, and its height and width.
    """
    y, x, (top, left) = height / sides[0], width / sides[1], corner
    return Box(left * x, top * y, (left + size[1]) * x, (top + size[0]) * y)


def _around(
    box: Box, size: tuple[int, ...], interpolation: str | None, height: int, width: int
) -> Box:
    """Returns the rectangle of all pixels that influence the resize of `box` to `size`.

    The filter of an interpolation (a key of `PILLOW`) also reads pixels around `box`. None: only
    the pixels of `box` are included. `height` and `width` are those of the image.
    """
    reach = PILLOW[interpolation][1] if interpolation else 0
    x, y = (reach * max(1.0, side) for side in (box.width / size[1], box.height / size[0]))
    left, top = math.floor(box.left - x), math.floor(box.top - y)
    right, bottom = math.ceil(box.right + x), math.ceil(box.bottom + y)
    return Box(max(left, 0), max(top, 0), min(right, width), min(bottom, height))


def _average(pixels: np.ndarray, shrink: int) -> np.ndarray:
    """Reduces an image by averaging each square of `shrink` x `shrink` pixels to one pixel."""
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
        return TURNS.get(opened.getexif().get(ORIENTATION), TURNS[1])
    except Exception:  # An image with damaged EXIF is still readable.
        return TURNS[1]


def hidden_orientation(image: bytes) -> int | None:
    """Returns the EXIF orientation of an image that is turned or mirrored, but keeps its size.

    Annotations of such an image may fit the stored or the upright pixels: their size is the same.
    The orientation is from 2 to 8. The result is None for other images, and for images that cannot
    be read.
    """
    if not _may_be_turned(image):
        return None
    try:
        opened = Image.open(io.BytesIO(image), formats=FORMATS)
        orientation = opened.getexif().get(ORIENTATION, 1)
    except Exception:  # Pillow's parsers raise errors of any type.
        return None
    turn = TURNS.get(orientation, TURNS[1])
    if turn == TURNS[1] or (turn.swap and opened.height != opened.width):
        return None
    return orientation


def _may_be_turned(image: bytes) -> bool:
    """Returns False if an encoded image has no EXIF orientation; does not decode the image."""
    if _jpeg is not None and (header := _jpeg.size(image)) is not None:
        return header[2]
    if not image.startswith(b"\x89PNG"):
        return True
    at = 8
    while at < len(image):  # Pillow would decode the whole PNG to find chunks at its end.
        if image.startswith(PNG_METADATA, at + 4):
            return True
        at += 12 + int.from_bytes(image[at : at + 4], "big")
    return False


def _upright(pixels: np.ndarray, turn: Turn) -> np.ndarray:
    """Returns the pixels of a stored image, turned upright."""
    if turn.flip_x:
        pixels = pixels[:, ::-1]
    if turn.flip_y:
        pixels = pixels[::-1]
    return pixels.swapaxes(0, 1) if turn.swap else pixels


def resize(pixels: np.ndarray, out: np.ndarray) -> None:
    """Resizes `pixels` into uint8 `out`, bilinear without antialiasing, as in the paper's code."""
    cv2.resize(pixels, out.shape[1::-1], dst=out, interpolation=cv2.INTER_LINEAR)


def resample(
    pixels: np.ndarray, out: np.ndarray, interpolation: str, box: Box | None = None
) -> None:
    """Resizes uint8 `[height, width, 3]` into uint8 `out` with an averaging interpolation.

    Args:
      interpolation: a key of `DETAIL`.
      box: rectangle to resize; Pillow's filters also read pixels around it. None: the whole image.
    """
    if interpolation == "area":
        return _resize_area(pixels, out)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    if box:  # By rounding, an edge may lie outside of the image.
        left, top = max(box.left, 0), max(box.top, 0)
        box = left, top, min(box.right, image.width), min(box.bottom, image.height)
    out[:] = np.asarray(image.resize(out.shape[1::-1], PILLOW[interpolation][0], box=box))


def _resize_area(pixels: np.ndarray, out: np.ndarray) -> None:
    """Resizes an image by averaging over the area of each output pixel.

    OpenCV averages only where no side is enlarged, so sides are enlarged in a second step.
    """
    height, width = (min(sides) for sides in zip(pixels.shape, out.shape[:2], strict=False))
    if (height, width) != out.shape[:2]:
        pixels = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
    cv2.resize(pixels, out.shape[1::-1], dst=out, interpolation=cv2.INTER_AREA)
