"""Moving averages of a run's weights: EMA, and teachers that follow a student.

They have no gradient and are updated after the optimizer's update. Each is part of the train state
and a separate item of checkpoints.
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
      share: returns the weight of the newest weights after update 1, 2, ...
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

    The average weights the parameters of update i by factor^(t - i). With `start="zero"` it is
    normalized by the sum of these weights and excludes the initial parameters. With
    `start="weights"` it starts at the initial parameters, whose share after update t is still
    factor^t (13.5 % after 20,000 steps at 0.9999).
    """

    def share(update: jax.Array) -> jax.Array:
        if start == "weights":
            return jnp.float32(1 - factor)
        return (1 - factor) / -jnp.expm1(update * math.log(factor))

    return share


def cosine_share(factor: float, steps: int, last: float = 1.0) -> Callable[[jax.Array], jax.Array]:
    """Returns `Momentum.share` for a momentum from `factor` to `last` over `steps` updates.

    The momentum follows half a cosine (BYOL, 2006.07733, section 3.2; DINO, 2104.14294, section
    3.2). The first update has momentum `factor`, as in the code of DINO, DINOv2 and DINOv3.
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
