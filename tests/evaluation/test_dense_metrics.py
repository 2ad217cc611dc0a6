"""Metrics of dense prediction equal those of other libraries and the published formulas."""

import numpy as np
import pytest

from tests.conftest import name_missing_operators
from vit_jax.data.fields import IGNORED, Boxes
from vit_jax.evaluation.dense_metrics import (
    COCO_METRICS,
    Detections,
    coco_metrics,
    confusion,
    depth_metrics,
    segmentation_metrics,
)

CLASSES = 7


@pytest.fixture(scope="module")
def torchmetrics():
    name_missing_operators(pytest.importorskip("torch"))
    return pytest.importorskip("torchmetrics")


def some_masks(seed, absent=()):
    """Yields predictions that are often right, and masks with unknown pixels, in three sizes."""
    rng = np.random.default_rng(seed)
    there = [label for label in range(CLASSES) if label not in absent]
    for shape in ((13, 17), (30, 8), (5, 40)):
        mask = rng.choice(there, shape)
        predicted = np.where(rng.random(shape) < 0.6, mask, rng.choice(there, shape))
        mask[rng.random(shape) < 0.1] = IGNORED
        yield predicted, mask


def test_segmentation_metrics_are_the_formulas_over_all_pixels():
    pairs = [*some_masks(0, absent=(3,))]
    metrics = segmentation_metrics(sum(confusion(*pair, CLASSES) for pair in pairs))
    predicted, mask = (np.concatenate([pair[i].ravel() for pair in pairs]) for i in range(2))
    predicted, mask = predicted[mask != IGNORED], mask[mask != IGNORED]
    ious, accuracies = [], []
    for label in (0, 1, 2, 4, 5, 6):
        both = ((predicted == label) & (mask == label)).sum()
        ious.append(both / ((predicted == label) | (mask == label)).sum())
        accuracies.append(both / (mask == label).sum())
    assert np.isclose(metrics.miou, np.mean(ious), rtol=1e-12)
    assert np.isclose(metrics.mean_accuracy, np.mean(accuracies), rtol=1e-12)
    assert metrics.pixel_accuracy == (predicted == mask).mean()
    assert np.isnan(metrics.ious).nonzero()[0].tolist() == [3]


def test_a_class_that_is_only_predicted_counts_in_the_iou_and_not_in_the_accuracy():
    metrics = segmentation_metrics(confusion(np.array([[0, 1]]), np.array([[0, 0]]), 3))
    assert (metrics.miou, metrics.mean_accuracy, metrics.pixel_accuracy) == (0.25, 0.5, 0.5)


def test_masks_without_known_pixels_have_no_metrics():
    counts = confusion(np.zeros((2, 2), int), np.full((2, 2), IGNORED, np.uint8), 3)
    assert np.isnan(segmentation_metrics(counts)[:3]).all()


def test_class_indices_above_the_last_class_are_an_error():
    with pytest.raises(ValueError, match="from 0 to 9 of 7"):
        confusion(np.zeros((1, 2), int), np.array([[0, 9]]), CLASSES)


@pytest.mark.slow
def test_segmentation_metrics_are_those_of_torchmetrics(torchmetrics):
    import torch
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassJaccardIndex,
        MulticlassRecall,
    )

    same = dict(num_classes=CLASSES, ignore_index=IGNORED)
    theirs = (
        MulticlassJaccardIndex(**same),
        MulticlassRecall(average="macro", **same),
        MulticlassAccuracy(average="micro", **same),
    )
    counts = np.zeros((CLASSES, CLASSES), int)
    for predicted, mask in some_masks(1, absent=(2,)):
        counts += confusion(predicted, mask, CLASSES)
        for metric in theirs:
            metric.update(torch.from_numpy(predicted), torch.from_numpy(mask))
    expected = [float(metric.compute()) for metric in theirs]
    np.testing.assert_allclose(segmentation_metrics(counts)[:3], expected, rtol=1e-6)


def test_depth_metrics_are_eigens_formulas():
    rng = np.random.default_rng(2)
    depth = rng.uniform(0.5, 12, (40, 30)).astype(np.float32)
    depth[rng.random(depth.shape) < 0.2] = 0
    predicted = (depth * rng.uniform(0.6, 1.6, depth.shape)).astype(np.float32)
    found = depth_metrics(predicted, depth, 1e-3, 10)
    # As in the evaluation script of BTS, which computes Eigen's metrics as DINOv2 does.
    predicted = predicted.copy()
    predicted[predicted < 1e-3], predicted[predicted > 10] = 1e-3, 10
    valid = np.logical_and(depth > 1e-3, depth < 10)
    gt, pred = depth[valid], predicted[valid]
    thresh = np.maximum(gt / pred, pred / gt)
    expected = dict(
        rmse=np.sqrt(((gt - pred) ** 2).mean()),
        abs_rel=np.mean(np.abs(gt - pred) / gt),
        log10=np.mean(np.abs(np.log10(pred) - np.log10(gt))),
        delta1=(thresh < 1.25).mean(),
        delta2=(thresh < 1.25**2).mean(),
        delta3=(thresh < 1.25**3).mean(),
    )
    for name, value in expected.items():
        assert np.isclose(getattr(found, name), value, rtol=1e-5), name


