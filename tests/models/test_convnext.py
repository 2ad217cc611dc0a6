"""Tests of ConvNeXt V1 and V2: outputs and gradients against NumPy."""

import jax
import numpy as np
import pytest
import reference
from flax import nnx
from reference import forward, layer_norm, linear, parameters, random_images, random_model

from vit_jax.errors import UserError
from vit_jax.models import abstract, family_of, list_models, model_factory

TINY = dict(blocks=(1, 2), widths=(8, 12), image_size=(20, 27), num_classes=5)
V2 = dict(grn=True, layer_scale=None)
CASES = {
    "V1": {},
    "V2": V2,
    "tanh GELU": dict(gelu="tanh", norm_epsilon=1e-3, head_epsilon=1e-2),
    "overlapping": dict(stem="overlapping", norm_first=True),
    "tiered": dict(stem="tiered", widths=(32, 12), head_hidden=7),
    "deviation norms": dict(centred_norm=False, stem="activated", norm_epsilon=1e-3),
    "other means": dict(mean=(0.4, 0.5, 0.6), std=0.25),
    "no head": dict(num_classes=0),
}


def convolve(x, p, side, stride, pad):
    seen = reference.windows(reference.pad_both(x, pad), side, stride)
    return (
        seen.reshape(*seen.shape[:2], -1) @ p["kernel"].reshape(-1, p["kernel"].shape[-1])
        + p["bias"]
    )


def depthwise(x, p):
    seen = reference.windows(reference.pad_both(x, 3), 7, 1)
    return (seen * p["kernel"][:, :, 0]).sum((2, 3)) + p["bias"]


def response_norm(x, p):
    strength = np.array(
        [[[np.sqrt((x[..., channel] ** 2).sum()) for channel in range(x.shape[-1])]]]
    )
    return p["scale"] * x * (strength / (strength.mean() + 1e-6)) + p["bias"] + x


def norm(x, p, epsilon):
    if "bias" in p:
        return layer_norm(x, p, epsilon)
    return x / np.sqrt(x.var(-1, keepdims=True, ddof=1) + epsilon) * p["scale"]


def block(x, p, gelu, epsilon):
    branch = reference.activate(
        linear(norm(depthwise(x, p["depthwise"]), p["norm"], epsilon), p["fc1"]), gelu
    )
    branch = response_norm(branch, p["response_norm"]) if "response_norm" in p else branch
    branch = linear(branch, p["fc2"])
    return x + (branch * p["scale1"] if "scale1" in p else branch)


def convnext(
    p,
    image,
    *,
    num_classes,
    stem="patches",
    norm_first=False,
    head_hidden=None,
    gelu="erf",
    norm_epsilon=1e-6,
    head_epsilon=None,
    mean=0.5,
    std=0.5,
    **_,
):
    x = ((image + 1) / 2 - np.array(mean)) / np.array(std)
    if stem == "patches":
        x = convolve(x, p["stem"]["0"], 4, 4, 0)
    else:
        x = convolve(x, p["stem"]["0"], 3, 2, 1)
        x = reference.activate(x, gelu) if stem == "activated" else x
        x = convolve(x, p["stem"]["1"], 3, 2, 1)
    x = norm(x, p["stem_norm"], norm_epsilon)
    for stage in p["stages"].values():
        if "downsample" in stage:
            x = convolve(norm(x, stage["norm"], norm_epsilon), stage["downsample"], 2, 2, 0)
        for name in sorted(stage.keys() - {"norm", "downsample"}):
            x = block(x, stage[name], gelu, norm_epsilon)
    last = head_epsilon or norm_epsilon
    x = (
        norm(x, p["norm"], last).mean((0, 1))
        if norm_first
        else norm(x.mean((0, 1)), p["norm"], last)
    )
    x = reference.activate(linear(x, p["pre_logits"]), gelu) if head_hidden else x
    return linear(x, p["head"]) if num_classes else x


@pytest.mark.one_variant
@pytest.mark.parametrize("case", CASES)
def test_convnext_equals_a_plain_forward_pass(case):
    arguments = TINY | CASES[case]
    model, images = random_model("ConvNeXt-T", **arguments), random_images(2, *TINY["image_size"])
    expected = np.stack([convnext(parameters(model), image, **arguments) for image in images])
    np.testing.assert_allclose(forward(model, images), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["V1", "V2"])
def test_gradients_are_the_slopes_of_a_plain_forward_pass(case):
    arguments = TINY | CASES[case]
    model, (image,) = random_model("ConvNeXt-T", **arguments), random_images(1, *TINY["image_size"])
    graphdef, state = nnx.split(model)
    gradients = jax.grad(lambda state: nnx.merge(graphdef, state)(image[None]).sum())(state)
    gradients, exact = nnx.to_pure_dict(gradients), parameters(model)
    generator = np.random.default_rng(0)
    for path, leaf in jax.tree.leaves_with_path(exact):
        direction = generator.normal(size=leaf.shape)

        def logits(step, path=path, direction=direction):
            moved = jax.tree.map_with_path(
                lambda at, x: x + step * direction if at == path else x, exact
            )
            return convnext(moved, image, **arguments).sum()

        slope = (logits(1e-4) - logits(-1e-4)) / 2e-4
        found = gradients
        for key in path:
            found = found[key.key]
        expected = (np.asarray(found, np.float64) * direction).sum()
        np.testing.assert_allclose(expected, slope, rtol=2e-3, atol=1e-3, err_msg=str(path))


