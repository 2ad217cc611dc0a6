"""Adam (Kingma and Ba, 2015)."""

import jax.numpy as jnp
import optax

from vit_jax.options.optimizer import OptimizerOptions


def update_rule(config: OptimizerOptions) -> optax.GradientTransformation:
    """Returns Adam's update (Kingma and Ba, 2015).

    `moment_dtype` is the dtype of the first moment only. In bfloat16, the second moment would never
    change, because its relative changes of about 1 / 1000 are below the rounding error.
    """
    moment = jnp.dtype(config.moment_dtype)
    return optax.scale_by_adam(
        b1=config.beta1, b2=config.beta2, eps=config.epsilon, mu_dtype=moment
    )
