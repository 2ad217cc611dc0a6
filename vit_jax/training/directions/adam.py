"""Adam (Kingma and Ba, 2015)."""

import jax.numpy as jnp
import optax
from ml_collections import ConfigDict


def direction(config: ConfigDict) -> optax.GradientTransformation:
    """Adam's direction (Kingma and Ba, 2015).

    `moment_dtype` is of the first moment only: a second moment in bfloat16 would stand still, since
    its steps of 1 / 1000 are below bfloat16's rounding.
    """
    moment = jnp.dtype(config.moment_dtype)
    return optax.scale_by_adam(
        b1=config.beta1, b2=config.beta2, eps=config.epsilon, mu_dtype=moment
    )
