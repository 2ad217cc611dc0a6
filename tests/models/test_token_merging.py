"""Tests of token merging against NumPy, which merges one patch after the other.

The authors' code (facebookresearch/ToMe) was compared by hand with timm's ViT-Ti/16 and with
DeiT-Ti/16 with two tokens. With random weights, the logits were equal within 6e-7 of the largest
one, for the class token or the mean, and for 3, 5 or 30 merged patches.
"""

import jax
import numpy as np
import pytest
from flax import nnx
from reference import assert_vit_equals_reference, forward, random_images, random_model

import vit_jax
from vit_jax.errors import UserError

VARIANTS = [
    {},
    dict(pooling="gap", position="sincos2d", norm_at="after"),
    dict(distillation="heads"),
    dict(registers=3, layer_scale=0.5),
    dict(registers=2, pooling="gap", pool_all=True, cls_token=True),
    dict(qk_norm=True, position="none", pooling="map"),
]


@pytest.mark.parametrize("merge_tokens", [2, 30])
@pytest.mark.parametrize("changes", VARIANTS)
def test_logits_are_those_of_numpy(changes, merge_tokens):
    image_size = (16, 20)  # There are 20 patches. With 30, each layer merges half of its patches.
    assert_vit_equals_reference(
        image_size=image_size, depth=3, merge_tokens=merge_tokens, **changes
    )


def test_merging_equal_patches_does_not_change_the_output():
    images = np.ones((1, 16, 16, 3), np.float32) * random_images(1, 1, 1)
    arguments = dict(image_size=16, num_classes=5, dim=16, depth=3, heads=4, position="none")
    plain, merging = (random_model(**arguments, merge_tokens=count) for count in (0, 5))
    np.testing.assert_allclose(forward(merging, images), forward(plain, images), rtol=1e-5)


def test_training_calls_and_dense_features_keep_all_patches():
    arguments = dict(image_size=16, num_classes=5, dim=16, depth=2, heads=4)
    plain, merging = (random_model(**arguments, merge_tokens=count) for count in (0, 5))
    images = random_images(2, 16, 16)
    assert np.abs(forward(merging, images) - forward(plain, images)).max() > 1e-3
    np.testing.assert_array_equal(forward(merging, images, 0), forward(plain, images, 0))
    dense = [nnx.jit(lambda x, y: x.features(y, dense=True))(x, images) for x in (plain, merging)]
    np.testing.assert_array_equal(*dense)


def test_activations_keep_their_dtype():
    model = random_model(image_size=16, num_classes=5, dtype="bfloat16", merge_tokens=3)
    images = jax.ShapeDtypeStruct((1, 16, 16, 3), np.float32)
    assert nnx.eval_shape(lambda x: model.encoded(x), images).dtype == "bfloat16"


@pytest.mark.parametrize(
    "changes",
    [
        dict(rope="dinov3"),
        dict(position="bias"),
        dict(position_at="every"),
        dict(position="relative"),
    ],
)
def test_positions_within_layers_are_an_error(changes):
    with pytest.raises(UserError, match="model.merge_tokens is for .* use model.merge_tokens=0"):
        vit_jax.create_model("ViT-Ti/16", merge_tokens=8, **changes)
