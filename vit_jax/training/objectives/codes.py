"""Metrics of a tokenizer's code usage in training, and a warning for dead codes."""

import math

import jax
import jax.numpy as jnp

RECENT = 0.99  # Decay per update of the moving average of the codes' frequencies.
RARE = 0.01  # A code counts as used if its frequency is at least RARE / number of codes.
FEWEST = 0.05  # If the share of used codes is smaller, the codebook has collapsed.
EARLY = 500  # Default of `early` in `dead_codes`, in updates.

METRICS = {"perplexity": "number", "codes_used": "share"}  # Names of metrics, and their formats.


def frequencies(codes: jax.Array, count: int) -> jax.Array:
    """Returns the share of each code among an image's codes, float32 `[batch, count]`.

    Args:
      codes: codes of all grid positions of each image, int32 `[batch, positions]`.
    """
    rows = jnp.arange(len(codes))[:, None]
    return jnp.zeros((len(codes), count), jnp.float32).at[rows, codes].add(1 / codes.shape[1])


def usage_after(usage: jax.Array, seen: jax.Array, update: jax.Array) -> jax.Array:
    """Updates the moving average of the codes' frequencies, float32 `[count]`.

    The average has the decay `RECENT` and bias correction, as in Adam. Its sum is 1, unless the
    caller changes the average between updates.

    Args:
      usage: average before the update; zeros before the first update.
      seen: frequencies in the update's images, `[batch, count]`, from `frequencies`.
      update: number of the update, from 1.
    """
    share = (1 - RECENT) / -jnp.expm1(update * math.log(RECENT))
    return usage + share * (seen.mean(axis=0) - usage)


def perplexity(usage: jax.Array) -> jax.Array:
    """Returns the perplexity of the codes.

    Args:
      usage: frequencies, `[count]`. If their sum is 1, the result is at most `count`. For zeros, as
        before the first update, the result is 1.
    """
    return jnp.exp(-jnp.where(usage > 0, usage * jnp.log(jnp.maximum(usage, 1e-30)), 0).sum())


def share_used(usage: jax.Array) -> jax.Array:
    """Returns the share of codes in use.

    A code is in use if its frequency is at least a hundredth (`RARE`) of the mean frequency of all
    codes.
    """
    return (usage >= RARE / len(usage)).mean(dtype=jnp.float32)


def usage_metrics(usage: jax.Array, images: int) -> dict[str, jax.Array]:
    """Returns the code usage metrics (`METRICS`) for each image, `[images]`.

    All images have the same values, computed from the recent frequencies `usage`, `[count]`.
    """
    values = {"perplexity": perplexity(usage), "codes_used": share_used(usage)}
    return {name: jnp.broadcast_to(value, (images,)) for name, value in values.items()}


def dead_codes(means: dict[str, float], update: int, remedy: str, early: int = EARLY) -> str | None:
    """Returns a warning with a remedy if most codes are unused, else None.

    Args:
      means: metrics, averaged over the updates since the last log line.
      update: number of the current update.
      remedy: advice on settings to change.
      early: there is no warning before this update, since few codes may be in use at the start of a
        run.
    """
    if update < early or means["codes_used"] >= FEWEST:
        return None
    return (
        f"most codes have died: {means['codes_used']:.2%} are in use (perplexity "
        f"{means['perplexity']:.3g}); "
    ) + remedy
