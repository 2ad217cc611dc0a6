"""Supervised classification: the loss and the accuracy.

Labels are class indices `[batch, max_labels]`, padded with -1; most data sets have one label.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import count_multiply_adds
from vit_jax.options.run import RunOptions
from vit_jax.training.averages import Momentum
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    Loss,
    Objective,
    StepContext,
    average_of,
)


def probabilities_of(config: RunOptions) -> str:
    """Returns the name of the function from logits to probabilities for the config's loss.

    The result is a key of `PROBABILITIES`: `softmax` or `sigmoid`.
    """
    return "softmax" if config.loss.name == "softmax" else "sigmoid"


class Classification(Objective):
    """Supervised classification of whole images, without parameters of its own.

    With `average`, the objective's state contains an EMA of the model's parameters, which is
    evaluated in place of the parameters.

    Attributes:
      class_weights: weight of each class in the training loss, set after construction. Empty: all
        weights are 1.

    Args:
      loss: name of the loss, `softmax`, `sigmoid` or `binary` (`classification_loss`).
      smoothing: share of the target that is spread over all classes in training.
      average: moving average of the parameters; None: no average.
    """

    labels = True
    metrics: ClassVar = {"accuracy": "share"}
    class_weights: tuple[float, ...] = ()

    def __init__(self, loss: str, smoothing: float, average: Momentum | None = None):
        self.loss, self.smoothing, self.average = loss, smoothing, average

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return False

    @classmethod
    def needs_a_label(cls, config: RunOptions) -> bool:
        # Only the loss `softmax` requires a label. For the losses `sigmoid` and `binary`, an image
        # without a label is a negative for all classes.
        return config.loss.name == "softmax"

    @classmethod
    def make(
        cls, config: RunOptions, model: nnx.Module, steps: int, rngs: nnx.Rngs
    ) -> "Classification":
        if getattr(model.options, "distillation", "none") == "heads":
            raise UserError(
                "model.distillation='heads' trains its second head on a teacher's predictions, "
                "but no teacher is given: give config.objective.name='distillation' and "
                "config.objective.teacher, or model.distillation='token', which trains the one "
                "head and keeps the token"
            )
        return cls(**values_of(config))

    @staticmethod
    def eval_params(config: RunOptions) -> str | None:
        return "average" if config.optimizer.average else None

    def initial_state(self, params: dict) -> dict[str, Any]:
        return {"average": params} if self.average else {}

    def update_state(self, state: dict, params: dict, aux: dict, update: jax.Array) -> dict:
        return {name: self.average.after(mean, params, update) for name, mean in state.items()}

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the cross-entropy and the top-1 accuracy of each image."""
        logits = model(batch["image"], context.rngs)
        losses = self.label_losses(logits, batch, context)
        return Loss(losses, {"accuracy": correct(logits, batch["labels"])}, logits=logits)

    def label_losses(self, logits: jax.Array, batch: Batch, context: StepContext) -> jax.Array:
        """Returns the loss of each image, `[batch]`.

        Label smoothing and class weights apply only in training.
        """
        targets = batch_targets(batch, logits.shape[-1], self.loss)
        smoothing = 0.0 if context.rngs is None else self.smoothing
        losses = classification_loss(logits, targets, self.loss, smoothing)
        if self.class_weights and context.rngs is not None:
            losses *= image_weights(batch, jnp.array(self.class_weights, jnp.float32))
        return losses

    def multiply_adds(
        self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None
    ) -> float:
        return count_multiply_adds(model)


def values_of(config: RunOptions) -> dict[str, Any]:
    """Returns the constructor's arguments of `Classification` for a config."""
    smoothing = config.loss.label_smoothing
    return dict(loss=config.loss.name, smoothing=smoothing, average=average_of(config))


def multi_hot(labels: jax.Array, num_classes: int) -> jax.Array:
    """Converts class indices `[batch, max_labels]` to zeros and ones `[batch, classes]`.

    The index -1 is padding and is ignored.
    """
    return jax.nn.one_hot(labels, num_classes).max(axis=1)


def class_targets(labels: jax.Array, num_classes: int, name: str) -> jax.Array:
    """Returns the targets of the loss `name`, `[batch, classes]`.

    For `softmax`, the targets of an image are a uniform distribution over its labels. For other
    losses, the target is 1 for each label of the image.
    """
    targets = multi_hot(labels, num_classes)
    if name == "softmax":
        targets = targets / jnp.maximum(targets.sum(-1, keepdims=True), 1)
    return targets


def batch_targets(batch: dict[str, jax.Array], num_classes: int, name: str) -> jax.Array:
    """Returns the targets of a batch, `[batch, classes]`, also after mixup or CutMix.

    A mixed image consists of an image and its partner. Its targets are `share` times the image's
    targets plus `1 - share` times the partner's targets. For the loss `binary`, the target is 1 for
    the classes of both images, regardless of `share` (Wightman et al., 2021).
    """
    targets = class_targets(batch["labels"], num_classes, name)
    if "share" not in batch:
        return targets
    share = batch["share"][:, None]
    mixed = share * targets + (1 - share) * class_targets(
        batch["partner_labels"], num_classes, name
    )
    return (mixed > 0).astype(mixed.dtype) if name == "binary" else mixed


def image_weights(batch: dict[str, jax.Array], class_weights: jax.Array) -> jax.Array:
    """Returns the class weight of each image, `[batch]`.

    For a mixed image it is `share` times the image's class weight plus `1 - share` times the class
    weight of the partner.
    """
    weights = class_weights[batch["labels"].max(axis=1)]
    if "share" not in batch:
        return weights
    partners = class_weights[batch["partner_labels"].max(axis=1)]
    return batch["share"] * weights + (1 - batch["share"]) * partners


def classification_loss(
    logits: jax.Array, targets: jax.Array, name: str, smoothing: float
) -> jax.Array:
    """Returns the cross-entropy of each image, `[batch]`.

    Args:
      logits: `[batch, classes]`.
      targets: targets from `batch_targets`, `[batch, classes]`.
      name: name of the loss. `softmax`: cross-entropy. `sigmoid`: binary cross-entropy, summed over
        the classes. `binary`: binary cross-entropy, averaged over the classes.
      smoothing: share of the target that is spread over all classes.
    """
    targets = (1 - smoothing) * targets + smoothing / logits.shape[-1]
    if name == "softmax":
        return optax.softmax_cross_entropy(logits, targets)
    losses = optax.sigmoid_binary_cross_entropy(logits, targets)
    return losses.sum(-1) if name == "sigmoid" else losses.mean(-1)


def correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns True for images whose most likely class is one of their labels, bool `[batch]`."""
    return (logits.argmax(-1)[:, None] == labels).any(-1)


OBJECTIVE = Classification
