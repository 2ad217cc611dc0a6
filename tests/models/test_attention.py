"""Attention on a CPU and a TPU, and a last layer that computes only the tokens that are read."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import vit_jax
from vit_jax.models.attention import attend
from vit_jax.models.layers import placing

# With fewer tokens, a TPU uses the same attention as a GPU.
BATCH, TOKENS, HEADS, HEAD_DIM = 2, 130, 3, 16
everywhere = pytest.mark.parametrize("platform", ["cpu", "tpu"])


def traced(function, platform: str):
    """Returns a function that is traced as for `platform` and runs on this machine."""

    def call(*arguments):
        with placing(lambda _, x: x, platform):
            return function(*arguments)

    return jax.jit(call)


@pytest.fixture(scope="module")
def arrays() -> list[np.ndarray]:
    """Returns queries, keys, values, and a gradient of the output."""
    random = np.random.default_rng(0)
    return [
        random.normal(size=(BATCH, TOKENS, HEADS, HEAD_DIM)).astype(np.float32) for _ in range(4)
    ]


def plain(query, key, value, bias=0.0):
    """Returns the attention's output and its weights, in float64."""
    scores = np.einsum("bqhd,bkhd->bhqk", query, key, dtype=np.float64) / np.sqrt(HEAD_DIM) + bias
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights, value), weights


def plain_gradients(query, key, value, gradient):
    """Returns the gradients in float64, by the softmax's derivative p (g - sum(p g))."""
    _, weights = plain(query, key, value)
    of_weights = np.einsum("bqhd,bkhd->bhqk", gradient, value, dtype=np.float64)
    of_scores = (
        weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) / np.sqrt(HEAD_DIM)
    )
    return (
        np.einsum("bhqk,bkhd->bqhd", of_scores, key),
        np.einsum("bhqk,bqhd->bkhd", of_scores, query),
        np.einsum("bhqk,bqhd->bkhd", weights, gradient),
    )


@everywhere
def test_attention_is_the_plain_one(arrays, platform):
    np.testing.assert_allclose(
        traced(attend, platform)(*arrays[:3]), plain(*arrays[:3])[0], atol=1e-6
    )


@everywhere
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_gradients_are_the_plain_ones(arrays, which, platform):
    gradients = jax.vjp(traced(attend, platform), *arrays[:3])[1](arrays[3])
    np.testing.assert_allclose(gradients[which], plain_gradients(*arrays)[which], atol=2e-6)


@everywhere
@pytest.mark.parametrize("scale", [0.0, 1e-3, 40.0])
def test_attention_is_finite_and_right_for_small_and_large_scores(arrays, scale, platform):
    query, key, value = scale * arrays[0], scale * arrays[1], arrays[2]
    ours = traced(attend, platform)(query, key, value)
    np.testing.assert_allclose(ours, plain(query, key, value)[0], atol=2e-4)


@everywhere
def test_attention_in_bfloat16_rounds_as_the_plain_one_does(arrays, platform):
    low = [jnp.asarray(x, jnp.bfloat16) for x in arrays[:3]]
    exact = plain(*(np.asarray(x, np.float64) for x in low))[0]
    ours, theirs = (
        np.abs(np.asarray(f(*low), np.float64) - exact).max()
        for f in (traced(attend, platform), jax.nn.dot_product_attention)
    )
    assert ours < 1.5 * theirs


@pytest.mark.parametrize("queries", [1, TOKENS])
def test_a_bias_is_added_to_the_scores_of_fewer_queries_too(arrays, queries):
    query, key, value, _ = arrays
    bias = np.random.default_rng(2).normal(size=(BATCH, HEADS, queries, TOKENS)).astype(np.float32)
    ours = jax.jit(attend)(query[:, :queries], key, value, bias)
    np.testing.assert_allclose(ours, plain(query[:, :queries], key, value, bias)[0], atol=1e-6)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(1).uniform(-1, 1, (2, 192, 192, 3)).astype(np.float32)


@pytest.mark.one_variant
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"distillation": "heads"}, {"position": "relative"}, {"qk_norm": True}]
)
def test_skipping_unread_tokens_does_not_change_the_logits(options, scan, images):
    model = vit_jax.create_model(
        "ViT-Ti/16", depth=3, num_classes=5, image_size=192, scan=scan, remat="dots", **options
    )
    model.head.kernel[...] = jax.random.normal(jax.random.key(2), model.head.kernel.shape)
    graphdef, params = nnx.split(model)
    read, every = (
        jax.jit(lambda params, whole=whole: nnx.merge(graphdef, params)(images, whole=whole))(
            params
        )
        for whole in (False, True)
    )
    np.testing.assert_allclose(read, every, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_twenty_steps_for_a_tpu_have_the_losses_of_the_plain_path(images):
    """The models for TPU and GPU differ in all platform-specific parts, and have equal losses.

    These parts are the attention, the last layer, and separate products for q, k and v.
    """
    model = vit_jax.create_model("ViT-Ti/16", depth=3, num_classes=5, image_size=192)
    graphdef, params = nnx.split(model)
    labels, optimizer = jnp.asarray([1, 3]), optax.adam(1e-3)

    def losses(whole: bool, platform: str):
        def loss(params):
            logits = nnx.merge(graphdef, params)(images, whole=whole)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        def step(params, state):
            value, gradient = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(params, updates), state, value

        step, state, values = traced(step, platform), (params, optimizer.init(params)), []
        for _ in range(20):
            *state, value = step(*state)
            values.append(float(value))
        return values

    # The attention for a GPU is JAX's own.
    ours, theirs = losses(False, "tpu"), losses(True, "gpu")
    assert theirs[-1] < 0.5 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
