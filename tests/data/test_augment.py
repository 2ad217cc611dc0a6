"""RandAugment's operations equal those of Pillow and NumPy, and augmentations are deterministic."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from vit_jax.data.randaugment import (
    GREY,
    OPERATIONS,
    adjust_brightness,
    adjust_contrast,
    adjust_saturation,
    adjust_sharpness,
    affine,
    autocontrast,
    color_jitter,
    cutout,
    equalize,
    host_augmentation,
    posterize,
    randaugment,
    resolve,
    rotate,
    solarize,
    solarize_add,
    translate,
)
from vit_jax.errors import UserError
from vit_jax.options.data import LEVELS


def picture(height=40, width=56, seed=0) -> np.ndarray:
    """Returns a smooth image: one channel has all values, another has few."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(256, size=(5, 7, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return (pixels * (1, 0.5, 0.7) + (0, 60, 20)).clip(0, 255).astype(np.uint8)


def close(ours: np.ndarray, theirs, levels: float) -> None:
    assert ours.dtype == np.uint8
    assert np.abs(ours.astype(int) - np.asarray(theirs)).max() <= levels


class Draws:
    """A random generator that always returns the same number."""

    def __init__(self, value: float):
        self.random = lambda: value


def apply(name: str, pixels: np.ndarray, magnitude: float, draw=0.0) -> np.ndarray:
    return OPERATIONS[name](pixels, magnitude / 10, Draws(draw))


@pytest.mark.parametrize("seed", range(3))
def test_equalize_is_pillows(seed):
    pixels = picture(seed=seed)
    np.testing.assert_array_equal(equalize(pixels), ImageOps.equalize(Image.fromarray(pixels)))


@pytest.mark.parametrize("seed", range(3))
def test_autocontrast_is_pillows(seed):
    pixels = picture(seed=seed)
    close(autocontrast(pixels), ImageOps.autocontrast(Image.fromarray(pixels)), 1)


@pytest.mark.parametrize("operation", [autocontrast, equalize])
def test_images_of_one_colour_are_unchanged(operation):
    pixels = np.full((9, 11, 3), (7, 200, 0), np.uint8)
    np.testing.assert_array_equal(operation(pixels), pixels)


def test_invert_is_pillows():
    pixels = picture()
    np.testing.assert_array_equal(
        apply("Invert", pixels, 10), ImageOps.invert(Image.fromarray(pixels))
    )


@pytest.mark.parametrize("bits", range(1, 9))
def test_posterize_is_pillows(bits):
    pixels = picture()
    np.testing.assert_array_equal(
        posterize(pixels, bits), ImageOps.posterize(Image.fromarray(pixels), bits)
    )


@pytest.mark.parametrize("threshold", [0, 1, 77, 128, 255])
def test_solarize_is_pillows(threshold):
    pixels = picture()
    np.testing.assert_array_equal(
        solarize(pixels, threshold), ImageOps.solarize(Image.fromarray(pixels), threshold)
    )


@pytest.mark.parametrize("addition", [0, 55, 110, 330])
def test_solarize_add_raises_the_dark_values(addition):
    pixels = picture()
    raised = np.where(pixels < 128, np.minimum(pixels.astype(int) + addition, 255), pixels)
    np.testing.assert_array_equal(solarize_add(pixels, addition), raised)


@pytest.mark.parametrize("factor", [0.0, 0.1, 0.7, 1.0, 1.9, 3.7])
@pytest.mark.parametrize(
    ("ours", "theirs", "levels"),
    [
        (adjust_brightness, ImageEnhance.Brightness, 1),
        # Both implementations round the image that they blend with. Factors above 1 magnify the
        # error.
        (adjust_contrast, ImageEnhance.Contrast, 3),
        (adjust_saturation, ImageEnhance.Color, 3),
        (adjust_sharpness, ImageEnhance.Sharpness, 3),
    ],
)
def test_enhancement_is_pillows(ours, theirs, levels, factor):
    pixels = picture()
    close(ours(pixels, factor), theirs(Image.fromarray(pixels)).enhance(factor), levels)


@pytest.mark.parametrize(
    "change", [adjust_brightness, adjust_contrast, adjust_saturation, adjust_sharpness]
)
def test_factor_of_one_changes_nothing(change):
    pixels = picture()
    close(change(pixels, 1.0), pixels, 0)


