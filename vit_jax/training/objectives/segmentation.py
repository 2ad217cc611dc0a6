"""Semantic segmentation: a head predicts the class of each pixel."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from vit_jax.data.dense_fields import mask_field
from vit_jax.data.fields import IGNORED, MASK, Field
from vit_jax.errors import UserError
from vit_jax.models.dense import Head, make_head
from vit_jax.models.dense.batch_norm import initial_statistics, updated_statistics
from vit_jax.options.objective import SegmentationOptions
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    Loss,
    Objective,
    StepContext,
    check_self_supervised,
)

STATISTICS = "statistics"  # State: running mean and variance of the head's batch norms.


class Segmentation(Objective):
    """Semantic segmentation by a head on the model's dense features.

    The loss of an image is the cross-entropy of the resized scores, summed over its pixels without
    ignored ones and divided by the number of all pixels, as in mmsegmentation and DINOv3.

    Args:
      options: the section `segmentation`.
      head: the head.
    """

    section = "segmentation"
    own_classes = True
    made_by = ("head",)
    carried = (STATISTICS,)
    metrics: ClassVar = {"pixel_accuracy": "share"}
    split_metrics: ClassVar = {"miou": "share", "pixel_accuracy": "share"}

    def __init__(self, options: SegmentationOptions, head: Head):
        self.head = head

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return False

    @staticmethod
    def fields(config: RunOptions) -> tuple[Field, ...]:
        return (mask_field(config.data.image_size),)

    @classmethod
    def make(cls, config: RunOptions, model: Any, steps: int, rngs: nnx.Rngs) -> "Segmentation":
        check_self_supervised(config, all_trained=False)
        classes = config.data.num_classes
        if classes is None or not 2 <= classes <= IGNORED:
            raise UserError(
                f"config.data.num_classes is {classes}, and segmentation needs 2 to {IGNORED} "
                "classes: their names are the data's"
            )
        options, frozen = config.segmentation, config.finetune.train == "head"
        return cls(options, make_head(options, model, classes, frozen=frozen, rngs=rngs))

    def initial_state(self, params: dict) -> dict[str, Any]:
        statistics = initial_statistics(self.head)
        return {STATISTICS: statistics} if statistics else {}

    def update_state(self, state: dict, params: dict, aux: dict, update: jax.Array) -> dict:
        return {name: updated_statistics(old, aux) for name, old in state.items()}

    def __call__(self, model: Any, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss and the pixel accuracy of each image.

        In evaluation `Loss.outputs` has `areas`, as `class_areas` returns them.

        Args:
          batch: `image`, and `mask` uint8 `[batch, height, width]`.
        """
        outputs = self.head(model, batch["image"], context.rngs, context.state.get(STATISTICS))
        mask = batch[MASK]
        scores = resized(self.head.scores(outputs), mask.shape[1:])
        areas = class_areas(scores.argmax(-1), mask, scores.shape[-1])
        shared, true = areas[..., 0].sum(-1), areas[..., 2].sum(-1)
        return Loss(
            pixel_losses(scores, mask),
            {"pixel_accuracy": shared / jnp.maximum(true, 1)},
            aux=outputs["moments"],
            outputs={"areas": areas},
        )

    def over_split(self, outputs: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns the mean IoU over the classes that masks or predictions have, and the accuracy.

        Args:
          outputs: `areas` int32 `[images, classes, 3]`.
        """
        shared, predicted, true = np.moveaxis(outputs["areas"].sum(0, np.int64), -1, 0)
        union = predicted + true - shared
        occurs = union > 0
        return {
            "miou": float((shared[occurs] / union[occurs]).mean()) if occurs.any() else 0.0,
            "pixel_accuracy": float(shared.sum() / max(true.sum(), 1)),
        }


def resized(scores: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Resizes `[batch, rows, columns, classes]` bilinearly to this height and width.

    It is PyTorch's `interpolate(mode="bilinear", align_corners=False)`.
    """
    shape = (scores.shape[0], *size, scores.shape[-1])
    return jax.image.resize(scores, shape, "linear", antialias=False)


def pixel_losses(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the cross-entropy of each image, `[batch]`: the mean over its pixels.

    An ignored pixel counts in the mean with a loss of 0.

    Args:
      scores: float32 `[batch, height, width, classes]`.
      mask: class of each pixel, `[batch, height, width]`.
    """
    known = mask != IGNORED
    targets = jnp.where(known, mask, 0).astype(jnp.int32)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
    return jnp.where(known, losses, 0).mean((1, 2))


def class_areas(predicted: jax.Array, mask: jax.Array, classes: int) -> jax.Array:
    """Returns for each image and class the pixels that agree, are predicted, and are true.

    Ignored pixels do not count. Sums over images give the split's IoU and accuracy.

    Args:
      predicted: class of each pixel, `[batch, height, width]`.
      mask: true classes, of the same shape.
      classes: number of classes.

    Returns:
      int32 `[batch, classes, 3]`.
    """

    def count(labels, counted):
        empty = jnp.zeros(classes, jnp.int32)
        return jax.vmap(lambda labels, ones: empty.at[labels].add(ones, mode="drop"))(
            labels.reshape(len(labels), -1), counted.reshape(len(labels), -1).astype(jnp.int32)
        )

    known, mask = mask != IGNORED, mask.astype(jnp.int32)
    areas = (count(mask, known & (predicted == mask)), count(predicted, known), count(mask, known))
    return jnp.stack(areas, axis=-1)


OBJECTIVE = Segmentation
