"""Tests of attention weights, tokens and features that a call of a model returns in addition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import create_model

SMALL = dict(num_classes=5, image_size=(8, 12), dim=16, depth=3, mlp_dim=32, heads=2)
VARIANTS = {
    "plain": {},
    "scanned": dict(scan=True),
    "recomputed": dict(remat="full"),
    "relative": dict(position="relative", registers=2),
    "pooled": dict(pooling="gap", rope="eva02"),
    "mapped": dict(pooling="map", qk_norm=True),
}


def setup(**variant):
    model = create_model("ViT-Ti/4", **SMALL, **variant)
    for layer in model.blocks.values():  # Larger kernels make the attention weights non-uniform.
        for block in (layer,) if hasattr(layer, "attention") else (layer.row, layer.column):
            kernel = block.attention.qkv.kernel
            kernel[...] = 3 * kernel[...]
    if model.head is not None:
        model.head.kernel[...] = jax.random.normal(jax.random.key(1), model.head.kernel.shape)
    return model, jax.random.uniform(jax.random.key(2), (2, 8, 12, 3), minval=-1)


@pytest.mark.one_variant
@pytest.mark.parametrize("variant", VARIANTS)
def test_capturing_does_not_change_the_logits(variant):
    model, images = setup(**VARIANTS[variant])
    logits, _ = model(images, capture=("attention", "tokens"))
    np.testing.assert_allclose(logits, model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layer_is_captured_once(variant):
    model, images = setup(**VARIANTS[variant])
    _, found = model(images, capture=("attention", "tokens"))
    assert [x.shape for x in found["attention"]] == [(2, 2, model.tokens, model.tokens)] * 3
    assert [x.shape for x in found["tokens"]] == [(2, model.tokens, 16)] * 4
    for weights in found["attention"]:
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
        assert float(weights.std()) > 1e-3


def test_captured_attention_equals_the_layers_weights():
    model, images = setup()
    _, found = model(images, capture=("attention", "tokens"))
    block, x = model.blocks["01"], found["tokens"][1]
    _, _, value = block.attention.project(block.norm1(x))
    attended = np.einsum("bhqk,bkhd->bqhd", found["attention"][1], value)
    x = x + block.attention.out(jnp.asarray(attended))
    np.testing.assert_allclose(
        x + block.mlp(block.norm2(x)), found["tokens"][2], rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_axial_lines_are_captured_rows_before_columns():
    model, images = setup(pooling="gap", attention="axial")
    logits, found = model(images, capture=("attention",))
    shapes = [x.shape for x in found["attention"]]
    assert shapes == [(2 * 2, 2, 3, 3), (2 * 3, 2, 2, 2)] * 3
    np.testing.assert_allclose(logits, model(images), rtol=1e-5, atol=1e-5)


def test_capturing_works_in_a_compiled_function():
    model, images = setup()
    graphdef, params = nnx.split(model)
    compiled = jax.jit(
        lambda params, images: nnx.merge(graphdef, params)(images, capture=("attention",))
    )
    for (_, eager), (_, jitted) in [
        (model(images, capture=("attention",)), compiled(params, images))
    ]:
        np.testing.assert_allclose(
            jitted["attention"][2], eager["attention"][2], rtol=1e-5, atol=1e-6
        )


def test_nothing_is_computed_for_captures_that_are_not_requested():
    model, images = setup()
    graphdef, params = nnx.split(model)

    def program(**options):
        return str(
            jax.make_jaxpr(lambda p, x: nnx.merge(graphdef, p)(x, **options))(params, images)
        )

    plain = program(whole=True)
    program(capture=("attention",))
    assert program(whole=True) == plain
    assert len(program(capture=("tokens",)).splitlines()) <= len(plain.splitlines()) + 2


def test_the_error_about_an_unknown_capture_names_it():
    model, images = setup()
    with pytest.raises(
        UserError, match="'atention' cannot be captured; there are: attention, tokens"
    ):
        model(images, capture=("atention",))
