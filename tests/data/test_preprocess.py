"""Which rectangle of an image is seen, and at what size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.malformed import encode, picture
from vit_jax.data.decode import INTERPOLATIONS
from vit_jax.data.preprocess import CROPS, TestCrop, TrainCrop, inception_box, part_box, random_resized_box

sides = st.integers(1, 5000)


@pytest.mark.parametrize("draw", [inception_box, random_resized_box])
@given(sides, sides, st.integers(0, 2**32))
def test_random_box_lies_within_the_image(draw, height, width, seed):
    left, top, right, bottom = draw(np.random.default_rng(seed), height, width)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_image_too_narrow_for_any_draw_is_seen_whole_or_in_its_middle():
    narrow = dict(height=1000, width=10, area=(0.9, 1.0))
    assert inception_box(np.random.default_rng(0), **narrow) == (0, 0, 10, 1000)
    assert random_resized_box(np.random.default_rng(0), **narrow) == (0, 493, 10, 506)


@given(
    sides,
    sides,
    st.sampled_from(("square", "short_side")),
    st.integers(1, 500),
    st.integers(0, 500),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_part_box_lies_within_the_image(height, width, kind, size, more, x, y):
    left, top, right, bottom = part_box(height, width, kind, size + more, size, x, y)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("kind", CROPS)
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_train_crop_is_a_function_of_its_draws(kind, mode, interpolation):
    crop = TrainCrop(16, kind, resize=20, mode=mode, interpolation=interpolation)
    image = encode(picture())
    first, again, other = (crop(image, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert first.shape == (16, 16, 3) and first.dtype == np.uint8
    np.testing.assert_array_equal(first, again)
    assert np.array_equal(first, other) == (kind == "none")


def test_train_crop_keeps_left_and_right():
    ramp = np.tile(np.arange(64, dtype=np.uint8)[None, :, None], (64, 1, 3))
    for seed in range(50):
        crop = TrainCrop(16)(ramp, np.random.default_rng(seed))
        assert crop[0, 0, 0] < crop[0, -1, 0]


@pytest.mark.parametrize(("kind", "expected"), [("square", 16 / 9), ("short_side", 1)])
def test_random_part_of_a_wide_image_is_squeezed_or_not(kind, expected):
    y, x = np.mgrid[:90, :160].astype(np.uint8)
    crop = TrainCrop(45, kind, resize=90)(np.stack([x, y, y], -1), np.random.default_rng(0))
    across, down = np.ptp(crop[0, :, 0].astype(int)), np.ptp(crop[:, 0, 1].astype(int))
    assert across / down == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("kind", ["square", "short_side"])
def test_random_part_reaches_every_edge(kind):
    y, x = np.mgrid[:100, :120].astype(np.uint8)
    image = np.stack([x, y, y], -1)
    crops = [TrainCrop(50, kind, resize=100)(image, np.random.default_rng(seed)) for seed in range(200)]
    assert min(crop[..., 0].min() for crop in crops) < 5 and max(crop[..., 0].max() for crop in crops) > 114
    assert min(crop[..., 1].min() for crop in crops) < 5 and max(crop[..., 1].max() for crop in crops) > 94


def test_short_side_test_crop_keeps_the_aspect_ratio_and_the_centre():
    pixels = np.zeros((100, 300, 3), np.uint8)
    pixels[40:60, 140:160] = 255  # A square in the middle of a wide image.
    bright = np.argwhere(TestCrop(50, resize=50)(pixels)[..., 0] > 127)
    assert tuple(bright.min(0)) == (20, 20)
    assert tuple(bright.max(0)) == (29, 29)


def test_square_test_crop_of_its_own_size_is_all_of_the_image():
    pixels = np.zeros((100, 300, 3), np.uint8)
    pixels[:50, :150] = 255
    crop = TestCrop(50, "square", resize=50)(pixels)
    assert crop[:24, :24].min() == 255 and crop[26:].max() == 0 and crop[:, 26:].max() == 0


@pytest.mark.parametrize("kind", ["square", "short_side"])
def test_test_crop_leaves_out_the_margin(kind):
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[16:240, 16:240] = 200
    assert TestCrop(224, kind, resize=256)(pixels).min() == 200


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_test_crop_of_height_and_width_keeps_the_aspect_ratio_and_the_centre(mode):
    pixels = np.zeros((120, 300, 3), np.uint8)
    pixels[50:70, 140:160] = 255
    crop = TestCrop((60, 100), resize=60, mode=mode)(encode(pixels, quality=95))
    bright = np.argwhere(crop[..., 0] > 127)
    assert crop.shape == (60, 100, 3)
    assert (tuple(bright.min(0)), tuple(bright.max(0))) == ((25, 45), (34, 54))


@given(sides, sides, st.integers(1, 500), st.integers(1, 500))
def test_part_of_height_and_width_is_the_largest_of_its_aspect_ratio(height, width, rows, columns):
    box = part_box(height, width, "short_side", min(rows, columns), (rows, columns), 0.5, 0.5)
    assert box.height == height or box.width == width
    assert abs(box.width - box.height * columns / rows) <= 1 + columns / rows  # Whole pixels.
    left, top, right, bottom = box
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
