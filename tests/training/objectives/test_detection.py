"""Tests of detection: matching of predictions and objects, losses of boxes and masks, metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.optimize import linear_sum_assignment

import vit_jax
from vit_jax.config import with_values
from vit_jax.evaluation.dense_metrics import coco_metrics
from vit_jax.models.dense.detector import best_of, corners_of
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives import make_objective
from vit_jax.training.objectives.box_losses import centred, focal_losses, generalized_iou
from vit_jax.training.objectives.detection import (
    SampledMasks,
    compare_masks,
    largest_overlaps,
    set_losses,
)
from vit_jax.training.objectives.mask_losses import Points, draw_points, sample
from vit_jax.training.objectives.objective import StepContext


def drawn_boxes(rng, count):
    """Returns random boxes as centre x, centre y, width and height."""
    sides = rng.uniform(0.05, 0.6, (count, 2))
    centres = rng.uniform(sides / 2, 1 - sides / 2)
    return np.concatenate([centres, sides], axis=1).astype(np.float32)


def giou_by_hand(one, other):
    """Returns the generalized IoU of two boxes, each given as left, top, right and bottom."""
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


def mask_by_hand(logits, true):
    """Returns the cross-entropy and the dice loss of a mask at sampled points."""
    p = 1 / (1 + np.exp(-logits.astype(float)))
    of_dice = 1 - (2 * (p * true).sum() + 1) / (p.sum() + true.sum() + 1)
    return -np.mean(true * np.log(p) + (1 - true) * np.log(1 - p)), of_dice


def sampled_masks(rng, queries, most, dim=4):
    """Returns query embeddings, and an image's pixels and masks sampled at 12, 36 and 3 points."""
    sizes = 12, 36, 3
    pixels = Points(*(rng.normal(size=(n, dim)).astype(np.float32) for n in sizes))
    true = Points(*(rng.integers(0, 2, (most, n)).astype(np.float32) for n in sizes))
    return rng.normal(size=(queries, dim)).astype(np.float32), SampledMasks(pixels, true)


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("objects", [0, 1, 3, 6])
def test_set_losses_are_those_of_the_cheapest_matching(objects, masks):
    rng = np.random.default_rng(objects)
    queries, classes, most = 8, 4, 6
    embeddings, sampled = sampled_masks(rng, queries, most)
    logits = rng.normal(size=(queries, classes)).astype(np.float32)
    boxes, targets = drawn_boxes(rng, queries), drawn_boxes(rng, most)
    labels = np.where(np.arange(most) < objects, rng.integers(0, classes, most), -1)
    more = (embeddings, sampled) if masks else ()
    found = set_losses(logits, boxes, targets, labels.astype(np.int32), *more)

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
            if masks:
                logits_at = sampled.pixels.matched @ embeddings[query]
                terms = mask_by_hand(logits_at, sampled.true.matched[column])
                costs[query, column] += 5 * sum(terms)
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
    if masks:
        expected |= {"mask_loss": 0.0, "dice_loss": 0.0}
    for query, column in pairs if masks else ():
        # The losses use the 9 least certain of 36 candidate points, and 3 random points.
        candidates = sampled.pixels.candidates @ embeddings[query]
        chosen = np.argsort(np.abs(candidates))[:9]
        logits_at = np.append(candidates[chosen], sampled.pixels.others @ embeddings[query])
        true = sampled.true.candidates[column, chosen], sampled.true.others[column]
        terms = mask_by_hand(logits_at, np.concatenate(true))
        expected["mask_loss"] += terms[0]
        expected["dice_loss"] += terms[1]
    assert {name: float(x) for name, x in found.items()} == pytest.approx(expected, rel=1e-4)


def test_logits_of_sampled_pixels_equal_sampled_logits():
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(5, 7, 4)).astype(np.float32)
    embedding = rng.normal(size=4).astype(np.float32)
    points = draw_points(jax.random.key(0), 16).matched
    products = sample(jnp.moveaxis(pixels, -1, 0), points).T @ embedding
    np.testing.assert_allclose(products, sample((pixels @ embedding)[None], points)[0], atol=1e-5)


