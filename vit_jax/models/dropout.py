"""Dropout and stochastic depth: zeros in place of a share of the values, by a key and nothing else.

Stochastic depth may also leave out images before it computes what would be zero.
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
    """Zeros in place of a share of the values, the others enlarged; without `rngs` the values
    themselves.

    They keep their type. The factor is float32: 0.9 in bfloat16 is 0.8984, which enlarges by 0.2 %
    too much.

    Args:
      rate: the share, from 0 to below 1; what falls is that to the nearest 1 / 65,536.
      shape: of as many axes as `x`, at least two; the values along an axis of 1 fall together.
    """
    if rngs is None or (not isinstance(rate, jax.Array) and not rate):
        return x
    shape = shape or x.shape
    dropped = jnp.round(rate * 2**16).astype(jnp.uint32)
    drawn = draw16(rngs.dropout(), shape, first=part() * shape[0])
    kept = jnp.concatenate([numbers >= dropped for numbers in drawn], axis=-2)
    # Without the barrier each use of the mask draws anew, which costs more than the layer's
    # products.
    kept = jax.lax.optimization_barrier(kept[..., : shape[-2], :])
    return jnp.where(kept, (x / jnp.float32(1 - rate)).astype(x.dtype), 0)


def draw16(key: jax.Array, shape: tuple[int, ...], first: jax.Array | int = 0) -> list[jax.Array]:
    """Uniform numbers below 2^16, as uint32, the same on any mesh: four arrays, the quarters of
    `shape`.

    A block of threefry has 64 bits, of which `jax.random.bits` gives 32. This takes four numbers of
    each, for the quarters (rounded up) of the last axis but one: of the tokens, which no mesh
    divides.

    Args:
      first: number of the first row, of a larger array's numbers.
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
    """`x + branch(x)`, where the branch is computed for a drawn subset of the images alone, and
    enlarged.

    Args:
      x: `[batch, ..., tokens, dim]`.
      branch: treats each image by itself.
      rate: the share of images that are left out, from 0 to below 1, as near as whole images of a
        group come.
      read: the branch returns so many tokens only, the first, and so does this.
    """
    groups, size, kept = subset_sizes(x.shape[0], rate)
    rest = x[..., :read, :]
    if kept == size:
        return rest + branch(x)
    drawn = draw_subset(x.shape[0], rate, rngs)
    indexed = dict(unique_indices=True, mode="promise_in_bounds")

    def of_groups(x):
        return x.reshape(groups, -1, *x.shape[1:])

    # Each group is indexed by itself, so that a device with whole groups asks no other for images.
    chosen = jax.vmap(lambda x, rows: x.at[rows].get(**indexed))(of_groups(x), drawn)
    changes = branch(chosen.reshape(-1, *x.shape[1:]))
    changes = (changes * jnp.float32(size / kept)).astype(x.dtype)
    add = jax.vmap(lambda x, rows, changes: x.at[rows].add(changes, **indexed))
    return add(of_groups(rest), drawn, of_groups(changes)).reshape(rest.shape)


def draw_subset(images: int, rate: float, rngs: nnx.Rngs) -> jax.Array:
    """int32 `[groups, kept]`: the images of each group that are kept, all different; the same on
    any mesh.
    """
    groups, size, kept = subset_sizes(images, rate)
    numbers = part() * groups + jnp.arange(groups)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(rngs.dropout(), numbers)
    return jax.vmap(lambda key: jax.random.permutation(key, size)[:kept])(keys)


def subset_sizes(images: int, rate: float) -> tuple[int, int, int]:
    """Groups of consecutive images, images of each group, and how many of these are kept, at least
    one.

    A group has 32 images, or as many as the largest power of two that divides their number; where
    that is below 8, all are one group.
    """
    size = math.gcd(images, 32)
    size = size if size >= 8 else images
    return images // size, size, max(1, round(size * (1 - rate)))
