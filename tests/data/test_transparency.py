"""Transparent parts of images are replaced by a background."""

import io
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.data.malformed import chunk, encode, picture, png
from vit_jax.data.decode import decode
from vit_jax.data.preprocess import TestCrop, TrainCrop
from vit_jax.options.data import BACKGROUNDS, CROPS, INTERPOLATIONS, TEST_CROPS

pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")
SHADES = [(name, shade) for name, shade in BACKGROUNDS.items() if shade is not None]
UNDER = np.array([200, 30, 90], np.uint8)  # The colour of the transparent pixels.


def cut_out(height: int = 24, width: int = 30) -> np.ndarray:
    """Returns an RGBA image whose visible part is a disc.

    The right half of the disc is half transparent. The transparent pixels around it have colours
    that must not be visible.
    """
    y, x = np.mgrid[:height, :width]
    inside = np.hypot(y - height / 2, x - width / 2) < height / 3
    alpha = np.where(inside, np.where(x < width / 2, 255, 100), 0).astype(np.uint8)
    colors = np.where(inside[..., None], picture(height, width), UNDER)
    return np.dstack([colors, alpha])


def over(rgba: np.ndarray, shade: int) -> np.ndarray:
    alpha = rgba[..., 3:] / 255
    return (rgba[..., :3] * alpha + shade * (1 - alpha)).round()


def files(rgba: np.ndarray) -> dict[str, tuple[bytes, np.ndarray]]:
    """Returns encoded images with alpha by format, with their expected RGBA pixels."""
    image = Image.fromarray(rgba)
    grey = np.asarray(image.convert("LA"))
    palette = np.zeros((256, 4), np.uint8)
    palette[:] = [(i, 255 - i, i // 2, i) for i in range(256)]
    indices = np.arange(rgba.shape[0] * rgba.shape[1]).reshape(rgba.shape[:2]).astype(np.uint8)
    indexed = Image.fromarray(indices, "L")
    indexed.putpalette(palette[:, :3].tobytes())
    sixteen = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rgba.astype(">u2") * 257))
    animated = dict(save_all=True, append_images=[image.rotate(90)], lossless=True)
    return {
        "RGBA.png": (encode(image, "PNG", "RGBA"), rgba),
        "LA.png": (encode(image, "PNG", "LA"), np.dstack([grey[..., [0, 0, 0]], grey[..., 1]])),
        "palette.png": (
            encode(indexed, "PNG", "P", transparency=palette[:, 3].tobytes()),
            palette[indices],
        ),
        "16-bit.png": (png(*rgba.shape[:2], 16, 6, chunk(b"IDAT", sixteen)), rgba),
        "lossless.webp": (encode(image, "WEBP", "RGBA", lossless=True, exact=True), rgba),
        "animated.webp": (encode(image, "WEBP", "RGBA", **animated), rgba),
    }


@pytest.mark.parametrize(("background", "shade"), SHADES)
@pytest.mark.parametrize("form", files(cut_out()))
def test_transparent_picture_lies_on_its_background(form, background, shade):
    data, rgba = files(cut_out())[form]
    np.testing.assert_allclose(decode(data, background), over(rgba, shade), atol=1)


# Encoders of animated WebP do not keep the colours of transparent pixels.
@pytest.mark.parametrize("form", [form for form in files(cut_out()) if form != "animated.webp"])
def test_colours_of_transparent_pixels_are_only_visible_without_a_background(form):
    data, rgba = files(cut_out())[form]
    np.testing.assert_array_equal(decode(data, "none"), rgba[..., :3])


# Bit depth, colour type, a row of three pixels, and the transparent colour: that of the second
# pixel.
KEYED = {
    "1-bit grey": (1, 0, bytes([0b01000000]), (1,)),
    "2-bit grey": (2, 0, bytes([0b00100100]), (2,)),
    "4-bit grey": (4, 0, bytes([0x37, 0x50]), (7,)),
    "8-bit grey": (8, 0, bytes([9, 7, 8]), (7,)),
    "16-bit grey": (16, 0, bytes([1, 9, 1, 7, 1, 8]), (0x107,)),
    "8-bit colour": (8, 2, bytes([1, 2, 4, 1, 2, 3, 0, 2, 3]), (1, 2, 3)),
    "16-bit colour": (
        16,
        2,
        bytes([9, 1, 9, 2, 9, 4, 9, 1, 9, 2, 9, 3, 9, 0, 9, 2, 9, 3]),
        (0x901, 0x902, 0x903),
    ),
}


@pytest.mark.parametrize(("background", "shade"), SHADES)
@pytest.mark.parametrize("form", KEYED)
def test_only_pixels_of_the_transparent_colour_show_the_background(form, background, shade):
    """A PNG may define one colour as transparent. The other pixels differ from it by one level,
    also with 16 bits.
    """
    depth, colour, row, key = KEYED[form]
    name = chunk(b"tRNS", b"".join(level.to_bytes(2, "big") for level in key))
    body = chunk(b"IDAT", zlib.compress(b"\0" + row))
    opaque = decode(png(1, 3, depth, colour, body))
    keyed = decode(png(1, 3, depth, colour, name, body), background)
    assert keyed[0, 1].tolist() == [shade] * 3
    np.testing.assert_array_equal(keyed[:, [0, 2]], opaque[:, [0, 2]])
    np.testing.assert_array_equal(decode(png(1, 3, depth, colour, name, body), "none"), opaque)


def test_transparent_gif_lies_on_white():
    indices = np.array([[0, 1, 2]], np.uint8)
    image = Image.fromarray(indices, "L")
    image.putpalette([10, 20, 30, *UNDER, 70, 80, 90])
    for options in ({}, dict(save_all=True, append_images=[image.copy()])):
        data = encode(image, "GIF", "P", transparency=1, **options)
        assert Image.open(io.BytesIO(data)).info["transparency"] == 1
        assert decode(data)[0].tolist() == [[10, 20, 30], [255, 255, 255], [70, 80, 90]]


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_crops_contain_no_colours_of_transparent_pixels(mode, interpolation):
    """The edges must not contain these colours either: the background is added before resizing."""
    rgba, bare = cut_out(60, 60), cut_out(60, 60)
    bare[bare[..., 3] == 0] = 0
    how = dict(mode=mode, interpolation=interpolation)
    hidden, plain = (encode(Image.fromarray(image), "PNG", "RGBA") for image in (rgba, bare))
    for kind in TEST_CROPS:
        crop = TestCrop(21, kind, 25, **how)
        np.testing.assert_array_equal(crop(hidden), crop(plain))
    for kind in CROPS:
        crop = TrainCrop(21, kind, resize=25, **how)
        seen, expected = (
            crop(encode(Image.fromarray(image), "PNG", "RGBA"), np.random.default_rng(1))
            for image in (rgba, bare)
        )
        np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize(("background", "shade"), SHADES)
def test_crops_put_a_picture_on_the_background_that_they_are_given(background, shade):
    data = encode(Image.new("RGBA", (40, 40), (*UNDER.tolist(), 0)), "PNG", "RGBA")
    assert np.unique(TestCrop(16, resize=20, background=background)(data)).tolist() == [shade]
    assert np.unique(
        TrainCrop(16, background=background)(data, np.random.default_rng(0))
    ).tolist() == [shade]
