"""PIL images of all modes in memory, and BMP files with an unused fourth byte per pixel."""

import colorsys
import io
import struct

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax.data.decode import decode
from vit_jax.data.sources.handed_in import as_image
from vit_jax.errors import UserError

COLOUR = np.random.default_rng(0).integers(256, size=(4, 5, 3), dtype=np.uint8)
GREY = COLOUR[..., 0]


def pixels(image: Image.Image) -> np.ndarray:
    found = as_image(image)
    return decode(found) if isinstance(found, bytes) else found


def of_planes(mode: str, planes: np.ndarray) -> Image.Image:
    return Image.frombytes(mode, planes.shape[1::-1], np.ascontiguousarray(planes).tobytes())


def test_cmyk_is_converted_as_ink():
    inks = np.random.default_rng(1).integers(256, size=(4, 5, 4), dtype=np.uint8)
    expected = (255 - inks[..., :3]) * (255.0 - inks[..., 3:]) / 255
    np.testing.assert_allclose(pixels(of_planes("CMYK", inks)), expected, atol=1)


def test_ycbcr_is_converted_to_rgb():
    planes = cv2.cvtColor(COLOUR, cv2.COLOR_RGB2YCrCb)[..., [0, 2, 1]]
    np.testing.assert_allclose(pixels(of_planes("YCbCr", planes)), COLOUR.astype(int), atol=2)


def test_hsv_is_converted_to_rgb():
    found = pixels(of_planes("HSV", COLOUR)).reshape(-1, 3)
    expected = [colorsys.hsv_to_rgb(*cell) for cell in (COLOUR / 255).reshape(-1, 3).tolist()]
    np.testing.assert_allclose(found, np.array(expected) * 255, atol=3)


@pytest.mark.parametrize("mode", ["I", "I;16", "I;16L", "I;16B"])
def test_grey_of_many_bits_is_of_full_range(mode):
    levels = GREY.astype({"I": "<i4", "I;16B": ">u2"}.get(mode, "<u2")) * 257
    np.testing.assert_array_equal(
        pixels(of_planes(mode, levels)), np.repeat(GREY[..., None], 3, axis=-1)
    )


def test_grey_of_floats_is_from_0_to_1():
    image = Image.fromarray((GREY / 255).astype(np.float32))
    np.testing.assert_array_equal(pixels(image), np.repeat(GREY[..., None], 3, axis=-1))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.fromarray(GREY).convert("F"), r"goes beyond \[0, 1\]"),
        (
            Image.fromarray(GREY).convert("I"),
            r"mode I.*as 16 bits.*convert\(.I;16.\), or .*convert\(.L.\)",
        ),
        (
            Image.fromarray(GREY.astype(np.int32) * 65_536),
            "levels from .* to .*, and is read as 16 bits",
        ),
    ],
    ids=["F", "I of 8 bits", "I of 24 bits"],
)
def test_ambiguous_levels_are_refused(image, message):
    with pytest.raises(UserError, match=message):
        as_image(image)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBX"])
def test_other_opaque_modes_are_pillows_rgb(mode):
    image = Image.fromarray(COLOUR).convert(mode)
    np.testing.assert_array_equal(pixels(image), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["LA", "PA", "RGBa", "RGBA"])
def test_transparent_modes_are_put_on_white(mode):
    image = Image.fromarray(np.full((2, 2, 4), (9, 9, 9, 0), np.uint8))
    if mode == "PA":
        image = image.convert("P").convert("PA")
        image.putalpha(0)
    image = image.convert(mode)
    assert (pixels(image) == 255).all()


def bmp(alpha: np.ndarray) -> bytes:
    """Returns a BMP of 32 bits with an alpha mask (BITMAPV4HEADER), as written by Windows."""
    rows = np.dstack([COLOUR[..., ::-1], alpha])[::-1].tobytes()
    header = struct.pack("<IiiHHIIiiII", 108, 5, 4, 1, 32, 3, len(rows), 2835, 2835, 0, 0)
    header += struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    header = header.ljust(108, b"\0")
    return b"BM" + struct.pack("<IHHI", 122 + len(rows), 0, 0, 122) + header + rows


def test_idle_alpha_of_a_bmp_is_no_transparency():
    idle = bmp(np.zeros((4, 5), np.uint8))
    np.testing.assert_array_equal(
        decode(idle), cv2.imdecode(np.frombuffer(idle, np.uint8), 1)[..., ::-1]
    )
    np.testing.assert_array_equal(pixels(Image.open(io.BytesIO(idle))), COLOUR)
    used = np.zeros((4, 5), np.uint8)
    used[1, 2] = 255
    expected = np.where(used[..., None], COLOUR, 255)
    np.testing.assert_array_equal(decode(bmp(used)), expected)
    np.testing.assert_array_equal(pixels(Image.open(io.BytesIO(bmp(used)))), expected)
