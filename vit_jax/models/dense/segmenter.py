"""A model of images with a head for semantic segmentation."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models.dense.batch_norm import Moments
from vit_jax.models.image_model import ImageModel


class Segmenter(nnx.Module):
    """A model of images with a head that classifies each place.

    Attributes:
      model: the model of images.
      head: the head.
      class_names: names of the classes.
      statistics: running mean and variance of the head's batch norms; empty: it has none.
      predictor: preprocessing and class maps of images of any size; None: the segmenter is not of
        a checkpoint.
    """

    def __init__(
        self,
        model: ImageModel,
        head: nnx.Module,
        class_names: Sequence[str],
        statistics: Moments | None = None,
    ):
        self.model, self.head = model, head
        self.class_names: tuple[str, ...] = tuple(class_names)
        self.statistics = nnx.Dict(
            {
                name: nnx.Dict({key: nnx.BatchStat(jnp.asarray(x)) for key, x in norm.items()})
                for name, norm in (statistics or {}).items()
            }
        )
        self.predictor: Any = None

    def __call__(self, images: Any) -> jax.Array:
        """Returns the score of each class at each place of the head.

        Args:
          images: of the model's size, as in `ImageModel.__call__`.

        Returns:
          float32 `[batch, rows, columns, classes]`; the class with the highest one is predicted.
        """
        head: Any = self.head
        statistics = nnx.to_pure_dict(nnx.state(self.statistics))
        return head.scores(head(self.model, images, None, statistics or None))

    def predict(self, images: Any, whole: bool = False) -> list[np.ndarray]:
        """Returns the class of each pixel of images of any size.

        By default an image's short side is resized to the model's size, and windows slide along the
        long side; see `vit_jax.models.dense.windows`.

        Args:
          images: as in `ImageModel.predict`: paths, PIL images or arrays of any size.
          whole: squeeze the whole image to the model's size instead.

        Returns:
          A class map `[height, width]` for each image, of its size: uint8, or uint16 for more than
          255 classes; indices of `class_names`.

        Raises:
          UserError: an image cannot be read, or the segmenter was not loaded from a run.
        """
        return self._loaded(self, images, whole)

    def stream(
        self, source: Any, on_unreadable: Callable[[int, Any], None]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the index and the class map of each readable image, as in `predict`.

        Images are read as they are needed, so memory does not grow with their number.

        Args:
          source: a data source.
          on_unreadable: callback for the index of an unreadable image, and the error.

        Raises:
          UserError: the segmenter was not loaded from a run.
        """
        return self._loaded.stream(self, source, on_unreadable)

    @property
    def _loaded(self) -> Any:
        if self.predictor is None:
            raise UserError(
                "this segmenter is not of a checkpoint, and has no preprocessing of images: see "
                "vit_jax.load_segmenter"
            )
        return self.predictor
