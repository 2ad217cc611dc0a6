"""Memories of a run's weights: their EMA, and teachers that follow a student.

Nothing here is trained. A memory is changed after each update, is a part of the train state, and is
an item of its own in each checkpoint.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Momentum:
    """An exponential moving average (EMA) of weights: `mean += share(t) (weights - mean)` after
    update t.

    Attributes:
      share: of the newest weights, as a function of the number of the update, which counts from 1.
    """

    share: Callable[[jax.Array], jax.Array]

    def after(self, mean: dict, weights: dict, update: jax.Array) -> dict:
        """The average after an update that made `weights`; before the first one it is those."""
        share = self.share(update)
        return jax.tree.map(lambda mean, x: mean + share * (x - mean), mean, weights)


def polyak_share(factor: float, start: str) -> Callable[[jax.Array], jax.Array]:
    """The share of the newest parameters in Polyak's average after update t = 1, 2, ...

    The average is the sum of factor^(t - i) times parameters i. From `zero` it is divided by the
    sum of its weights, so that nothing of the first parameters is left in it; from `weights` it
    starts at these, and keeps factor^t of them (13.5 % after 20,000 steps at 0.9999).
    """

    def share(update: jax.Array) -> jax.Array:
        if start == "weights":
            return jnp.float32(1 - factor)
        return (1 - factor) / -jnp.expm1(update * math.log(factor))

    return share


def cosine_share(factor: float, steps: int, last: float = 1.0) -> Callable[[jax.Array], jax.Array]:
    """The share of a teacher whose momentum goes from `factor` to `last` over so many updates, as
    half a cosine (BYOL, 2006.07733, section 3.2; DINO, 2104.14294, section 3.2).

    The first update has `factor` itself, as in the code of DINO, DINOv2 and DINOv3.
    """

    def share(update: jax.Array) -> jax.Array:
        progress = jnp.clip((update - 1) / steps, 0, 1)
        return (1 - last) + (last - factor) * (1 + jnp.cos(jnp.pi * progress)) / 2

    return share


def with_weights(module: nnx.Module, weights: dict) -> nnx.Module:
    """A module that computes as `module` does, with other weights: a teacher made of its
    student.
    """
    return nnx.merge(nnx.graphdef(module), weights)
