"""Supervised classification: the loss, and what counts as right.

Labels come as class indices `[batch, max_labels]`, padded with -1; most data sets have one.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Classification(nnx.Module):
    """Supervised: the logits of whole images against their labels; no parameters but the model's.

    Args:
      loss: `softmax`, or `sigmoid`, summed over the classes.
      smoothing: share of the target that is spread over all classes in training.
    """

    metrics = ("accuracy",)

    def __init__(self, loss: str, smoothing: float):
        self.loss, self.smoothing = loss, smoothing

    def prepare(self, batch: dict[str, jax.Array], keys: jax.Array) -> dict[str, jax.Array]:
        """The batch itself: nothing is drawn."""
        return batch

    def __call__(
        self, model: nnx.Module, batch: dict[str, jax.Array], rngs: nnx.Rngs | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross-entropy and precision at 1 of each image, `[batch]`."""
        logits = model(batch["image"], rngs)
        targets = batch_targets(batch, logits.shape[-1], self.loss)
        losses = classification_loss(logits, targets, self.loss, 0.0 if rngs is None else self.smoothing)
        return losses, {"accuracy": correct(logits, batch["labels"])}


def multi_hot(labels: jax.Array, num_classes: int) -> jax.Array:
    """`[batch, max_labels]` indices to `[batch, classes]` zeros and ones; padding adds nothing."""
    return jax.nn.one_hot(labels, num_classes).max(axis=1)


def class_targets(labels: jax.Array, num_classes: int, name: str) -> jax.Array:
    """What the loss `name` wants to see, `[batch, classes]`.

    `softmax`: the labels' even mixture; `sigmoid`: one for each label.
    """
    targets = multi_hot(labels, num_classes)
    if name == "softmax":
        targets = targets / jnp.maximum(targets.sum(-1, keepdims=True), 1)
    return targets


def batch_targets(batch: dict[str, jax.Array], num_classes: int, name: str) -> jax.Array:
    """`class_targets` of a batch's `labels`, mixed with its partners' where `augment` mixed the images."""
    targets = class_targets(batch["labels"], num_classes, name)
    if "share" not in batch:
        return targets
    share = batch["share"][:, None]
    return share * targets + (1 - share) * class_targets(batch["partner_labels"], num_classes, name)


def classification_loss(logits: jax.Array, targets: jax.Array, name: str, smoothing: float) -> jax.Array:
    """Cross-entropy of each image, `[batch]`.

    Args:
      targets: as `class_targets` makes them, or a mixture of such.
      name: `softmax`, or `sigmoid`, summed over the classes.
      smoothing: share of the target that is spread over all classes.
    """
    targets = (1 - smoothing) * targets + smoothing / logits.shape[-1]
    if name == "softmax":
        return optax.softmax_cross_entropy(logits, targets)
    return optax.sigmoid_binary_cross_entropy(logits, targets).sum(-1)


def correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Precision at 1, `[batch]` bool: the highest logit is one of the image's classes."""
    return (logits.argmax(-1)[:, None] == labels).any(-1)
