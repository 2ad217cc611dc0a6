"""Metrics of dense prediction: mean IoU, depth errors, average precision of objects."""

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vit_jax.data.fields import IGNORED, Boxes
from vit_jax.errors import UserError
from vit_jax.models.dense.detector import Detections

DELTA = 1.25  # Threshold of delta1. The thresholds of delta2 and delta3 are its square and cube.
NYU_CROP = np.s_[45:471, 41:601]  # Evaluated part of NYU Depth v2's images, 480x640 (Eigen).
# COCO's twelve metrics, in the order of `COCOeval.stats`.
COCO_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100")
COCO_METRICS += ("ARs", "ARm", "ARl")


def confusion(predicted: np.ndarray, mask: np.ndarray, classes: int) -> np.ndarray:
    """Returns an image's confusion matrix; a data set's matrix is the sum over all images.

    Args:
      predicted: predicted class of each pixel, int `[height, width]`.
      mask: true class of each pixel, `[height, width]`; pixels with the value `IGNORED` are not
        counted.

    Returns:
      Pixel counts, int64 `[classes, classes]`: a row for each true class, a column for each
      predicted class.

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
    """Metrics of semantic segmentation in the range 0 to 1, as in mmsegmentation."""

    miou: float  # Mean IoU over the classes that occur in the masks or in the predictions.
    mean_accuracy: float  # Mean pixel accuracy over the classes that occur in the masks.
    pixel_accuracy: float  # Share of correctly classified pixels.
    ious: np.ndarray  # IoU of each class, float64 `[classes]`; NaN for a class that does not occur.


def segmentation_metrics(counts: np.ndarray) -> SegmentationMetrics:
    """Computes metrics from a summed confusion matrix; NaN if all pixels are `IGNORED`."""
    right, true, predicted = counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)
    ious = _ratio(right, true + predicted - right)
    accuracies = _ratio(right, true)
    pixel_accuracy = _ratio(right.sum(), true.sum())
    return SegmentationMetrics(_mean(ious), _mean(accuracies), float(pixel_accuracy), ious)


def _ratio(count: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Returns `count / total`; NaN where `total` is 0."""
    with np.errstate(invalid="ignore"):
        return np.true_divide(count, total)


def _mean(values: np.ndarray) -> float:
    """Returns the mean of the values that are not NaN."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


class DepthMetrics(NamedTuple):
    """Depth metrics of an image (Eigen et al. 2014). A data set's metrics are means over images."""

    rmse: float  # Root mean squared error, in metres.
    abs_rel: float  # Mean over pixels of |predicted - true| / true.
    log10: float  # Mean over pixels of |log10(predicted) - log10(true)|.
    # Share of pixels with max(predicted / true, true / predicted) below 1.25, 1.25**2 and 1.25**3.
    delta1: float
    delta2: float
    delta3: float


def depth_metrics(
    predicted: np.ndarray, depth: np.ndarray, nearest: float = 1e-3, farthest: float = 10.0
) -> DepthMetrics | None:
    """Returns the depth metrics of an image; None if no pixel is evaluated.

    Args:
      predicted: predicted depth in metres, float `[height, width]`. It is clipped to the range from
        `nearest` to `farthest`.
      depth: true depth in metres, float `[height, width]`; 0: unknown.
      nearest, farthest: pixels are evaluated if their true depth in metres is between these limits.
        `farthest` is 10 for NYU Depth v2 and 80 for KITTI.
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
    overlaps: Callable[[int], np.ndarray] | None = None,
) -> dict[str, float]:
    """Computes COCO's metrics of detected objects with pycocotools.

    Args:
      objects: true objects of each image. They must have masks if `masks` is True.
      masks: True: compare masks. False: compare boxes.
      overlaps: function from the index of an image to the IoU of each detection with each true
        object of this image, `[detections, objects]`. IoUs below 0.5 have no effect. None: the IoU
        is computed from boxes or masks.

    Returns:
      A dictionary of these metrics, from 0 to 1. A metric is -1 if there are no true objects, for
      example no small objects for `APs`.

      - `AP`: average precision, averaged over IoU thresholds from 0.5 to 0.95.
      - `AP50`, `AP75`: average precision at the IoU threshold 0.5 or 0.75.
      - `APs`, `APm`, `APl`: `AP` of small, medium and large objects.
      - `AR1`, `AR10`, `AR100`: recall with at most 1, 10 or 100 detections for each image.
      - `ARs`, `ARm`, `ARl`: recall of small, medium and large objects.

    Raises:
      UserError: pycocotools is not installed.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints progress and a table.
        evaluation = _coco_evaluation(detections, objects, classes, masks, overlaps)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(COCO_METRICS, map(float, evaluation.stats), strict=True))