def test_overlaps_of_masks_are_those_of_pycocotools():
    coco_masks = pytest.importorskip("pycocotools.mask")
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 16, 12)).astype(np.float32)
    rows = rng.choice([0, 1, 2, 255], (16, 12)).astype(np.uint8)
    labels = np.array([3, 0, -4, -1])  # The third object is a crowd; the last one is padding.

    def encoded(masks):
        return coco_masks.encode(np.asfortranarray(masks.astype(np.uint8)))

    true = encoded(rows[..., None] == np.arange(3))
    expected = coco_masks.iou(encoded((logits > 0).transpose(1, 2, 0)), true, [0, 0, 1])
    found, quality = compare_masks(logits, rows, labels)
    np.testing.assert_allclose(found[:, :3], expected, rtol=1e-6)
    np.testing.assert_array_equal(found[:, 3], 0)
    inside = logits > 0
    probabilities = (inside / (1 + np.exp(-logits))).sum((1, 2)) / inside.sum((1, 2))
    np.testing.assert_allclose(quality, probabilities, rtol=1e-5)


def drawn_masks(rng, size=48, most=6):
    """Returns an image's map of object numbers, its labelled boxes, and logits of similar masks."""
    corners = rng.integers(0, size - 20, (most, 2))
    corners = np.concatenate([corners, corners + rng.integers(8, 20, (most, 2))], axis=1)
    labels = rng.choice([0, 1, -2, -1], most, p=[0.4, 0.3, 0.1, 0.2])
    rows = np.full((size, size), 255, np.uint8)
    for row, (left, top, right, bottom) in enumerate(corners):
        if labels[row] != -1:
            rows[top:bottom, left:right] = row
    found = rows == np.concatenate([np.arange(most), np.arange(most)])[:, None, None]
    found = [np.roll(mask, rng.integers(-2, 3, 2), axis=(0, 1)) for mask in found]
    return rows, np.concatenate([corners, labels[:, None]], axis=1), np.where(found, 1.0, -1.0)


def test_precision_of_masks_needs_only_the_largest_overlaps(program):
    pytest.importorskip("pycocotools")
    rng = np.random.default_rng(0)
    rows, boxes, logits = map(np.stack, zip(*(drawn_masks(rng) for _ in range(40)), strict=True))
    overlaps = np.asarray(jax.vmap(compare_masks)(logits, rows, boxes[..., 4])[0])
    outputs = dict(zip(("overlaps", "overlapped"), largest_overlaps(overlaps), strict=True))
    assert outputs["overlaps"].shape == (40, 12, 2)
    outputs["boxes"] = np.tile(boxes[..., :4], (1, 2, 1)).astype(float)
    classes = np.tile(boxes[..., 4].clip(0), (1, 2))
    outputs["classes"] = np.where(rng.random((40, 12)) < 0.8, classes, 1)
    outputs["scores"], outputs["true"] = rng.random((40, 12)), boxes
    outputs = {name: np.asarray(x) for name, x in outputs.items()}
    _, objective, _ = program
    found = objective.over_split(outputs)

    def all_overlaps(image):
        return overlaps[image][:, boxes[image, :, 4] != -1]

    true, detected = objective.objects(outputs)
    expected = coco_metrics(detected, true, 2, overlaps=all_overlaps)
    assert (found["mask_ap"], found["mask_ap50"]) == (expected["AP"], expected["AP50"])
    assert 0.05 < expected["AP"] < 0.9


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
    scores, classes, corners, masks = best_of({"classes": logits, "boxes": boxes}, 3)
    assert masks is None
    assert classes.tolist() == [[1, 0, 0]]
    assert np.all(np.diff(scores[0]) <= 0)
    np.testing.assert_allclose(corners[0, 1], [0.7, 0.7, 1.0, 1.0], atol=1e-6)


