"""Adafactor, in the version of "Scaling Vision Transformers"."""

import jax
import jax.numpy as jnp
import optax

from vit_jax.options.optimizer import OptimizerOptions
from vit_jax.parallel.sharding import path_name
from vit_jax.training.lora import weight_axes


def update_rule(config: OptimizerOptions) -> optax.GradientTransformation:
    """Returns Adafactor's update of "Scaling Vision Transformers" (Zhai et al., 2022, section 3.5).

    As in big_vision, the second moment is factored into sums over rows and columns, with a decay of
    at most beta2. Unlike the original Adafactor (Shazeer and Stern, 2018), this version has
    momentum, and updates are not scaled by the parameters' RMS. `clip_update` is an upper bound of
    the updates' RMS. In the original Adafactor the bound is 1.
    """
    return optax.chain(
        # The second moment of an array is factored over its two largest axes, if both sizes are at
        # least 32. An axis that stacks q, k and v has size 3, so it is never factored.
        optax.scale_by_factored_rms(
            min_dim_size_to_factor=32,
            decay_rate_fn=lambda step, power: jnp.minimum(config.beta2, 1 - (step + 1.0) ** -power),
        ),
        clip_by_rms(config.clip_update, config.clip_update_of),
        optax.ema(config.beta1, debias=False, accumulator_dtype=jnp.dtype(config.moment_dtype)),
    )


def clip_by_rms(limit: float, of: str) -> optax.GradientTransformation:
    """Scales updates down to a root mean square of at most `limit`.

    Args:
      limit: maximum; 0: no limit.
      of: `array`: one RMS for each array. `projection`: if one array contains query, key and value
        kernels, each of the three has its own RMS. Published code stores the three kernels as
        separate arrays, so `projection` gives the same result as published code.
    """

    def clip(path, x):
        name = path_name(path)
        axes = weight_axes(name, x.ndim)
        apart = (
            [] if axes is None else [axis for axis, kind in enumerate(axes.names) if kind == "part"]
        )
        together = [axis for axis in range(x.ndim) if of == "array" or axis not in apart]
        rms = jnp.sqrt(jnp.square(x).mean(axis=tuple(together), keepdims=True))
        return x / jnp.maximum(1, rms / limit)

    if not limit:
        return optax.identity()
    return optax.stateless(lambda updates, params=None: jax.tree.map_with_path(clip, updates))
