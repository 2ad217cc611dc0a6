"""Adam (Kingma and Ba, 2015)."""

import jax.numpy as jnp
import optax

from vit_jax.options.optimizer import OptimizerOptions


def update_rule(config: OptimizerOptions) -> optax.GradientTransformation:
    """Returns Adam's update (Kingma and Ba, 2015).

    `moment_dtype` applies only to the first moment. A second moment in bfloat16 would never change,
    since relative changes of 1 / 1000 are rounded away.
    """
    moment = jnp.dtype(config.moment_dtype)
    return optax.scale_by_adam(
        b1=config.beta1, b2=config.beta2, eps=config.epsilon, mu_dtype=moment
    )
