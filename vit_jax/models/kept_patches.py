"""Gathers square patches of each image into a smaller image, and scatters the patches back."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KeptPatches(NamedTuple):
    """Positions of the kept patches of each image.

    The kept patches are stacked vertically to a tall image, `[batch, kept * side, side, channels]`.
    A layer whose receptive field lies within one patch computes the same values from the tall image
    as from the whole image. The methods also work for feature maps of a lower resolution, if the
    side of a patch is a multiple of the map's stride. `side` is the side of a patch, in pixels for
    an image and in positions for a feature map.

    Attributes:
      positions: int32 `[batch, kept]`, distinct raster indices of the patches.
      grid: rows and columns of patches.
    """

    positions: jax.Array
    grid: tuple[int, int]

    def gather(self, x: jax.Array) -> jax.Array:
        """Stacks the kept patches of whole images, `[batch, height, width, channels]`, vertically.

        The result is `[batch, kept * side, side, channels]`.
        """
        rows, columns = self.grid
        batch, height, _, channels = x.shape
        side = height // rows
        patches = x.reshape(batch, rows, side, columns, side, channels).swapaxes(2, 3)
        patches = patches.reshape(batch, rows * columns, side * side * channels)
        kept = jnp.take_along_axis(
            patches, self.positions[..., None], axis=1, mode="promise_in_bounds"
        )
        return kept.reshape(batch, -1, side, channels)

    def scatter(self, x: jax.Array) -> jax.Array:
        """Inverts `gather`; patches that were not kept are zeros in the whole images."""
        rows, columns = self.grid
        batch, _, side, channels = x.shape
        kept = x.reshape(batch, -1, side * side * channels)

        def place(kept, positions):
            zeros = jnp.zeros((rows * columns, kept.shape[1]), kept.dtype)
            return zeros.at[positions].set(kept, unique_indices=True, mode="promise_in_bounds")

        patches = jax.vmap(place)(kept, self.positions)
        patches = patches.reshape(batch, rows, columns, side, side, channels).swapaxes(2, 3)
        return patches.reshape(batch, rows * side, columns * side, channels)
