"""Detection: the losses of a set of boxes, and their matching."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from vit_jax.training.objectives.box_losses import (
    centred,
    corners_of,
    focal_losses,
    generalized_iou,
)
from vit_jax.training.objectives.detection import best_of, set_losses


def drawn_boxes(rng, count):
    """Returns random boxes as centre x, centre y, width and height."""
    sides = rng.uniform(0.05, 0.6, (count, 2))
    centres = rng.uniform(sides / 2, 1 - sides / 2)
    return np.concatenate([centres, sides], axis=1).astype(np.float32)


def giou_by_hand(one, other):
    """Returns the generalized IoU of two boxes of left, top, right and bottom."""
    width = max(0, min(one[2], other[2]) - max(one[0], other[0]))
    height = max(0, min(one[3], other[3]) - max(one[1], other[1]))
    shared = width * height
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    union = sum(areas) - shared
    hull = (max(one[2], other[2]) - min(one[0], other[0])) * (
        max(one[3], other[3]) - min(one[1], other[1])
    )
    return shared / union - (hull - union) / hull


def focal_by_hand(logit, target):
    """Returns the focal loss with alpha 0.25 and gamma 2."""
    p = 1 / (1 + np.exp(-logit))
    if target:
        return -0.25 * (1 - p) ** 2 * np.log(p)
    return -0.75 * p**2 * np.log(1 - p)


def test_generalized_iou_is_its_definition():
    rng = np.random.default_rng(0)
    one, other = corners_of(drawn_boxes(rng, 50)), corners_of(drawn_boxes(rng, 50))
    expected = [giou_by_hand(*pair) for pair in zip(one.tolist(), other.tolist(), strict=True)]
    np.testing.assert_allclose(generalized_iou(one, other), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(centred(one), centred(corners_of(centred(one))), atol=1e-6)


def test_equal_boxes_have_an_iou_of_one_and_empty_ones_are_finite():
    box = jnp.array([0.1, 0.2, 0.5, 0.9])
    assert float(generalized_iou(box, box)) == pytest.approx(1)
    empty = jnp.array([0.3, 0.3, 0.3, 0.3])
    gradient = jax.grad(lambda x: generalized_iou(x, empty))(empty)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("objects", [0, 1, 3, 6])
def test_set_losses_are_those_of_the_cheapest_matching(objects):
    rng = np.random.default_rng(objects)
    queries, classes, most = 8, 4, 6
    logits = rng.normal(size=(queries, classes)).astype(np.float32)
    boxes, targets = drawn_boxes(rng, queries), drawn_boxes(rng, most)
    labels = np.where(np.arange(most) < objects, rng.integers(0, classes, most), -1)
    found = set_losses(logits, boxes, targets, labels.astype(np.int32))

    costs, distances, overlaps = (np.zeros((queries, objects)) for _ in range(3))
    for query in range(queries):
        for column in range(objects):
            logit = logits[query, labels[column]]
            distances[query, column] = np.abs(boxes[query] - targets[column]).sum()
            pair = corners_of(boxes[query]).tolist(), corners_of(targets[column]).tolist()
            overlaps[query, column] = giou_by_hand(*pair)
            class_cost = focal_by_hand(logit, 1) - focal_by_hand(logit, 0)
            costs[query, column] = (
                2 * class_cost + 5 * distances[query, column] - 2 * overlaps[query, column]
            )
    pairs = [*zip(*linear_sum_assignment(costs), strict=True)]
    hot = np.zeros((queries, classes))
    for query, column in pairs:
        hot[query, labels[column]] = 1
    focal = [focal_by_hand(*pair) for pair in zip(logits.ravel(), hot.ravel(), strict=True)]
    expected = {
        "class_loss": sum(focal),
        "box_loss": sum(distances[pair] for pair in pairs),
        "giou_loss": sum(1 - overlaps[pair] for pair in pairs),
    }
    assert {name: float(x) for name, x in found.items()} == pytest.approx(expected, rel=1e-4)


def test_focal_losses_are_their_definition():
    logits = np.linspace(-8, 8, 33, dtype=np.float32)
    for target in (0, 1):
        expected = [focal_by_hand(logit, target) for logit in logits]
        np.testing.assert_allclose(
            focal_losses(logits, np.full_like(logits, target)), expected, rtol=1e-4, atol=1e-9
        )


def test_best_predictions_come_first():
    logits = jnp.array([[[[0.0, 3.0], [2.0, -1.0]]]])
    boxes = jnp.array([[[[0.5, 0.5, 0.2, 0.2], [0.9, 0.9, 0.4, 0.4]]]])
    scores, classes, corners = best_of({"classes": logits, "boxes": boxes}, 3)
    assert classes.tolist() == [[1, 0, 0]]
    assert np.all(np.diff(scores[0]) <= 0)
    np.testing.assert_allclose(corners[0, 1], [0.7, 0.7, 1.0, 1.0], atol=1e-6)
