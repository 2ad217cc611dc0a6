"""Metrics of dense prediction: IoU of classes, errors of depth, average precision of objects."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.fields import IGNORED, Boxes
from vit_jax.errors import UserError
from vit_jax.models.dense.detector import Detections

DELTA = 1.25  # Largest ratio of right depths; delta2 and delta3 are of its powers.
NYU_CROP = np.s_[45:471, 41:601]  # Evaluated part of NYU Depth v2's images, 480x640 (Eigen).
# COCO's twelve metrics, in the order of `COCOeval.stats`.
COCO_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100")
COCO_METRICS += ("ARs", "ARm", "ARl")


def confusion(predicted: np.ndarray, mask: np.ndarray, classes: int) -> np.ndarray:
    """Returns the number of pixels of each true and each predicted class.

    The counts of several images are added.

    Args:
      predicted: class of each pixel, int `[height, width]`.
      mask: true class of each pixel; pixels that are `IGNORED` do not count.
      classes: number of classes.

    Returns:
      int64 `[true class, predicted class]`.

    Raises:
      ValueError: the mask contains a class that does not exist.
    """
    known = mask != IGNORED
    true = mask[known].astype(np.int64)
    if true.size and not 0 <= true.min() <= true.max() < classes:
        raise ValueError(f"a mask has classes from {true.min()} to {true.max()} of {classes}")
    counts = np.bincount(true * classes + predicted[known], minlength=classes**2)
    return counts.reshape(classes, classes)


class SegmentationMetrics(NamedTuple):
    """Metrics of semantic segmentation, shares of 1, as in mmsegmentation.

    Attributes:
      miou: mean IoU of the classes that occur in the masks or in the predictions.
      mean_accuracy: mean over the classes in the masks of the share of right pixels.
      pixel_accuracy: share of right pixels.
      ious: IoU of each class, float64 `[classes]`; NaN: it does not occur.
    """

    miou: float
    mean_accuracy: float
    pixel_accuracy: float
    ious: np.ndarray


def segmentation_metrics(counts: np.ndarray) -> SegmentationMetrics:
    """Returns the metrics of a confusion matrix, NaN if no pixel is known.

    Args:
      counts: sum of `confusion` over all images.
    """
    right, true, predicted = counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)
    ious = _ratio(right, true + predicted - right)
    accuracies = _ratio(right, true)
    pixel_accuracy = _ratio(right.sum(), true.sum())
    return SegmentationMetrics(_mean(ious), _mean(accuracies), float(pixel_accuracy), ious)


def _ratio(count: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Returns a quotient, NaN where the divisor is 0."""
    with np.errstate(invalid="ignore"):
        return np.true_divide(count, total)


