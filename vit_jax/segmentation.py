"""Segmenters: loading and prediction of class maps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.data.decode import Unreadable, why_unreadable
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.evaluation.window_inference import WindowInference
from vit_jax.inference import image_source
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.interop.open import open_checkpoint
from vit_jax.interop.segmentation import with_head
from vit_jax.load import build_model
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.parallel.mesh import make_mesh


def load_segmenter(
    source: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    decode: str | None = None,
    log: Callable[[str], None] = print,
) -> Segmenter:
    """Loads the model of a segmentation run with its head.

    `segmenter.predict(images)` returns the class of each pixel of images of any size;
    `segmenter(images)` the scores of preprocessed images.

    Args:
      source: the workdir of a run with `config.objective.name='segmentation'`, `WORKDIR@best` or
        `WORKDIR@STEP`.
      image_size: size of the windows in pixels; None: that of the run's images.
      decode: `fast`, or `exact` to decode JPEGs whole by Pillow; None: as the run.
      log: callback for each line of the log.

    Raises:
      UserError: the checkpoint does not exist, is damaged, or has no segmentation head.
    """
    checkpoint = open_checkpoint(source, image_size)
    changes: dict[str, Any] = {} if image_size is None else {"image_size": image_size}
    segmenter = with_head(checkpoint, build_model(checkpoint, log=log, **changes))
    segmenter.predictor = SegmentationPredictor(checkpoint, decode)
    return segmenter


class SegmentationPredictor:
    """Predicts class maps with a checkpoint's preprocessing.

    Args:
      checkpoint: the checkpoint whose preprocessing the images get.
      decode: as in `load_segmenter`.
    """

    def __init__(self, checkpoint: Checkpoint, decode: str | None = None):
        self._checkpoint, self._decode = checkpoint, decode
        self._inferences: dict[bool, WindowInference] = {}

    def __call__(self, segmenter: Segmenter, images: Any, whole: bool) -> list[np.ndarray]:
        """Returns the class maps of images; see `Segmenter.predict`."""
        source = image_source(images)

        def reject(index: int, error: Unreadable | OSError) -> None:
            raise UserError(f"cannot read {source.describe(index)}: {why_unreadable(error)}")

        return [mask for _, mask in self.stream(segmenter, source, reject, whole)]

    def stream(
        self,
        segmenter: Segmenter,
        source: Source,
        on_unreadable: Callable[[int, Unreadable | OSError], None],
        whole: bool = False,
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the index and the class map of each readable image; images are read on demand.

        Args:
          segmenter: the segmenter.
          source: the images.
          on_unreadable: callback for the index of an unreadable image, and the error.
          whole: as in `Segmenter.predict`.
        """
        if whole not in self._inferences:
            crop = checkpoint_crop(self._checkpoint, segmenter.model.image_size, self._decode)
            self._inferences[whole] = WindowInference(segmenter, make_mesh(), crop, whole)
        return self._inferences[whole](segmenter, source, on_unreadable)
