"""Colour distortions of views equal torchvision's and have each view's probabilities."""

import itertools
import pickle
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.stats import binomtest, chisquare, kstest

from vit_jax.config import base_config, check
from vit_jax.data.colour_distortion import OPERATIONS, ColourDistortion
from vit_jax.errors import UserError
from vit_jax.runs.assemble import training_views

AUTHORS = (0.4, 0.4, 0.2, 0.1)
ALL = ColourDistortion(AUTHORS, 1.0, grey=0.3, blur=0.6, solarize=0.4)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    small = Image.fromarray(noise(5, 7))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture
def reference(torch):
    """Returns the authors' operations by name: those of torchvision, and Pillow's blur."""
    transforms = pytest.importorskip("torchvision.transforms")
    functional = transforms.functional
    return {
        "brightness": functional.adjust_brightness,
        "contrast": functional.adjust_contrast,
        "saturation": functional.adjust_saturation,
        "hue": functional.adjust_hue,
        "grey": lambda image, _: functional.to_grayscale(image, 3),
        "blur": OPERATIONS["blur"],
        "solarize": functional.solarize,
    }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *(
            (name, (0, 0.6, 0.83, 1, 1.2, 1.4, 3))
            for name in ("brightness", "contrast", "saturation")
        ),
        ("hue", (-0.5, -0.1, -0.0371, -0.001, 0, 0.001, 0.05, 0.1, 0.5)),
        ("grey", (1,)),
        ("solarize", (128,)),
    ],
)
def test_operation_is_torchvisions_to_the_bit(name, values, reference):
    for pixels, value in itertools.product((noise(33, 47), smooth(40, 56)), values):
        image = Image.fromarray(pixels)
        np.testing.assert_array_equal(OPERATIONS[name](image, value), reference[name](image, value))


def test_blurs_radius_is_the_deviation_of_a_gaussian():
    pixels = smooth(60, 60)
    for radius in (0.1, 0.7, 2.0):
        blurred = np.asarray(OPERATIONS["blur"](Image.fromarray(pixels), radius)).astype(float)
        wanted = gaussian_filter(pixels.astype(float), (radius, radius, 0), mode="nearest")
        assert np.abs(blurred - wanted).mean() < 0.6
    assert np.abs(blurred - pixels).mean() > 1.2


def test_call_applies_the_drawn_operations_in_order(reference):
    pixels = smooth(24, 24)
    for seed in range(40):
        image = Image.fromarray(pixels)
        for name, value in ALL.draw(np.random.default_rng(seed)):
            image = reference[name](image, value)
        np.testing.assert_array_equal(ALL(pixels, np.random.default_rng(seed)), image)


def test_jitters_order_and_factors_are_uniform():
    rng, strengths = np.random.default_rng(0), (0.4, 1.5, 0.2, 0.1)
    drawn = [ColourDistortion(strengths, 1.0).draw(rng) for _ in range(6000)]
    orders = Counter(tuple(name for name, _ in done) for done in drawn)
    assert len(orders) == 24 and chisquare([*orders.values()]).pvalue > 0.01
    ranges = dict(brightness=(0.6, 1.4), contrast=(0, 2.5), saturation=(0.8, 1.2), hue=(-0.1, 0.1))
    for name, (least, most) in ranges.items():
        factors = [dict(done)[name] for done in drawn]
        assert kstest(factors, "uniform", (least, most - least)).pvalue > 0.01


def test_operations_are_done_with_their_probabilities_and_in_their_order():
    rng = np.random.default_rng(0)
    distortion = ColourDistortion((0.4, 0, 0, 0), 0.8, grey=0.2, blur=0.1, solarize=0.3)
    drawn = [distortion.draw(rng) for _ in range(6000)]
    shares = dict(brightness=0.8, grey=0.2, blur=0.1, solarize=0.3)
    names = [[name for name, _ in done] for done in drawn]
    assert all(done == [name for name in shares if name in done] for done in names)
    for name, share in shares.items():
        assert binomtest(sum(name in done for done in names), len(names), share).pvalue > 0.01
    pairs = sum("grey" in done and "solarize" in done for done in names)
    assert binomtest(pairs, len(names), 0.2 * 0.3).pvalue > 0.01
    radii = [dict(done)["blur"] for done in drawn if "blur" in dict(done)]
    assert kstest(radii, "uniform", (0.1, 1.9)).pvalue > 0.01


def test_distortion_keeps_its_input_and_replays():
    pixels = noise(9, 13)
    before = pixels.copy()
    pixels.setflags(write=False)
    copy = pickle.loads(pickle.dumps(ALL))
    for seed in range(20):
        first, second = (one(pixels, np.random.default_rng(seed)) for one in (ALL, copy))
        assert (first.shape, first.dtype) == (pixels.shape, np.uint8)
        np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(pixels, before)


def config_of(**values):
    config = base_config()
    config.objective.name = "dino"
    config.dino.update(values)
    config.data.update(dict(image_size=16, crop="random_resized"))
    return config


def test_views_get_the_distortions_of_the_config():
    config = config_of(
        jitter=AUTHORS,
        grey=0.2,
        blur=(1.0, 0.1, 0.5),
        solarize=(0.0, 0.2, 0.3),
        local_crops=3,
        local_size=8,
    )
    large, small = training_views(config)
    first = ColourDistortion(AUTHORS, 0.8, 0.2, blur=1.0, solarize=0.0)
    assert large.distort == (first, ColourDistortion(AUTHORS, 0.8, 0.2, 0.1, 0.2))
    assert small.distort == 3 * (ColourDistortion(AUTHORS, 0.8, 0.2, 0.5, 0.3),)


def test_defaults_are_those_of_dinos_authors():
    """As `DataAugmentationDINO` in main_dino.py of facebookresearch/dino."""
    large, small = training_views(config_of())
    assert large.distort == (
        ColourDistortion(AUTHORS, 0.8, 0.2, blur=1.0),
        ColourDistortion(AUTHORS, 0.8, 0.2, blur=0.1, solarize=0.2),
    )
    assert small.distort == 8 * (ColourDistortion(AUTHORS, 0.8, 0.2, blur=0.5),)


def test_nothing_is_distorted_with_probabilities_of_0():
    pixels = noise(8, 8)
    off = dict(jitter=(0.0,) * 4, grey=0.0, blur=(0.0,) * 3, solarize=(0.0,) * 3)
    for view in training_views(config_of(**off, local_crops=2)):
        for distortion in view.distort:
            np.testing.assert_array_equal(distortion(pixels, np.random.default_rng(0)), pixels)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(jitter=(0.4, 0.4, 0.2, 0.6)), "the hue's, is at most 0.5"),
        (dict(jitter=(0.4, -0.1, 0.2, 0.1)), "4 numbers from 0 to 100"),
        (dict(jitter=(0.4, 0.4, 0.2)), "4 numbers from 0 to 100"),
        (dict(blur=(1.0, 0.1)), "3 numbers from 0 to 1"),
        (dict(solarize=(0.0, 1.2, 0.0)), "3 numbers from 0 to 1"),
        (dict(grey=-0.1), "a finite number, 0 or above, at most 1"),
    ],
)
def test_impossible_values_are_refused_in_one_line(values, words):
    with pytest.raises(UserError, match=words) as error:
        check(config_of(**values))
    assert re.fullmatch(f"config.dino.{next(iter(values))} is .*", str(error.value))
