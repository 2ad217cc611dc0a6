"""Tests of the TPU kernel of window attention against plain attention, simulated on a CPU."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from vit_jax.config import base_config
from vit_jax.models import create_model
from vit_jax.models.layers import placing
from vit_jax.models.window_attention import attend_in_windows, supported
from vit_jax.parallel import sharding
from vit_jax.parallel.chips import supports_kernels
from vit_jax.parallel.mesh import make_mesh


def plain(query, key, value, bias, masks, classes):
    scores = jnp.einsum("bwqhd,bwkhd->bwhqk", query, key, precision="highest")
    scores = scores / math.sqrt(query.shape[-1]) + bias + masks[classes][:, None]
    return jnp.einsum("bwhqk,bwkhd->bwqhd", jax.nn.softmax(scores), value, precision="highest")


# Each shape is batch, windows, tokens, heads, head_dim.
SHAPES = {
    "an odd number of heads": (2, 4, 49, 3, 32),
    "two groups, the second of two heads": (1, 2, 16, 6, 32),
    "as many tokens as rows, wide heads": (1, 1, 64, 2, 64),
}


def random_inputs(shape, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(4)]
    _, windows, tokens, heads, _ = shape
    bias = jnp.asarray(rng.normal(size=(heads, tokens, tokens)), jnp.float32)
    masks = np.where(rng.random((2, tokens, tokens)) < 0.3, -100, 0).astype(np.float32)
    return arrays, bias, masks, np.arange(windows) % 2


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients_equal_plain_attention(shape):
    (*inputs, gradient), bias, masks, classes = random_inputs(shape)
    with pltpu.force_tpu_interpret_mode():
        out, backward = jax.vjp(lambda *x: attend_in_windows(*x, masks, classes), *inputs, bias)
        gradients = backward(gradient)
    expected, backward = jax.vjp(lambda *x: plain(*x, masks, classes), *inputs, bias)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for ours, theirs in zip(gradients, backward(gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * abs(theirs).max())


def test_padding_is_not_attended_to():
    (*inputs, gradient), bias, masks, classes = random_inputs((1, 1, 5, 2, 32))
    rows = ((0, 0), (0, 0), (0, 3), (0, 0), (0, 0))
    padded = [jnp.pad(x, rows, constant_values=7) for x in (*inputs, gradient)]
    with pltpu.force_tpu_interpret_mode():
        out, backward = jax.vjp(lambda *x: attend_in_windows(*x, bias, masks, classes), *padded[:3])
        gradients = backward(padded[3])
    expected, backward = jax.vjp(lambda *x: plain(*x, bias, masks, classes), *inputs)
    np.testing.assert_allclose(out[:, :, :5], expected, atol=1e-5)
    for ours, theirs in zip(gradients, backward(gradient), strict=True):
        np.testing.assert_allclose(ours[:, :, :5], theirs, atol=1e-5)
        assert not ours[:, :, 5:].any()


def test_bfloat16_is_as_exact_as_plain_attention():
    (*inputs, gradient), bias, masks, classes = random_inputs((1, 2, 49, 3, 32), jnp.bfloat16)

    def results(attend, dtype):
        wide = [x.astype(dtype) for x in inputs]
        out, backward = jax.vjp(lambda *x: attend(*x, masks, classes), *wide, bias)
        return [x.astype(jnp.float32) for x in (out, *backward(gradient.astype(out.dtype)))]

    with pltpu.force_tpu_interpret_mode():
        ours = results(attend_in_windows, jnp.bfloat16)
    for x, near, exact in zip(
        ours, results(plain, jnp.bfloat16), results(plain, jnp.float32), strict=True
    ):
        assert abs(x - exact).max() <= 1.5 * abs(near - exact).max() + 1e-6


@pytest.mark.parametrize(("tokens", "head_dim"), [(65, 32), (49, 128), (49, 24)])
def test_other_sizes_are_unsupported(tokens, head_dim):
    assert supported(49, 32)
    assert not supported(tokens, head_dim)


@pytest.mark.parametrize(
    ("kind", "supports"),
    {
        "TPU v3": False,
        "TPU v4": True,
        "TPU v5 lite": True,
        "TPU v6 lite": True,
        "cpu": False,
    }.items(),
)
def test_tpus_of_these_kinds_run_kernels(kind, supports):
    assert supports_kernels(kind) == supports


@pytest.mark.parametrize("devices", [1, 2])
def test_a_swin_has_the_same_loss_and_gradients_with_the_kernel(devices, monkeypatch):
    # The CPU simulates the kernel.
    monkeypatch.setattr(sharding, "supports_kernels", lambda _: True)
    monkeypatch.setenv(sharding.KERNELS, "1")
    # The maps have 6x8 positions, not divisible by windows of 4, and then 3x4, smaller than a
    # window.
    values = dict(dim=32, blocks=(2, 1), stage_heads=(1, 2), window=4, patch_size=2)
    model = create_model("Swin-T", image_size=(12, 16), num_classes=3, seed=0, **values)
    graphdef, params = nnx.split(model)
    images = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, size=(2, 12, 16, 3)), jnp.float32)
    mesh = make_mesh(base_config().mesh, jax.devices("cpu")[:devices])

    def loss(params, **where):
        with placing(lambda _, x: x, **where):
            return (nnx.merge(graphdef, params)(images) ** 2).sum()

    expected = jax.jit(jax.value_and_grad(partial(loss, platform="cpu")))(params)
    kernel = partial(loss, platform="tpu", by_shard=sharding.by_shard(mesh))
    with pltpu.force_tpu_interpret_mode():
        assert "window_attention_backward" in str(jax.make_jaxpr(jax.grad(kernel))(params))
        ours = jax.jit(jax.value_and_grad(kernel))(params)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * abs(y).max())
