"""Object detection: a set of boxes with classes, matched one to one with the true objects.

Matching costs and loss weights are from Deformable DETR (Zhu et al., 2010.04159) for boxes, and
from Mask DINO (Li et al., 2206.02777) for masks.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.data.dense_fields import CROWD, NO_OBJECT, boxes_field, boxes_of, instances_field
from vit_jax.data.fields import BOXES, IGNORED, INSTANCES, Boxes, Field
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import coco_metrics, image_matches
from vit_jax.models.dense.detector import LEAST_SCORE, Detections, best_of, corners_of
from vit_jax.models.dense.detr import DetectionHead, detection_head
from vit_jax.models.dense.palette import class_legend
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.box_losses import centred, focal_losses, generalized_iou
from vit_jax.training.objectives.mask_losses import (
    Points,
    Targets,
    draw_points,
    most_uncertain,
    pair_losses,
    point_losses,
    sample,
    sample_targets,
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

COUNT = "objects_per_image"  # Entry that `prepare` adds to the batch.
DETECTIONS = 100  # Maximum number of an image's detections in COCO's metrics.
# Weights of the terms (class, box, GIoU, mask and dice), both in the matching cost and in the loss.
CLASS_WEIGHT, BOX_WEIGHT, GIOU_WEIGHT = 2.0, 5.0, 2.0
MASK_WEIGHT, DICE_WEIGHT = 5.0, 5.0
WEIGHTS = {
    "class_loss": CLASS_WEIGHT,
    "box_loss": BOX_WEIGHT,
    "giou_loss": GIOU_WEIGHT,
    "mask_loss": MASK_WEIGHT,
    "dice_loss": DICE_WEIGHT,
}


class SampledMasks(NamedTuple):
    """Pixel embeddings and true masks of an image at the random points of the mask loss.

    Attributes:
      pixels: pixel embeddings. Each field of `Points` contains the embeddings at its points,
        float32 `[points, dim]`, in place of coordinates.
      true: true masks. Each field of `Points` contains the values of all masks at its points,
        float32 `[objects, points]`, in place of coordinates.
    """

    pixels: Points
    true: Points


class Detection(Objective):
    """Detection by a set of predictions; each true object is matched with one prediction.

    The loss is computed for the proposals (the decoder's initial boxes) and for the predictions of
    each decoder layer, and these losses are added. Each loss is a sum of these terms:

    - 2 times the focal loss of all predictions,
    - 5 times the L1 distance of the matched boxes,
    - 2 times the generalized IoU loss of the matched boxes,
    - with masks, 5 times the cross-entropy and 5 times the dice loss of the matched masks at
      sampled points (`mask_losses.py`).

    In training the loss of an image is divided by the batch's mean number of objects per image. In
    evaluation it is divided by the image's own number of objects, at least 1.

    Args:
      points: number of points at which the loss of a mask is computed.
    """

    section = "detection"
    own_classes = True
    made_by = ("dim", "depth", "queries", "masks")
    metrics: ClassVar = {"class_loss": "number", "box_loss": "number", "giou_loss": "number"}
    split_metrics: ClassVar = {"ap": "share", "ap50": "share"}
    picture_rows = (
        f"true boxes, and predicted ones with a score of {LEAST_SCORE:g} or more; they match at an "
        "IoU of 0.5"
    )

    def __init__(self, head: DetectionHead, num_classes: int, points: int = 0):
        self.head, self.num_classes, self.points = head, num_classes, points

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return False

    @staticmethod
    def fields(config: RunOptions) -> tuple[Field, ...]:
        size, options = config.data.image_size, config.detection
        boxes = boxes_field(size, options.most)
        return (boxes, instances_field(size, options.most)) if options.masks else (boxes,)

    @classmethod
    def make(cls, config: RunOptions, model: Any, steps: int, rngs: nnx.Rngs) -> "Detection":
        check_self_supervised(config, all_trained=False)
        options = config.detection
        if options.queries < options.most:
            raise UserError(
                f"config.detection.queries is {options.queries}, and must be at least "
                f"config.detection.most = {options.most}: each object needs a prediction"
            )
        if options.masks and options.most > IGNORED:
            raise UserError(
                f"config.detection.most is {options.most}, and with config.detection.masks must be "
                f"at most {IGNORED}"
            )
        classes = config.data.num_classes
        if classes is None:
            raise UserError("config.data.num_classes is None, and must be the number of classes")
        frozen = config.finetune.train == "head"
        head = detection_head(options, model, classes, frozen=frozen, rngs=rngs)
        kind = InstanceSegmentation if options.masks else Detection
        return kind(head, classes, options.points)

    def warning(self, means: dict[str, float], update: int) -> str | None:
        if update == 1 or means["box_loss"] > 0:
            return None
        return (
            "no training image since the last of these lines has an object, so only the background "
            "is learned: check the annotations of config.data.path"
        )

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """Adds `objects_per_image`, float32 `[batch]`, to the batch.

        All images have the same value, the mean number of objects in the batch. If the head
        predicts masks, the method also adds `key`, `[batch, ...]`. It contains a random key of each
        image as integers (`jax.random.key_data`).
        """
        count = (batch[BOXES][..., 4] >= 0).sum(-1).mean()
        more = {COUNT: jnp.full(len(keys), jnp.maximum(count, 1 / len(keys)))}
        if self.head.masks is not None:
            more["key"] = jax.random.key_data(keys)
        return batch | more

    def __call__(self, model: Any, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss of each image, and the loss's terms as metrics.

        In evaluation `Loss.outputs` contains the predictions with the highest scores (`scores`,
        `classes` and `boxes`), and the true boxes (`true`), in pixels. With masks it also contains
        the two largest IoUs of each predicted mask with true masks (`overlaps`), and the indices of
        these true masks (`overlapped`).

        Args:
          batch: `image`, and `boxes` float32 `[batch, most, 5]`. A box consists of left, top, right
            and bottom in pixels, and the class. The class is -1 for padding and below -1 for
            crowds. With masks also `instances`, uint8 `[batch, height, width]`: for each pixel, the
            index in `boxes` of the object at this pixel.
        """
        height, width = batch["image"].shape[1:3]
        sides = jnp.array([width, height, width, height], jnp.float32)
        predicted = self.head(model, batch["image"], context.rngs)
        labels = batch[BOXES][..., 4].astype(jnp.int32)
        targets = centred(batch[BOXES][..., :4] / sides)
        counts = jnp.maximum((labels >= 0).sum(-1), 1).astype(jnp.float32)
        count = counts if context.rngs is None else batch[COUNT]
        masks = self._sampled_masks(predicted, batch)
        terms = jax.vmap(jax.vmap(set_losses), in_axes=(0, 0, None, None, 0, None))(
            predicted["classes"], predicted["boxes"], targets, labels, predicted.get("masks"), masks
        )
        terms = {name: x.sum(0) / count for name, x in terms.items()}
        each = jnp.stack([WEIGHTS[name] * term for name, term in terms.items()]).sum(0)
        if context.rngs is not None:
            return Loss(each, terms)
        best = best_of(predicted, DETECTIONS)
        outputs = {"scores": best.scores, "classes": best.classes, "boxes": best.boxes * sides}
        if best.masks is not None:
            outputs = _with_masks(outputs, best.masks, batch[INSTANCES], labels)
        return Loss(each, terms, outputs=outputs | {"true": batch[BOXES]})

    def _sampled_masks(self, predicted: dict, batch: Batch) -> SampledMasks | None:
        """Samples pixel embeddings and true masks at random points; None: the head has no masks."""
        if "pixels" not in predicted:
            return None
        keys = jax.random.wrap_key_data(batch["key"])

        def of_image(pixels: jax.Array, rows: jax.Array, key: jax.Array) -> SampledMasks:
            objects = jnp.arange(batch[BOXES].shape[1], dtype=jnp.uint8)
            targets = Targets(objects, jnp.ones_like(objects, bool), rows)
            maps, points = jnp.moveaxis(pixels, -1, 0), draw_points(key, self.points)
            return SampledMasks(
                Points(*(sample(maps, places).T for places in points)),
                Points(*(sample_targets(targets, places) for places in points)),
            )

        return jax.vmap(of_image)(predicted["pixels"], batch[INSTANCES], keys)

    def over_split(self, outputs: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns COCO's AP and AP50 of boxes and masks, measured on the evaluation crops.

        The metrics are NaN if the split has no objects.
        """
        objects, found = self.objects(outputs)

        def overlaps_of(image: int) -> np.ndarray:
            values, present = outputs["overlaps"][image], outputs["true"][image, :, 4] != NO_OBJECT
            overlaps = np.zeros((len(values), len(present)), values.dtype)
            np.put_along_axis(overlaps, outputs["overlapped"][image], values, axis=1)
            return overlaps[:, present]

        compared: dict[str, Any] = {"": None}
        if "overlaps" in outputs:
            compared["mask_"] = overlaps_of
        metrics = {}
        for start, overlaps in compared.items():
            of_coco = coco_metrics(found, objects, self.num_classes, overlaps=overlaps)
            for name in ("AP", "AP50"):
                value = of_coco[name] if of_coco[name] >= 0 else float("nan")
                metrics[start + name.lower()] = value
        return metrics

    def objects(self, outputs: dict[str, np.ndarray]) -> tuple[list[Boxes], list[Detections]]:
        """Returns the true and the predicted objects of each image, in pixels of its crop."""
        found = zip(outputs["boxes"], outputs["classes"], outputs["scores"], strict=True)
        return [boxes_of(rows) for rows in outputs["true"]], [Detections(*each) for each in found]

    def image_scores(self, outputs: dict[str, np.ndarray]) -> ImageScores:
        """Returns the F1 score of each image.

        Only predictions with a score of at least `LEAST_SCORE` are counted.
        """
        objects, found = self.objects(outputs)
        certain = [each.above(LEAST_SCORE) for each in found]
        matches = image_matches(certain, objects, self.num_classes)
        return ImageScores("F1", np.array([each.f1 for each in matches]))

    def legend(self, outputs: dict[str, np.ndarray], class_names: Sequence[str]) -> dict[str, str]:
        objects, found = self.objects(outputs)
        shown = [*objects, *(each.above(LEAST_SCORE) for each in found)]
        labels = {label for each in shown for label in each.labels.tolist()}
        return class_legend(sorted(labels), class_names, background=False)


class InstanceSegmentation(Detection):
    """Detection by a head that also predicts a mask of each object."""

    metrics: ClassVar = Detection.metrics | {"mask_loss": "number", "dice_loss": "number"}
    split_metrics: ClassVar = Detection.split_metrics | {"mask_ap": "share", "mask_ap50": "share"}


def set_losses(
    classes: jax.Array,
    boxes: jax.Array,
    targets: jax.Array,
    labels: jax.Array,
    embeddings: jax.Array | None = None,
    masks: SampledMasks | None = None,
) -> dict[str, jax.Array]:
    """Returns the unweighted terms of one image's loss.

    Each term is a sum over the image's predictions (focal loss) or over its objects (all others).

    Args:
      classes: class logits of the queries, `[queries, classes]`.
      boxes: predicted boxes, `[queries, 4]`.
      targets: true boxes, `[objects, 4]`.
      labels: classes of the true boxes, int32 `[objects]`; below 0 for padding and crowds, which
        are not matched.
      embeddings: mask embeddings of the queries, `[queries, dim]`; None: boxes only.
      masks: the image's pixel embeddings and true masks at the sampled points.
    """
    present = labels >= 0
    label = jnp.where(present, labels, 0)
    distances = jnp.abs(boxes[:, None] - targets).sum(-1)
    overlaps = generalized_iou(corners_of(boxes)[:, None], corners_of(targets))
    positive = focal_losses(classes, jnp.ones_like(classes))
    negative = focal_losses(classes, jnp.zeros_like(classes))
    class_costs = (positive - negative)[:, label]
    costs = CLASS_WEIGHT * class_costs + BOX_WEIGHT * distances - GIOU_WEIGHT * overlaps
    if embeddings is not None and masks is not None:
        of_masks, of_dice = pair_losses(embeddings @ masks.pixels.matched.T, masks.true.matched)
        costs += (MASK_WEIGHT * of_masks + DICE_WEIGHT * of_dice).T
    (rows,) = match(costs.T[None], present[None])
    hot = jnp.zeros_like(classes).at[rows, label].max(present.astype(classes.dtype))
    objects = jnp.arange(len(rows))
    losses = {
        "class_loss": focal_losses(classes, hot).sum(),
        "box_loss": jnp.where(present, distances[rows, objects], 0).sum(),
        "giou_loss": jnp.where(present, 1 - overlaps[rows, objects], 0).sum(),
    }
    if embeddings is not None and masks is not None:
        of_mask, of_dice = matched_mask_losses(embeddings[rows], masks)
        losses["mask_loss"] = jnp.where(present, of_mask, 0).sum()
        losses["dice_loss"] = jnp.where(present, of_dice, 0).sum()
    return losses


def matched_mask_losses(embeddings: jax.Array, masks: SampledMasks) -> tuple[jax.Array, jax.Array]:
    """Returns the cross-entropy and the dice loss of each object's mask, each `[objects]`.

    The losses are computed at sampled points. Most points of a mask are chosen among the candidates
    (`Points.candidates`): the points at which the predicted mask is most uncertain. All masks of
    the image share the remaining points, `Points.others`.

    Args:
      embeddings: mask embedding of each object's matched query, `[objects, dim]`.
      masks: the image's pixel embeddings and true masks at the sampled points.
    """
    pixels, true = masks
    candidates = embeddings @ pixels.candidates.T
    chosen = most_uncertain(candidates, len(pixels.matched) - len(pixels.others))

    def at_chosen(values: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.take_along_axis(values, chosen, axis=1), others], axis=1)

    predicted = at_chosen(candidates, embeddings @ pixels.others.T)
    return point_losses(predicted, at_chosen(true.candidates, true.others))


def _with_masks(
    outputs: dict[str, jax.Array], logits: jax.Array, instances: jax.Array, labels: jax.Array
) -> dict[str, jax.Array]:
    """Compares predicted masks with true masks, and multiplies the scores by the masks' quality.

    The quality of a predicted mask is the mean probability of its pixels (`compare_masks`).

    Args:
      outputs: `scores`, `classes` and `boxes` of the detections.
      logits: logits of the predicted masks, `[batch, detections, rows, columns]`.
      instances: index of the object at each pixel, uint8 `[batch, height, width]`.
      labels: class of each object, `[batch, objects]`; -1 for padding, below -1 for crowds.

    Returns:
      The outputs in descending order of the new scores, with two additional entries:

      - `overlaps`, float32 `[batch, detections, 2]`: the two largest IoUs of each predicted mask
        with true masks.
      - `overlapped`, int32 `[batch, detections, 2]`: the indices of these true masks.
    """
    overlaps, quality = jax.vmap(compare_masks)(logits, instances, labels)
    values, objects = largest_overlaps(overlaps)
    outputs = outputs | {"overlaps": values, "overlapped": objects}
    outputs["scores"] = outputs["scores"] * quality
    order = jnp.argsort(-outputs["scores"], axis=1)
    return {name: jax.vmap(lambda x, rows: x[rows])(x, order) for name, x in outputs.items()}


def compare_masks(
    logits: jax.Array, instances: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compares the predicted and the true masks of an image.

    Args:
      logits: logits of the predicted masks, `[detections, rows, columns]`.
      instances: index of the object at each pixel, uint8 `[height, width]`.
      labels: class of each object, `[objects]`; -1 for padding, below -1 for crowds.

    Returns:
      Two arrays:

      - The IoU of each pair of a predicted and a true mask, `[detections, objects]`. If the true
        object is a crowd, the intersection is divided by the predicted area instead of the union,
        as in COCO's metrics.
      - The quality of each predicted mask, `[detections]`: the mean predicted probability over the
        pixels of the mask.
    """
    (height, width), (rows, columns) = instances.shape, logits.shape[1:]
    # Masks are enlarged to the image's size bilinearly, one row of pixels at a time. The enlarged
    # masks of all detections would take gigabytes.
    by_row = jax.image.resize(jnp.eye(rows), (height, rows), "bilinear")
    by_column = jax.image.resize(jnp.eye(columns), (width, columns), "bilinear")

    def of_row(sums: Any, row: Any) -> tuple[Any, None]:
        weights, objects = row
        enlarged = jnp.einsum("r,drc,wc->dw", weights, logits, by_column)
        found = enlarged > 0
        true = jax.nn.one_hot(objects, len(labels))
        probability = jnp.where(found, nnx.sigmoid(enlarged), 0).sum(1)
        areas = found.astype(jnp.float32) @ true, found.sum(1), true.sum(0), probability
        return jax.tree.map(jnp.add, sums, areas), None

    zeros = jnp.zeros((len(logits), len(labels)))
    sums = zeros, jnp.zeros(len(logits), jnp.int32), jnp.zeros(len(labels)), zeros[:, 0]
    (shared, of_found, of_true, total), _ = jax.lax.scan(of_row, sums, (by_row, instances))
    of_true = jnp.where(labels <= CROWD, shared, of_true)
    overlaps = shared / jnp.maximum(of_found[:, None] + of_true - shared, 1)
    return overlaps, total / jnp.maximum(of_found, 1)


def largest_overlaps(overlaps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two largest IoUs of each predicted mask, and the indices of the true masks.

    COCO's metrics need only IoUs of at least 0.5. True masks are disjoint, so at most two of them
    have such an IoU with a predicted mask.

    Args:
      overlaps: IoUs of all predicted and true masks, from `compare_masks`,
        `[..., detections, objects]`.

    Returns:
      The IoUs, float32, and the indices, int32. Both are `[..., detections, 2]`.
    """
    return tuple(jax.lax.top_k(overlaps, min(2, overlaps.shape[-1])))


OBJECTIVE = Detection
