"""A codebook of directions: the nearest of them, and how they follow what is given to them.

All is computed of the global batch, a part of the codes at a time: the similarities of all patches
with all codes would take gigabytes.
"""

import jax
import jax.numpy as jnp

from vit_jax.training.objectives.prototypes import unit

ITERATIONS = 10  # Of k-means, as BEiT v2's authors take.
AT_ONCE = 1024  # Codes.


def nearest(x: jax.Array, codes: jax.Array) -> jax.Array:
    """The number of the code nearest each vector, int32 `[...]`; of several as near the first.

    Args:
      x: of length 1, `[..., dim]`.
      codes: of length 1, `[codes, dim]`.
    """
    found, best = jnp.zeros(x.shape[:-1], jnp.int32), jnp.full(x.shape[:-1], -jnp.inf, x.dtype)
    for first in range(0, len(codes), AT_ONCE):
        near = jnp.einsum("...d,cd->...c", x, codes[first : first + AT_ONCE], precision="highest")
        top, place = near.max(-1), first + near.argmax(-1).astype(jnp.int32)
        found, best = jnp.where(top > best, place, found), jnp.maximum(top, best)
    return found


def sums_by_code(x: jax.Array, given: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The sum of the vectors that are given each code, `[codes, dim]`, and their number, `[codes]`.

    As a product of matrices, whose sums have the same order in every run: a scatter's have not on a
    GPU.

    Args:
      x: `[vectors, dim]`.
      given: the code of each, `[vectors]`.
      count: number of the codes.
    """
    sums, hits = [], []
    for first in range(0, count, AT_ONCE):
        here = jax.nn.one_hot(given - first, min(AT_ONCE, count - first), dtype=x.dtype)
        sums.append(jnp.einsum("nc,nd->cd", here, x, precision="highest"))
        hits.append(here.sum(axis=0))
    return jnp.concatenate(sums), jnp.concatenate(hits)


def means_of_codes(x: jax.Array, given: jax.Array, codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The direction of the mean of the vectors that are given each code, and how many these are.

    A code that none is given stays as it is.
    """
    sums, hits = sums_by_code(x, given, len(codes))
    return jnp.where(hits[:, None] > 0, unit(sums / jnp.maximum(hits, 1)[:, None]), codes), hits


def k_means(x: jax.Array, count: int, key: jax.Array) -> jax.Array:
    """Finds so many directions to which vectors of length 1, `[vectors, dim]`, lie near: spherical
    k-means.

    It begins at vectors drawn at random, all different ones, of which there must be so many.
    """
    first = x[jax.random.permutation(key, len(x))[:count]]
    return jax.lax.fori_loop(
        0, ITERATIONS, lambda _, codes: means_of_codes(x, nearest(x, codes), codes)[0], first
    )


def codes_after(codes: jax.Array, means: jax.Array, momentum: float) -> jax.Array:
    """The codes, of length 1, moved towards the directions of what they were given."""
    return unit(momentum * codes + (1 - momentum) * means)
