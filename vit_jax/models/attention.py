"""Softmax attention, softmax(q k / sqrt(head_dim)) v (paper, appendix A), as each device does it
best.

On TPUs the products of 64-wide heads and some hundred tokens keep the matrix units waiting: what
costs is each pass over the `[tokens, tokens]` scores. So there

- scores are computed twice rather than kept: once for each row's maximum, once for its
  exponentials, which alone are kept for the backward pass, in the model's dtype;
- the exponentials are divided by their sum after the product with the values, on `[tokens,
  head_dim]`;
- the backward pass takes sum(dout * out) for the softmax's sum (as FlashAttention does; Dao et al.,
  2022) and computes the scores' gradient within the two products that use it.

On a CPU heads come before tokens, so that each head's product reads memory in order, and division
comes after the product with the values.

On NVIDIA's GPUs cuDNN's fused attention computes in bfloat16 and float16, and keeps no scores in
memory.

It is the same function, term by term; a test holds that. docs/measurements.md has what each step
gave.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from vit_jax.models.dropout import drop
from vit_jax.models.layers import capture, platform

LANES = 128  # Tokens in a row of a TPU's registers; fewer tokens leave most of them empty.

SCORES, VALUES = (
    "attention_scores",
    "attention_values",
)  # In traces, and in what is said of a program.

_compute_once = jax.lax.optimization_barrier  # What is behind it is not computed anew for each use.


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    dropout: float = 0.0,
    rngs: nnx.Rngs | None = None,
    attended: int | None = None,
) -> jax.Array:
    """`[batch, tokens, heads, head_dim]` each; keys and values may be more or fewer than queries.

    The softmax is taken in float32.

    Args:
      bias: `[batch or 1, heads, queries, keys]`, added to the scores.
      dropout: rate of dropped attention weights, where `rngs` are given.
      attended: number of keys that are attended to; later ones are padding and are masked. There is
        neither bias nor dropout then. None: all keys.
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
    """Returns True where a model is traced for this machine's GPU, and cuDNN has a fused attention
    for it.

    A program that is traced here for a GPU elsewhere takes XLA's.
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
    """True where JAX finds cuDNN, and its device is a GPU of NVIDIA's since Ampere."""

    def loss(x: jax.Array) -> jax.Array:
        return (
            jax.nn.dot_product_attention(x, x, x, implementation="cudnn").astype(jnp.float32).sum()
        )

    device = jax.devices()[0]
    major = str(getattr(device, "compute_capability", "")).partition(".")[
        0
    ]  # AMD's is a name, as gfx942.
    if device.platform != "gpu" or not major.isdecimal() or int(major) < 8:
        return False
    try:
        jax.eval_shape(jax.grad(loss), jax.ShapeDtypeStruct((1, 2, 1, 64), jnp.bfloat16))
    except (NotImplementedError, RuntimeError):  # There is no cuDNN, or one that is too old.
        return False
    return True


def _attend_by_cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention by cuDNN; odd numbers of tokens are padded."""
    if query.shape[1] % 2 == 0 == key.shape[1] % 2:
        return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
    even = [jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value)]
    return _attend_to_first(even[0], even[1], even[2], key.shape[1])[:, : query.shape[1]]


def _attend_to_first(
    query: jax.Array, key: jax.Array, value: jax.Array, attended: int
) -> jax.Array:
    """Attention to the first `attended` keys; the others are masked.

    JAX requires even numbers of tokens for the gradients of cuDNN's attention, so callers pad odd
    ones.
    """
    fused = query.shape[1] > 1 and cudnn_takes(query.dtype, query.shape[-1])
    lengths = jnp.full(query.shape[0], attended, jnp.int32)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        key_value_seq_lengths=lengths,
        implementation="cudnn" if fused else "xla",
    )


def weights(query: jax.Array, key: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Attention weights, float32 `[batch, heads, queries, keys]`; each query's row sums to 1."""
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
    """`[batch, heads, tokens, head_dim]` each."""
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

    # Each time behind a barrier of its own, or the compiler would find them equal and keep one.
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
    """Lays tokens along the lanes: rows of 64-wide heads would half fill them, and fuse with no
    product.
    """
    layout = Layout(major_to_minor=(0, 1, 3, 2))
    return jax.lax.platform_dependent(
        x, tpu=lambda x: with_layout_constraint(x, layout), default=lambda x: x
    )


@jax.named_scope(SCORES)
def _scores(query, key):
    products = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    return products / math.sqrt(query.shape[-1])
