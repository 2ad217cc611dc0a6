"""Batch normalization (Ioffe and Szegedy, 2015); running statistics are not parameters.

A training step normalizes by the statistics of the batch over all devices. It returns the mean and
variance of each image, and the training objective updates its running statistics from these values.
With gradient accumulation each micro-batch is normalized by its own statistics, as in PyTorch.
"""

import jax
import jax.numpy as jnp
from flax import nnx

MOMENTUM = 0.1  # Weight of the batch in the running statistics, as in PyTorch.
EPSILON = 1e-5

Moments = dict[str, dict[str, jax.Array]]  # Name of the norm -> `mean`, `variance` of each channel.


class Statistics:
    """Statistics of all batch norms of a head during one call of the head.

    Args:
      running: running mean and variance of each norm, by the name of the norm. None: the norms use
        the statistics of the batch.

    Attributes:
      moments: filled if `running` is None. A dictionary for each norm, by the name of the norm:
        `mean` and `variance` over the positions of each image, `[batch, channels]`; and `places`,
        the number of positions of each image, `[batch]`.
    """

    def __init__(self, running: Moments | None = None):
        self.running, self.moments = running, {}


class BatchNorm(nnx.Module):
    """Normalizes each channel over the batch and the positions, in float32.

    Args:
      name: key of this norm in `Statistics`, unique in the head.
      channels: number of channels.
    """

    def __init__(self, name: str, channels: int):
        self.name = name
        self.scale = nnx.Param(jnp.ones(channels))
        self.bias = nnx.Param(jnp.zeros(channels))

    def __call__(self, x: jax.Array, statistics: Statistics) -> jax.Array:
        """Maps `[batch, height, width, channels]` to the same shape and dtype."""
        wide = x.astype(jnp.float32)
        if statistics.running is None:
            each = {"mean": wide.mean((1, 2)), "variance": wide.var((1, 2))}
            places = jnp.full(len(x), float(x.shape[1] * x.shape[2]))
            statistics.moments[self.name] = jax.lax.stop_gradient(each | {"places": places})
            mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        else:
            mean, variance = (statistics.running[self.name][key] for key in ("mean", "variance"))
        factor = self.scale[...] * jax.lax.rsqrt(variance + EPSILON)
        return ((wide - mean) * factor + self.bias[...]).astype(x.dtype)


def initial_statistics(head: nnx.Module) -> Moments:
    """Returns the running statistics of a head's batch norms before the first update."""
    norms = [part for _, part in nnx.iter_modules(head) if isinstance(part, BatchNorm)]
    return {
        norm.name: {"mean": jnp.zeros(norm.scale.shape), "variance": jnp.ones(norm.scale.shape)}
        for norm in norms
    }


def updated_statistics(running: Moments, moments: Moments) -> Moments:
    """Returns the running statistics after a batch, with PyTorch's unbiased variance.

    `moments` is `Statistics.moments` of the batch.
    """

    def after(old: dict[str, jax.Array], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        mean, count = batch["mean"], batch["places"].sum()
        variance = (batch["variance"].mean(0) + mean.var(0)) * count / jnp.maximum(count - 1, 1)
        new = {"mean": mean.mean(0), "variance": variance}
        return {key: (1 - MOMENTUM) * old[key] + MOMENTUM * new[key] for key in old}

    return {name: after(old, moments[name]) for name, old in running.items()}
