"""Moving averages of a run's weights: their EMA, and teachers that follow a student.

They have no gradient. Each is updated after the optimizer's update, is part of the train state and
is a separate item of each checkpoint.
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
      share: weight of the newest weights, a function of the number of the update, counted from 1.
    """

    share: Callable[[jax.Array], jax.Array]

    def after(self, mean: dict, weights: dict, update: jax.Array) -> dict:
        """Returns the average after an update that resulted in `weights`.

        Before the first update the average is the initial weights.
        """
        share = self.share(update)
        return jax.tree.map(lambda mean, x: mean + share * (x - mean), mean, weights)


def polyak_share(factor: float, start: str) -> Callable[[jax.Array], jax.Array]:
    """Returns the weight of the newest parameters in Polyak's average after update t = 1, 2, ...

    The average is the sum of factor^(t - i) times parameters i. With `start="zero"` it is divided
    by the sum of its weights, so the initial parameters have no part in it. With `start="weights"`
    it starts at the initial parameters and keeps factor^t of them (13.5 % after 20,000 steps at
    0.9999).
    """

    def share(update: jax.Array) -> jax.Array:
        if start == "weights":
            return jnp.float32(1 - factor)
        return (1 - factor) / -jnp.expm1(update * math.log(factor))

    return share


def cosine_share(factor: float, steps: int, last: float = 1.0) -> Callable[[jax.Array], jax.Array]:
    """Returns the share of a teacher with momentum from `factor` to `last` over `steps` updates.

    The momentum follows half a cosine (BYOL, 2006.07733, section 3.2; DINO, 2104.14294, section
    3.2). The first update has momentum `factor`, as in the code of DINO, DINOv2 and DINOv3.
    """

    def share(update: jax.Array) -> jax.Array:
        progress = jnp.clip((update - 1) / steps, 0, 1)
        return (1 - last) + (last - factor) * (1 + jnp.cos(jnp.pi * progress)) / 2

    return share


def with_weights(module: nnx.Module, weights: dict) -> nnx.Module:
    """Returns a copy of `module` with other weights, such as a teacher made from its student."""
    return nnx.merge(nnx.graphdef(module), weights)
