"""Attention within small windows as a TPU kernel, which stores no scores in the chip's memory.

A window of 7x7 positions has 49x49 scores per head, and a head is 32 wide. In a TPU's memory the
last axis of an array is padded to 128 lanes. Arrays of scores, or of the queries of single heads,
are therefore up to four times as large as their numbers, and a Swin without this kernel spends most
of its time on them. The kernel reads queries, keys and values with all heads side by side in the
lanes, and keeps all other values in registers and on-chip memory:

- A group of heads is computed with all of its 128 lanes. Keys and values are set to zero outside of
  one head's lanes, so that a product over all lanes equals the product over this head's lanes. The
  matrix unit multiplies matrices of 128x128 in any case.
- Two heads form a pair. Their keys are two blocks of 64 rows, so the scores of both fill 128 lanes.
- Sums over the keys are products with a matrix of ones.
- The backward pass recomputes the weights from queries and keys.
- The steps of several images are interleaved, because each step depends on the previous one.

A test compares values and gradients with plain attention; docs/measurements.md has the figures.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # Width of a register, and of the matrix unit.
KEYS = 64  # Rows for the keys of a head: the window's tokens and padding.
SUBLANES = 8  # Rows of a register.
FAR = -1e30  # Score of padding; its weight is 0.
IMAGES = 16  # Images whose steps are interleaved. With 8 the backward pass takes a tenth longer.


class _Cost(NamedTuple):
    cycles: int  # For a window and a group of heads, from the compiler's schedule for v5e.
    products: int  # Number of products, each with tokens^2 x head_dim multiply-adds per head.


FORWARD, BACKWARD = _Cost(172, 2), _Cost(467, 5)
_ROWS, _LAST = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))  # a b, and a b^T.
_FIRST = (((0,), (0,)), ((), ()))  # a^T b.


class _Static(NamedTuple):
    """Static arguments of the kernels."""

    tokens: int
    head_dim: int
    classes: tuple[int, ...]  # Index of each window's mask.


def supported(tokens: int, head_dim: int) -> bool:
    """Returns True if the kernel supports windows of this size and heads of this width."""
    return tokens <= KEYS and LANES % (2 * head_dim) == 0


def attend_in_windows(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array,
    masks: np.ndarray,
    classes: np.ndarray,
) -> jax.Array:
    """Returns softmax(q k / sqrt(head_dim) + bias + mask) v, with the softmax in float32.

    Args:
      query: `[batch, windows, rows, heads, head_dim]`. Rows after the tokens are padding: they are
        not attended to, and have zero gradients.
      key: same shape as `query`.
      value: same shape as `query`.
      bias: float32 `[heads, tokens, tokens]`, added to the scores.
      masks: float32 `[classes, tokens, tokens]`, added to the scores of all heads.
      classes: integers `[windows]`, the index of each window's mask.
    """
    heads, head_dim = query.shape[3:]
    flat = (x.reshape(*x.shape[:3], heads * head_dim) for x in (query, key, value))
    tokens = bias.shape[-1]
    static = _Static(tokens, head_dim, tuple(map(int, classes)))
    biases = _biases(bias, jnp.asarray(masks, jnp.float32), LANES // head_dim)
    return _attend(static, *flat, biases).reshape(query.shape)


def _biases(bias: jax.Array, masks: jax.Array, group: int) -> jax.Array:
    """Returns bias + mask of each class of windows, `[classes, groups, pairs, KEYS, 2 KEYS]`.

    Padded keys get the score FAR, and padded heads the score 0.

    Args:
      bias: `[heads, tokens, tokens]`.
      masks: `[classes, tokens, tokens]`.
      group: number of heads in a group.
    """
    heads, tokens, _ = bias.shape
    both = jnp.pad(bias, ((0, -heads % group), (0, 0), (0, 0))) + masks[:, None]
    both = jnp.pad(both, [(0, 0)] * 3 + [(0, KEYS - tokens)], constant_values=FAR)
    both = jnp.pad(both, [(0, 0)] * 2 + [(0, KEYS - tokens), (0, 0)])
    both = both.reshape(len(masks), -1, group // 2, 2, KEYS, KEYS)
    return both.swapaxes(3, 4).reshape(*both.shape[:3], KEYS, 2 * KEYS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, biases):
    return _forward(static, query, key, value, biases)[0]


def _forward(static, query, key, value, biases):
    like = jax.ShapeDtypeStruct(query.shape, query.dtype)
    (out,) = _call(_forward_kernel, FORWARD, static, (query, key, value), biases, [like])
    return out, (query, key, value, biases)


def _backward(static, kept, gradient):
    query, key, value, biases = kept
    like = jax.ShapeDtypeStruct(query.shape, query.dtype)
    of_bias = jax.ShapeDtypeStruct(biases.shape[1:], jnp.float32)
    arrays, outputs = (query, key, value, gradient), [like, like, like, of_bias]
    *gradients, of_bias = _call(_backward_kernel, BACKWARD, static, arrays, biases, outputs)
    # All classes of windows have the same biases, and the masks are constants. So the sum over all
    # windows is assigned to the first class.
    rest = jnp.zeros((len(biases) - 1, *of_bias.shape), jnp.float32)
    return *gradients, jnp.concatenate([of_bias[None], rest])


_attend.defvjp(_forward, _backward)


def _call(kernel, cost, static, arrays, biases, outputs):
    """Calls a kernel for each group of heads, window and block of images.

    Args:
      arrays: inputs `[batch, windows, tokens, dim]`.
      biases: result of `_biases`.
      outputs: shapes of the outputs: of arrays like the inputs, and of the sum over all windows of
        gradients of biases.
    """
    batch, windows, _, dim = arrays[0].shape
    images = math.gcd(batch, IMAGES)
    # Blocks are larger than the arrays' last two axes. Their padding has undefined values.
    block = pl.BlockSpec((images, 1, KEYS, LANES), lambda group, w, b, classes: (b, w, 0, group))
    shape = biases.shape[2:]
    added = pl.BlockSpec((1, 1, *shape), lambda group, w, b, classes: (classes[w], group, 0, 0, 0))
    summed = pl.BlockSpec((1, *shape), lambda group, w, b, classes: (group, 0, 0, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(biases.shape[1], windows, batch // images),
        in_specs=[block] * len(arrays) + [added],
        out_specs=[block if x.shape == arrays[0].shape else summed for x in outputs],
    )
    return pl.pallas_call(
        functools.partial(kernel, static, dim),
        grid_spec=grid,
        out_shape=outputs,
        name=f"window_attention{kernel.__name__.removesuffix('_kernel')}",
        # The compiler does not estimate the cost of kernels; `planning/hlo.py` reads it here.
        metadata={
            "cycles": str(cost.cycles * batch * windows * biases.shape[1]),
            "flops": str(2 * cost.products * batch * windows * static.tokens**2 * dim),
        },
    )(jnp.asarray(static.classes, jnp.int32), *arrays, biases)


class _Lanes:
    """Masks of a group's lanes, and matrices of ones whose products sum over lanes."""

    def __init__(self, static: _Static, dim: int, dtype: jnp.dtype):
        self.tokens, self.head_dim, self.dtype = static.tokens, static.head_dim, dtype
        self.rows = -(-static.tokens // SUBLANES) * SUBLANES  # Rows for queries.
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, (KEYS, LANES), axis) for axis in (0, 1))
        self.lane, self.left = lane, lane < KEYS
        self.valid = row < static.tokens
        if dim % LANES:
            self.valid &= lane < dim - pl.program_id(0) * LANES
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
        self.below, self.column = row >= KEYS, lane
        # A product with it sums over each head's keys, and repeats the sum in the lanes of keys.
        self.ones = self._ones(self.below == (lane >= KEYS))

    def _ones(self, where):
        return jnp.where(where, 1.0, 0.0).astype(self.dtype)

    def load(self, ref, images: list[int], rows: int) -> list[jax.Array]:
        """Loads the group's lanes of each image, with zeros in place of padding."""
        values = [ref[image, 0, pl.ds(0, rows)] for image in images]
        return [jnp.where(self.valid[:rows], x, jnp.zeros_like(x)) for x in values]

    def of_head(self, head: int) -> jax.Array:
        """Returns a mask of a head's lanes, `[KEYS, LANES]`."""
        start = head * self.head_dim
        return (self.lane >= start) & (self.lane < start + self.head_dim)

    def pair(self, arrays: list[jax.Array], pair: int) -> list[jax.Array]:
        """Stacks the rows of two heads, `[2 KEYS, LANES]`, with zeros outside of their lanes."""
        heads = [self.of_head(2 * pair + head) for head in range(2)]
        return [
            jnp.concatenate([jnp.where(head, x, jnp.zeros_like(x)) for head in heads])
            for x in arrays
        ]

    def spread(self, pair: int) -> jax.Array:
        """Returns ones that sum over each head's keys, and repeat the sum in the head's lanes."""
        start = jnp.where(self.below, 2 * pair + 1, 2 * pair) * self.head_dim
        return self._ones((self.column >= start) & (self.column < start + self.head_dim))

    def sums(self, x: jax.Array) -> jax.Array:
        """Sums over each head's keys, and repeats the sum in the lanes of its keys."""
        high = x.astype(self.dtype)
        total = _dot(high, self.ones, _ROWS)
        if self.dtype != jnp.float32:  # Adds the digits that `high` does not have.
            low = (x - high.astype(jnp.float32)).astype(self.dtype)
            total += _dot(low, self.ones, _ROWS)
        return total

    def exponentials(self, queries, keys, bias) -> list[jax.Array]:
        """Returns exp(score - the row's maximum score) of each image."""
        factor, left = 1 / math.sqrt(self.head_dim), self.left[: self.rows]
        scores = [
            _dot(query, key, _LAST) * factor + bias
            for query, key in zip(queries, keys, strict=True)
        ]
        highest = [
            jnp.where(
                left,
                jnp.where(left, x, -jnp.inf).max(-1, keepdims=True),
                jnp.where(left, -jnp.inf, x).max(-1, keepdims=True),
            )
            for x in scores
        ]
        return [jnp.exp(x - top).astype(self.dtype) for x, top in zip(scores, highest, strict=True)]


