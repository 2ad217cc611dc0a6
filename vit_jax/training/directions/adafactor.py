"""Adafactor, as "Scaling Vision Transformers" changed it."""

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from vit_jax.parallel.sharding import path_name
from vit_jax.training.lora import weight_axes


def direction(config: ConfigDict) -> optax.GradientTransformation:
    """Adafactor's direction in "Scaling Vision Transformers" (Zhai et al., 2022, section 3.5) and
    big_vision.

    It keeps sums over rows and columns in place of the second moment, with a decay up to beta2; it
    has momentum, and does not scale by the parameters. `clip_update` bounds its updates as the
    original does, at 1 (Shazeer and Stern, 2018).
    """
    return optax.chain(
        # Of the two largest axes of 32 or more, which never are those of q, k and v.
        optax.scale_by_factored_rms(
            min_dim_size_to_factor=32,
            decay_rate_fn=lambda step, power: jnp.minimum(config.beta2, 1 - (step + 1.0) ** -power),
        ),
        clip_by_rms(config.clip_update, config.clip_update_of),
        optax.ema(config.beta1, debias=False, accumulator_dtype=jnp.dtype(config.moment_dtype)),
    )


def clip_by_rms(limit: float, of: str) -> optax.GradientTransformation:
    """Updates whose root mean square is at most `limit`.

    Args:
      limit: 0: none.
      of: `array`, each for itself, or `projection`: so too the parts of one array that published
        code keeps in several, as q, k and v. The result is then the same however they are stored.
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
