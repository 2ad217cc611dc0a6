"""Bipartite matching of predictions and targets, for set prediction (DETR, 2005.12872)."""

import jax
import jax.numpy as jnp
import optax

WORST = 1e6  # In place of costs that are not finite, with which the algorithm would not end.


def match(costs: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns the prediction of each target that minimizes the sum of the costs, without gradient.

    Args:
      costs: `[batch, targets, predictions]`, at most as many targets as predictions.
      valid: bool `[batch, targets]`; the others are padding. They get different predictions, too,
        but do not change those of valid targets.

    Returns:
      int32 `[batch, targets]`, different indices of predictions.
    """
    costs = jnp.nan_to_num(costs.astype(jnp.float32), nan=WORST, posinf=WORST, neginf=-WORST)
    costs = jnp.where(valid[..., None], jnp.clip(costs, -WORST, WORST), 0)

    def one(costs):
        targets, predictions = optax.assignment.hungarian_algorithm(costs)
        return jnp.zeros(len(costs), jnp.int32).at[targets].set(predictions.astype(jnp.int32))

    return jax.vmap(one)(jax.lax.stop_gradient(costs))
