"""Some square patches of each image, side by side as a smaller image, and back in their places."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class KeptPatches(NamedTuple):
    """The places of the patches that are kept of each image.

    One under the other they are a tall image, `[batch, kept * side, side, channels]`, of which
    layers that see one place, or a part of a patch, compute what they would in the whole image.
    Maps of a lower
    resolution are gathered alike, as long as a patch has whole places: `side` is their number in
    its row.

    Attributes:
      positions: int32 `[batch, kept]`, numbers of the patches in raster order, each once.
      grid: rows and columns of patches.
    """

    positions: jax.Array
    grid: tuple[int, int]

    def gather(self, x: jax.Array) -> jax.Array:
        """The tall image of a whole one, `[batch, height, width, channels]`."""
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
        """The whole image of a tall one, with zeros where nothing is kept."""
        rows, columns = self.grid
        batch, _, side, channels = x.shape
        kept = x.reshape(batch, -1, side * side * channels)

        def place(kept, positions):
            zeros = jnp.zeros((rows * columns, kept.shape[1]), kept.dtype)
            return zeros.at[positions].set(kept, unique_indices=True, mode="promise_in_bounds")

        patches = jax.vmap(place)(kept, self.positions)
        patches = patches.reshape(batch, rows, columns, side, side, channels).swapaxes(2, 3)
        return patches.reshape(batch, rows * side, columns * side, channels)
