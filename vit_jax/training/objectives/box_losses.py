"""Losses between predicted and true boxes: L1, generalized IoU and the focal loss.

A box is an array of centre x, centre y, width and height, as fractions of the image's sides.
"""

import jax
import jax.numpy as jnp
import optax

ALPHA, GAMMA = 0.25, 2.0  # Parameters of the focal loss (Lin et al., 1708.02002).


def centred(corners: jax.Array) -> jax.Array:
    """Converts left, top, right, bottom `[..., 4]` to centre x, centre y, width, height."""
    start, end = corners[..., :2], corners[..., 2:]
    return jnp.concatenate([(start + end) / 2, end - start], axis=-1)


def generalized_iou(one: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the generalized IoU of boxes, `[...]` in [-1, 1] (Rezatofighi et al., 1902.09630).

    Args:
      one, other: boxes `[..., 4]`: left, top, right and bottom. Their shapes are broadcast.
    """

    def area(start, end):
        return jnp.prod((end - start).clip(0), axis=-1)

    starts, ends = (one[..., :2], other[..., :2]), (one[..., 2:], other[..., 2:])
    shared = area(jnp.maximum(*starts), jnp.minimum(*ends))
    union = area(starts[0], ends[0]) + area(starts[1], ends[1]) - shared
    hull = area(jnp.minimum(*starts), jnp.maximum(*ends))
    return shared / jnp.maximum(union, 1e-9) - (hull - union) / jnp.maximum(hull, 1e-9)


def focal_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the sigmoid focal loss of each logit; the result has the shape of `logits`.

    Args:
      logits: logits of any shape.
      targets: 0 or 1 for each logit.
    """
    return optax.sigmoid_focal_loss(logits, targets, alpha=ALPHA, gamma=GAMMA)