def _dot(a: jax.Array, b: jax.Array, axes) -> jax.Array:
    # Kernels have no higher precision for bfloat16, and only one for float32.
    fast = jax.config.jax_default_matmul_precision in (None, "default", "fastest", "bfloat16")
    exact = a.dtype == jnp.float32 and not fast
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def _store(ref, arrays: list[jax.Array]) -> None:
    for image, x in enumerate(arrays):
        ref[image, 0, pl.ds(0, len(x))] = x.astype(ref.dtype)


def _forward_kernel(static, dim, classes, query, key, value, bias, out):
    lanes, images = _Lanes(static, dim, query.dtype), list(range(len(query)))
    queries = lanes.load(query, images, lanes.rows)
    keys, values = (lanes.load(ref, images, KEYS) for ref in (key, value))
    products = totals = [0.0] * len(images)
    for pair in range(bias.shape[2]):
        weights = lanes.exponentials(
            queries, lanes.pair(keys, pair), bias[0, 0, pair, pl.ds(0, lanes.rows)]
        )
        pairs, spread = lanes.pair(values, pair), lanes.spread(pair)
        products = [x + _dot(w, v, _ROWS) for x, w, v in zip(products, weights, pairs, strict=True)]
        totals = [x + _dot(w, spread, _ROWS) for x, w in zip(totals, weights, strict=True)]
    _store(out, [x / total for x, total in zip(products, totals, strict=True)])


