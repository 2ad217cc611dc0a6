"""Decoding and cropping."""

import contextlib
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vit_jax.data.preprocess import Unreadable, central_crop, decode, inception_crop_box, random_crop


def encoded(mode: str = "RGB", form: str = "JPEG", size: tuple[int, int] = (40, 30)) -> bytes:
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(256, size=(*size[::-1], 3), dtype=np.uint8)).convert(mode)
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 2**32))
def test_crop_lies_within_the_image(height, width, seed):
    left, top, right, bottom = inception_crop_box(np.random.default_rng(seed), height, width)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@given(st.integers(0, 2**32))
def test_crop_has_a_legal_area_and_aspect_ratio(seed):
    left, top, right, bottom = inception_crop_box(np.random.default_rng(seed), 1000, 1100)
    width, height = right - left, bottom - top
    assert 0.049 <= width * height / 1_100_000 <= 1.001
    assert 3 / 4 - 0.01 <= width / height <= 4 / 3 + 0.01


def test_image_too_narrow_for_any_draw_gets_a_central_crop():
    box = inception_crop_box(np.random.default_rng(0), 1000, 10, area=(0.9, 1.0))
    assert box == (0, 493, 10, 506)


def test_random_crop_mirrors_half_of_the_images():
    image = Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint32).reshape(64, 64, 3).astype(np.uint8))
    crops = [random_crop(image, np.random.default_rng(i), 64, area=(1, 1), aspect=(1, 1)) for i in range(200)]
    mirrored = sum(np.array_equal(crop, np.asarray(image)[:, ::-1]) for crop in crops)
    assert 70 < mirrored < 130
    assert mirrored + sum(np.array_equal(crop, image) for crop in crops) == 200


def test_random_crop_without_flip_keeps_left_and_right():
    ramp = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8)[None, :, None], (64, 1, 3)))
    for seed in range(50):
        crop = random_crop(ramp, np.random.default_rng(seed), 16, flip=False)
        assert crop.shape == (16, 16, 3) and crop.dtype == np.uint8
        assert crop[0, 0, 0] < crop[0, -1, 0]


def test_central_crop_keeps_the_aspect_ratio_and_the_centre():
    pixels = np.zeros((100, 300, 3), np.uint8)
    pixels[40:60, 140:160] = 255  # A square in the middle of a wide image.
    crop = central_crop(Image.fromarray(pixels), size=50, resize=50)
    bright = np.argwhere(crop[..., 0] > 127)
    assert tuple(bright.min(0)) == (20, 20)
    assert tuple(bright.max(0)) == (29, 29)


def test_central_crop_leaves_out_the_margin():
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[16:240, 16:240] = 200
    assert central_crop(Image.fromarray(pixels), size=224, resize=256).min() == 200


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_of_any_mode_becomes_rgb(mode):
    assert np.asarray(decode(encoded(mode))).shape == (30, 40, 3)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_png_of_any_mode_becomes_rgb(mode):
    assert np.asarray(decode(encoded(mode, "PNG"))).shape == (30, 40, 3)


def test_sixteen_bit_grey_keeps_its_brightness():
    file = io.BytesIO()
    Image.fromarray(np.array([[0, 32768, 65535]], np.uint16)).save(file, "PNG")
    assert np.asarray(decode(file.getvalue()))[0, :, 0].tolist() == [0, 128, 255]


def test_phone_pictures_stand_upright():
    image = Image.fromarray(np.zeros((20, 40, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # Turned by a quarter.
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif)
    assert decode(file.getvalue()).size == (20, 40)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@given(share=st.floats(0, 0.95))
def test_image_cut_short_is_unreadable(form, share):
    whole = encoded(form=form)
    with pytest.raises(Unreadable):
        decode(whole[: int(share * len(whole))])


@given(st.binary(max_size=300))
def test_bytes_that_are_no_image_are_unreadable(content):
    with pytest.raises(Unreadable):
        decode(content)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_damaged_image_is_decoded_or_unreadable(position, value):
    damaged = bytearray(encoded(form="PNG"))
    damaged[position % len(damaged)] = value
    with contextlib.suppress(Unreadable):
        assert decode(bytes(damaged)).mode == "RGB"


def test_decompression_bomb_is_unreadable():
    file = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(file, "PNG")
    with pytest.raises(Unreadable):
        decode(file.getvalue())
