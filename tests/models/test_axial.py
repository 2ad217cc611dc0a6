"""Tests of axial attention of ViTs and ResNets against loops in NumPy (appendix D.6)."""

import numpy as np
import pytest
import reference
from reference import TINY, assert_vit_equals_reference, count, forward, random_images, random_model

import vit_jax
from vit_jax.errors import UserError

RESNET = dict(image_size=(16, 32), num_classes=5, resnet_blocks=(2, 1), axial=True)


@pytest.mark.one_variant
@pytest.mark.parametrize(
    "overrides",
    [
        dict(pooling="gap"),
        dict(pooling="map"),
        dict(pooling="gap", position="2d"),
        dict(pooling="gap", position="2d", position_at="every"),
        dict(pooling="gap", position="1d", position_at="shared"),
        dict(pooling="gap", position="sincos2d"),
        dict(pooling="gap", layer_scale=0.1, qk_norm=True, mlp="swiglu"),
    ],
    ids=str,
)
def test_axial_vit_equals_a_plain_forward_pass(overrides):
    assert_vit_equals_reference(attention="axial", **overrides)


def test_axial_vit_attends_along_rows_before_columns():
    """A changed patch affects its row after half a layer, and all patches after the layer."""
    block = random_model(**TINY, attention="axial", pooling="gap").blocks["00"]
    x = np.random.default_rng(2).normal(size=(1, 6, 16)).astype(np.float32)
    changed = x.copy()
    # The patch in row 1 and column 1. Only one channel changes: a layer norm removes a constant that
    # is added to all channels.
    changed[0, 4, 0] += 1
    rows = [forward(block.row, tokens.reshape(2, 3, 16)) for tokens in (x, changed)]
    moved = (rows[0] != rows[1]).any(axis=2)
    np.testing.assert_array_equal(moved, [[False] * 3, [True] * 3])
    assert (forward(block, x) != forward(block, changed)).any(axis=2).all()


@pytest.mark.parametrize("name", ["ViT-B/32", "ViT-B/16"])
def test_axial_layers_have_twice_the_parameters(name):
    layers = 12 * 7_087_872
    class_token_with_its_place = 2 * 768
    assert count(f"Axial-{name}", 0) == count(name, 0) + layers - class_token_with_its_place


def test_axial_vit_by_name_averages_its_patches():
    card = vit_jax.model_card("Axial-ViT-B/32", num_classes=0)
    assert card.tokens == 7 * 7
    assert card.parameters == count("ViT-B/32", 0, attention="axial", pooling="gap")


def test_axial_resnet_equals_plain_loops():
    model = random_model("BiT-R50x1", **RESNET)
    images = random_images(2, *RESNET["image_size"])
    params = reference.parameters(model)
    expected = np.stack([reference.bit(params, image, **RESNET) for image in images])
    np.testing.assert_allclose(forward(model, images), expected, atol=2e-5)


def test_axial_resnet_replaces_only_its_3x3_convolutions():
    def axis(middle, length):
        of_qkv_and_norms = 2 * middle**2 + 2 * 2 * middle + 2 * middle
        return of_qkv_and_norms + (2 * length - 1) * 2 * middle // 8

    more = 0
    for stage, units in enumerate((3, 4, 6, 3)):
        middle, length = 64 * 2**stage, 56 // 2**stage
        lengths = [56 if stage == 0 else 2 * length] + [length] * (
            units - 1
        )  # The first unit halves the size of its input.
        more += sum(2 * axis(middle, length) - 9 * middle**2 for length in lengths)
    assert count("AxialResNet50", 0) - count("BiT-R50x1", 0) == more


@pytest.mark.parametrize("image_size", [(36, 64), (32, 60)])
def test_the_error_about_an_axial_resnets_image_size_names_valid_sizes(image_size):
    with pytest.raises(
        UserError, match=f"multiples of 8 pixels, not {image_size[0]}x{image_size[1]}"
    ):
        vit_jax.create_model("BiT-R50x1", **(RESNET | dict(image_size=image_size)))