def _coco_evaluation(
    detections: Sequence[Detections],
    objects: Sequence[Boxes],
    classes: int,
    masks: bool = False,
    overlaps: Callable[[int], np.ndarray] | None = None,
) -> Any:
    """Returns a `COCOeval` of pycocotools that contains the predicted and the true objects."""
    check_pycocotools()
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    class Evaluation(COCOeval):
        """A `COCOeval` whose IoUs are computed by `overlaps`, the argument of `coco_metrics`."""

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
            return overlaps(imgId)[np.ix_(*places)].astype(np.float64)

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
    """Counts of an image's objects, matched within a class by an IoU of at least 0.5."""

    found: int = 0  # Number of true objects with a matching prediction (true positives).
    missed: int = 0  # Number of true objects without a matching prediction (false negatives).
    wrong: int = 0  # Number of predictions without a matching true object (false positives).

    @property
    def f1(self) -> float:
        """F1 score: harmonic mean of precision and recall; 1 if all three counts are 0."""
        total = 2 * self.found + self.missed + self.wrong
        return 2 * self.found / total if total else 1.0


def image_matches(
    detections: Sequence[Detections], objects: Sequence[Boxes], classes: int
) -> list[Matches]:
    """Matches true and predicted boxes of each image with pycocotools, and counts the matches.

    A crowd is an annotation of several objects as one region (COCO's `iscrowd`). Crowds are not
    counted, and predictions that match a crowd are not counted either.

    Args:
      detections: predicted objects of each image. All of them are counted, whatever their score.

    Raises:
      UserError: pycocotools is not installed.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = _coco_evaluation(detections, objects, classes)
        evaluation.params.iouThrs = np.array([0.5])
        evaluation.params.areaRng = evaluation.params.areaRng[:1]  # All sizes.
        evaluation.evaluate()
    counts = np.zeros((len(objects), 3), np.int64)
    for each in filter(None, evaluation.evalImgs):  # An item for each image and class.
        counted, right = ~each["dtIgnore"][0].astype(bool), each["dtMatches"][0] > 0
        found, true = (counted & right).sum(), (np.asarray(each["gtIgnore"]) == 0).sum()
        counts[each["image_id"]] += found, true - found, (counted & ~right).sum()
    return [Matches(*row) for row in counts.tolist()]


def _image(number: int, masks: np.ndarray | None) -> dict[str, int]:
    """Returns an image's entry in a COCO file, with the size of its masks, or else 1 x 1."""
    if masks is None or not len(masks):
        return dict(id=number, height=1, width=1)
    height, width = masks[0]["size"] if masks.dtype == object else masks.shape[1:]
    return dict(id=number, height=height, width=width)


Objects = TypeVar("Objects", Boxes, Detections)


def run_lengths_of(mask: np.ndarray) -> dict[str, Any]:
    """Compresses a mask, bool `[height, width]`, to pycocotools' run lengths."""
    from pycocotools import mask as coco_mask

    return coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))


def compressed(objects: Objects) -> Objects:
    """Compresses objects' masks to pycocotools' run lengths, a few hundred bytes for each mask."""
    if objects.masks is None or objects.masks.dtype == object:
        return objects
    masks = np.empty(len(objects.masks), object)
    masks[:] = list(map(run_lengths_of, objects.masks))
    return objects._replace(masks=masks)


def _annotations(each: Sequence[Boxes] | Sequence[Detections], masks: bool) -> list[dict[str, Any]]:
    """Returns objects as annotations of a COCO file.

    The area of a true object is the annotated area. Without an annotated area it is the area of the
    object's mask, and without a mask the area of its box. The area of a prediction is the area of
    its mask if masks are compared, else the area of its box.
    """
    from pycocotools import mask

    run_lengths: Any = mask  # pycocotools' functions accept several masks; their types do not.
    rows = []
    for number, objects in enumerate(each):
        corners = np.asarray(objects.corners, np.float64)
        sides = corners[:, 2:] - corners[:, :2]
        areas, codes = sides.prod(axis=1), None
        if objects.masks is not None and (masks or isinstance(objects, Boxes)):
            codes = compressed(objects).masks.tolist()
            areas = run_lengths.area(codes)
        if isinstance(objects, Boxes) and objects.areas is not None:
            areas = objects.areas
        for index, label in enumerate(objects.labels.tolist()):
            row: dict[str, Any] = dict(image_id=number, category_id=label, iscrowd=0)
            row["place"] = index
            row["id"] = len(rows) + 1  # In pycocotools, the id 0 means "not found".
            row["bbox"] = [*corners[index, :2].tolist(), *sides[index].tolist()]
            row["area"] = float(areas[index])
            if codes is not None:
                row["segmentation"] = codes[index]
            if isinstance(objects, Detections):
                row["score"] = float(objects.scores[index])
            elif objects.crowd is not None:
                row["iscrowd"] = int(objects.crowd[index])
            rows.append(row)
    return rows
