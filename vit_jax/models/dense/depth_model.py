"""An image model with a head for monocular depth."""

from typing import Any

import jax
import numpy as np

from vit_jax.models.dense.dense_model import DenseModel


class DepthModel(DenseModel):
    """An image model with a head that predicts the distance from the camera (depth) in metres."""

    loaded_by = "load_depth"
    output = "depth", "metres at each place, to be resized bilinearly to the input"

    def __call__(self, images: Any) -> jax.Array:
        """Returns the depth in metres at each position of the head's output grid.

        Args:
          images: images of the model's size: uint8, floats in [-1, 1], or PIL images.

        Returns:
          float32 `[batch, rows, columns, 1]`.
        """
        return self.head.scores(self.outputs(images))

    def predict(self, images: Any, whole: bool = False) -> list[np.ndarray]:
        """Returns the depth of each pixel of images of any size.

        By default an image's short side is resized to the model's image size, and a sliding window
        moves along the long side. Depths are blended where windows overlap.

        Args:
          images: paths, PIL images or uint8 arrays of any size, as in `ImageModel.predict`.
          whole: resize the whole image to the model's image size, ignoring its aspect ratio,
            instead of using windows.

        Returns:
          The depth of each pixel of each image, in metres, float32 `[height, width]`.

        Raises:
          UserError: an image cannot be read, or the model was not loaded from a run.
        """
        return self._loaded(self, images, whole=whole)