def sample(pixels: np.ndarray, matrix) -> np.ndarray:
    """Computes the result of `affine` pixel by pixel."""
    height, width, _ = pixels.shape
    sampled = np.full_like(pixels, GREY)
    for y in range(height):
        for x in range(width):
            u, v = np.rint(np.array(matrix) @ (x, y, 1)).astype(int)
            if 0 <= u < width and 0 <= v < height:
                sampled[y, x] = pixels[v, u]
    return sampled


@pytest.mark.parametrize(
    "matrix",
    [
        [[1, 0.31, 0], [0, 1, 0]],
        [[1, -0.31, 0], [0, 1, 0]],
        [[1, 0, 0], [0.47, 1, 0]],
        [[0.797, 0.604, 3.123], [-0.604, 0.797, 7.311]],
    ],
)
def test_affine_takes_the_nearest_pixel_or_grey(matrix):
    pixels = picture()
    same = (affine(pixels, matrix) == sample(pixels, matrix)).all(-1)
    # OpenCV computes coordinates in fixed point, which changes the rounding of midpoints.
    assert same.mean() > 0.97


@pytest.mark.parametrize("quarters", [1, 2, 3, -1])
def test_quarter_turns_are_exact(quarters):
    pixels = picture(31, 31)
    np.testing.assert_array_equal(rotate(pixels, 90 * quarters), np.rot90(pixels, quarters))


@pytest.mark.parametrize(
    ("right", "down"), [(5, 0), (-5, 0), (0, 7), (0, -7), (56, 0), (-80, 0), (0, 99)]
)
def test_translation_moves_and_fills_with_grey(right, down):
    pixels = picture()
    np.testing.assert_array_equal(
        translate(pixels, right, down), sample(pixels, [[1, 0, -right], [0, 1, -down]])
    )


def test_cutout_greys_a_square_that_may_leave_the_image():
    pixels = np.zeros((40, 56, 3), np.uint8)
    inside, corner = cutout(pixels, Draws(0.5), 6), cutout(pixels, Draws(0.0), 6)
    assert (inside[14:26, 22:34] == GREY).all() and (inside == GREY).sum() == 3 * 12 * 12
    assert (corner[:6, :6] == GREY).all() and (corner == GREY).sum() == 3 * 6 * 6


def test_operations_are_those_of_the_tensorflow_implementation():
    colours = {"AutoContrast", "Equalize", "Invert", "Posterize", "Solarize", "SolarizeAdd"}
    colours |= {"Color", "Contrast", "Brightness", "Sharpness"}
    places = {"Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout"}
    assert set(OPERATIONS) == colours | places


# The random number 0 gives the positive sign.
@pytest.mark.parametrize(
    ("name", "magnitude", "expected"),
    [
        ("Rotate", 20, lambda x: rotate(x, 60)),
        ("Posterize", 0, lambda x: posterize(x, 1)),
        ("Posterize", 10, lambda x: posterize(x, 4)),
        ("Posterize", 15, lambda x: posterize(x, 6)),
        ("Posterize", 30, lambda x: x),
        ("Solarize", 0, lambda x: 255 - x),
        ("Solarize", 5, lambda x: solarize(x, 128)),
        ("Solarize", 10, lambda x: 255 - x),
        ("Solarize", 15, lambda x: solarize(x, 128)),
        ("Color", 10, lambda x: adjust_saturation(x, 1.9)),
        ("Contrast", 0, lambda x: adjust_contrast(x, 0.1, grey=196)),
        ("Brightness", 5, lambda x: adjust_brightness(x, 1.0)),
        ("Sharpness", 20, lambda x: adjust_sharpness(x, 3.7)),
        ("ShearX", 10, lambda x: affine(x, [[1, 0.3, 0], [0, 1, 0]])),
        ("ShearY", 20, lambda x: affine(x, [[1, 0, 0], [0.6, 1, 0]])),
        # 100 of 224 pixels correspond to 25 of 56.
        ("TranslateX", 10, lambda x: translate(x, right=25)),
        # 150 of 224 pixels correspond to 27 of 40.
        ("TranslateY", 15, lambda x: translate(x, down=27)),
        ("Cutout", 20, lambda x: cutout(x, Draws(0), 14)),
        ("SolarizeAdd", 15, lambda x: solarize_add(x, 165)),
    ],
)
def test_magnitude_has_the_same_effect_as_in_the_tensorflow_implementation(
    name, magnitude, expected
):
    pixels = picture()
    np.testing.assert_array_equal(apply(name, pixels, magnitude), expected(pixels))


