"""Pixels as model inputs: uint8 or floats, and the mean and std of a training set."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.options.model import Statistic


def to_floats(images: jax.Array) -> jax.Array:
    """Converts uint8 images to float32 pixels in [-1, 1]; floats keep their values."""
    if images.dtype == jnp.uint8:
        return images.astype(jnp.float32) / 127.5 - 1
    return images.astype(jnp.float32)


def from_lists(values: Any) -> np.ndarray:
    """Returns nested lists of numbers as an array; integers from 0 to 255 become uint8.

    Raises:
      UserError: the lists differ in shape.
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise UserError(f"lists of images must be of one shape: {error}") from error
    whole = array.dtype == np.int64 and array.size and array.min() >= 0 and array.max() <= 255
    return array.astype(np.uint8) if whole else array


def in_channels(images: jax.Array, channels: int) -> jax.Array:
    """Converts RGB images, uint8 `[..., 3]`, to grey, `[..., 1]`, for a model with one channel.

    For models with other numbers of channels the images are returned unchanged. Grey is the ITU-R
    601-2 luma in Pillow's fixed-point arithmetic. If the three channels of an image are equal, the
    grey image has the values of one channel.
    """
    if channels != 1 or images.shape[-1] != 3:
        return images
    weighted = images.astype(jnp.int32) * jnp.array([19595, 38470, 7471])
    return ((weighted.sum(-1, keepdims=True) + 2**15) >> 16).astype(jnp.uint8)


def affine(mean: Statistic, std: Statistic) -> tuple[np.ndarray, np.ndarray]:
    """Converts a mean and std of pixels in [0, 1] to values for pixels in [-1, 1], float32."""
    return np.float32(2 * np.asarray(mean) - 1), np.float32(2 * np.asarray(std))
