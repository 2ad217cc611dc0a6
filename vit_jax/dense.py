"""Models for segmentation, detection and depth: loading, and prediction for images of any size."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import jax
import numpy as np
from flax import nnx

from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.data.decode import Unreadable, why_unreadable
from vit_jax.data.placement import Placement
from vit_jax.data.preprocess import FixedCrop, TestCrop
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.evaluation.window_inference import WindowInference
from vit_jax.inference import image_source
from vit_jax.interop.checkpoint import check_finite
from vit_jax.interop.dense import DEPTH, DETECTION, SEGMENTATION, Kind, Task, with_head
from vit_jax.interop.objective_files import open_objective_files
from vit_jax.interop.open import open_checkpoint
from vit_jax.load import build_model
from vit_jax.models.dense.depth_model import DepthModel
from vit_jax.models.dense.detector import Best, Detections, Detector
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.models.dense.windows import Windows
from vit_jax.models.pixels import in_channels
from vit_jax.parallel.mesh import make_mesh
from vit_jax.paths import is_workdir, split_checkpoint

BATCH = 8  # Number of images in one call of a detector.

OnUnreadable = Callable[[int, Unreadable | OSError], None]


def objective_at(source: str) -> str | None:
    """Returns the objective of a checkpoint, such as `segmentation`; None: unknown."""
    path = Path(split_checkpoint(source)[0])
    if not is_workdir(str(path)):
        # Heads for segmentation and detection predict classes. Class names are only stored in
        # workdirs, so these heads can only be loaded from workdirs.
        objective = open_objective_files(path, check_finite) if path.is_dir() else None
        return DEPTH.objective if objective and objective.name == DEPTH.objective else None
    from vit_jax.runs.workdir import place_of, saved_run

    saved = saved_run(place_of(source)[0])
    return saved and saved.config.objective.name


def load_segmenter(
    source: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    decode: str | None = None,
    log: Callable[[str], None] = print,
) -> Segmenter:
    """Loads the model of a segmentation run with its head.

    `segmenter.predict(images)` returns the class of each pixel, for images of any size.
    `segmenter(images)` computes the class scores of images that are already preprocessed.

    Args:
      source: the workdir of a run with `config.objective.name='segmentation'`, `WORKDIR@best` or
        `WORKDIR@STEP`.
      image_size: size in pixels of the sliding windows into which an image is split; None: the
        run's image size.
      decode: `fast`, or `exact` to decode whole JPEGs with Pillow; None: the run's mode.
      log: callback for each line of the log.

    Raises:
      UserError: the checkpoint does not exist, is damaged, or has no segmentation head.
    """
    return _load(SEGMENTATION, source, image_size, decode, log)


def load_detector(
    source: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    decode: str | None = None,
    log: Callable[[str], None] = print,
) -> Detector:
    """Loads the model of a detection run with its head.

    `detector.predict(images)` returns the objects in images of any size.

    Args:
      source: the workdir of a run with `config.objective.name='detection'`, `WORKDIR@best` or
        `WORKDIR@STEP`.
      image_size: size to which images are resized, in pixels; None: the run's image size.
      decode: `fast`, or `exact` to decode whole JPEGs with Pillow; None: the run's mode.
      log: callback for each line of the log.

    Raises:
      UserError: the checkpoint does not exist, is damaged, or has no detection head.
    """
    return _load(DETECTION, source, image_size, decode, log)


def load_depth(
    source: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    decode: str | None = None,
    log: Callable[[str], None] = print,
    **changes: Any,
) -> DepthModel:
    """Loads the model of a depth run with its head.

    `model.predict(images)` returns the depth of each pixel, in metres, of images of any size.

    Args:
      source: the workdir of a run with `config.objective.name='depth'`, `WORKDIR@best` or
        `WORKDIR@STEP`; or a folder with a depth head, written by `vit_jax.convert`.
      image_size: size in pixels of the sliding windows into which an image is split; None: the
        run's image size.
      decode: `fast`, or `exact` to decode whole JPEGs with Pillow; None: the run's mode.
      log: callback for each line of the log.
      **changes: other model arguments to change, as in `load_model`. For example,
        `position_resize='bicubic'` changes how position embeddings are resized for `image_size`.

    Raises:
      UserError: the checkpoint does not exist, is damaged, or has no depth head.
    """
    return _load(DEPTH, source, image_size, decode, log, **changes)


def _load(
    task: Task[Kind],
    source: str | Path,
    image_size: int | tuple[int, int] | None,
    decode: str | None,
    log: Callable[[str], None],
    **changes: Any,
) -> Kind:
    checkpoint = open_checkpoint(source, image_size)
    changes |= {} if image_size is None else {"image_size": image_size}
    loaded = with_head(task, checkpoint, build_model(checkpoint, log=log, **changes))
    crop = checkpoint_crop(checkpoint, loaded.model.image_size, decode)
    loaded.predictor = PREDICTORS[task.objective](crop)
    return loaded


class Predictor:
    """Callable that applies a model with its head to images of any size, with the run's crop."""

    def __init__(self, crop: TestCrop):
        self.crop = crop

    def __call__(self, model: Any, images: Any, **options: Any) -> list[Any]:
        """Returns the prediction of each image: classes or depths of its pixels, or its objects.

        Args:
          images: paths, PIL images or uint8 arrays of any size, as in `ImageModel.predict`.
          **options: arguments of `predict` of the model, such as a segmenter's `whole`.
        """
        source = image_source(images)

        def reject(index: int, error: Unreadable | OSError) -> None:
            raise UserError(f"cannot read {source.describe(index)}: {why_unreadable(error)}")

        return [found for _, found in self.stream(model, source, reject, **options)]

    def stream(
        self, model: Any, source: Source, on_unreadable: OnUnreadable, **options: Any
    ) -> Iterator[tuple[int, Any]]:
        """Yields index and prediction of each readable image, as in `DenseModel.stream`."""
        raise NotImplementedError


