"""Tests of hybrids and BiT ResNets against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from reference import TINY, forward, fresh_model, random_images, random_model

import vit_jax
from vit_jax.errors import UserError
from vit_jax.models import abstract, model_factory

HYBRID = TINY | dict(image_size=(32, 64))
BIT = dict(image_size=(32, 64), num_classes=5)


def images_for(image_size, channels=3):
    """Returns images that are so dark that the epsilon of the first norm matters."""
    return random_images(2, *image_size, channels) * np.float32(1e-3)


@pytest.mark.one_variant
@pytest.mark.parametrize(
    "overrides",
    [
        dict(resnet_blocks=(2, 1), patch_size=1),
        dict(resnet_blocks=(1, 1), patch_size=2, pooling="gap", channels=1),
        dict(resnet_blocks=(), patch_size=4, position="2d"),
        dict(resnet_blocks=(1,), resnet_width=2, patch_size=4, channels=5),
        dict(resnet_blocks=(1, 2, 1), resnet_width=1 / 8, resnet_stem="small", patch_size=2),
    ],
    ids=str,
)
def test_hybrid_equals_a_plain_forward_pass(overrides):
    arguments = HYBRID | overrides
    model = random_model(**arguments)
    images, params = images_for((32, 64), arguments.get("channels", 3)), reference.parameters(model)
    expected = np.stack([reference.vit(params, image, **arguments) for image in images])
    np.testing.assert_allclose(forward(model, images), expected, atol=2e-5)


@pytest.mark.one_variant
@pytest.mark.parametrize(
    "overrides",
    [
        dict(resnet_blocks=(2, 1)),
        # The sides are odd in all stages.
        dict(resnet_blocks=(1, 1), image_size=(35, 50), channels=1),
        dict(resnet_blocks=(2, 2), image_size=(8, 5)),  # The maps have 2x2 positions, then one.
        dict(resnet_blocks=(1,), resnet_width=2, channels=5, num_classes=0),
        dict(resnet_blocks=(1, 2), resnet_width=3 / 8, resnet_stem="small", image_size=(13, 18)),
    ],
    ids=str,
)
def test_bit_equals_a_plain_forward_pass(overrides):
    arguments = BIT | overrides
    model = random_model("BiT-R50x1", **arguments)
    images = images_for(arguments["image_size"], arguments.get("channels", 3))
    params = reference.parameters(model)
    expected = np.stack([reference.bit(params, image, **arguments) for image in images])
    np.testing.assert_allclose(forward(model, images), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("width", "groups"), [(1 / 32, [1, 1]), (1 / 4, [8, 8]), (1, [32, 32]), (3 / 2, [32, 32])]
)
def test_norms_have_32_groups_or_groups_of_two_channels(width, groups):
    model = abstract(model_factory("BiT-R26x1", num_classes=0, image_size=32, resnet_width=width))
    unit = model.resnet.stages["1"]["02"]
    assert [unit.norm2.num_groups, unit.norm3.num_groups] == groups
    assert model.norm.num_groups == min(32, round(64 * width) * 16)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            dict(resnet_width=5 / 4),
            r"32 groups of a norm do not divide 80 channels.*model\.resnet_width",
        ),
        (dict(resnet_width=1 / 64), r"resnet_width is 0\.015625 and must be a multiple of 1/32"),
        (dict(resnet_width=0.3), r"resnet_width is 0\.3 and must be a multiple of 1/32"),
        (dict(resnet_width=1 / 8, axial=True), "16 channels or a multiple, not 8"),
        (dict(resnet_stem="tiny"), "resnet_stem is 'tiny' and must be large or small"),
    ],
    ids=str,
)
def test_errors_about_widths_name_them(overrides, message):
    with pytest.raises(UserError, match=message):
        abstract(model_factory("BiT-R26x1", **BIT | dict(image_size=32) | overrides))


def test_small_stem_keeps_the_size_of_the_image():
    images = jax.ShapeDtypeStruct((1, 32, 24, 3), jnp.float32)
    for name, shape in (("small", (4, 3)), ("large", (1, 1))):
        make = model_factory("BiT-R14x1/8", image_size=(32, 24), num_classes=0, resnet_stem=name)
        features = nnx.eval_shape(lambda model, x: model.resnet(x)[-1], abstract(make), images)
        assert features.shape == (1, *shape, 256)


def test_bit_accepts_images_of_other_sizes():
    small, large = (
        random_model("BiT-R50x1", image_size=size, num_classes=5, resnet_blocks=(1,))
        for size in ((16, 16), (32, 48))
    )
    images = random_images(2, 32, 48)
    np.testing.assert_array_equal(forward(small, images), forward(large, images))


def test_new_units_of_a_hybrid_output_their_shortcut():
    model = fresh_model(**HYBRID, resnet_blocks=(1,))
    unit = model.resnet.stages["1"]["01"]
    assert not np.any(unit.norm3.scale[...])
    x = random_images(2, 4, 8, 64)
    shortcut = forward(unit.norm_proj, forward(unit.conv_proj, x))
    np.testing.assert_allclose(forward(unit, x), np.maximum(shortcut, 0), atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            dict(resnet_blocks=(1, 1), patch_size=1, image_size=(32, 60)),
            "the hybrid's stride 8 .* 32x60",
        ),
        (
            dict(resnet_blocks=(1, 1), patch_size=4, image_size=(32, 48)),
            "the hybrid's stride 32 .* 32x48",
        ),
        (
            dict(resnet_blocks=(), patch_size=2, image_size=(36, 64)),
            "the hybrid's stride 8 .* 36x64",
        ),
    ],
    ids=str,
)
def test_errors_about_a_hybrids_image_size_name_the_stride(overrides, message):
    with pytest.raises(UserError, match=message):
        vit_jax.create_model("ViT-Ti/4", **(TINY | overrides))
