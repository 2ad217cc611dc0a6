"""Photometric distortions equal those of NumPy, OpenCV and torchvision, and have the right
probabilities.
"""

import pickle
from collections import Counter

import cv2
import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from tests.data.test_timm_augment import photograph
from vit_jax.config import base_config, check
from vit_jax.data.photometric import VARIANTS, PhotometricDistortion
from vit_jax.errors import UserError
from vit_jax.options.data import PHOTOMETRIC
from vit_jax.runs.assemble import image_augmentation


def in_hsv(pixels: np.ndarray, change) -> np.ndarray:
    """Returns an RGB image after a change of its HSV values, with channels in mmcv's order, BGR."""
    hsv = cv2.cvtColor(np.ascontiguousarray(pixels[..., ::-1]), cv2.COLOR_BGR2HSV)
    change(hsv)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[..., ::-1]


def mmsegmentation(pixels: np.ndarray, name: str, strength: float) -> np.ndarray:
    """Applies a distortion of mmsegmentation with its defaults 32, (0.5, 1.5), (0.5, 1.5), 18."""
    floats = pixels.astype(np.float32)
    if name == "brightness":
        return (floats + 32 * strength).clip(0, 255).astype(np.uint8)
    if name == "contrast":
        return (floats * (1 + strength / 2)).clip(0, 255).astype(np.uint8)

    def change(hsv):
        if name == "hue":
            hsv[..., 0] = (hsv[..., 0].astype(int) + int(18 * (1 + strength)) - 18) % 180
        else:
            hsv[..., 1] = np.minimum(hsv[..., 1] * np.float32(1 + strength / 2), 255)

    return in_hsv(pixels, change)


def test_mmsegmentations_distortions_are_bit_exact():
    distortion = PhotometricDistortion("mmsegmentation")
    for seed in range(30):
        pixels = expected = np.asarray(photograph(40, 33, seed))
        for name, strength in distortion.draw(np.random.default_rng(seed)):
            expected = mmsegmentation(expected, name, strength)
        np.testing.assert_array_equal(distortion(pixels, np.random.default_rng(seed)), expected)


@pytest.mark.parametrize("variant", ["dinov3", "eomt"])
def test_distortions_of_dinov3_and_eomt_are_torchvisions(torch, variant):
    functional = pytest.importorskip("torchvision.transforms.v2").functional
    theirs = {
        "brightness": lambda x, strength: functional.adjust_brightness(x, 1 + 32 / 255 * strength),
        "contrast": lambda x, strength: functional.adjust_contrast(x, 1 + strength / 2),
        "saturation": lambda x, strength: functional.adjust_saturation(x, 1 + strength / 2),
        "hue": lambda x, strength: functional.adjust_hue(
            x, dict(dinov3=0.5, eomt=0.05)[variant] * strength
        ),
    }
    for name in ("brightness", "contrast") if variant == "dinov3" else ():
        theirs[name] = lambda x, strength, name=name: torch.tensor(
            mmsegmentation(x.permute(1, 2, 0).numpy(), name, strength)
        ).permute(2, 0, 1)
    for seed, (name, function) in enumerate(3 * list(theirs.items())):
        pixels = np.asarray(photograph(40, 33, seed))
        strength = np.random.default_rng(seed).uniform(-1, 1)
        ours = getattr(VARIANTS[variant], name)(pixels, strength)
        expected = function(torch.tensor(pixels).permute(2, 0, 1), strength).permute(1, 2, 0)
        error = np.abs(ours.astype(int) - expected.numpy().astype(int))
        # OpenCV's hue has a resolution of 2 degrees.
        assert error.max() <= (10 if name == "hue" else 1)
        assert name != "hue" or error.mean() < 1.5


def test_each_distortion_has_probability_half_and_the_contrast_two_places():
    rng = np.random.default_rng(0)
    draws = [PhotometricDistortion("eomt").draw(rng) for _ in range(4000)]
    names = Counter(name for draw in draws for name, _ in draw)
    for count in names.values():
        assert chisquare([count, 4000 - count]).pvalue > 1e-3
    complete = Counter(tuple(name for name, _ in draw) for draw in draws if len(draw) == 4)
    early = ("brightness", "contrast", "saturation", "hue")
    late = ("brightness", "saturation", "hue", "contrast")
    assert {*complete} == {early, late} and chisquare([*complete.values()]).pvalue > 1e-3
    strengths = [strength for draw in draws for _, strength in draw]
    assert kstest(strengths, "uniform", (-1, 2)).pvalue > 1e-3


@pytest.mark.parametrize("variant", PHOTOMETRIC)
def test_a_run_has_a_variant_by_its_name(variant):
    config = base_config()
    config.steps = 2
    config.augment.photometric = variant
    check(config)
    augment = pickle.loads(pickle.dumps(image_augmentation(config)))
    assert augment == PhotometricDistortion(variant) and variant in VARIANTS
    pixels = np.asarray(photograph(20, 20, 0))
    before = pixels.copy()
    augment(pixels, np.random.default_rng(0))
    np.testing.assert_array_equal(pixels, before)


@pytest.mark.parametrize(
    "values",
    [{"augment.three_augment": 0.0}, {"augment.color_jitter": (0.4, 0.4, 0.4)}],
)
def test_a_second_photometric_augmentation_is_rejected(values):
    config = base_config()
    config.steps = 2
    config.augment.photometric = "eomt"
    config.update_from_flattened_dict(values)
    with pytest.raises(UserError, match="photometric is 'eomt' and must be None with"):
        check(config)