@pytest.mark.parametrize("name", ["Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"])
def test_direction_is_random(name):
    pixels = picture()
    assert (apply(name, pixels, 10, draw=0.1) != apply(name, pixels, 10, draw=0.9)).any()


def test_every_operation_is_drawn_equally_often(monkeypatch):
    counts = dict.fromkeys(OPERATIONS, 0)

    def counter(name):
        def count(pixels, level, rng):
            counts[name] += 1
            return pixels

        return count

    for name in counts:
        monkeypatch.setitem(OPERATIONS, name, counter(name))
    randaugment(picture(), np.random.default_rng(0), 8000, 10)
    assert min(counts.values()) > 400 and max(counts.values()) < 600


def test_brightness_jitter_is_uniform_about_one():
    pixels = np.full((1, 1, 3), 100, np.uint8)
    rng = np.random.default_rng(0)
    values = np.array([color_jitter(pixels, rng, 0.4, 0.0, 0.0)[0, 0, 0] for _ in range(2000)])
    assert (values.min(), values.max()) == (60, 140)
    assert abs(values.mean() - 100) < 2 and abs(values.std() - 80 / 12**0.5) < 1.5


def test_jitter_comes_in_random_order():
    # The values of a bright image are clipped before or after the contrast changes.
    class Ordered(Draws):
        def __init__(self, order):
            self.permutation = lambda n: order
            self.uniform = lambda low, high: high

    pixels = picture()
    one, other = (
        color_jitter(pixels, Ordered(order), 0.9, 0.9, 0) for order in ([0, 1, 2], [1, 0, 2])
    )
    assert (one != other).any()


images = st.builds(
    lambda height, width, seed: np.random.default_rng(seed).integers(
        256, size=(height, width, 3), dtype=np.uint8
    ),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 99),
)


@settings(max_examples=150, deadline=None)
@given(images, st.integers(0, 2**32), st.integers(0, 4), st.floats(0, 40))
def test_augmentation_keeps_shape_and_input_and_replays(pixels, seed, layers, magnitude):
    before = pixels.copy()
    pixels.setflags(write=False)
    augment = host_augmentation((layers, magnitude), (0.4, 0.4, 1.4))
    first, second = (augment(pixels, np.random.default_rng(seed)) for _ in range(2))
    assert (first.shape, first.dtype) == (pixels.shape, np.uint8)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(pixels, before)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_leaves_its_input_as_it_is(name):
    pixels = picture()
    for magnitude in (0, 15, 40):
        apply(name, pixels, magnitude)
    np.testing.assert_array_equal(pixels, picture())


def test_augmentation_can_be_pickled():
    augment = host_augmentation((2, 15), (0.3, 0.3, 0.3))
    copy = pickle.loads(pickle.dumps(augment))
    pixels = picture()
    np.testing.assert_array_equal(
        copy(pixels, np.random.default_rng(3)), augment(pixels, np.random.default_rng(3))
    )


def test_no_augmentation_is_none():
    assert host_augmentation() is None


def test_levels_are_augregs():
    table = {
        "none": (0, 0, 0),
        "light1": (2, 0, 0),
        "light2": (2, 10, 0.2),
        "medium1": (2, 15, 0.2),
        "medium2": (2, 15, 0.5),
        "strong1": (2, 20, 0.5),
        "strong2": (2, 20, 0.8),
    }
    assert table == LEVELS


def test_given_values_replace_the_levels():
    assert resolve("medium2") == ((2, 15), 0.5)
    assert resolve("medium2", randaugment=(1, 9)) == ((1, 9), 0.5)
    assert resolve("medium2", mixup=0.0) == ((2, 15), 0.0)


def test_unknown_level_is_named_with_the_nearest():
    with pytest.raises(UserError, match="medum1.*medium1"):
        resolve("medum1")
