"""Tests of the crops, resizing and backgrounds that a config selects for a run's images."""

import itertools

import numpy as np
import pytest
from PIL import Image

from tests.data.malformed import encode
from vit_jax.config import VALUES, base_config, check
from vit_jax.data.preprocess import random_resized_box
from vit_jax.data.timm_augment import RandPolicy
from vit_jax.errors import UserError
from vit_jax.options.data import BACKGROUNDS, CROPS, INTERPOLATIONS, TEST_CROPS
from vit_jax.runs.assemble import image_augmentation, train_crop
from vit_jax.runs.evaluator import test_crop as evaluation_crop

PIXELS = np.random.default_rng(0).integers(0, 256, (90, 70, 3), np.uint8)


def config(**data):
    made = base_config()
    made.steps = 1
    made.data.update(dict(image_size=32, test_resize=40) | data)
    if made.data.crop in ("square", "short_side"):
        made.data.crop_resize = 40
    check(made)
    return made


def test_config_accepts_only_supported_crops_interpolations_and_backgrounds():
    for key, known in {
        "data.crop": CROPS,
        "data.test_crop": TEST_CROPS,
        "data.interpolation": INTERPOLATIONS,
        "data.test_interpolation": INTERPOLATIONS,
        "data.background": tuple(BACKGROUNDS),
    }.items():
        rule = VALUES[key].rule
        assert all(map(rule.holds, known)) and not rule.holds("nearest")
        assert rule.words == " or ".join(known)


@pytest.mark.parametrize("name", ["bilinear_antialias", "bicubic", "lanczos"])
def test_training_and_evaluation_use_the_configs_interpolation(name):
    filters = dict(bilinear_antialias="BILINEAR", bicubic="BICUBIC", lanczos="LANCZOS")
    by_name = Image.Resampling[filters[name]]
    made = config(interpolation=name, crop="random_resized", test_crop="square")
    box = random_resized_box(np.random.default_rng(7), *PIXELS.shape[:2])
    part = Image.fromarray(PIXELS[box.top : box.bottom, box.left : box.right]).resize(
        (32, 32), by_name
    )
    np.testing.assert_array_equal(train_crop(made)(PIXELS, np.random.default_rng(7)), part)
    whole = Image.fromarray(PIXELS).resize((40, 40), by_name).crop((4, 4, 36, 36))
    np.testing.assert_array_equal(evaluation_crop(made)(PIXELS), whole)


def test_the_default_interpolation_is_bilinear():
    assert base_config().data.interpolation is None
    crops = (train_crop(config()), evaluation_crop(config()))
    assert {crop.interpolation for crop in crops} == {"bilinear"}


@pytest.mark.parametrize(
    ("background", "shade"), [("white", 255), ("black", 0), ("grey", 128), ("none", 77)]
)
def test_training_and_evaluation_put_transparent_images_on_the_configs_background(
    background, shade
):
    data = encode(Image.new("RGBA", (50, 50), (77, 77, 77, 0)), "PNG", "RGBA")
    for interpolation, decode in itertools.product(("bilinear", "bicubic"), ("fast", "exact")):
        made = config(background=background, interpolation=interpolation, decode=decode)
        assert np.unique(train_crop(made)(data, np.random.default_rng(0))).tolist() == [shade]
        assert np.unique(evaluation_crop(made)(data)).tolist() == [shade]
    assert base_config().data.background == "white"


def test_evaluation_may_use_another_interpolation_than_training():
    made = config(interpolation="bilinear", test_interpolation="area")
    assert (train_crop(made).interpolation, evaluation_crop(made).interpolation) == (
        "bilinear",
        "area",
    )
    made.data.test_interpolation = None
    assert evaluation_crop(made).interpolation == "bilinear"


@pytest.mark.parametrize(
    ("interpolation", "resampling"),
    [(None, "bilinear"), ("bilinear_antialias", "bilinear"), ("bicubic", "bicubic")],
)
def test_policy_turns_and_shears_by_the_interpolation_of_the_crops(interpolation, resampling):
    made = config(interpolation=interpolation)
    assert image_augmentation(made) is None
    made.augment.policy = "rand-m9-mstd0.5-inc1"
    expected = RandPolicy(9.0, 2, 0.5, 0.5, True, resampling=resampling)
    assert image_augmentation(made) == expected


@pytest.mark.parametrize(
    ("mean", "fill"),
    [(None, (128,) * 3), ((0.5,), (128,) * 3), ((0.485, 0.456, 0.406), (124, 116, 104))],
)
def test_policy_fills_with_the_mean_that_the_model_subtracts(mean, fill):
    made = config()
    made.augment.policy, made.model.mean = "rand-m9-mstd0.5-inc1", mean
    assert image_augmentation(made).fill == fill


@pytest.mark.parametrize("interpolation", ["lanczos", "area"])
def test_policy_rejects_unsupported_interpolations(interpolation):
    made = config(interpolation=interpolation)
    made.augment.policy = "rand-m9"
    with pytest.raises(
        UserError, match=f"data.interpolation is '{interpolation}' and must be .* augment.policy"
    ):
        check(made)
