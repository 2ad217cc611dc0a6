"""Codebook of unit vectors: nearest codes, and updates of the codes.

The functions work on the global batch and on a part of the codes at a time, since the similarities
of all patches with all codes would take gigabytes.
"""

import jax
import jax.numpy as jnp

from vit_jax.training.objectives.prototypes import unit

ITERATIONS = 10  # Iterations of k-means, as in BEiT v2's code.
AT_ONCE = 1024  # Codes per product.


def nearest(x: jax.Array, codes: jax.Array) -> jax.Array:
    """Returns the index of each vector's nearest code, int32 `[...]`; the first one in a tie.

    Args:
      x: vectors of length 1, `[..., dim]`.
      codes: codes of length 1, `[codes, dim]`.
    """
    found, best = jnp.zeros(x.shape[:-1], jnp.int32), jnp.full(x.shape[:-1], -jnp.inf, x.dtype)
    for first in range(0, len(codes), AT_ONCE):
        near = jnp.einsum("...d,cd->...c", x, codes[first : first + AT_ONCE], precision="highest")
        top, place = near.max(-1), first + near.argmax(-1).astype(jnp.int32)
        found, best = jnp.where(top > best, place, found), jnp.maximum(top, best)
    return found


def sums_by_code(x: jax.Array, given: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of each code's vectors, `[codes, dim]`, and their number, `[codes]`.

    It uses a matrix product because a scatter on a GPU is not deterministic: it adds in varying
    order.

    Args:
      x: `[vectors, dim]`.
      given: the code of each vector, `[vectors]`.
      count: number of codes.
    """
    sums, hits = [], []
    for first in range(0, count, AT_ONCE):
        here = jax.nn.one_hot(given - first, min(AT_ONCE, count - first), dtype=x.dtype)
        sums.append(jnp.einsum("nc,nd->cd", here, x, precision="highest"))
        hits.append(here.sum(axis=0))
    return jnp.concatenate(sums), jnp.concatenate(hits)


def means_of_codes(x: jax.Array, given: jax.Array, codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the normalized mean of each code's vectors, and their number.

    A code without vectors stays unchanged.
    """
    sums, hits = sums_by_code(x, given, len(codes))
    return jnp.where(hits[:, None] > 0, unit(sums / jnp.maximum(hits, 1)[:, None]), codes), hits


def k_means(x: jax.Array, count: int, key: jax.Array) -> jax.Array:
    """Fits `count` unit vectors to unit vectors, `[vectors, dim]`, by spherical k-means.

    It starts from distinct random vectors of `x`, which must have at least `count`.
    """
    first = x[jax.random.permutation(key, len(x))[:count]]
    return jax.lax.fori_loop(
        0, ITERATIONS, lambda _, codes: means_of_codes(x, nearest(x, codes), codes)[0], first
    )


def codes_after(codes: jax.Array, means: jax.Array, momentum: float) -> jax.Array:
    """Moves the codes, of length 1, towards the means of their vectors."""
    return unit(momentum * codes + (1 - momentum) * means)
