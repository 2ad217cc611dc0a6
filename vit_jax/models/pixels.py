"""Pixels as models take them: uint8 or floats, and the mean and deviation of a training set."""

import jax
import jax.numpy as jnp
import numpy as np

Statistic = float | tuple[float, ...]  # Of all channels, or of each.


def to_floats(images: jax.Array) -> jax.Array:
    """Pixels in [-1, 1], float32: those of uint8 images; floats keep their values."""
    if images.dtype == jnp.uint8:
        return images.astype(jnp.float32) / 127.5 - 1
    return images.astype(jnp.float32)


def plain_statistic(value: Statistic) -> Statistic:
    """The same as one number where all channels have the same."""
    if not isinstance(value, list | tuple):
        return float(value)
    return float(value[0]) if len(set(value)) == 1 else tuple(map(float, value))


def affine(mean: Statistic, deviation: Statistic) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of pixels in [-1, 1], float32."""
    return np.float32(2 * np.asarray(mean) - 1), np.float32(2 * np.asarray(deviation))