class SegmentationPredictor(Predictor):
    """Callable that predicts the class of each pixel, with sliding windows."""

    merge = staticmethod(Windows.class_map)

    def __init__(self, crop: TestCrop):
        super().__init__(crop)
        self._inferences: dict[bool, WindowInference] = {}

    def stream(
        self,
        model: Segmenter | DepthModel,
        source: Source,
        on_unreadable: OnUnreadable,
        whole: bool = False,
    ) -> Iterator[tuple[int, np.ndarray]]:
        if whole not in self._inferences:
            self._inferences[whole] = WindowInference(
                model, make_mesh(), self.crop, whole, self.merge
            )
        return self._inferences[whole](model, source, on_unreadable)


class DepthPredictor(SegmentationPredictor):
    """Callable that predicts the depth of each pixel, with sliding windows."""

    merge = staticmethod(Windows.value_map)


class DetectionPredictor(Predictor):
    """Callable that predicts objects. Their boxes are in pixels of the original image."""

    def __init__(self, crop: TestCrop):
        super().__init__(crop)

        @nnx.jit
        def best(detector: Detector, images: jax.Array):
            return detector(in_channels(images, detector.channels))

        self._best = best

    def stream(
        self,
        model: Detector,
        source: Source,
        on_unreadable: OnUnreadable,
        threshold: float = 0.0,
        encode: Callable[[np.ndarray], Any] | None = None,
    ) -> Iterator[tuple[int, Detections]]:
        def crops() -> Iterator[tuple[int, Placement, np.ndarray]]:
            for index in range(len(source)):
                try:
                    yield index, *placed_crop(self.crop, source[index].image)
                except (Unreadable, OSError) as error:
                    on_unreadable(index, error)

        waiting = crops()
        while batch := list(islice(waiting, BATCH)):
            images = np.stack([pixels for _, _, pixels in batch])
            padded = np.pad(images, ((0, BATCH - len(batch)), (0, 0), (0, 0), (0, 0)))
            best = jax.tree.map(np.asarray, self._best(model, padded))
            for row, (index, placement, _) in enumerate(batch):
                one = jax.tree.map(lambda x, row=row: x[row], best)
                yield index, detections(one, placement, threshold, encode)


# Class of the predictor for each objective.
PREDICTORS: dict[str, Callable[[TestCrop], Predictor]] = {
    SEGMENTATION.objective: SegmentationPredictor,
    DETECTION.objective: DetectionPredictor,
    DEPTH.objective: DepthPredictor,
}


