"""Bipartite matching of predictions and targets, for set prediction (DETR, 2005.12872)."""

import jax
import jax.numpy as jnp
import optax

WORST = 1e6  # Upper bound of the costs. With infinite costs the algorithm would not end.
EXCLUDED = 1e8  # Cost of a pair that must not be matched.


def match(costs: jax.Array, valid: jax.Array) -> jax.Array:
    """Matches each target with a different prediction and minimizes the sum of the costs.

    No gradient flows through the result.

    Args:
      costs: cost of each pair, `[batch, targets, predictions]`. There must be at least as many
        predictions as targets.
      valid: bool `[batch, targets]`; False for padding. Padding gets predictions that are left
        over.

    Returns:
      Index of each target's prediction, int32 `[batch, targets]`.
    """
    costs = jnp.nan_to_num(costs.astype(jnp.float32), nan=WORST, posinf=WORST, neginf=-WORST)
    costs = jnp.clip(costs, -WORST, WORST)
    return jax.vmap(_match_image)(jax.lax.stop_gradient(costs), valid)


def _match_image(costs: jax.Array, valid: jax.Array) -> jax.Array:
    targets, predictions = costs.shape
    # Each padded target gets an additional prediction of its own. If padded targets competed for
    # the predictions, the algorithm would take about 30 times as long with 100 targets.
    padding_costs = jnp.where(jnp.eye(targets, dtype=bool) & ~valid[:, None], 0, EXCLUDED)
    costs = jnp.where(valid[:, None], costs, EXCLUDED)
    rows, columns = optax.assignment.hungarian_algorithm(
        jnp.concatenate([costs, padding_costs], axis=1)
    )
    matched = jnp.zeros(targets, jnp.int32).at[rows].set(columns.astype(jnp.int32))

    taken = jnp.zeros(predictions, bool).at[jnp.where(valid, matched, predictions)].set(True)
    left = jnp.argsort(taken, stable=True).astype(jnp.int32)
    return jnp.where(valid, matched, left[jnp.cumsum(~valid) - 1])
