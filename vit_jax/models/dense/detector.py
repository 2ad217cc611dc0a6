"""An image model with a head for object detection."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models.dense.dense_model import DenseModel

LEAST_SCORE = 0.3  # Default minimum score of an object.


class Detections(NamedTuple):
    """The predicted objects of an image, the most certain first.

    Attributes:
      corners: boxes as left, top, right and bottom, in pixels, float32 `[objects, 4]`.
      labels: class of each object, int32 `[objects]`.
      scores: probability of the class, float32 `[objects]`. If the detector also predicts masks,
        the probability is multiplied by the mean probability of the mask's pixels, as in Mask DINO.
      masks: True for the pixels of each object, bool `[objects, height, width]`. If `predict`
        encodes the masks, a NumPy array `[objects]` with dtype object, which contains an encoded
        mask for each object. None: the detector predicts boxes only.
    """

    corners: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    masks: np.ndarray | None = None

    def above(self, threshold: float) -> "Detections":
        """Returns the objects with a score of at least the threshold."""
        kept = self.scores >= threshold
        return Detections(*(None if x is None else x[kept] for x in self))


def least_score(threshold: float | None) -> float:
    """Returns the minimum score of predicted objects: `threshold`, or 0.3 if `threshold` is None.

    Raises:
      UserError: the value is 0 or less, or more than 1.
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise UserError(f"--threshold is {threshold:g}, and must be above 0, and at most 1")
    return LEAST_SCORE if threshold is None else threshold


class Best(NamedTuple):
    """The predictions with the highest scores for each image of a batch, the best first.

    Attributes:
      scores: probability of the class, `[batch, objects]`. It is not multiplied by the mean
        probability of the mask's pixels, which is a factor of the final `Detections.scores`.
      classes: int32 `[batch, objects]`.
      boxes: left, top, right and bottom, relative to the image in [0, 1], `[batch, objects, 4]`.
      masks: logits `[batch, objects, rows, columns]`; None: the head predicts boxes only.
    """

    scores: jax.Array
    classes: jax.Array
    boxes: jax.Array
    masks: jax.Array | None


class Detector(DenseModel):
    """An image model with a head that predicts a set of objects."""

    loaded_by = "load_detector"
    output = "objects", "left, top, right and bottom in [0, 1] of the input, score, class"

    @property
    def predicts_masks(self) -> bool:
        """Whether the detector predicts a mask of each object, not only a box."""
        return self.head.masks is not None

    def __call__(self, images: Any, most: int = 100) -> Best:
        """Returns the objects with the highest scores in each image.

        Args:
          images: images of the model's size: uint8, floats in [-1, 1], or PIL images.
          most: number of objects in each image.
        """
        return best_of(self.outputs(images), most)

    def predict(self, images: Any, threshold: float = LEAST_SCORE) -> list[Detections]:
        """Returns the objects in images of any size.

        Args:
          images: paths, PIL images or uint8 arrays of any size, as in `ImageModel.predict`.
          threshold: minimum score of an object.

        Raises:
          UserError: an image cannot be read, or the detector was not loaded from a run.
        """
        return self._loaded(self, images, threshold=threshold)


def corners_of(boxes: jax.Array) -> jax.Array:
    """Converts centre x, centre y, width, height `[..., 4]` to left, top, right, bottom."""
    centres, half = boxes[..., :2], boxes[..., 2:] / 2
    return jnp.concatenate([centres - half, centres + half], axis=-1)


def best_of(predicted: dict[str, Any], most: int) -> Best:
    """Returns the predictions of the last decoder layer that have the highest class probabilities.

    A query can give several predictions, with different classes.

    Args:
      predicted: outputs of a `DetectionHead`.
      most: number of predictions for each image, at most queries times classes.
    """
    logits, boxes = predicted["classes"][-1], corners_of(predicted["boxes"][-1]).clip(0, 1)
    batch, queries, classes = logits.shape
    scores, best = jax.lax.top_k(
        nnx.sigmoid(logits).reshape(batch, -1), min(most, queries * classes)
    )
    chosen = (best // classes)[..., None]
    masks = None
    if "masks" in predicted:
        embeddings = jnp.take_along_axis(predicted["masks"][-1], chosen, axis=1)
        masks = jnp.einsum("bqd,bhwd->bqhw", embeddings, predicted["pixels"])
    return Best(scores, best % classes, jnp.take_along_axis(boxes, chosen, axis=1), masks)
