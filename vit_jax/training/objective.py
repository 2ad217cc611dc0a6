"""Supervised classification: the loss, and what counts as right.

Labels come as class indices `[batch, max_labels]`, padded with -1; most data sets have one.
"""

import jax
import jax.numpy as jnp
import optax


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