def placed_crop(crop: TestCrop, image: bytes | np.ndarray) -> tuple[Placement, np.ndarray]:
    """Returns the shown rectangle, and the crop, uint8 `[height, width, 3]`; raises Unreadable."""
    opened = FixedCrop(crop).open(image)
    return crop.place(opened.height, opened.width), crop(opened)


def detections(
    best: Best,
    placement: Placement,
    threshold: float = 0.0,
    encode: Callable[[np.ndarray], Any] | None = None,
) -> Detections:
    """Converts a detector's outputs for a crop to objects in the original image.

    Args:
      best: the detector's outputs for one crop, as NumPy arrays without a batch axis.
      placement: placement of the crop in the original image.
      threshold: minimum score of an object.
      encode: function that compresses a mask, bool `[height, width]`, such as `run_lengths_of`.
        Each mask is compressed before the next one is computed, which saves memory. None: the
        result contains the masks as arrays.
    """
    selected = best.scores >= threshold
    corners = original_corners(best.boxes[selected], placement)
    found = Detections(corners, best.classes[selected].astype(np.int32), best.scores[selected])
    if best.masks is None:
        return found
    one = () if encode else placement.image  # Shape of a mask; an encoded mask is one object.
    masks = np.empty((selected.sum(), *one), object if encode else bool)
    scores = np.empty_like(found.scores)
    for place, logits in enumerate(best.masks[selected]):
        enlarged = original_logits(logits, placement)
        mask = enlarged > 0
        scores[place] = found.scores[place] * mask_quality(enlarged[mask])
        masks[place] = encode(mask) if encode else mask
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= threshold]
    return Detections(corners[order], found.labels[order], scores[order], masks[order])


def mask_quality(logits: np.ndarray) -> float:
    """Returns the mean sigmoid of the logits of a mask's pixels, `[pixels]`; 0: an empty mask."""
    return float((1 / (1 + np.exp(-logits))).mean()) if logits.size else 0.0


def original_corners(boxes: np.ndarray, placement: Placement) -> np.ndarray:
    """Converts boxes in a crop to left, top, right and bottom in pixels of the original image.

    The boxes are clipped to the part of the image that the crop shows.

    Args:
      boxes: left, top, right and bottom as fractions of the crop's sides, `[boxes, 4]`.
      placement: placement of the crop in the original image.
    """
    (rows, columns), (height, width) = placement.size, placement.shown
    box = placement.box
    scale = np.array([(box.right - box.left) / width, (box.bottom - box.top) / height])
    corners = boxes.reshape(-1, 2, 2) * [columns, rows] * scale + [box.left, box.top]
    corners = corners.clip([box.left, box.top], [box.right, box.bottom])
    return corners.reshape(-1, 4).astype(np.float32)


def original_logits(logits: np.ndarray, placement: Placement) -> np.ndarray:
    """Converts an object's mask logits in a crop to those of the image, float32 `[height, width]`.

    The logits are interpolated bilinearly. Outside the crop they are minus infinity.

    Args:
      logits: logits of the object's mask, which cover the whole crop, float32 `[rows, columns]`.
      placement: placement of the crop in the original image.
    """
    box = placement.box
    # If x is a coordinate in the original image, a * x + b is the coordinate in the logits.
    a, b = np.zeros(2), np.zeros(2)
    for axis, (start, end) in enumerate(((box.left, box.right), (box.top, box.bottom))):
        side = 1 - axis
        share = placement.shown[side] / placement.size[side] / (end - start)
        a[axis] = share * logits.shape[side]
        b[axis] = a[axis] * (0.5 - start) - 0.5
    height, width = placement.image
    enlarged = cv2.warpAffine(
        logits.astype(np.float32),
        np.array([[a[0], 0, b[0]], [0, a[1], b[1]]]),
        (width, height),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )
    x, y = np.arange(width) + 0.5, np.arange(height) + 0.5
    shown = ((y > box.top) & (y < box.bottom))[:, None] & (x > box.left) & (x < box.right)
    return np.where(shown, enlarged, -np.inf)
