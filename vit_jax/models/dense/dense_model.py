"""An image model with a head for dense prediction."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models.dense.batch_norm import Moments
from vit_jax.models.image_model import ImageModel


class DenseModel(nnx.Module):
    """Base class of image models with a head for segmentation, depth or object detection.

    Attributes:
      loaded_by: name of the function that loads this kind of model from a run; for error messages.
      output: name and description of the output of an exported program.
      model: the image model.
      head: the head.
      class_names: names of the classes.
      statistics: running mean and variance of the head's batch norms; empty without batch norms.
      predictor: preprocessing and prediction for images of any size; None: the model was not loaded
        from a checkpoint.
    """

    loaded_by: ClassVar[str]
    output: ClassVar[tuple[str, str]]

    def __init__(
        self,
        model: ImageModel,
        head: Any,
        class_names: Sequence[str] = (),
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

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the model's images in pixels."""
        return self.model.image_size

    @property
    def channels(self) -> int:
        """Number of channels of the model's images."""
        return self.model.channels

    def outputs(self, images: Any) -> Any:
        """Returns the outputs of the head for images of the model's size."""
        statistics = nnx.to_pure_dict(nnx.state(self.statistics))
        return self.head(self.model, images, None, statistics or None)

    def stream(
        self, source: Any, on_unreadable: Callable[[int, Any], None], **options: Any
    ) -> Iterator[tuple[int, Any]]:
        """Yields the index and the prediction of each readable image of a data source.

        Maps, masks and boxes are in pixels of the original image. Images are read one after
        another, so memory does not grow with the number of images.

        Args:
          source: a data source.
          on_unreadable: called with the index of an unreadable image and the error.
          **options: arguments of `predict`, such as a segmenter's `whole` or a detector's
            `threshold`. A detector also accepts `encode`, a function that encodes the masks (see
            `vit_jax.dense.detections`).

        Raises:
          UserError: the model was not loaded from a run.
        """
        return self._loaded.stream(self, source, on_unreadable, **options)

    @property
    def _loaded(self) -> Any:
        if self.predictor is None:
            raise UserError(
                f"this {type(self).__name__} is not of a checkpoint, and has no preprocessing of "
                f"images: see vit_jax.{self.loaded_by}"
            )
        return self.predictor
