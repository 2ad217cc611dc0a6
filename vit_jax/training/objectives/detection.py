"""Object detection: a set of boxes with classes, matched one to one with the true objects.

Costs and weights are those of Deformable DETR (Zhu et al., 2010.04159).
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.data.dense_fields import boxes_field
from vit_jax.data.fields import BOXES, Boxes, Field
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import Detections, coco_metrics
from vit_jax.models.dense.detr import DetectionHead
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.box_losses import (
    centred,
    corners_of,
    focal_losses,
    generalized_iou,
)
from vit_jax.training.objectives.matching import match
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    Loss,
    Objective,
    StepContext,
    check_self_supervised,
)

# Weights of a term in the matching cost and in the loss.
CLASS_WEIGHT, BOX_WEIGHT, GIOU_WEIGHT = 2.0, 5.0, 2.0


class Detection(Objective):
    """Detection by a set of predictions; each true object is matched with one of them.

    The loss is the sum over the proposals and the layers of the decoder of the focal loss of all
    predictions, and of the L1 distance and the generalized IoU of the matched ones, divided by the
    mean number of objects in an image.

    Args:
      head: the head.
      num_classes: number of classes.
    """

    section = "detection"
    own_classes = True
    made_by = ("dim", "depth")
    metrics: ClassVar = {"class_loss": "number", "box_loss": "number", "giou_loss": "number"}
    split_metrics: ClassVar = {"ap": "share", "ap50": "share"}

    def __init__(self, head: DetectionHead, num_classes: int):
        self.head, self.num_classes = head, num_classes

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return False

    @staticmethod
    def fields(config: RunOptions) -> tuple[Field, ...]:
        return (boxes_field(config.data.image_size, config.detection.most),)

    @classmethod
    def make(cls, config: RunOptions, model: Any, steps: int, rngs: nnx.Rngs) -> "Detection":
        check_self_supervised(config, all_trained=False)
        options = config.detection
        if options.queries < options.most:
            raise UserError(
                f"config.detection.queries is {options.queries}, and must be at least "
                f"config.detection.most = {options.most}: each object needs a prediction"
            )
        classes = config.data.num_classes
        if classes is None:
            raise UserError("config.data.num_classes is None, and must be the number of classes")
        head = DetectionHead(
            model,
            classes,
            dim=options.dim,
            queries=options.queries,
            depth=options.depth,
            frozen=config.finetune.train == "head",
            rngs=rngs,
        )
        return cls(head, classes)

    def __call__(self, model: Any, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss of each image and its terms.

        In evaluation `Loss.outputs` has the best predictions and the true boxes, in pixels.

        Args:
          batch: `image`, and `boxes` float32 `[batch, most, 5]`: left, top, right and bottom in
            pixels, and the class, which is -1 for padding.
        """
        height, width = batch["image"].shape[1:3]
        sides = jnp.array([width, height, width, height], jnp.float32)
        predicted = self.head(model, batch["image"], context.rngs)
        labels = batch[BOXES][..., 4].astype(jnp.int32)
        targets = centred(batch[BOXES][..., :4] / sides)
        count = jnp.maximum((labels >= 0).sum(-1).mean(), 1 / len(labels))
        terms = jax.vmap(jax.vmap(set_losses), in_axes=(0, 0, None, None))(
            predicted["classes"], predicted["boxes"], targets, labels
        )
        terms = {name: x.sum(0) / count for name, x in terms.items()}
        each = (
            CLASS_WEIGHT * terms["class_loss"]
            + BOX_WEIGHT * terms["box_loss"]
            + GIOU_WEIGHT * terms["giou_loss"]
        )
        if context.rngs is not None:
            return Loss(each, terms)
        scores, classes, boxes = best_of(predicted, labels.shape[-1])
        outputs = {"scores": scores, "classes": classes, "boxes": boxes * sides}
        return Loss(each, terms, outputs=outputs | {"true": batch[BOXES]})

    def over_split(self, outputs: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns COCO's AP and AP50 of the crops.

        Args:
          outputs: `scores`, `classes`, `boxes` and `true`, as in a call.
        """
        true = outputs["true"]
        kept = [row[row[:, 4] >= 0] for row in true]
        objects = [Boxes(row[:, :4], row[:, 4].astype(np.int64)) for row in kept]
        found = zip(outputs["boxes"], outputs["classes"], outputs["scores"], strict=True)
        metrics = coco_metrics([Detections(*each) for each in found], objects, self.num_classes)
        return {"ap": metrics["AP"], "ap50": metrics["AP50"]}


def set_losses(
    classes: jax.Array, boxes: jax.Array, targets: jax.Array, labels: jax.Array
) -> dict[str, jax.Array]:
    """Returns the terms of the loss of one image: sums over its predictions or objects.

    Args:
      classes: logits, `[queries, classes]`.
      boxes: `[queries, 4]`.
      targets: true boxes, `[objects, 4]`.
      labels: their classes, int32 `[objects]`; -1: padding.
    """
    present = labels >= 0
    label = jnp.where(present, labels, 0)
    distances = jnp.abs(boxes[:, None] - targets).sum(-1)
    overlaps = generalized_iou(corners_of(boxes)[:, None], corners_of(targets))
    positive = focal_losses(classes, jnp.ones_like(classes))
    negative = focal_losses(classes, jnp.zeros_like(classes))
    class_costs = (positive - negative)[:, label]
    costs = CLASS_WEIGHT * class_costs + BOX_WEIGHT * distances - GIOU_WEIGHT * overlaps
    (rows,) = match(costs.T[None], present[None])
    hot = jnp.zeros_like(classes).at[rows, label].max(present.astype(classes.dtype))
    objects = jnp.arange(len(rows))
    return {
        "class_loss": focal_losses(classes, hot).sum(),
        "box_loss": jnp.where(present, distances[rows, objects], 0).sum(),
        "giou_loss": jnp.where(present, 1 - overlaps[rows, objects], 0).sum(),
    }


def best_of(predicted: dict[str, Any], most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the predictions of the last layer with the highest scores, the best first.

    Returns:
      Scores `[batch, most]`, classes int32 `[batch, most]`, and boxes as left, top, right and
      bottom in [0, 1], `[batch, most, 4]`.
    """
    logits, boxes = predicted["classes"][-1], corners_of(predicted["boxes"][-1]).clip(0, 1)
    batch, queries, classes = logits.shape
    scores, best = jax.lax.top_k(
        nnx.sigmoid(logits).reshape(batch, -1), min(most, queries * classes)
    )
    chosen = jnp.take_along_axis(boxes, (best // classes)[..., None], axis=1)
    return scores, best % classes, chosen


OBJECTIVE = Detection