def test_an_image_without_known_depths_has_no_metrics():
    assert depth_metrics(np.ones((2, 2)), np.array([[0, 0], [11, 0.0]])) is None


@pytest.mark.slow
def test_relative_errors_of_depth_are_those_of_torchmetrics(torchmetrics):
    import torch
    from torchmetrics.functional import mean_absolute_percentage_error, mean_squared_error

    rng = np.random.default_rng(3)
    depth, predicted = rng.uniform(1, 9, (2, 50, 50))
    found = depth_metrics(predicted, depth)
    assert found is not None
    tensors = torch.from_numpy(predicted), torch.from_numpy(depth)
    rmse = mean_squared_error(*tensors, squared=False)
    assert np.isclose(found.rmse, float(rmse), rtol=1e-6)
    assert np.isclose(found.abs_rel, float(mean_absolute_percentage_error(*tensors)), rtol=1e-6)


def some_objects(seed, images=6, classes=3, size=160):
    """Returns predictions near rectangles of all of COCO's sizes, and the rectangles with masks."""
    rng = np.random.default_rng(seed)

    def masks_of(corners):
        rows, columns = np.indices((size, size))
        left, top, right, bottom = corners.T[:, :, None, None]
        return (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)

    detections, objects = [], []
    for _ in range(images):
        count = rng.integers(1, 6)
        start, sides = rng.uniform(0, 80, (count, 2)), rng.uniform(6, 79, (count, 2))
        corners = np.concatenate([start, start + sides], axis=1).round(1).astype(np.float32)
        labels = rng.integers(0, classes, count)
        crowd = rng.random(count) < 0.15
        objects.append(Boxes(corners, labels, masks_of(corners), crowd))
        found = np.concatenate([corners + rng.normal(0, 3, corners.shape), corners[:1] / 2])
        found = found.clip(0, size).astype(np.float32)
        guesses = np.append(np.where(rng.random(count) < 0.8, labels, 0), 1)
        detections.append(Detections(found, guesses, rng.random(count + 1), masks_of(found)))
    return detections, objects


@pytest.mark.slow
@pytest.mark.parametrize("masks", [False, True])
def test_average_precision_is_that_of_torchmetrics(torchmetrics, masks):
    pytest.importorskip("pycocotools")
    import torch
    from torchmetrics.detection import MeanAveragePrecision

    detections, objects = some_objects(4)

    def tensors(each):
        values = dict(boxes=each.corners, labels=each.labels, masks=each.masks)
        if isinstance(each, Detections):
            values["scores"] = each.scores
        else:
            values["iscrowd"] = each.crowd.astype(np.int64)
            # COCO defines small, medium and large objects by the area of their masks.
            values["area"] = each.masks.sum(axis=(1, 2)).astype(np.float32)
        return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in values.items()}

    # torchmetrics' default recall thresholds are float32. Finding half of the objects is then below
    # the threshold of 0.5.
    steps = np.linspace(0, 1, 101).tolist()
    kind = "segm" if masks else "bbox"
    theirs = MeanAveragePrecision(iou_type=kind, rec_thresholds=steps)
    theirs.update([*map(tensors, detections)], [*map(tensors, objects)])
    names = ["map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar_1", "mar_10"]
    names += ["mar_100", "mar_small", "mar_medium", "mar_large"]
    expected, found = theirs.compute(), coco_metrics(detections, objects, 3, masks)
    assert tuple(found) == COCO_METRICS and 0.1 < found["AP"] < 0.9
    for ours, name in zip(COCO_METRICS, names, strict=True):
        assert np.isclose(found[ours], float(expected[name]), atol=1e-6), ours


def test_given_overlaps_replace_those_of_the_boxes():
    mask = pytest.importorskip("pycocotools.mask")
    detections, objects = some_objects(6)

    def encoded(each):
        return mask.encode(np.asfortranarray(each.masks.transpose(1, 2, 0).astype(np.uint8)))

    overlaps = [
        mask.iou(encoded(found), encoded(true), true.crowd.astype(np.uint8))
        for found, true in zip(detections, objects, strict=True)
    ]
    by_masks = coco_metrics(detections, objects, 3, masks=True)
    given = coco_metrics(detections, objects, 3, overlaps=overlaps.__getitem__)
    assert [given[name] for name in ("AP", "AP50", "AP75", "AR100")] == pytest.approx(
        [by_masks[name] for name in ("AP", "AP50", "AP75", "AR100")]
    )
    assert given["AP"] != coco_metrics(detections, objects, 3)["AP"]


def test_perfect_and_missing_detections():
    pytest.importorskip("pycocotools")
    _, objects = some_objects(5)
    objects = [each._replace(crowd=None) for each in objects]
    perfect = [Detections(x.corners, x.labels, np.ones(len(x.labels)), x.masks) for x in objects]
    assert coco_metrics(perfect, objects, 3)["AP"] == pytest.approx(1)
    assert coco_metrics(perfect, objects, 3, masks=True)["AP"] == pytest.approx(1)
    none = [Detections(x.corners[:0], x.labels[:0], np.ones(0), x.masks[:0]) for x in objects]
    assert coco_metrics(none, objects, 3)["AP"] == 0
