"""Tests of filters, position embeddings and tokens drawn as images."""

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.inspection.embeddings import filters, position_similarity, token_colours
from vit_jax.models import create_model

SMALL = dict(num_classes=5, image_size=(8, 12), dim=16, depth=1, mlp_dim=32, heads=2)


def test_similarity_is_the_cosine_of_two_position_embeddings():
    model = create_model("ViT-Ti/4", **SMALL)
    table = np.asarray(model.position_embedding.table[...], np.float64)[0, 1:]
    found = position_similarity(model)
    assert found.shape == (2, 3, 2, 3)
    for one in range(6):
        for other in range(6):
            a, b = table[one], table[other]
            wanted = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            np.testing.assert_allclose(
                found[one // 3, one % 3, other // 3, other % 3], wanted, atol=1e-5
            )


@pytest.mark.parametrize("position", ["2d", "sincos2d"])
def test_other_position_embeddings_have_a_similarity_of_1_with_themselves(position):
    found = position_similarity(create_model("ViT-Ti/4", **SMALL, position=position))
    np.testing.assert_allclose(np.diagonal(found.reshape(6, 6)), 1, rtol=1e-6)
    assert found.min() < 0.999


PLACELESS = (
    dict(position="none"),
    dict(position="relative"),
    dict(position_at="every"),
    dict(image_size=4),
)


@pytest.mark.parametrize("options", PLACELESS)
def test_models_without_position_embeddings_of_patches_are_refused(options):
    with pytest.raises(UserError, match="position"):
        position_similarity(create_model("ViT-Ti/4", **SMALL | options))


def test_filters_are_principal_components():
    model = create_model("ViT-Ti/4", **SMALL)
    # The patch embedding has two directions of known strength; the first is stronger.
    first, second = np.zeros((2, 4, 4, 3))
    first[0, 0, 0], second[3, 3, 2] = 1, 1
    dims = np.random.default_rng(0).normal(size=(2, 16))
    dims[1] -= dims[0] * (dims[0] @ dims[1]) / (dims[0] @ dims[0])
    dims = dims / np.linalg.norm(dims, axis=1, keepdims=True)
    kernel = 3 * first[..., None] * dims[0] + second[..., None] * dims[1]
    model.patch_embedding.kernel[...] = kernel.astype(np.float32)
    found = filters(model, 2)
    np.testing.assert_allclose(found[0], first, atol=1e-5)
    np.testing.assert_allclose(found[1], second, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "side"),
    [
        ("R+ViT-Ti/16", dict(dim=16, depth=1, mlp_dim=32, heads=2), 7),
        ("BiT-R50x1", dict(resnet_blocks=(1,), resnet_width=1), 7),
        ("ConvNeXt-T", dict(blocks=(1,), widths=(8,)), 4),
        ("Swin-T", dict(dim=16, blocks=(1,), stage_heads=(1,)), 4),
    ],
)
def test_filters_are_those_of_the_first_layer(name, options, side):
    found = filters(create_model(name, num_classes=5, image_size=64, **options), 8)
    assert found.shape == (8, side, side, 3) and found.min() == 0 and found.max() == 1


def test_three_principal_components_of_tokens_become_three_colours():
    model = create_model("ViT-Ti/4", **SMALL)
    tokens = np.zeros((4, 7, 16))
    strengths = np.random.default_rng(0).normal(size=(4, 6, 3)) * (9, 3, 1)
    tokens[:, 1:, [2, 5, 11]] = strengths
    colours = token_colours(model, tokens)
    assert colours.shape == (4, 2, 3, 3) and colours.min() == 0 and colours.max() == 1
    for channel in range(3):
        related = np.corrcoef(colours[..., channel].ravel(), strengths[..., channel].ravel())[0, 1]
        assert abs(related) > 0.9


def test_equal_tokens_have_one_colour():
    colours = token_colours(create_model("ViT-Ti/4", **SMALL), np.ones((1, 7, 16)))
    assert np.ptp(colours) == 0