@pytest.fixture(scope="module")
def program():
    """Returns a tiny detector, its objective and a batch whose first image has no boxes."""
    values = {"objective.name": "detection", "data.num_classes": 2, "data.image_size": 32}
    head = {"detection.dim": 16, "detection.depth": 1, "detection.queries": 6, "detection.most": 3}
    options = with_values(RunOptions(), values | head)
    model = vit_jax.create_model(
        "ViT-32x1/8", image_size=32, num_classes=0, mlp_dim=32, pooling="gap"
    )
    objective = make_objective(options, model, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, 16, (4, 3, 2))
    boxes = np.concatenate([corners, corners + 12, rng.integers(0, 2, (4, 3, 1))], axis=2)
    boxes[0, :, 4], boxes[1, 1:, 4] = -1, -1
    images = rng.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    batch = {"image": jnp.asarray(images), "boxes": jnp.asarray(boxes, jnp.float32)}
    return model, objective, batch


def test_losses_do_not_depend_on_how_a_batch_is_divided(program):
    model, objective, batch = program
    keys = jax.random.split(jax.random.key(0), 4)
    prepared = objective.prepare(batch, keys)
    assert prepared["objects_per_image"].tolist() == [7 / 4] * 4

    @jax.jit
    def losses(batch):
        return objective(model, batch, StepContext(nnx.Rngs(dropout=0))).each

    halves = [
        losses({key: x[part] for key, x in prepared.items()}) for part in (slice(0, 2), slice(2, 4))
    ]
    np.testing.assert_allclose(losses(prepared), jnp.concatenate(halves), rtol=1e-5)


def test_evaluation_of_an_image_does_not_depend_on_the_others(program):
    model, objective, batch = program
    losses = jax.jit(lambda batch: objective(model, batch).each)
    each = losses(batch)
    alone = [losses({key: x[i : i + 1] for key, x in batch.items()}) for i in range(4)]
    np.testing.assert_allclose(each, jnp.concatenate(alone), rtol=1e-5)
    assert np.isfinite(each).all()


def test_average_precision_is_one_if_the_best_boxes_are_the_true_ones(program):
    pytest.importorskip("pycocotools")
    _, objective, batch = program
    boxes = np.asarray(batch["boxes"])
    outputs = {
        "boxes": boxes[..., :4],
        "classes": np.maximum(boxes[..., 4], 0).astype(int),
        "scores": np.where(boxes[..., 4] >= 0, 0.9, 0.1),
        "true": boxes,
    }
    assert objective.over_split(outputs) == pytest.approx({"ap": 1, "ap50": 1})


def test_predictions_in_a_crowd_are_ignored_and_precision_without_objects_is_nan(program):
    pytest.importorskip("pycocotools")
    _, objective, _ = program
    corners = [[0, 0, 4, 4], [10, 10, 30, 30], [0, 0, 0, 0]]
    boxes = np.array([[*row, label] for row, label in zip(corners, (0, -2, -1), strict=True)])
    outputs = {
        "boxes": np.array([[[0, 0, 4, 4], [12, 12, 16, 16], [20, 20, 26, 26]]], float),
        "classes": np.zeros((1, 3), int),
        "scores": np.array([[0.5, 0.9, 0.8]]),
        "true": boxes[None],
    }
    assert objective.over_split(outputs) == pytest.approx({"ap": 1, "ap50": 1})
    assert objective.image_scores(outputs).values == pytest.approx([1])
    outside = outputs | {"boxes": outputs["boxes"] + [[[0], [0], [-16]]]}
    assert objective.image_scores(outside).values == pytest.approx([2 / 3])
    uncertain = outside | {"scores": np.array([[0.5, 0.9, 0.2]])}
    assert objective.image_scores(uncertain).values == pytest.approx([1])
    assert objective.legend(outputs, ("cat", "dog")) == {"cat": "#800000"}
    nothing = outputs | {"true": np.array([[[0, 0, 0, 0, -1]]])}
    assert all(map(np.isnan, objective.over_split(nothing).values()))


def test_training_without_objects_is_warned_of_after_the_first_step(program):
    objective = program[1]
    assert "no training image" in objective.warning({"box_loss": 0.0}, 2)
    assert objective.warning({"box_loss": 0.0}, 1) is None
    assert objective.warning({"box_loss": 0.1}, 2) is None
