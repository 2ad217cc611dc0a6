"""Object detection: a set of boxes with classes, matched one to one with the true objects.

Costs and weights are those of Deformable DETR (Zhu et al., 2010.04159).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.data.dense_fields import boxes_field, boxes_of
from vit_jax.data.fields import BOXES, Boxes, Field
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import coco_metrics, image_matches
from vit_jax.models.dense.detector import LEAST_SCORE, Detections, best_of, corners_of
from vit_jax.models.dense.detr import DetectionHead, detection_head
from vit_jax.models.dense.palette import class_legend
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.box_losses import (
    centred,
    focal_losses,
    generalized_iou,
)
from vit_jax.training.objectives.matching import match
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    ImageScores,
    Loss,
    Objective,
    StepContext,
    check_self_supervised,
)

COUNT = "objects_per_image"  # Entry of a prepared batch.
DETECTIONS = 100  # Of an image, in COCO's metrics.
# Weights of a term in the matching cost and in the loss.
CLASS_WEIGHT, BOX_WEIGHT, GIOU_WEIGHT = 2.0, 5.0, 2.0


class Detection(Objective):
    """Detection by a set of predictions; each true object is matched with one of them.

    For the proposals and for each layer of the decoder, the loss is the focal loss of all
    predictions, and the L1 distance and the generalized IoU loss of the matched ones, weighted 2, 5
    and 2. Their sum is divided by the batch's mean number of objects in an image; in evaluation, by
    the image's own, at least 1.

    Args:
      head: the head.
      num_classes: number of classes.
    """

    section = "detection"
    own_classes = True
    made_by = ("dim", "depth", "queries")
    metrics: ClassVar = {"class_loss": "number", "box_loss": "number", "giou_loss": "number"}
    split_metrics: ClassVar = {"ap": "share", "ap50": "share"}
    picture_rows = (
        f"true boxes, and predicted ones with a score of {LEAST_SCORE:g} or more; they match at an "
        "IoU of 0.5"
    )

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
        frozen = config.finetune.train == "head"
        return cls(detection_head(options, model, classes, frozen=frozen, rngs=rngs), classes)

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """Adds `objects_per_image` float32 `[batch]`: the mean number, the same for all images."""
        count = (batch[BOXES][..., 4] >= 0).sum(-1).mean()
        return batch | {COUNT: jnp.full(len(keys), jnp.maximum(count, 1 / len(keys)))}

    def __call__(self, model: Any, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss of each image and its terms.

        In evaluation `Loss.outputs` has the best predictions and the true boxes, in pixels.

        Args:
          batch: `image`, and `boxes` float32 `[batch, most, 5]`: left, top, right and bottom in
            pixels, and the class, which is -1 for padding and lower for crowds.
        """
        height, width = batch["image"].shape[1:3]
        sides = jnp.array([width, height, width, height], jnp.float32)
        predicted = self.head(model, batch["image"], context.rngs)
        labels = batch[BOXES][..., 4].astype(jnp.int32)
        targets = centred(batch[BOXES][..., :4] / sides)
        own = jnp.maximum((labels >= 0).sum(-1), 1).astype(jnp.float32)
        count = own if context.rngs is None else batch[COUNT]
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
        scores, classes, boxes = best_of(predicted, DETECTIONS)
        outputs = {"scores": scores, "classes": classes, "boxes": boxes * sides}
        return Loss(each, terms, outputs=outputs | {"true": batch[BOXES]})

    def over_split(self, outputs: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns COCO's AP and AP50 of the crops; NaN if no image has an object.

        Args:
          outputs: `scores`, `classes`, `boxes` and `true`, as in a call.
        """
        objects, found = self.objects(outputs)
        metrics = coco_metrics(found, objects, self.num_classes)
        if metrics["AP"] < 0:  # There is no object.
            return {"ap": float("nan"), "ap50": float("nan")}
        return {"ap": metrics["AP"], "ap50": metrics["AP50"]}

    def objects(self, outputs: dict[str, np.ndarray]) -> tuple[list[Boxes], list[Detections]]:
        """Returns the true and the predicted objects of each image, in pixels of its crop."""
        found = zip(outputs["boxes"], outputs["classes"], outputs["scores"], strict=True)
        return [boxes_of(rows) for rows in outputs["true"]], [Detections(*each) for each in found]

    def image_scores(self, outputs: dict[str, np.ndarray]) -> ImageScores:
        """Returns the F1 of each image, of the predictions with a score of `LEAST_SCORE`."""
        objects, found = self.objects(outputs)
        certain = [each.above(LEAST_SCORE) for each in found]
        matches = image_matches(certain, objects, self.num_classes)
        return ImageScores("F1", np.array([each.f1 for each in matches]))

    def legend(self, outputs: dict[str, np.ndarray], class_names: Sequence[str]) -> dict[str, str]:
        objects, found = self.objects(outputs)
        shown = [*objects, *(each.above(LEAST_SCORE) for each in found)]
        labels = {label for each in shown for label in each.labels.tolist()}
        return class_legend(sorted(labels), class_names, background=False)


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


OBJECTIVE = Detection
