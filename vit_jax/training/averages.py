"""Moving averages of a run's weights: EMA, and teachers that follow a student.

Moving averages have no gradient. They are updated after the optimizer's update. The train state
contains them, and a checkpoint stores each average as a separate item.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Momentum:
    """Exponential moving average (EMA): `mean += share(t) * (weights - mean)` after update t.

    Attributes:
      share: function from the update's number t = 1, 2, ... to the share of the newest weights in
        the average. For an EMA with the constant decay 0.99, `share(t)` is 0.01.
    """

    share: Callable[[jax.Array], jax.Array]

    def after(self, mean: dict, weights: dict, update: jax.Array) -> dict:
        """Returns the new average, given the old average `mean` and the new `weights`.

        Before the first update, `mean` must be the initial weights.
        """
        share = self.share(update)
        return jax.tree.map(lambda mean, x: mean + share * (x - mean), mean, weights)


def polyak_share(factor: float, start: str) -> Callable[[jax.Array], jax.Array]:
    """Returns `Momentum.share` for Polyak averaging with a constant decay, `factor`.

    After update t, the average contains the parameters of update i with a share proportional to
    factor^(t - i).

    With `start="zero"` the average does not contain the initial parameters, and the shares are
    normalized to the sum 1. With `start="weights"` the average starts at the initial parameters.
    After update t, the initial parameters have the share factor^t, for example 13.5 % after 20,000
    updates with the factor 0.9999.
    """

    def share(update: jax.Array) -> jax.Array:
        if start == "weights":
            return jnp.float32(1 - factor)
        return (1 - factor) / -jnp.expm1(update * math.log(factor))

    return share


def cosine_share(factor: float, steps: int, last: float = 1.0) -> Callable[[jax.Array], jax.Array]:
    """Returns `Momentum.share` for a momentum that changes from `factor` to `last`.

    The share is 1 - momentum. The momentum follows half a cosine over `steps` updates (BYOL,
    2006.07733, section 3.2; DINO, 2104.14294, section 3.2). The first update has momentum `factor`,
    as in the code of DINO, DINOv2 and DINOv3.
    """

    def share(update: jax.Array) -> jax.Array:
        progress = jnp.clip((update - 1) / steps, 0, 1)
        return (1 - last) + (last - factor) * (1 + jnp.cos(jnp.pi * progress)) / 2

    return share


def with_weights(module: nnx.Module, weights: dict) -> nnx.Module:
    """Returns a copy of `module` with the given weights.

    For example, the student's module with the teacher's weights is the teacher.
    """
    return nnx.merge(nnx.graphdef(module), weights)
