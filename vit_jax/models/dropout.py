"""Dropout and stochastic depth; the masks are the same on any device and mesh.

`add_for_subset` is a faster stochastic depth: it computes a residual branch only for the images
whose branch is not dropped.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.random import threefry2x32_p

from vit_jax.models.layers import part


def drop(
    x: jax.Array, rate: float, rngs: nnx.Rngs | None, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """Applies dropout: zeros a random share of the values and scales up the others.

    Without `rngs` the values are returned unchanged. The result has the dtype of `x`. The values
    are scaled in float32. In bfloat16 a factor of 0.9 would be rounded to 0.8984, an error of
    0.2 %.

    Args:
      rate: dropout rate, from 0 to below 1, rounded to a multiple of 1 / 65,536.
      shape: shape of the mask, with the number of axes of `x`, at least two. Along an axis of size
        1 all values are dropped or kept together. None: the shape of `x`.
    """
    if rngs is None or (not isinstance(rate, jax.Array) and not rate):
        return x
    shape = shape or x.shape
    dropped = jnp.round(rate * 2**16).astype(jnp.uint32)
    drawn = draw16(rngs.dropout(), shape, first=part() * shape[0])
    kept = jnp.concatenate([numbers >= dropped for numbers in drawn], axis=-2)
    # Without this optimization barrier XLA recomputes the random numbers wherever the mask is used.
    # The recomputation takes more time than the layer's matrix products.
    kept = jax.lax.optimization_barrier(kept[..., : shape[-2], :])
    return jnp.where(kept, (x / jnp.float32(1 - rate)).astype(x.dtype), 0)


def draw16(key: jax.Array, shape: tuple[int, ...], first: jax.Array | int = 0) -> list[jax.Array]:
    """Draws uniform integers below 2^16, uint32, as four arrays: quarters of `shape`.

    JAX's generator (threefry) computes blocks of 64 random bits, and `jax.random.bits` uses only 32
    bits of each block. This function splits each block into four numbers of 16 bits. The first
    array contains the first number of every block, the second array the second number, and so on.
    The arrays must be concatenated along the second-to-last axis, which is the axis of the tokens.
    If the length of this axis is not divisible by 4, the concatenation is longer than `shape`.

    The numbers are the same on any mesh, because the axis of the tokens is never sharded.

    Args:
      shape: shape of the numbers on this device.
      first: if axis 0 is sharded, the index in the whole array of the first element on this device.
    """
    *outer, rows, last = shape
    blocks = (*outer, -(-rows // 4), last)
    strides = [int(np.prod(blocks[axis + 1 :])) for axis in range(1, len(blocks))]

    def index(axis):
        return jax.lax.broadcasted_iota(jnp.uint32, blocks, axis)

    within = sum(index(axis) * np.uint32(stride) for axis, stride in enumerate(strides, 1))
    words = (jnp.broadcast_to(word, blocks) for word in jax.random.key_data(key))
    pair = threefry2x32_p.bind(*words, index(0) + jnp.uint32(first), within)
    return [half for word in pair for half in (word & 0xFFFF, word >> 16)]


def add_for_subset(
    x: jax.Array,
    branch: Callable[[jax.Array], jax.Array],
    rate: float,
    rngs: nnx.Rngs,
    read: int | None = None,
) -> jax.Array:
    """Returns `x + branch(x)` with stochastic depth: only a random subset of the images is changed.

    The branch is computed for this subset only, and its outputs are scaled up.

    Args:
      x: `[batch, ..., tokens, dim]`.
      branch: a function that treats each image independently.
      rate: share of images that skip the branch, from 0 to below 1. The share is rounded to a whole
        number of images in each group of images (see `subset_sizes`).
      read: number of leading tokens that the branch returns. This function then returns only these
        tokens. None: all tokens.
    """
    groups, size, kept = subset_sizes(x.shape[0], rate)
    rest = x[..., :read, :]
    if kept == size:
        return rest + branch(x)
    drawn = draw_subset(x.shape[0], rate, rngs)
    indexed = dict(unique_indices=True, mode="promise_in_bounds")

    def of_groups(x):
        return x.reshape(groups, -1, *x.shape[1:])

    # Each group of images is indexed separately. Therefore devices need no communication if each
    # group is stored on one device.
    chosen = jax.vmap(lambda x, rows: x.at[rows].get(**indexed))(of_groups(x), drawn)
    changes = branch(chosen.reshape(-1, *x.shape[1:]))
    changes = (changes * jnp.float32(size / kept)).astype(x.dtype)
    add = jax.vmap(lambda x, rows, changes: x.at[rows].add(changes, **indexed))
    return add(of_groups(rest), drawn, of_groups(changes)).reshape(rest.shape)


def draw_subset(images: int, rate: float, rngs: nnx.Rngs) -> jax.Array:
    """Draws the images whose branch is computed; returns their indices, int32 `[groups, kept]`.

    In each group of images, `kept` distinct images are drawn (see `subset_sizes`). Row i contains
    the indices of the drawn images within group i. The indices are the same on any mesh.
    """
    groups, size, kept = subset_sizes(images, rate)
    numbers = part() * groups + jnp.arange(groups)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rngs.dropout(), numbers)
    return jax.vmap(lambda key: jax.random.permutation(key, size)[:kept])(keys)


def subset_sizes(images: int, rate: float) -> tuple[int, int, int]:
    """Returns the number of groups, the images in a group, and the kept images in a group.

    A batch is divided into groups of consecutive images. The size of a group is 32, 16 or 8: the
    largest of these numbers that divides the number of images. If none of the three numbers is a
    divisor, all images form one group. The same number of images, at least one, is kept in each
    group.
    """
    size = math.gcd(images, 32)
    size = size if size >= 8 else images
    return images // size, size, max(1, round(size * (1 - rate)))