def _mean(values: np.ndarray) -> float:
    """Returns the mean of the values that are not NaN."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


class DepthMetrics(NamedTuple):
    """Metrics of an image's depth (Eigen et al. 2014); a data set's are the means of its images'.

    Attributes:
      rmse: root of the mean squared error, metres.
      abs_rel: mean error relative to the true depth.
      log10: mean error of the decimal logarithm.
      delta1, delta2, delta3: share of pixels whose ratio to the true depth, or its inverse, is
        below 1.25, 1.25**2 and 1.25**3.
    """

    rmse: float
    abs_rel: float
    log10: float
    delta1: float
    delta2: float
    delta3: float


def depth_metrics(
    predicted: np.ndarray, depth: np.ndarray, nearest: float = 1e-3, farthest: float = 10.0
) -> DepthMetrics | None:
    """Returns the metrics of an image's depth; None if no pixel's depth is known.

    Args:
      predicted: metres, float `[height, width]`; it is clipped to the evaluated depths.
      depth: true depth in metres, float `[height, width]`; 0 where it is unknown.
      nearest, farthest: only true depths between these are evaluated; 10 m for NYU Depth v2 and 80
        m for KITTI.
    """
    known = (depth > nearest) & (depth < farthest)
    if not known.any():
        return None
    true = depth[known].astype(np.float64)
    found = predicted[known].astype(np.float64).clip(nearest, farthest)
    ratio = np.maximum(true / found, found / true)
    return DepthMetrics(
        float(np.sqrt(np.mean((found - true) ** 2))),
        float(np.mean(np.abs(found - true) / true)),
        float(np.mean(np.abs(np.log10(found / true)))),
        *(float(np.mean(ratio < DELTA**power)) for power in (1, 2, 3)),
    )


def coco_metrics(
    detections: Sequence[Detections],
    objects: Sequence[Boxes],
    classes: int,
    masks: bool = False,
    overlaps: Sequence[np.ndarray] | None = None,
) -> dict[str, float]:
    """Returns COCO's metrics of detected objects, computed by pycocotools.

    Args:
      detections: predicted objects of each image.
      objects: true objects of each image, with masks if `masks`.
      classes: number of classes.
      masks: compare masks instead of boxes.
      overlaps: IoU of each detection with each object of an image, `[detections, objects]`; None:
        it is that of their boxes or masks.

    Returns:
      `AP` (mean over IoU thresholds from 0.5 to 0.95), `AP50`, `AP75`, `APs`, `APm` and `APl`
      (small, medium and large objects), `AR1`, `AR10` and `AR100` (recall with that number of
      detections), `ARs`, `ARm` and `ARl`: shares of 1, -1 where no object is of this kind.

    Raises:
      UserError: pycocotools is not installed.
    """
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise UserError("box and mask AP need pycocotools: pip install pycocotools") from error

    class Evaluation(COCOeval):
        """An evaluation with the given overlaps."""

        def computeIoU(self, imgId: int, catId: int) -> Any:
            if overlaps is None:
                return super().computeIoU(imgId, catId)
            found, true = (
                table.loadAnns(table.getAnnIds(imgIds=imgId, catIds=catId))
                for table in (self.cocoDt, self.cocoGt)
            )
            if not found or not true:
                return []
            found = sorted(found, key=lambda row: -row["score"])[: self.params.maxDets[-1]]
            places = [row["place"] for row in found], [row["place"] for row in true]
            return overlaps[imgId][np.ix_(*places)].astype(np.float64)

    def indexed(each: Sequence[Boxes] | Sequence[Detections]) -> Any:
        table: Any = COCO()
        table.dataset = dict(
            images=[_image(number, found.masks) for number, found in enumerate(each)],
            categories=[dict(id=label) for label in range(classes)],
            annotations=_annotations(each),
        )
        table.createIndex()
        return table

    with contextlib.redirect_stdout(io.StringIO()):  # It prints its progress and its table.
        evaluation = Evaluation(indexed(objects), indexed(detections), "segm" if masks else "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(COCO_METRICS, map(float, evaluation.stats), strict=True))


def _image(number: int, masks: np.ndarray | None) -> dict[str, int]:
    """Returns an image's row of a COCO file, with its size if objects have masks."""
    sides = {} if masks is None else dict(height=masks.shape[1], width=masks.shape[2])
    return dict(id=number) | sides


def _annotations(each: Sequence[Boxes] | Sequence[Detections]) -> list[dict[str, Any]]:
    """Returns objects as rows of a COCO file; areas are the masks', or else the boxes'."""
    from pycocotools import mask

    run_lengths: Any = mask  # Its functions take one mask or several, unlike their types.
    rows = []
    for number, found in enumerate(each):
        sides = np.asarray(found.corners[:, 2:] - found.corners[:, :2], np.float64)
        areas, codes = sides.prod(axis=1), None
        if found.masks is not None:
            stacked = np.asfortranarray(found.masks.transpose(1, 2, 0).astype(np.uint8))
            codes = run_lengths.encode(stacked)
            areas = run_lengths.area(codes)
        for index, label in enumerate(found.labels.tolist()):
            row: dict[str, Any] = dict(image_id=number, category_id=label, iscrowd=0)
            row["place"] = index
            row["id"] = len(rows) + 1  # pycocotools takes the number 0 for "not found".
            row["bbox"] = [*map(float, found.corners[index, :2]), *sides[index].tolist()]
            row["area"] = float(areas[index])
            if codes is not None:
                row["segmentation"] = codes[index]
            if isinstance(found, Detections):
                row["score"] = float(found.scores[index])
            elif found.crowd is not None:
                row["iscrowd"] = int(found.crowd[index])
            rows.append(row)
    return rows
