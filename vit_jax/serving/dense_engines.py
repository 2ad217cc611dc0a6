"""Compiled programs of segmenters and detectors."""

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

import cv2
import numpy as np

from vit_jax.data.placement import Placement
from vit_jax.data.preprocess import TestCrop
from vit_jax.dense import detections, placed_crop
from vit_jax.evaluation.window_inference import in_windows
from vit_jax.inspection.class_maps import overlay, palette_image
from vit_jax.inspection.page_images import image_address, png
from vit_jax.models.dense.detector import Detections, Detector
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.models.dense.windows import Windows
from vit_jax.object_files import overlay as draw_objects
from vit_jax.serving.engine import Asked, Engine

SIDE = 1024  # Pixels of the longest side of a picture.


class SegmenterEngine(Engine):
    """Programs for class maps of images at their original size.

    The windows of the images of a batch are computed together.

    Args:
      segmenter: the segmenter.
      crop: the run's evaluation transform.
      batch_size: largest number of windows in a batch.
    """

    parameters = ("overlay", "seen")

    def __init__(self, segmenter: Segmenter, crop: TestCrop, batch_size: int):
        super().__init__(segmenter, batch_size, Segmenter.__call__)
        self._names = segmenter.class_names
        self._in_windows = partial(in_windows, crop=crop, size=segmenter.image_size)

    def decode(self, image: bytes) -> tuple[Windows, np.ndarray]:
        return self._in_windows(image)

    def compute(
        self, images: Sequence[tuple[Windows, np.ndarray]], classes: Sequence[Any] = ()
    ) -> list[np.ndarray]:
        """Returns the scores of the windows of each image, `[windows, rows, columns, classes]`."""
        scores = self._values([cut for windows, image in images for cut in windows.cut(image)])
        ends = np.cumsum([windows.count for windows, _ in images])
        return np.split(scores, ends[:-1])

    def answer(
        self, image: tuple[Windows, np.ndarray], result: np.ndarray, asked: Asked
    ) -> dict[str, Any]:
        windows, resized = image
        mask = windows.class_map(result)
        counts = np.sum([np.bincount(row, minlength=len(self._names)) for row in mask], axis=0)
        order = [label for label in np.argsort(-counts, kind="stable").tolist() if counts[label]]
        answer: dict[str, Any] = {
            "mask": base64.b64encode(png(palette_image(mask))).decode(),
            "classes": [
                {"class": self._names[label], "label": label, "share": counts[label] / mask.size}
                for label in order
            ],
        }
        if asked.seen:
            answer["seen"] = image_address(resized, SIDE)
        if asked.overlay:
            shown = cv2.resize(mask, resized.shape[1::-1], interpolation=cv2.INTER_NEAREST)
            answer["overlay"] = image_address(overlay(resized, shown), SIDE)
        return answer


class DetectorEngine(Engine):
    """Programs for the objects of images.

    Args:
      detector: the detector.
      crop: the run's evaluation transform.
      batch_size: largest number of images in a batch.
      threshold: least score of the returned objects.
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
        """Returns the objects of each image, in pixels of the original."""
        rows = zip(*self._values([pixels for _, pixels in images]), strict=True)
        return [
            detections(scores, labels, boxes, placement).above(self._threshold)
            for (scores, labels, boxes), (placement, _) in zip(rows, images, strict=True)
        ]

    def answer(
        self, image: tuple[Placement, np.ndarray], result: Detections, asked: Asked
    ) -> dict[str, Any]:
        placement, pixels = image
        objects = []
        for corners, label, score in zip(*result[:3], strict=True):
            left, top, right, bottom = corners.tolist()
            box = [left, top, right - left, bottom - top]
            objects.append({"class": self._names[label], "score": float(score), "box": box})
        answer: dict[str, Any] = {"objects": objects}
        height, width = placement.shown
        shown = pixels[:height, :width]
        if asked.seen:
            answer["seen"] = image_address(shown, SIDE)
        if asked.overlay:
            drawn = result._replace(corners=placement.place_boxes(result.corners))
            picture = draw_objects(shown, drawn, self._names)
            answer["overlay"] = image_address(np.asarray(picture), SIDE)
        return answer