# Numbers of parameters for 1,000 classes (arXiv 2201.03545, table 12; arXiv 2301.00808, table 10).
# `ROUNDED` is in millions.
PUBLISHED = {"ConvNeXt-T": 28_589_128, "ConvNeXt-S": 50_223_688, "ConvNeXt-B": 88_591_464}
PUBLISHED |= {"ConvNeXt-L": 197_767_336, "ConvNeXt-XL": 350_196_968}
ROUNDED = {
    "Atto": 3.7,
    "Femto": 5.2,
    "Pico": 9.1,
    "Nano": 15.6,
    "T": 28.6,
    "B": 89,
    "L": 198,
    "H": 660,
}


def test_parameters_are_the_publications():
    for name, parameters_ in PUBLISHED.items():
        assert reference.count(name) == parameters_
    for size, millions in ROUNDED.items():
        found = reference.count(f"ConvNeXtV2-{size}") / 1e6
        assert round(found, 1 if millions < 29 else 0) == pytest.approx(
            millions, abs=0.051 if millions < 29 else 0.5
        )


def test_version_1_has_eleven_sizes_and_version_2_nine():
    assert len(list_models("ConvNeXt-*")) == 11 and len(list_models("ConvNeXtV2-*")) == 9


def layers_of(name):
    model = abstract(model_factory(name, num_classes=3, image_size=32))
    return family_of(model).layer(model)


def test_layers_of_large_models_are_groups_of_three_blocks():
    """The layers for layer decay are those of the authors, minus one.

    The authors number the stem as layer 0, stages 1 and 2 as layers 1 and 2, the nine groups of
    stage 3 as layers 3 to 11, and stage 4 as layer 12.
    """
    layer = layers_of("ConvNeXt-B")
    numbers = {
        "stem/0/kernel": -1,
        "stem_norm/scale": -1,
        "stages/0/02/fc1/kernel": 0,
        "stages/1/downsample/kernel": 1,
        "stages/1/00/norm/bias": 1,
        "stages/2/norm/scale": 2,
        "stages/2/02/depthwise/kernel": 2,
        "stages/2/03/depthwise/kernel": 3,
        "stages/2/26/scale1": 10,
        "stages/3/downsample/bias": 11,
        "stages/3/02/fc2/kernel": 11,
        "norm/scale": float("inf"),
        "head/kernel": float("inf"),
    }
    assert {path: layer(path) for path in numbers} == numbers


def test_layers_of_small_models_are_their_blocks():
    """Each block is a layer, as in the authors' `layer_decay_type single`.

    The stem belongs to the first block.
    """
    layer = layers_of("ConvNeXtV2-T")
    numbers = {
        "stem/0/kernel": 0,
        "stages/0/00/fc1/kernel": 0,
        "stages/0/02/fc1/kernel": 2,
        "stages/1/downsample/kernel": 3,
    }
    numbers |= {"stages/2/08/fc2/bias": 14, "stages/3/norm/scale": 15, "stages/3/02/norm/scale": 17}
    assert {path: layer(path) for path in numbers} == numbers


def test_dense_features_are_of_every_stage():
    model = random_model("ConvNeXt-T", **TINY)
    shapes = [features.shape for features in model.features(random_images(2, 20, 27), dense=True)]
    assert shapes == [(2, 5, 6, 8), (2, 2, 3, 12)]


def test_stochastic_depth_rises_to_its_rate():
    """An image keeps the last of three blocks with probability 1/2, and the first block always."""
    model = random_model("ConvNeXt-T", **TINY | dict(stochastic_depth=0.5, image_size=8))
    images = np.repeat(random_images(1, 8, 8), 400, 0)
    logits = forward(model, images, seed=0)
    outcomes, counts = np.unique(logits.round(3), axis=0, return_counts=True)
    # Whether an image keeps the second block (dropped with probability 1/4) and the third (1/2).
    expected = sorted([400 * a * b for a in (1 / 4, 3 / 4) for b in (1 / 2, 1 / 2)])
    assert len(outcomes) == 4
    np.testing.assert_allclose(sorted(counts), expected, atol=45)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(image_size=7), "images of 7x7 pixels are too small for 2 stages: use 8 or more"),
        (
            dict(widths=(8,)),
            "model.blocks has 2 stages and model.widths 1: each stage needs its width",
        ),
        (dict(blocks=()), r"blocks is \(\) and must be a tuple of blocks"),
        (dict(stem="large"), "stem is 'large' and must be patches or overlapping or tiered"),
        (dict(head_hidden=0), "head_hidden is 0 and must be"),
    ],
    ids=str,
)
def test_errors_about_invalid_options_name_them(overrides, message):
    with pytest.raises(UserError, match=message):
        abstract(model_factory("ConvNeXt-T", **TINY | overrides))


def test_images_of_other_sizes_are_accepted_unless_they_are_too_small():
    model = random_model("ConvNeXt-T", **TINY)
    assert model(random_images(1, 16, 40)).shape == (1, 5)
    with pytest.raises(UserError, match="images of 40x7 pixels are too small for 2 stages"):
        model(random_images(1, 40, 7))
