"""Compiled programs of segmenters, detectors and depth models."""

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

import cv2
import jax
import numpy as np

from vit_jax.data.map_files import run_lengths
from vit_jax.data.placement import Placement
from vit_jax.data.preprocess import TestCrop
from vit_jax.dense import detections, placed_crop
from vit_jax.depth_files import depth_image, in_colours, unit_of
from vit_jax.evaluation.window_inference import in_windows
from vit_jax.inspection.class_maps import overlay, palette_image
from vit_jax.inspection.page_images import image_address, png
from vit_jax.models.dense.depth_model import DepthModel
from vit_jax.models.dense.detector import Detections, Detector
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.models.dense.windows import Windows
from vit_jax.object_files import overlay as draw_objects
from vit_jax.serving.engine import Asked, Engine

SIDE = 1024  # Longest side of a returned image, in pixels.


class WindowsEngine(Engine):
    """Base class for models that predict a map (classes or depths) at an image's original size.

    An image is divided into windows. A batch may contain windows of several images.

    Args:
      model: the segmenter or depth model.
      batch_size: maximum number of windows in a batch.
    """

    parameters = ("overlay", "seen")

    def __init__(self, model: Segmenter | DepthModel, crop: TestCrop, batch_size: int):
        super().__init__(model, batch_size, type(model).__call__)
        self._in_windows = partial(in_windows, crop=crop, size=model.image_size)

    def decode(self, image: bytes) -> tuple[Windows, np.ndarray]:
        return self._in_windows(image)

    def compute(
        self, images: Sequence[tuple[Windows, np.ndarray]], classes: Sequence[Any] = ()
    ) -> list[np.ndarray]:
        """Computes the windows of several images in common batches.

        Returns:
          For each image, the model's outputs for its windows, `[windows, rows, columns, values]`.
          A segmenter has one value per class, the logit. A depth model has one value, the depth.
        """
        outputs = self._values([cut for windows, image in images for cut in windows.cut(image)])
        ends = np.cumsum([windows.count for windows, _ in images])
        return np.split(outputs, ends[:-1])

    def answer(
        self, image: tuple[Windows, np.ndarray], result: np.ndarray, asked: Asked
    ) -> dict[str, Any]:
        windows, resized = image
        whole = self._map(windows, result)
        answer = self._described(whole)
        if asked.seen:
            answer["seen"] = image_address(resized, SIDE)
        if asked.overlay:
            answer["overlay"] = image_address(self._picture(resized, whole), SIDE)
        return answer

    def _map(self, windows: Windows, result: np.ndarray) -> np.ndarray:
        """Merges the outputs of an image's windows to a map `[height, width]` of the image."""
        raise NotImplementedError

    def _described(self, whole: np.ndarray) -> dict[str, Any]:
        """Returns the JSON response for a map of classes or depths, without pictures."""
        raise NotImplementedError

    def _picture(self, resized: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Draws a map in colours at the size of the resized image, for the picture `overlay`."""
        raise NotImplementedError


class SegmenterEngine(WindowsEngine):
    """Compiled programs of a segmenter, which predicts maps of classes."""

    def __init__(self, model: Segmenter, crop: TestCrop, batch_size: int):
        super().__init__(model, crop, batch_size)
        self._names = model.class_names

    def _map(self, windows: Windows, result: np.ndarray) -> np.ndarray:
        return windows.class_map(result)

    def _described(self, whole: np.ndarray) -> dict[str, Any]:
        counts = np.sum([np.bincount(row, minlength=len(self._names)) for row in whole], axis=0)
        order = [label for label in np.argsort(-counts, kind="stable").tolist() if counts[label]]
        return {
            "mask": base64.b64encode(png(palette_image(whole))).decode(),
            "classes": [
                {"class": self._names[label], "label": label, "share": counts[label] / whole.size}
                for label in order
            ],
        }

    def _picture(self, resized: np.ndarray, whole: np.ndarray) -> np.ndarray:
        shown = cv2.resize(whole, resized.shape[1::-1], interpolation=cv2.INTER_NEAREST)
        return overlay(resized, shown)


class DepthEngine(WindowsEngine):
    """Compiled programs of a depth model, which predicts maps of depths."""

    def __init__(self, model: DepthModel, crop: TestCrop, batch_size: int):
        super().__init__(model, crop, batch_size)
        self._unit = unit_of(model.head.range[1])

    def _map(self, windows: Windows, result: np.ndarray) -> np.ndarray:
        return windows.value_map(result)

    def _described(self, whole: np.ndarray) -> dict[str, Any]:
        nearest, median, farthest = np.quantile(whole, (0, 0.5, 1)).tolist()
        return {
            "depth": base64.b64encode(png(depth_image(whole, self._unit))).decode(),
            "unit": self._unit,
            "metres": {"nearest": nearest, "median": median, "farthest": farthest},
        }

    def _picture(self, resized: np.ndarray, whole: np.ndarray) -> np.ndarray:
        return in_colours(cv2.resize(whole, resized.shape[1::-1], interpolation=cv2.INTER_AREA))


class DetectorEngine(Engine):
    """Compiled programs of a detector.

    Args:
      batch_size: maximum number of images in a batch.
      threshold: minimum score of the returned objects.
    """

    parameters = ("overlay", "seen")

    def __init__(self, detector: Detector, crop: TestCrop, batch_size: int, threshold: float):
        super().__init__(detector, batch_size, Detector.__call__)
        self._names, self._crop, self._threshold = detector.class_names, crop, threshold

    def decode(self, image: bytes) -> tuple[Placement, np.ndarray]:
        return placed_crop(self._crop, image)

    def compute(
        self, images: Sequence[tuple[Placement, np.ndarray]], classes: Sequence[Any] = ()
    ) -> list[Detections]:
        """Returns the objects of each image, in pixels of the original image."""
        best = self._values([pixels for _, pixels in images])
        return [
            detections(jax.tree.map(lambda x, row=row: x[row], best), placement, self._threshold)
            for row, (placement, _) in enumerate(images)
        ]

    def answer(
        self, image: tuple[Placement, np.ndarray], result: Detections, asked: Asked
    ) -> dict[str, Any]:
        placement, pixels = image
        objects = []
        for number, (corners, label, score) in enumerate(zip(*result[:3], strict=True)):
            left, top, right, bottom = corners.tolist()
            box = [left, top, right - left, bottom - top]
            found = {"class": self._names[label], "score": float(score), "box": box}
            if result.masks is not None:
                found["segmentation"] = run_lengths(result.masks[number])
            objects.append(found)
        answer: dict[str, Any] = {"objects": objects}
        height, width = placement.shown
        shown = pixels[:height, :width]
        if asked.seen:
            answer["seen"] = image_address(shown, SIDE)
        if asked.overlay:
            # Enlarge small images, so that class names are legible.
            factor = max(1, SIDE // max(shown.shape))
            large = cv2.resize(shown, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)
            drawn = result._replace(corners=factor * placement.place_boxes(result.corners))
            if result.masks is not None:
                drawn = drawn._replace(masks=_on_picture(result.masks, placement, large.shape))
            picture = draw_objects(large, drawn, self._names)
            answer["overlay"] = image_address(np.asarray(picture), SIDE)
        return answer


def _on_picture(masks: np.ndarray, placement: Placement, size: tuple[int, ...]) -> np.ndarray:
    """Resizes masks of the original image, bool `[objects, height, width]`, to the `overlay`.

    The picture `overlay` shows the model's input without its padding. Small inputs are enlarged.
    `placement` is that of the original image in the model's input. `size` is the picture's height
    and width in pixels. Returns bool `[objects, size[0], size[1]]`.
    """
    height, width = placement.shown
    out = np.zeros((len(masks), *size[:2]), bool)
    for mask, enlarged in zip(masks, out, strict=True):
        placed = placement.place_map(mask, False, np.zeros(placement.size, np.uint8))
        shown = np.ascontiguousarray(placed[:height, :width])
        enlarged[:] = cv2.resize(shown, size[1::-1], interpolation=cv2.INTER_NEAREST)
    return out
