"""Softmax attention, softmax(q k / sqrt(head_dim)) v (paper, appendix A), tuned for each device.

TPU: with 64-wide heads and a few hundred tokens, memory bandwidth limits attention: each pass over
the `[tokens, tokens]` scores is expensive. Therefore

- the scores are not stored but computed twice: once for the maximum of each row, and once for the
  exponentials. Only the exponentials are stored for the backward pass, in the model's dtype;
- the softmax's division comes after the product with the values, because the outputs, `[tokens,
  head_dim]`, are smaller than the scores;
- the backward pass computes the inner sum of the softmax's gradient as sum(dout * out), as in
  FlashAttention (Dao et al., 2022). Two products use the gradient of the scores, and each of them
  recomputes this gradient.

CPU: the heads axis comes before the tokens axis, so the product of each head reads memory in order.
The division comes after the product with the values, too.

NVIDIA GPU: in bfloat16 and float16, attention is computed by cuDNN's fused kernel, which stores no
scores.

All variants compute the same function; a test compares them. docs/measurements.md lists how much
time each of these steps saves.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from vit_jax.models.dropout import drop
from vit_jax.models.layers import capture, platform

LANES = 128  # Width of a TPU's vector registers. With fewer tokens, part of a register is empty.

# Scope names in traces and profiles.
SCORES, VALUES = "attention_scores", "attention_values"

# An optimization barrier: XLA computes the result of an expression once, and does not recompute it
# for each use.
_compute_once = jax.lax.optimization_barrier


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    dropout: float = 0.0,
    rngs: nnx.Rngs | None = None,
    attended: int | None = None,
) -> jax.Array:
    """Returns attention outputs `[batch, queries, heads, head_dim]`; the softmax is in float32.

    Args:
      query: `[batch, queries, heads, head_dim]`.
      key: `[batch, keys, heads, head_dim]`; there may be more or fewer keys than queries.
      value: `[batch, keys, heads, head_dim]`.
      bias: `[batch or 1, heads or 1, queries, keys]`, added to the scores.
      dropout: dropout rate of the attention weights, applied only with `rngs`.
      attended: number of keys to attend to; later keys are padding and are masked. None: all keys.
        If a number is given, bias and dropout are ignored.
    """
    if attended is not None:
        return _attend_to_first(query, key, value, attended)
    capture("attention", lambda: weights(query, key, bias))
    if dropout and rngs is not None:
        kept = drop(weights(query, key, bias).astype(value.dtype), dropout, rngs)
        with jax.named_scope(VALUES):
            return jnp.einsum("bhqk,bkhd->bqhd", kept, value)
    if platform() == "cpu":
        return _attend_on_cpu(query, key, value, bias)
    if platform() == "tpu" and bias is None and min(query.shape[1], key.shape[1]) >= LANES:
        return _attend_on_tpu(*(x.swapaxes(1, 2) for x in (query, key, value))).swapaxes(1, 2)
    if bias is None and query.shape[1] > 1 and cudnn_takes(query.dtype, query.shape[-1]):
        return _attend_by_cudnn(query, key, value)
    return jax.nn.dot_product_attention(query, key, value, bias=bias)


def cudnn_takes(dtype: jnp.dtype, head_dim: int) -> bool:
    """Returns True if cuDNN's fused attention supports this dtype and head width on this machine.

    If a machine without a GPU exports a program for GPUs, the program uses XLA's attention.
    """
    sixteen_bits = dtype in (jnp.bfloat16, jnp.float16)
    return (
        platform() == "gpu"
        and sixteen_bits
        and head_dim <= 128
        and head_dim % 8 == 0
        and _has_cudnn()
    )


@functools.cache
def _has_cudnn() -> bool:
    """Returns True if JAX finds cuDNN and the device is an NVIDIA GPU (Ampere or later)."""

    def loss(x: jax.Array) -> jax.Array:
        return (
            jax.nn.dot_product_attention(x, x, x, implementation="cudnn").astype(jnp.float32).sum()
        )

    device = jax.devices()[0]
    # On an NVIDIA GPU `compute_capability` is a number such as 8.0, on an AMD GPU a name such as
    # gfx942.
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    if device.platform != "gpu" or not major.isdecimal() or int(major) < 8:
        return False
    try:
        jax.eval_shape(jax.grad(loss), jax.ShapeDtypeStruct((1, 2, 1, 64), jnp.bfloat16))
    except (NotImplementedError, RuntimeError):  # cuDNN is missing or too old.
        return False
    return True


def _attend_by_cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes attention with cuDNN; pads the tokens with one zero token if their number is odd."""
    if query.shape[1] % 2 == 0 == key.shape[1] % 2:
        return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
    even = [jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value)]
    return _attend_to_first(even[0], even[1], even[2], key.shape[1])[:, : query.shape[1]]


