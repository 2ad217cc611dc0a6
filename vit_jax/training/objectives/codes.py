"""Measures of how evenly a tokeniser that is trained uses its codes, and of when they have died."""

import math

import jax
import jax.numpy as jnp

RECENT = 0.99  # An update's share in the mean of the codes' frequencies is a hundredth.
RARE = 0.01  # Times an even share: a code that is seen less often is not in use.
FEWEST = 0.05  # Share of codes in use below which most have died.
EARLY = 500  # Updates, as `dead_codes` has them.

METRICS = {"perplexity": "number", "codes_used": "share"}


def frequencies(codes: jax.Array, count: int) -> jax.Array:
    """Counts each code among those of an image, as shares of 1, float32 `[batch, count]`.

    Args:
      codes: int32 `[batch, places]`.
      count: number of the codes that there are.
    """
    rows = jnp.arange(len(codes))[:, None]
    return jnp.zeros((len(codes), count), jnp.float32).at[rows, codes].add(1 / codes.shape[1])


def usage_after(usage: jax.Array, seen: jax.Array, update: jax.Array) -> jax.Array:
    """The recent frequency of each code after an update, float32 `[count]`, which sums to 1.

    It is a mean over the updates with weights that fall by `RECENT`, corrected for its start.

    Args:
      usage: before the update; zeros before the first.
      seen: of the update's images, `[batch, count]`, as `frequencies` gives them.
      update: its number, from 1.
    """
    share = (1 - RECENT) / -jnp.expm1(update * math.log(RECENT))
    return usage + share * (seen.mean(axis=0) - usage)


def perplexity(usage: jax.Array) -> jax.Array:
    """The number of codes that would be as hard to guess if all were as frequent: of `count` at
    most.

    Args:
      usage: frequencies `[count]` that sum to 1; of zeros, before the first update, it is 1.
    """
    return jnp.exp(-jnp.where(usage > 0, usage * jnp.log(jnp.maximum(usage, 1e-30)), 0).sum())


def share_used(usage: jax.Array) -> jax.Array:
    """The share of the codes that are in use: as frequent as a hundredth of an even share, at
    least.
    """
    return (usage >= RARE / len(usage)).mean(dtype=jnp.float32)


def usage_metrics(usage: jax.Array, images: int) -> dict[str, jax.Array]:
    """`METRICS` of the recent frequencies `[count]`, the same for each of so many images."""
    values = {"perplexity": perplexity(usage), "codes_used": share_used(usage)}
    return {name: jnp.broadcast_to(value, (images,)) for name, value in values.items()}


def dead_codes(means: dict[str, float], update: int, remedy: str, early: int = EARLY) -> str | None:
    """A line that says that most codes have died, and what to change; None where they have not.

    Args:
      means: of the metrics since the last line.
      update: number of the last of these updates.
      remedy: what to change, in words.
      early: updates before which a tokeniser may still be finding its codes.
    """
    if update < early or means["codes_used"] >= FEWEST:
        return None
    return (
        f"most codes have died: {means['codes_used']:.2%} are in use (perplexity "
        f"{means['perplexity']:.3g}); "
    ) + remedy
