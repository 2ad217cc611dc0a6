"""Tests of attention rollout and attention distance against NumPy, and on known attention."""

import jax
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.inspection.attention_maps import attention_distance, check_attends, of_patches, rollout
from vit_jax.models import create_model

SMALL = dict(num_classes=5, dim=16, depth=3, mlp_dim=32, heads=2)


def captured(**options):
    model = create_model("ViT-Ti/4", **SMALL, **dict(image_size=(8, 12)) | options)
    for layer in model.blocks.values():
        layer.attention.qkv.kernel[...] = 3 * layer.attention.qkv.kernel[...]
    _, found = model(
        jax.random.uniform(jax.random.key(0), (2, *model.image_size, 3)), capture=("attention",)
    )
    return model, [np.asarray(weights) for weights in found["attention"]]


def with_attention(matrix: np.ndarray, size, patch, **options):
    """Returns a model, and one layer of two heads with this attention matrix."""
    model = create_model(f"ViT-Ti/{patch}", **SMALL, image_size=size, **options)
    return model, [np.broadcast_to(matrix, (1, 2, *matrix.shape))]


def test_rollout_is_the_product_of_its_definition():
    _, attention = captured()
    for image in range(2):
        product = np.eye(7)
        for weights in attention:
            mixed = sum(weights[image, head].astype(np.float64) for head in range(2)) / 2 + np.eye(
                7
            )
            mixed = np.array([row / row.sum() for row in mixed])
            product = mixed @ product
        np.testing.assert_allclose(rollout(attention)[-1][image], product, atol=1e-5)


def test_the_first_layers_rollout_is_its_own_attention():
    _, attention = captured()
    np.testing.assert_allclose(
        rollout(attention)[0], (attention[0].mean(1) + np.eye(7)) / 2, atol=1e-6
    )


def test_rollouts_rows_sum_to_one():
    _, attention = captured(registers=2)
    for rolled in rollout(attention):
        np.testing.assert_allclose(rolled.sum(-1), 1, rtol=1e-5)


def test_uniform_attention_has_a_uniform_map():
    model, attention = with_attention(np.full((17, 17), 1 / 17), 32, 8)
    np.testing.assert_allclose(
        of_patches(model, rollout(attention * 3)[-1]), np.full((1, 4, 4), 1 / 16)
    )


def test_patches_are_shown_at_their_positions():
    matrix = np.eye(7)
    matrix[0] = 0
    matrix[0, 1 + 4] = 1  # The class token attends to the second patch of the second row.
    model, attention = with_attention(matrix, (8, 12), 4)
    (seen,) = of_patches(model, rollout(attention)[-1])
    np.testing.assert_allclose(seen, [[0, 0, 0], [0, 1, 0]], atol=1e-6)


def test_model_that_averages_patches_shows_their_average():
    model, attention = captured(pooling="gap", registers=1)
    wanted = rollout(attention)[-1][:, :6, :6].mean(1)
    wanted = wanted / wanted.sum(-1, keepdims=True)
    np.testing.assert_allclose(
        of_patches(model, rollout(attention)[-1]).reshape(2, 6), wanted, rtol=1e-5
    )


def test_attention_of_tokens_to_themselves_has_a_distance_of_zero():
    model, attention = with_attention(np.eye(50), 224, 32)
    np.testing.assert_array_equal(attention_distance(model, attention), np.zeros((1, 2)))


# Expected: the mean distance between two patches of a grid, including a patch and itself.
@pytest.mark.parametrize(
    ("size", "patch", "pixels"),
    [(224, 16, 116.49), (224, 32, 115.50), (224, 14, 116.57), (384, 16, 200.05)],
)
def test_uniform_attention_has_the_mean_distance(size, patch, pixels):
    tokens = (size // patch) ** 2 + 1
    model, attention = with_attention(np.full((tokens, tokens), 1 / tokens), size, patch)
    np.testing.assert_allclose(
        attention_distance(model, attention), np.full((1, 2), pixels), atol=0.005
    )


def test_distance_is_the_sum_of_its_definition():
    model, attention = captured()
    found = attention_distance(model, attention)
    for layer, weights in enumerate(attention):
        for head in range(2):
            total = 0.0
            for image in range(2):
                for query in range(6):
                    row = weights[image, head, 1 + query, 1:].astype(np.float64)
                    for key in range(6):
                        down, right = query // 3 - key // 3, query % 3 - key % 3
                        total += row[key] / row.sum() * 4 * np.hypot(down, right)
            np.testing.assert_allclose(found[layer, head], total / 12, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("BiT-R50x1", dict(resnet_blocks=(1,), resnet_width=1), "a BiT has no attention among all"),
        (
            "Swin-T",
            dict(dim=16, blocks=(2, 2), stage_heads=(1, 2)),
            r"a Swin has no attention .* capture=\('attention', 'attended', 'features'\)",
        ),
        (
            "ViT-Ti/4",
            dict(SMALL, attention="axial", pooling="gap"),
            "not defined for axial attention",
        ),
        ("ViT-Ti/32", SMALL, "the model has one patch"),
    ],
)
def test_the_error_about_models_without_attention_states_the_reason(name, options, words):
    model = create_model(name, image_size=32, **{"num_classes": 5} | options)
    with pytest.raises(UserError, match=words):
        check_attends(model)
