"""Tests of the discrete VAE's encoder and its codes against NumPy."""

import jax
import numpy as np
import pytest
import reference
from reference import linear, parameters, random_images, random_model

from vit_jax.errors import UserError
from vit_jax.models import abstract, create_model, family_of, model_factory
from vit_jax.models.model_card import count_parameters

TINY = dict(blocks=(1, 2), widths=(8, 12), image_size=(12, 16), num_classes=7)
CASES = {
    "two stages": {},
    "one stage": dict(blocks=(2,), widths=(8,)),
    "three stages": dict(blocks=(1, 1, 1), widths=(8, 8, 16)),
    "pixels otherwise": dict(mean=(0.4, 0.5, 0.6), std=0.25),
    "no head": dict(num_classes=0),
}


def convolve(x, p):
    side = p["kernel"].shape[0]
    seen = reference.windows(reference.pad_both(x, side // 2), side, 1)
    return (
        seen.reshape(*seen.shape[:2], -1) @ p["kernel"].reshape(-1, p["kernel"].shape[-1])
        + p["bias"]
    )


def block(x, p, gain):
    branch = x
    for number in range(1, 5):
        branch = convolve(np.maximum(branch, 0), p[f"conv{number}"])
    return (convolve(x, p["shortcut"]) if "shortcut" in p else x) + gain * branch


def encode(p, image, *, blocks, mean=-0.125, std=1.25, **_):
    """Returns the last stage's activated features of one image, in float64."""
    x = convolve(((image + 1) / 2 - np.array(mean)) / np.array(std), p["stem"])
    for stage, count in enumerate(blocks):
        if stage:
            x = x.reshape(x.shape[0] // 2, 2, x.shape[1] // 2, 2, -1).max((1, 3))
        for place in range(count):
            x = block(x, p["stages"][f"{stage + 1}"][f"{place + 1:02d}"], 1 / sum(blocks) ** 2)
    return np.maximum(x, 0)


@pytest.mark.parametrize("case", CASES)
def test_forward_pass_and_codes_are_the_papers(case):
    arguments = TINY | CASES[case]
    model = random_model("DVAE", **arguments)
    images, p = random_images(2, *model.image_size), parameters(model)
    for image, found in zip(images, np.asarray(model(images)), strict=True):
        features = encode(p, image.astype(np.float64), **arguments)
        pooled = features.mean((0, 1))
        np.testing.assert_allclose(
            found, linear(pooled, p["head"]) if "head" in p else pooled, rtol=2e-4
        )
        if "head" in p:
            expected = linear(features, p["head"])
            np.testing.assert_allclose(
                model.code_scores(image[None])[0], expected, rtol=1e-3, atol=1e-3
            )
            np.testing.assert_array_equal(
                model.codes(image[None])[0], expected.argmax(-1).reshape(-1)
            )


def test_openais_encoder_has_its_number_of_parameters():
    # Counted in OpenAI's own code, including the vocabulary of 8,192.
    assert (
        count_parameters(abstract(model_factory("DVAE", num_classes=8192, image_size=112)))
        == 53_786_240
    )


def test_pixels_are_mapped_as_openais():
    model = abstract(model_factory("DVAE", num_classes=8, image_size=8))
    pixels = np.arange(192, dtype=np.uint8).reshape(1, 8, 8, 3)
    np.testing.assert_allclose(model.normalize(pixels), 0.1 + 0.8 * pixels / 255.0, rtol=1e-6)


def test_codes_need_image_sizes_divisible_by_the_stride():
    model = create_model(
        "DVAE", num_classes=5, image_size=16, blocks=(1, 1, 1, 1), widths=(8, 8, 8, 8)
    )
    assert (model.code_stride, model.code_grid) == (8, (2, 2))
    codes = jax.jit(lambda model, images: model.codes(images))(
        model, np.zeros((2, 24, 8, 3), np.uint8)
    )
    assert codes.shape == (2, 3) and codes.dtype == np.int32
    with pytest.raises(UserError, match="20x16 pixels do not divide into places of 8x8"):
        model.codes(np.zeros((2, 20, 16, 3), np.uint8))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            dict(image_size=18),
            "images of 18x18 pixels do not divide into places of 8x8: take multiples of 8",
        ),
        (dict(widths=(8, 8)), r"model.blocks has 4 stages and model.widths 2"),
        (dict(widths=(8, 8, 8, 10)), r"widths is .* must be a tuple of multiples of 4"),
    ],
)
def test_arguments_that_make_no_encoder_are_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        abstract(model_factory("DVAE", **dict(num_classes=5, image_size=32) | arguments))


def test_names_describe_sizes_that_are_not_openais():
    family = family_of(abstract(model_factory("DVAE", num_classes=0, image_size=8)))
    assert (
        family.spell(dict(blocks=(1, 1), widths=[8, 16])) == "DVAE (blocks (1, 1), widths (8, 16))"
    )
