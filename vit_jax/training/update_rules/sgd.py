"""Stochastic gradient descent with momentum."""

import jax.numpy as jnp
import optax

from vit_jax.options.optimizer import OptimizerOptions


def update_rule(config: OptimizerOptions) -> optax.GradientTransformation:
    """Returns SGD's update: the sum of all gradients so far, decayed by the momentum `beta1`."""
    return optax.trace(decay=config.beta1, accumulator_dtype=jnp.dtype(config.moment_dtype))
