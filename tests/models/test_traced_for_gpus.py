"""A model traced for a GPU computes the same as one traced for a CPU. Both run on a CPU here."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.models import attention, create_model, vit
from vit_jax.models.layers import placing

MODELS = {
    "class token": {},
    "all tokens": {"pooling": "gap"},
    "rotations and registers": {"rope": "dinov3", "position": "none", "registers": 3},
    "learned rotations": {"rope": "mixed", "position": "none", "qkv_bias": "qv"},
    "positions at every layer": {"position_at": "every"},
    "biases": {"position": "bias"},
    "axial": {"attention": "axial", "pooling": "gap"},
    "exact gelu, no biases": {"gelu": "erf", "bias": False, "qkv_bias": "none"},
    "gated": {"mlp": "swiglu"},
    "hybrid": {"resnet_blocks": (), "resnet_width": 0.125, "patch_size": 4},
    "scanned": {"scan": True},
}


def logits_and_gradient(model, images, platform):
    graphdef, params = nnx.split(model)

    def loss(params):
        with placing(lambda _, x: x, platform):
            logits = nnx.merge(graphdef, params)(images)
        return jax.nn.log_softmax(logits)[:, 0].sum(), logits

    (_, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return logits, gradient


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_logits_and_gradients_are_those_of_a_cpu(name, monkeypatch):
    """Equal both without and with a padding token, which makes an odd number of tokens even."""
    values = {"dim": 32, "depth": 2, "mlp_dim": 64, "heads": 2, "image_size": 48, "num_classes": 5}
    model = create_model("ViT-Ti/16", **values | MODELS[name])
    shape = model.head.kernel.shape
    model.head.kernel.set_value(jax.random.normal(jax.random.key(1), shape))
    images = np.random.default_rng(0).uniform(-1, 1, (3, 48, 48, 3)).astype(np.float32)
    wanted = logits_and_gradient(model, images, "cpu")
    for even in (False, True):
        monkeypatch.setattr(vit, "cudnn_takes", lambda *_, even=even: even)
        found = logits_and_gradient(model, images, "gpu")
        for x, reference in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(
                x, reference, rtol=1e-4, atol=1e-5 * max(1, np.abs(reference).max())
            )


def test_the_padding_token_is_not_attended_to():
    query, key, value = (jax.random.normal(jax.random.key(i), (2, 6, 2, 8)) for i in range(3))
    wanted = attention.attend(query, key[:, :5], value[:, :5])
    changed = value.at[:, 5].set(100.0)
    np.testing.assert_allclose(attention.attend(query, key, changed, attended=5), wanted, atol=1e-5)


def test_captured_activations_have_no_padding_token(monkeypatch):
    monkeypatch.setattr(vit, "cudnn_takes", lambda *_: True)
    model = create_model("ViT-Ti/16", depth=2, image_size=32, num_classes=0)
    with placing(lambda _, x: x, "gpu"), model.capturing(["attention", "tokens"]) as found:
        jax.eval_shape(model, jnp.zeros((1, 32, 32, 3), jnp.uint8))
    assert (
        {x.shape[-1] for x in found["attention"]}
        == {5}
        == {x.shape[1] for x in found["tokens"][:-1]}
    )


@pytest.mark.parametrize("capability", ["9.0", "7.5", "gfx942"])
def test_a_gpu_without_cudnn_uses_xlas_attention(capability, monkeypatch):
    """JAX finds no cuDNN on this machine, whatever GPU it reports."""
    device = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    attention._has_cudnn.cache_clear()
    with placing(lambda _, x: x, "gpu"):
        assert not attention.cudnn_takes(jnp.bfloat16, 64)
    attention._has_cudnn.cache_clear()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cudnn_is_not_used_without_a_gpu_on_this_machine(dtype):
    """A machine without a GPU uses XLA's attention in models traced for another machine's GPU."""
    with placing(lambda _, x: x, "gpu"):
        assert not attention.cudnn_takes(dtype, 64)
    x = jnp.ones((1, 5, 2, 64), dtype)
    assert attention.attend(x, x, x).shape == x.shape
