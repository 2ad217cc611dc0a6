"""Tests of attention within windows of a ViT."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from vit_jax.errors import UserError
from vit_jax.models.transformer import EncoderBlock, Stack, WindowBlock

SMALL = dict(num_classes=0, dim=32, depth=4, heads=2, mlp_dim=64, pooling="gap")


def test_a_window_block_is_an_encoder_block_with_a_mask():
    rows, columns, side = 6, 9, 3
    stack = Stack(dim=16, heads=2, mlp_dim=32)
    windows = WindowBlock((rows, columns), side, stack, rngs=nnx.Rngs(0))
    plain = EncoderBlock(stack, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, rows * columns, 16)).astype(np.float32)
    y, z = np.divmod(np.arange(rows * columns), columns)
    own = y // side * columns + z // side
    bias = np.where(own[:, None] == own, 0.0, -np.inf).astype(np.float32)
    expected = plain(x, bias=jnp.broadcast_to(bias, (2, *bias.shape)))
    np.testing.assert_allclose(windows(x), expected, atol=2e-6)


def test_padding_does_not_change_other_windows():
    stack = Stack(dim=16, heads=2, mlp_dim=32)
    padded = WindowBlock((7, 7), 4, stack, rngs=nnx.Rngs(0))
    exact = WindowBlock((4, 4), 4, stack, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(1, 7, 7, 16)).astype(np.float32)
    found = padded(x.reshape(1, 49, 16)).reshape(1, 7, 7, 16)[:, :4, :4]
    expected = exact(x[:, :4, :4].reshape(1, 16, 16)).reshape(1, 4, 4, 16)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("count", "kinds"), [(0, "wwww"), (1, "wwwg"), (2, "wgwg"), (3, "wggg"), (9, "gggg")]
)
def test_global_layers_are_evenly_spaced(count, kinds):
    model = vit_jax.create_model(
        "ViT-Ti/8", image_size=64, attention="windows", window=4, global_layers=count, **SMALL
    )
    found = ["w" if isinstance(x, WindowBlock) else "g" for x in model.blocks.values()]
    assert "".join(found) == kinds


@pytest.mark.parametrize(("name", "window"), [("ViT-Ti/8", 16), ("DINOv3-S/16", 8)])
def test_one_window_is_full_attention_also_after_a_resize(name, window):
    values = SMALL | dict(image_size=64, registers=0)
    full = vit_jax.create_model(name, **values)
    values |= dict(attention="windows", window=window, global_layers=1)
    windows = vit_jax.create_model(name, **values)
    images = np.random.default_rng(0).integers(0, 256, (2, 128, 128, 3), dtype=np.uint8)
    found, expected = (model.resized(128)(images) for model in (windows, full))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (dict(pooling="cls"), "no class token"),
        (dict(registers=2), "no registers"),
        (dict(scan=True, global_layers=2), "model.scan=False"),
        (dict(position="relative"), "positions that are added"),
    ],
)
def test_contradictions_are_one_line(values, words):
    given = dict(image_size=64, attention="windows", window=4) | SMALL | values
    with pytest.raises(UserError, match=words) as raised:
        vit_jax.create_model("ViT-Ti/8", **given)
    assert "\n" not in str(raised.value)
