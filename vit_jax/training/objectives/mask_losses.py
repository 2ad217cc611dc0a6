"""Losses of sets of masks: classes, and masks at sampled points (Mask2Former, 2112.01527).

A segmentation is a set of masks, one for each class in the image. Each true mask is matched with a
query of the model. The loss of a mask is computed at sampled points, and most of these points are
where the predicted mask is uncertain.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.data.fields import IGNORED
from vit_jax.training.objectives.matching import match

OVERSAMPLED = 3  # Number of candidates, divided by the number of points of the loss.
UNCERTAIN = 0.75  # Share of the points that are chosen from the candidates by uncertainty.


class Weights(NamedTuple):
    """Weights of the losses and of the matching costs.

    Attributes:
      mask: weight of the binary cross-entropy at a mask's points.
      dice: weight of the dice loss.
      classes: weight of the cross-entropy of the class.
      no_object: weight of queries without a target in the cross-entropy of the class.
    """

    mask: float = 5.0
    dice: float = 5.0
    classes: float = 2.0
    no_object: float = 0.1


class Points(NamedTuple):
    """Random points in an image.

    Each field is an array `[..., points, 2]` with coordinates x and y in [0, 1].

    All masks of an image share these points. In Mask2Former each mask has its own candidates.

    Attributes:
      matched: points at which the matching costs are computed.
      candidates: points for the loss of a mask; only the most uncertain ones are used.
      others: points that are used for the loss of every mask.
    """

    matched: jax.Array
    candidates: jax.Array
    others: jax.Array


class Targets(NamedTuple):
    """True masks of an image: one mask for each class that occurs in the image.

    Attributes:
      labels: class of each mask, int32 `[..., targets]`.
      valid: False for padding, bool `[..., targets]`.
      mask: class of each pixel, `[..., height, width]`.
    """

    labels: jax.Array
    valid: jax.Array
    mask: jax.Array


def draw_points(key: jax.Array, points: int) -> Points:
    """Draws random points of one image.

    Args:
      points: number of points at which the loss of a mask is computed. More points are drawn, as
        candidates.
    """
    chosen = int(UNCERTAIN * points)
    keys = jax.random.split(key, 3)
    sizes = points, OVERSAMPLED * points, points - chosen
    return Points(*(jax.random.uniform(k, (n, 2)) for k, n in zip(keys, sizes, strict=True)))


def targets_of(mask: jax.Array, classes: int, most: int) -> Targets:
    """Returns the true masks of one image.

    Args:
      mask: class of each pixel, `[height, width]`; pixels of the class `IGNORED` have no mask.
      classes: number of classes.
      most: maximum number of masks. If the image has more classes, those with the largest areas are
        returned.
    """
    counted = jnp.where(mask == IGNORED, classes, mask).reshape(-1).astype(jnp.int32)
    areas = jnp.zeros(classes, jnp.int32).at[counted].add(1, mode="drop")
    areas, labels = jax.lax.top_k(areas, min(classes, most))
    return Targets(labels.astype(jnp.int32), areas > 0, mask)


def sample(maps: jax.Array, points: jax.Array) -> jax.Array:
    """Interpolates maps bilinearly at points, with zero padding, as PyTorch's `grid_sample` does.

    Args:
      maps: `[maps, height, width]`.
      points: x and y in [0, 1]. Either `[points, 2]`, the same points for all maps, or
        `[maps, points, 2]`.

    Returns:
      float32 `[maps, points]`.
    """
    flat = maps.reshape(len(maps), -1)

    def read(index):
        values = flat[:, index] if index.ndim == 1 else jnp.take_along_axis(flat, index, axis=1)
        return values.astype(jnp.float32)

    corners = _corners(maps.shape[1:], points)
    return jnp.stack([weight * read(index) for weight, index in corners]).sum(0)


def sample_targets(targets: Targets, points: jax.Array) -> jax.Array:
    """Interpolates the true masks of an image bilinearly at points, with zero padding.

    The result is float32 `[targets, points]`.
    """
    flat, corners = targets.mask.reshape(-1), _corners(targets.mask.shape, points)
    parts = [weight * (flat[index] == targets.labels[:, None]) for weight, index in corners]
    return jnp.stack(parts).sum(0)


def _corners(size: tuple[int, ...], points: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the bilinear weights and the flat indices of the four pixels around each point.

    The result is a list of four pairs (weight, index). Weight and index are `[..., points]`.
    """
    height, width = size
    x, y = points[..., 0] * width - 0.5, points[..., 1] * height - 0.5
    left, top = jnp.floor(x), jnp.floor(y)
    found = []
    for row, of_row in ((top, top + 1 - y), (top + 1, y - top)):
        for column, of_column in ((left, left + 1 - x), (left + 1, x - left)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            index = row.clip(0, height - 1) * width + column.clip(0, width - 1)
            found.append((jnp.where(inside, of_row * of_column, 0), index.astype(jnp.int32)))
    return found


def matching_costs(
    masks: jax.Array, classes: jax.Array, targets: Targets, points: jax.Array, weights: Weights
) -> jax.Array:
    """Returns the matching cost of each target with each query, float32 `[targets, queries]`.

    Args:
      masks: mask logits of one image, `[queries, rows, columns]`.
      classes: class logits, `[queries, classes + 1]`; the last class means no object.
      targets: true masks of the image.
      points: points at which masks are compared, `[points, 2]`.
    """
    of_masks, of_dice = pair_losses(sample(masks, points), sample_targets(targets, points))
    of_classes = -jax.nn.softmax(classes)[:, targets.labels].T
    return weights.mask * of_masks + weights.dice * of_dice + weights.classes * of_classes


def pair_losses(predicted: jax.Array, true: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cross-entropy and the dice loss of all pairs of a true and a predicted mask.

    Both losses are `[targets, queries]`.

    Args:
      predicted: logits of the masks at points, `[queries, points]`.
      true: true masks at the points, `[targets, points]`.
    """
    of_masks = true @ jax.nn.softplus(-predicted).T + (1 - true) @ jax.nn.softplus(predicted).T
    probability = jax.nn.sigmoid(predicted)
    shared, both = true @ probability.T, true.sum(-1)[:, None] + probability.sum(-1)
    return of_masks / predicted.shape[-1], 1 - (2 * shared + 1) / (both + 1)


def point_losses(predicted: jax.Array, true: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cross-entropy and the dice loss of matched masks, each `[masks]`.

    Args:
      predicted: logits of the predicted masks at points, `[masks, points]`.
      true: the true mask of each predicted mask at the points, `[masks, points]`.
    """
    of_mask = optax.sigmoid_binary_cross_entropy(predicted, true).mean(-1)
    probability = jax.nn.sigmoid(predicted)
    shared, both = (probability * true).sum(-1), probability.sum(-1) + true.sum(-1)
    return of_mask, 1 - (2 * shared + 1) / (both + 1)


def most_uncertain(logits: jax.Array, count: int) -> jax.Array:
    """Returns the indices of each mask's most uncertain points, `[masks, count]`.

    These are the `count` points with logits closest to 0.

    Args:
      logits: logits of the masks at points, `[masks, points]`.
      count: number of points to return.
    """
    return jax.lax.top_k(-jnp.abs(jax.lax.stop_gradient(logits)), count)[1]


class Sums(NamedTuple):
    """Unweighted losses of an image.

    The mask losses are summed over the masks, and the class loss over the queries.
    """

    mask: jax.Array
    dice: jax.Array
    classes: jax.Array


def image_losses(
    masks: jax.Array,
    classes: jax.Array,
    targets: Targets,
    matched: jax.Array,
    points: Points,
    no_object: float,
) -> Sums:
    """Returns the loss sums of one image, given the query that is matched with each target.

    Args:
      masks: mask logits, `[queries, rows, columns]`.
      classes: class logits, `[queries, classes + 1]`; the last class means no object.
      targets: true masks of the image.
      matched: index of each target's query, int32 `[targets]`.
      points: random points of the image.
      no_object: weight of queries without a target in the class loss.
    """
    masks = masks[matched]
    count = len(points.matched) - len(points.others)
    chosen = most_uncertain(sample(jax.lax.stop_gradient(masks), points.candidates), count)
    others = jnp.broadcast_to(points.others, (len(masks), *points.others.shape))
    places = jnp.concatenate([points.candidates[chosen], others], axis=1)
    predicted, true = sample(masks, places), sample_targets(targets, places)
    of_mask, of_dice = point_losses(predicted, true)
    nothing = classes.shape[-1] - 1
    labels = jnp.where(targets.valid, targets.labels, nothing)
    labels = jnp.full(len(classes), nothing).at[matched].set(labels)
    of_classes = optax.softmax_cross_entropy_with_integer_labels(classes, labels)
    weighted = of_classes * jnp.where(labels == nothing, no_object, 1)
    valid = targets.valid
    return Sums((of_mask * valid).sum(), (of_dice * valid).sum(), weighted.sum())


def set_losses(
    masks: jax.Array,
    classes: jax.Array,
    targets: Targets,
    points: Points,
    count: jax.Array,
    weights: Weights,
) -> jax.Array:
    """Returns the weighted loss of each image, float32 `[batch]`.

    Mask losses are divided by `count`. In the class loss, a query that is matched with a true mask
    has the weight 1, and each other query has the weight `weights.no_object`. The class loss is
    divided by the sum of these weights, computed as if `count` queries were matched.

    If every element of `count` is the batch's mean number of masks per image, the mean of the
    result over the batch is Mask2Former's loss.

    Args:
      masks: mask logits, `[batch, queries, rows, columns]`.
      classes: class logits, `[batch, queries, classes + 1]`; the last class means no object.
      targets: true masks, with a batch axis.
      points: random points of each image, with a batch axis.
      count: number of masks by which the mask losses of an image are divided, `[batch]`.
    """
    costs = jax.vmap(matching_costs, (0, 0, 0, 0, None))(
        masks, classes, targets, points.matched, weights
    )
    matched = match(costs, targets.valid)
    sums = jax.vmap(image_losses, (0, 0, 0, 0, 0, None))(
        masks, classes, targets, matched, points, weights.no_object
    )
    of_queries = count + weights.no_object * (classes.shape[1] - count)
    of_masks = weights.mask * sums.mask + weights.dice * sums.dice
    # If `count` is 0, the image has no masks, and the mask losses (`of_masks`) are 0. The maximum
    # avoids the division 0 / 0.
    return of_masks / jnp.maximum(count, 1e-6) + weights.classes * sums.classes / of_queries
