"""Codebook of unit vectors: nearest codes, and updates of the codes.

The functions process the codes in groups of `AT_ONCE`. The similarities of all patches of a global
batch with all codes would take gigabytes.
"""

import jax
import jax.numpy as jnp

from vit_jax.training.objectives.prototypes import unit

ITERATIONS = 10  # Iterations of k-means, as in BEiT v2's code.
AT_ONCE = 1024  # Number of codes in one matrix product.


def nearest(x: jax.Array, codes: jax.Array) -> jax.Array:
    """Returns the index of each vector's nearest code, int32 `[...]`; in a tie the lowest index.

    Args:
      x: vectors of unit norm, `[..., dim]`.
      codes: codes of unit norm, `[codes, dim]`.
    """
    found, best = jnp.zeros(x.shape[:-1], jnp.int32), jnp.full(x.shape[:-1], -jnp.inf, x.dtype)
    for first in range(0, len(codes), AT_ONCE):
        near = jnp.einsum("...d,cd->...c", x, codes[first : first + AT_ONCE], precision="highest")
        top, place = near.max(-1), first + near.argmax(-1).astype(jnp.int32)
        found, best = jnp.where(top > best, place, found), jnp.maximum(top, best)
    return found


def sums_by_code(x: jax.Array, indices: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Sums the vectors of each code, `[codes, dim]`, and counts them, `[codes]`.

    The sums are matrix products. A scatter would not be deterministic on a GPU, since it adds in
    varying order.

    Args:
      x: vectors, `[vectors, dim]`.
      indices: index of each vector's code, `[vectors]`.
      count: number of codes.
    """
    sums, hits = [], []
    for first in range(0, count, AT_ONCE):
        here = jax.nn.one_hot(indices - first, min(AT_ONCE, count - first), dtype=x.dtype)
        sums.append(jnp.einsum("nc,nd->cd", here, x, precision="highest"))
        hits.append(here.sum(axis=0))
    return jnp.concatenate(sums), jnp.concatenate(hits)


def means_of_codes(
    x: jax.Array, indices: jax.Array, codes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the new codes, `[codes, dim]`, and the number of vectors of each code, `[codes]`.

    A new code is the normalized mean of its vectors. A code without vectors stays unchanged.

    Args:
      x: vectors, `[vectors, dim]`.
      indices: index of each vector's code, `[vectors]`.
      codes: old codes, `[codes, dim]`.
    """
    sums, hits = sums_by_code(x, indices, len(codes))
    return jnp.where(hits[:, None] > 0, unit(sums / jnp.maximum(hits, 1)[:, None]), codes), hits


def k_means(x: jax.Array, count: int, key: jax.Array) -> jax.Array:
    """Returns `count` centroids of unit norm, `[count, dim]`, by spherical k-means.

    Args:
      x: vectors of unit norm, `[vectors, dim]`, at least `count`. The initial centroids are drawn
        from them without replacement.
      count: number of centroids.
      key: random key.
    """
    first = x[jax.random.permutation(key, len(x))[:count]]
    return jax.lax.fori_loop(
        0, ITERATIONS, lambda _, codes: means_of_codes(x, nearest(x, codes), codes)[0], first
    )


def codes_after(codes: jax.Array, means: jax.Array, momentum: float) -> jax.Array:
    """Returns the new codes: `momentum * codes + (1 - momentum) * means`, scaled to unit norm."""
    return unit(momentum * codes + (1 - momentum) * means)
