"""Metrics of dense prediction: IoU of classes, errors of depth, average precision of objects."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

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


def check_pycocotools() -> None:
    """Raises UserError if pycocotools is not installed."""
    try:
        import pycocotools  # noqa: F401
    except ImportError as error:
        raise UserError("box and mask AP need pycocotools: pip install pycocotools") from error


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
    with contextlib.redirect_stdout(io.StringIO()):  # It prints its progress and its table.
        evaluation = _coco_evaluation(detections, objects, classes, masks, overlaps)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(COCO_METRICS, map(float, evaluation.stats), strict=True))


def _coco_evaluation(
    detections: Sequence[Detections],
    objects: Sequence[Boxes],
    classes: int,
    masks: bool,
    overlaps: Sequence[np.ndarray] | None = None,
) -> Any:
    """Returns a `COCOeval` of pycocotools; arguments as in `coco_metrics`."""
    check_pycocotools()
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

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
            annotations=_annotations(each, masks),
        )
        table.createIndex()
        return table

    return Evaluation(indexed(objects), indexed(detections), "segm" if masks else "bbox")


class Matches(NamedTuple):
    """An image's true and predicted objects, matched by class at an IoU of 0.5.

    Attributes:
      found: true objects with a prediction.
      missed: true objects without one.
      wrong: predictions without a true object.
    """

    found: int = 0
    missed: int = 0
    wrong: int = 0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; 1 if there are no objects and no predictions."""
        total = 2 * self.found + self.missed + self.wrong
        return 2 * self.found / total if total else 1.0


def image_matches(
    detections: Sequence[Detections], objects: Sequence[Boxes], classes: int, masks: bool = False
) -> list[Matches]:
    """Returns the matches of each image, computed by pycocotools.

    Crowds, and predictions that match them, do not count.

    Args:
      detections, objects, classes, masks: as in `coco_metrics`; all predictions count.

    Raises:
      UserError: pycocotools is not installed.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = _coco_evaluation(detections, objects, classes, masks)
        evaluation.params.iouThrs = np.array([0.5])
        evaluation.params.areaRng = evaluation.params.areaRng[:1]  # All sizes.
        evaluation.evaluate()
    counts = np.zeros((len(objects), 3), np.int64)
    for each in filter(None, evaluation.evalImgs):  # Of an image and a class.
        counted, right = ~each["dtIgnore"][0].astype(bool), each["dtMatches"][0] > 0
        found, true = (counted & right).sum(), (np.asarray(each["gtIgnore"]) == 0).sum()
        counts[each["image_id"]] += found, true - found, (counted & ~right).sum()
    return [Matches(*row) for row in counts.tolist()]


def _image(number: int, masks: np.ndarray | None) -> dict[str, int]:
    """Returns an image's row of a COCO file, with its size if objects have masks."""
    if masks is None or not len(masks):
        return dict(id=number, height=1, width=1)
    height, width = masks[0]["size"] if masks.dtype == object else masks.shape[1:]
    return dict(id=number, height=height, width=width)


Objects = TypeVar("Objects", Boxes, Detections)


def compressed(found: Objects) -> Objects:
    """Returns objects with their masks as run lengths of pycocotools, some hundred bytes each."""
    if found.masks is None:
        return found
    from pycocotools import mask

    masks = np.empty(len(found.masks), object)
    masks[:] = [mask.encode(np.asfortranarray(one.astype(np.uint8))) for one in found.masks]
    return found._replace(masks=masks)


def _annotations(each: Sequence[Boxes] | Sequence[Detections], masks: bool) -> list[dict[str, Any]]:
    """Returns objects as rows of a COCO file.

    The areas of true objects are those of the annotations, else the masks', else the boxes'. Those
    of predictions are the masks' if masks are compared, else the boxes'.
    """
    from pycocotools import mask

    run_lengths: Any = mask  # Its functions take one mask or several, unlike their types.
    rows = []
    for number, found in enumerate(each):
        corners = np.asarray(found.corners, np.float64)
        sides = corners[:, 2:] - corners[:, :2]
        areas, codes = sides.prod(axis=1), None
        if found.masks is not None and (masks or isinstance(found, Boxes)):
            encoded = found.masks if found.masks.dtype == object else compressed(found).masks
            codes = encoded.tolist()
            areas = run_lengths.area(codes)
        if isinstance(found, Boxes) and found.areas is not None:
            areas = found.areas
        for index, label in enumerate(found.labels.tolist()):
            row: dict[str, Any] = dict(image_id=number, category_id=label, iscrowd=0)
            row["place"] = index
            row["id"] = len(rows) + 1  # pycocotools takes the number 0 for "not found".
            row["bbox"] = [*corners[index, :2].tolist(), *sides[index].tolist()]
            row["area"] = float(areas[index])
            if codes is not None:
                row["segmentation"] = codes[index]
            if isinstance(found, Detections):
                row["score"] = float(found.scores[index])
            elif found.crowd is not None:
                row["iscrowd"] = int(found.crowd[index])
            rows.append(row)
    return rows
