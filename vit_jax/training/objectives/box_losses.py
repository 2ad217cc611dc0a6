"""Losses between predicted and true boxes: L1, generalized IoU and the focal loss.

A box is an array of centre x, centre y, width and height, as fractions of the image's sides.
"""

import functools

import jax
import jax.numpy as jnp
import optax


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


# Called with logits and targets (0 or 1) of the same shape; returns the loss of each logit. The
# parameters are those of Lin et al., 1708.02002.
focal_losses = functools.partial(optax.sigmoid_focal_loss, alpha=0.25, gamma=2.0)
