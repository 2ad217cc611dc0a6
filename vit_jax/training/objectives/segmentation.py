"""Semantic segmentation: a head predicts the class of each pixel."""

from collections.abc import Sequence
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
from vit_jax.models.dense.eomt import EoMT, Masking, mask_probabilities
from vit_jax.models.dense.palette import class_legend, coloured, voc_palette
from vit_jax.models.dense.pyramid import resized
from vit_jax.options.objective import SegmentationOptions
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.mask_losses import (
    Targets,
    Weights,
    draw_points,
    set_losses,
    targets_of,
)
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    ImageScores,
    Loss,
    Objective,
    StepContext,
    check_self_supervised,
)

STATISTICS = "statistics"  # State: running mean and variance of the head's batch norms.


class Segmentation(Objective):
    """Semantic segmentation by a head on the model's dense features.

    The loss depends on the head:

    - Linear head and UPerNet: the scores are resized to the image, and the loss is the pixels'
      cross-entropy. Ignored pixels have the loss 0. The sum is divided by the number of all pixels,
      as in mmsegmentation and DINOv3. In training, UPerNet adds the loss of its auxiliary head.
    - EoMT: the loss of a set of masks (`mask_losses.py`). In training, EoMT predicts masks before
      each layer with queries and after the last layer. The losses of these predictions are added.
    """

    section = "segmentation"
    own_classes = True
    made_by = ("head", "dim", "auxiliary_dim", "queries", "query_layers")
    carried = (STATISTICS,)
    metrics: ClassVar = {"pixel_accuracy": "share"}
    split_metrics: ClassVar = {"miou": "share", "pixel_accuracy": "share"}
    picture_rows = "original, true classes, predicted classes"

    def __init__(self, options: SegmentationOptions, head: Head, classes: int, steps: int):
        self.head: Any = head
        self.classes, self.steps = classes, steps
        self.auxiliary_weight = options.auxiliary_weight
        self.masked = tuple(options.masked_until), tuple(options.unmasked_from)
        self.points = options.points
        self.weights = Weights(
            options.mask_weight, options.dice_weight, options.class_weight, options.no_object_weight
        )

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return config.segmentation.head == "eomt"

    @staticmethod
    def fields(config: RunOptions) -> tuple[Field, ...]:
        return (mask_field(config.data.image_size, config.data.cat_max_ratio),)

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
        head = make_head(options, model, classes, frozen=frozen, rngs=rngs)
        return cls(options, head, classes, steps)

    def initial_state(self, params: dict) -> dict[str, Any]:
        statistics = initial_statistics(self.head)
        return {STATISTICS: statistics} if statistics else {}

    def update_state(self, state: dict, params: dict, aux: dict, update: jax.Array) -> dict:
        return {name: updated_statistics(old, aux) for name, old in state.items()}

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """Adds a random key of each image and the mean number of masks to the batch.

        Only EoMT needs these entries. For other heads the batch is returned unchanged.

        Returns:
          The batch with two additional entries:

          - `key`, `[batch, ...]`: the `jax.random.key_data` of each image's random key.
          - `masks_per_image`, float32 `[batch]`: the mean number of masks per image in the batch,
            the same value for all images.
        """
        if not isinstance(self.head, EoMT):
            return batch
        count = jnp.full(len(keys), self._targets(batch).valid.sum(-1).mean())
        return batch | {"key": jax.random.key_data(keys), "masks_per_image": count}

    def __call__(self, model: Any, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss and the pixel accuracy of each image.

        `Loss.outputs` contains `areas`: the numbers of correct, predicted and true pixels of each
        class (`class_areas`). In evaluation `over_split` sums them over the images of a split.

        Args:
          batch: `image`, and `mask` uint8 `[batch, height, width]`, the class of each pixel.
        """
        images, mask, more = batch["image"], batch[MASK], {}
        if isinstance(self.head, EoMT):
            more["masking"] = self._masking(batch, context.update)
        outputs = self.head(model, images, context.rngs, context.state.get(STATISTICS), **more)
        scores = resized(self.head.scores(outputs), mask.shape[1:])
        if isinstance(self.head, EoMT):
            losses = self._set_losses(outputs, batch, training=context.rngs is not None)
        else:
            losses = pixel_losses(scores, mask)
        if "auxiliary" in outputs:
            auxiliary = resized(outputs["auxiliary"], mask.shape[1:])
            losses += self.auxiliary_weight * pixel_losses(auxiliary, mask)
        areas = class_areas(scores.argmax(-1), mask, self.classes)
        shared, true = areas[..., 0].sum(-1), areas[..., 2].sum(-1)
        return Loss(
            losses,
            {"pixel_accuracy": shared / jnp.maximum(true, 1)},
            aux=outputs.get("moments", {}),
            outputs={"areas": areas},
        )

    def pictures(
        self, model: Any, batch: Batch, context: StepContext = EVALUATION
    ) -> tuple[jax.Array, jax.Array]:
        """Returns two copies of the images in [0, 255], overlaid with the colours of classes.

        The first copy shows the true classes, the second copy the predicted classes. Ignored pixels
        have the colour of `IGNORED` in both copies. Each is `[batch, height, width, channels]`.
        """
        images, mask = batch["image"], batch[MASK]
        outputs = self.head(model, images, None, context.state.get(STATISTICS))
        predicted = resized(self.head.scores(outputs), mask.shape[1:]).argmax(-1)
        predicted = jnp.where(mask == IGNORED, IGNORED, predicted)
        palette = jnp.asarray(voc_palette(), jnp.float32)
        return coloured(images, mask, palette), coloured(images, predicted, palette)

    def over_split(self, outputs: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns the split's pixel accuracy, and the mean IoU over classes.

        Classes that occur neither in the masks nor in the predictions are ignored.

        Args:
          outputs: `areas`, the result of `class_areas` for all images, int32
            `[images, classes, 3]`.
        """
        shared, predicted, true = np.moveaxis(outputs["areas"].sum(0, np.int64), -1, 0)
        union = predicted + true - shared
        occurs = union > 0
        return {
            "miou": float((shared[occurs] / union[occurs]).mean()) if occurs.any() else 0.0,
            "pixel_accuracy": float(shared.sum() / max(true.sum(), 1)),
        }

    def image_scores(self, outputs: dict[str, np.ndarray]) -> ImageScores:
        """Returns each image's mean IoU over the classes in its mask or its prediction."""
        shared, predicted, true = np.moveaxis(outputs["areas"], -1, 0)
        union = predicted + true - shared
        with np.errstate(invalid="ignore"):  # 0 / 0 for an image without known pixels.
            ious = np.where(union > 0, shared / np.maximum(union, 1), 0).sum(1) / (union > 0).sum(1)
        return ImageScores("mIoU", ious)

    def legend(self, outputs: dict[str, np.ndarray], class_names: Sequence[str]) -> dict[str, str]:
        labels = np.flatnonzero(outputs["areas"].any((0, 2)))
        return class_legend(labels.tolist(), class_names)

    def _targets(self, batch: Batch) -> Targets:
        """Returns the true masks of each image, one for each class in the image."""
        most = self.head.queries.shape[0]
        return jax.vmap(lambda mask: targets_of(mask, self.classes, most))(batch[MASK])

    def _masking(self, batch: Batch, update: jax.Array | int) -> Masking:
        """Draws the queries whose attention is masked, for each image and each layer with queries.

        Such a query attends only to the patches within its own predicted mask.
        """
        shape = self.head.layers, self.head.queries.shape[0]
        draws = jax.vmap(lambda key: jax.random.uniform(key, shape))(_keys(batch, 0))
        return Masking(mask_probabilities(update, *self.masked, self.steps), draws)

    def _set_losses(self, outputs: dict[str, Any], batch: Batch, *, training: bool) -> jax.Array:
        """Returns EoMT's loss of each image, `[batch]`, summed over the predictions of all layers.

        Args:
          training: True: divide mask losses by the batch's mean number of masks per image. False:
            divide them by the image's own number of masks.
        """
        targets = self._targets(batch)
        count = batch["masks_per_image"] if training else targets.valid.sum(-1)

        def losses(prediction):
            number, masks, classes = prediction
            points = jax.vmap(lambda key: draw_points(key, self.points))(_keys(batch, number))
            return set_losses(masks, classes, targets, points, count, self.weights)

        masks, classes = outputs["masks"], outputs["classes"]
        numbers = jnp.arange(1, len(masks) + 1)
        return jax.lax.map(losses, (numbers, masks, classes)).sum(0)


def _keys(batch: Batch, number: jax.Array | int) -> jax.Array:
    """Returns a random key for each image: the image's key in the batch, folded with `number`."""
    keys = jax.random.wrap_key_data(batch["key"])
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def pixel_losses(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the cross-entropy of each image, `[batch]`: the mean over its pixels.

    Ignored pixels have the loss 0, but the mean includes them.

    Args:
      scores: logits of the classes, float32 `[batch, height, width, classes]`.
      mask: class of each pixel, `[batch, height, width]`.
    """
    known = mask != IGNORED
    targets = jnp.where(known, mask, 0).astype(jnp.int32)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
    return jnp.where(known, losses, 0).mean((1, 2))


def class_areas(predicted: jax.Array, mask: jax.Array, classes: int) -> jax.Array:
    """Counts the correct, predicted and true pixels of each class in each image.

    Ignored pixels are not counted. The IoU and the accuracy of a split are computed from the sums
    of these counts over its images.

    Args:
      predicted: predicted class of each pixel, `[batch, height, width]`.
      mask: true class of each pixel, `[batch, height, width]`.
      classes: number of classes.

    Returns:
      int32 `[batch, classes, 3]`; the last axis contains the correct, predicted and true pixels.
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