def _backward_kernel(
    static, dim, classes, query, key, value, gradient, bias, of_query, of_key, of_value, of_bias
):
    lanes, images = _Lanes(static, dim, query.dtype), list(range(len(query)))
    queries, gradients = (lanes.load(ref, images, lanes.rows) for ref in (query, gradient))
    keys, values = (lanes.load(ref, images, KEYS) for ref in (key, value))
    rows = pl.ds(0, lanes.rows)

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        of_bias[...] = jnp.zeros_like(of_bias)

    of_queries = [0.0] * len(images)
    of_keys = of_values = [jnp.zeros((KEYS, LANES), jnp.float32)] * len(images)
    for pair in range(bias.shape[2]):
        pairs = lanes.pair(keys, pair)
        weights = lanes.exponentials(queries, pairs, bias[0, 0, pair, rows])
        weights, of_scores = _of_scores(lanes, weights, gradients, lanes.pair(values, pair))
        of_bias[0, pair, rows] += sum(of_scores[1:], of_scores[0])
        of_scores = [(x / math.sqrt(static.head_dim)).astype(query.dtype) for x in of_scores]
        of_queries = [
            x + _dot(s, k, _ROWS) for x, s, k in zip(of_queries, of_scores, pairs, strict=True)
        ]
        of_keys = _add_pair(lanes, pair, of_keys, of_scores, queries)
        of_values = _add_pair(lanes, pair, of_values, weights, gradients)
    _store(of_query, of_queries)
    _store(of_key, of_keys)
    _store(of_value, of_values)


def _of_scores(lanes, weights, gradients, values):
    """Returns the weights of a pair of heads, and the gradients of scores in float32.

    The given weights are not yet divided by their sums. `gradients` are those of the outputs, and
    `values` are the values of the pair.
    """
    totals = [_dot(w, lanes.ones, _ROWS) for w in weights]
    of_weights = [_dot(g, v, _LAST) for g, v in zip(gradients, values, strict=True)]
    weights = [w.astype(jnp.float32) / x for w, x in zip(weights, totals, strict=True)]
    inner = [lanes.sums(w * x) for w, x in zip(weights, of_weights, strict=True)]
    of_scores = [w * (x - y) for w, x, y in zip(weights, of_weights, inner, strict=True)]
    return [w.astype(lanes.dtype) for w in weights], of_scores


def _add_pair(lanes, pair, totals, scores, rows):
    """Adds scores^T rows of each head of a pair in the head's lanes; returns the new totals."""
    products = [_dot(s, row, _FIRST) for s, row in zip(scores, rows, strict=True)]
    for half in range(2):
        here, keys = lanes.of_head(2 * pair + half), slice(half * KEYS, (half + 1) * KEYS)
        totals = [jnp.where(here, x[keys], y) for x, y in zip(products, totals, strict=True)]
    return totals
