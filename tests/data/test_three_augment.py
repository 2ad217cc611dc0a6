"""3-Augment equals its implementation in torchvision, and draws each operation equally often."""

import pickle
from collections import Counter

import numpy as np
import pytest
from PIL import ImageFilter, ImageOps
from scipy.stats import chisquare, kstest

from tests.data.test_timm_augment import photograph
from vit_jax.config import base_config, check
from vit_jax.data.three_augment import ThreeAugment
from vit_jax.errors import UserError
from vit_jax.runs.assemble import image_augmentation

OURS = ThreeAugment(0.3)


def test_pixels_are_those_of_the_authors_transforms(torch):
    transforms = pytest.importorskip("torchvision.transforms")
    functional = transforms.functional
    theirs = {
        "grey": lambda image, _: transforms.Grayscale(3)(image),
        "solarize": lambda image, _: ImageOps.solarize(image),
        "blur": lambda image, radius: image.filter(ImageFilter.GaussianBlur(radius=radius)),
        "brightness": functional.adjust_brightness,
        "contrast": functional.adjust_contrast,
        "saturation": functional.adjust_saturation,
    }
    for seed in range(30):
        image = photograph(40, 33, seed)
        expected = image
        for name, value in OURS.draw(np.random.default_rng(seed)):
            expected = theirs[name](expected, value)
        np.testing.assert_array_equal(
            OURS(np.asarray(image), np.random.default_rng(seed)), expected
        )


def test_one_of_three_comes_first_and_then_the_jitter_in_any_order():
    rng = np.random.default_rng(0)
    draws = [OURS.draw(rng) for _ in range(3000)]
    assert chisquare([*Counter(first for (first, _), *_ in draws).values()]).pvalue > 1e-3
    orders = Counter(tuple(name for name, _ in draw[1:]) for draw in draws)
    assert len(orders) == 6 and chisquare([*orders.values()]).pvalue > 1e-3
    assert {*next(iter(orders))} == {"brightness", "contrast", "saturation"}
    radii = [value for (name, value), *_ in draws if name == "blur"]
    assert kstest(radii, "uniform", (0.1, 1.9)).pvalue > 1e-3
    factors = [value for draw in draws for _, value in draw[1:]]
    assert kstest(factors, "uniform", (0.7, 0.6)).pvalue > 1e-3


def test_a_run_uses_three_augment_with_its_strength():
    config = base_config()
    config.steps = 2
    config.augment.three_augment = 0.2
    check(config)
    assert pickle.loads(pickle.dumps(image_augmentation(config))) == ThreeAugment(0.2)


@pytest.mark.parametrize(
    "values",
    [
        {"augment.policy": "rand-m9"},
        {"augment.level": "light1"},
        {"augment.randaugment": (2, 15)},
        {"augment.color_jitter": (0.4, 0.4, 0.4)},
    ],
)
def test_other_augmentations_with_three_augment_are_rejected(values):
    config = base_config()
    config.steps = 2
    config.augment.three_augment = 0.3
    config.update_from_flattened_dict(values)
    with pytest.raises(UserError, match="three_augment is 0.3 and must be None with"):
        check(config)
