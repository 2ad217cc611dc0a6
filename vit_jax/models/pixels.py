"""Images in every form that a model takes, brought to what its first layer was trained on."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError

Statistic = float | tuple[float, ...]  # Of all channels, or of each.


class ImageModel(nnx.Module):
    """What reads images: it checks them, and normalises them by the mean and deviation of its training.

    Args:
      image_size: height and width in pixels.
      channels: of the images.
      mean, deviation: of pixels in [0, 1], for all channels or for each; 0.5 and 0.5 make them [-1, 1].
      any_size: images of other sizes are taken too.

    Raises:
      UserError: a mean or deviation of another number of channels.
    """

    def __init__(
        self,
        image_size: tuple[int, int],
        channels: int,
        mean: Statistic,
        deviation: Statistic,
        any_size: bool = False,
    ):
        for name, value in dict(mean=mean, deviation=deviation).items():
            if isinstance(value, list | tuple) and len(value) not in (1, channels):
                raise UserError(f"{name} is {value!r} and must be one number, or {channels} (model.{name})")
        self.image_size, self.channels, self.any_size = tuple(image_size), channels, any_size
        self.mean, self.deviation = plain_statistic(mean), plain_statistic(deviation)

    def normalize(self, images: jax.Array) -> jax.Array:
        """What the first layer sees, float32 `[batch, height, width, channels]`.

        Args:
          images: uint8, or floats in [-1, 1].

        Raises:
          UserError: another shape or type.
        """
        x = to_floats(self._checked(images))
        shift, factor = _affine(self.mean, self.deviation)
        return x if np.all(shift == 0) and np.all(factor == 1) else (x - shift) / factor

    def denormalize(self, x: jax.Array) -> jax.Array:
        """What `normalize` was given, in [0, 255] and not rounded: `[..., channels]`."""
        shift, factor = _affine(self.mean, self.deviation)
        return (x * factor + shift + 1) * 127.5

    def _checked(self, images: jax.Array) -> jax.Array:
        images = jnp.asarray(images)
        shape = images.shape
        sized = len(shape) == 4 and (self.any_size or shape[1:3] == self.image_size) and 0 not in shape[1:]
        if not sized or shape[3] != self.channels:
            height, width = ("height", "width") if self.any_size else self.image_size
            raise UserError(
                f"the model takes images [batch, {height}, {width}, {self.channels}], "
                f"not {str(list(shape)).replace(chr(39), '')}"
            )
        if images.dtype != jnp.uint8 and not jnp.issubdtype(images.dtype, jnp.floating):
            raise UserError(f"the model takes images of uint8, or of floats in [-1, 1], not {images.dtype}")
        return images


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


def _affine(mean: Statistic, deviation: Statistic) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of pixels in [-1, 1], float32."""
    return np.float32(2 * np.asarray(mean) - 1), np.float32(2 * np.asarray(deviation))
