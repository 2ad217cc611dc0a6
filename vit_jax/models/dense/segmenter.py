"""An image model with a head for semantic segmentation."""

from typing import Any

import jax
import numpy as np

from vit_jax.models.dense.dense_model import DenseModel


class Segmenter(DenseModel):
    """An image model with a head that classifies each position of a grid over the image."""

    loaded_by = "load_segmenter"
    output = "scores", "score of each class at each place, to be resized bilinearly to the input"

    def __call__(self, images: Any) -> jax.Array:
        """Returns the score of each class at each position of the head's output grid.

        Args:
          images: images of the model's size: uint8, floats in [-1, 1], or PIL images.

        Returns:
          Scores, float32 `[batch, rows, columns, classes]`. The predicted class of a position is
          the class with the highest score.
        """
        return self.head.scores(self.outputs(images))

    def predict(self, images: Any, whole: bool = False) -> list[np.ndarray]:
        """Returns the class of each pixel of images of any size.

        By default an image's short side is resized to the model's image size, and a sliding window
        moves along the long side; see `vit_jax.models.dense.windows`.

        Args:
          images: paths, PIL images or uint8 arrays of any size, as in `ImageModel.predict`.
          whole: resize the whole image to the model's image size, ignoring its aspect ratio,
            instead of using windows.

        Returns:
          The class of each pixel of each image, as an index in `class_names`: `[height, width]`,
          uint8, or uint16 for more than 255 classes.

        Raises:
          UserError: an image cannot be read, or the segmenter was not loaded from a run.
        """
        return self._loaded(self, images, whole=whole)