def _attend_to_first(
    query: jax.Array, key: jax.Array, value: jax.Array, attended: int
) -> jax.Array:
    """Computes attention to the first `attended` keys; all later keys are masked.

    For the backward pass both the number of queries and the number of keys must be even, because
    JAX does not support odd numbers in the backward pass of cuDNN's attention.
    """
    fused = query.shape[1] > 1 and cudnn_takes(query.dtype, query.shape[-1])
    lengths = jnp.full(query.shape[0], attended, jnp.int32)
    return jax.nn.dot_product_attention(
        query, key, value, key_value_seq_lengths=lengths, implementation="cudnn" if fused else "xla"
    )


def weights(query: jax.Array, key: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Returns attention weights, float32 `[batch, heads, queries, keys]`; each row sums to 1."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(query.shape[-1])
    return jax.nn.softmax(scores if bias is None else scores + bias.astype(jnp.float32))


@jax.jit
def _attend_on_cpu(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None
) -> jax.Array:
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    scores = _scores(query, key) if bias is None else _scores(query, key) + bias.astype(jnp.float32)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    share = 1 / weights.sum(-1, keepdims=True)
    with jax.named_scope(VALUES):
        weights = weights.astype(value.dtype)
        out = (
            jnp.einsum("bhqk,bhkd->bhqd", weights, value, preferred_element_type=jnp.float32)
            * share
        )
    return out.astype(value.dtype).swapaxes(1, 2)


@jax.custom_vjp
def _attend_on_tpu(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes attention on a TPU; all arrays are `[batch, heads, tokens, head_dim]`."""
    return _forward(query, key, value)[0]


def _forward(query, key, value):
    query, key, value = map(_tokens_in_lanes, (query, key, value))
    highest = _scores(query, key).max(-1, keepdims=True)
    again, highest = _compute_once((query, highest))
    weights = jnp.exp(_scores(again, key) - highest)
    total = weights.sum(-1, keepdims=True)
    weights, total = _compute_once((weights.astype(query.dtype), total))
    with jax.named_scope(VALUES):
        out = (
            jnp.einsum("bhqk,bhkd->bhqd", weights, value, preferred_element_type=jnp.float32)
            / total
        )
    out = _compute_once(out.astype(query.dtype))
    return out, (query, key, value, weights, total, out)


def _backward(kept, gradient):
    query, key, value, weights, total, out = kept
    gradient = gradient.astype(jnp.float32) / total
    inner = (gradient * out.astype(jnp.float32)).sum(-1, keepdims=True)
    gradient, inner = _compute_once((gradient.astype(query.dtype), inner))

    def of_scores(gradient, value):
        products = jnp.einsum(
            "bhqd,bhkd->bhqk", gradient, value, preferred_element_type=jnp.float32
        )
        scaled = weights.astype(jnp.float32) * (products - inner) / math.sqrt(query.shape[-1])
        return scaled.astype(query.dtype)

    # The gradients of the query and of the key each recompute the gradient of the scores. Each
    # computation reads its inputs through a separate barrier; otherwise XLA would merge the two
    # computations into one.
    for_key, value_for_key = _compute_once((gradient, value))
    for_query, value_for_query, key = _compute_once((gradient, value, key))
    with jax.named_scope(SCORES):
        of_query = jnp.einsum("bhqk,bhkd->bhqd", of_scores(for_query, value_for_query), key)
        of_key = jnp.einsum("bhqk,bhqd->bhkd", of_scores(for_key, value_for_key), query)
    with jax.named_scope(VALUES):
        of_value = jnp.einsum("bhqk,bhqd->bhkd", weights, gradient)
    return of_query, of_key, of_value


_attend_on_tpu.defvjp(_forward, _backward)


def _tokens_in_lanes(x):
    """Sets a memory layout in which the tokens are along the TPU's 128 lanes.

    If the 64 features of a head were along the lanes, the features would fill only half of the
    lanes.
    """
    layout = Layout(major_to_minor=(0, 1, 3, 2))
    return jax.lax.platform_dependent(
        x, tpu=lambda x: with_layout_constraint(x, layout), default=lambda x: x
    )


@jax.named_scope(SCORES)
def _scores(query, key):
    products = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    return products / math.sqrt(query.shape[-1])
