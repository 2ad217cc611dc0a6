"""The suite `segmentation`: mIoU of a segmenter on images with masks, at their original size."""

import functools
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.data.class_names import has_names
from vit_jax.data.decode import Unreadable, why_unreadable
from vit_jax.data.dense_fields import check_size
from vit_jax.data.fields import MASK
from vit_jax.data.sources import SOURCES, DataSet, open_source
from vit_jax.data.sources.base import Source, Subset, check_fields, fingerprint
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import confusion, segmentation_metrics
from vit_jax.evaluation.suite import (
    DATA_DIR,
    Measurement,
    Options,
    Row,
    Segmented,
    Stopped,
    Subject,
    Suite,
    in_data_dir,
)
from vit_jax.evaluation.suite_fewshot import SETS
from vit_jax.evaluation.window_inference import WindowInference
from vit_jax.progress import Progress

# Rows of a data set, with the metric's name.
METRICS = {"mIoU": "miou", "mean accuracy": "mean_accuracy", "pixel accuracy": "pixel_accuracy"}
MOST_SHOWN = 24  # Images on the page.
VALIDATION = "val"  # Benchmarks are evaluated on it, because masks of test images are secret.


def tested_set(described: DataSet, options: Options) -> DataSet:
    """Returns a data set of `--set` with its kind, folder and split.

    A folder is one of images and masks. Its default split is `test`, else `val`, else `all`.
    """
    if described.kind == "tfds":
        return described._replace(path=in_data_dir(described.path, options["data_dir"]))
    if described.kind == "folder":
        described = described._replace(kind="masks")
    layout_at = SOURCES[described.kind].layout_at
    if described.test_split != "test" or layout_at is None:
        return described
    _, splits = layout_at(described.path)
    split = next(name for name in ("test", VALIDATION, *splits) if name in splits)
    return described._replace(test_split=split)


def open_masked(described: DataSet, options: Options, subject: Subject) -> Source:
    """Opens the test images of a data set with their masks, in the segmenter's classes.

    Raises:
      UserError: the checkpoint has no segmentation head, the data cannot be opened or have no
        masks, or their classes are not those of the segmenter.
    """
    names = subject.segmenter.class_names
    described = tested_set(described, options)
    source = open_source(
        described.kind,
        described.test_split,
        path=described.path,
        image_size=subject.segmenter.model.image_size[0],
        num_classes=len(names),
        labels=False,
        fields=(MASK,),
    )
    check_fields(source, (MASK,), "test")
    there = tuple(source.class_names)
    if len(there) != len(names):
        raise UserError(
            f"{described.name} has {len(there):,} classes, and the segmenter {len(names):,}: "
            "evaluate it on data with the classes of its training"
        )
    differing = [pair for pair in zip(there, names, strict=True) if pair[0] != pair[1]]
    if differing and has_names(there) and has_names(names):
        raise UserError(
            f"{described.name} has a class {differing[0][0]!r} where the segmenter has "
            f"{differing[0][1]!r}: evaluate it on data with the classes of its training"
        )
    return source


class Counts:
    """Confusion counts of a data set, and the mIoU of each image.

    Attributes:
      total: pixels of each true and each predicted class, int64 `[classes, classes]`.
      of_images: mIoU and index of each image with known pixels.
    """

    def __init__(self, classes: int):
        self.total = np.zeros((classes, classes), np.int64)
        self.of_images: list[tuple[float, int]] = []

    def add(self, index: int, predicted: np.ndarray, mask: np.ndarray) -> None:
        """Adds an image."""
        counts = confusion(predicted, mask, len(self.total))
        self.total += counts
        if counts.any():
            self.of_images.append((segmentation_metrics(counts).miou, index))

    def worst(self) -> list[tuple[float, int]]:
        """Returns the mIoU and the index of the images with the lowest ones, the lowest first."""
        return heapq.nsmallest(MOST_SHOWN, self.of_images)


def measured(described: DataSet, subject: Subject, source: Source) -> list[Row]:
    """Returns the rows of a data set, and passes its worst images to `on_outputs`."""
    segmenter = subject.segmenter
    inference = WindowInference(segmenter, subject.mesh, subject.test_crop)
    counts = Counts(len(segmenter.class_names))
    progress = Progress(described.name, len(source), "images", subject.log)

    def skip(index: int, error: Unreadable | OSError) -> None:
        subject.log(f"unreadable image skipped: {source.describe(index)} ({why_unreadable(error)})")

    for index, predicted in inference(segmenter, source, skip):
        if not subject.go_on():
            raise Stopped
        mask = source.fields_of(index)[MASK]
        check_size(mask.shape, predicted.shape, source.describe(index))
        counts.add(index, predicted, mask)
        progress(index + 1)
    if not counts.of_images:
        raise UserError(f"{described.name} has no readable image with known pixels in its mask")
    worst = counts.worst()
    chosen = Subset(source, [index for _, index in worst])
    again = inference(segmenter, chosen, skip)  # So that masks of all images need not be kept.
    shown = [(place, worst[place][0], predicted) for place, predicted in again]
    subject.on_outputs(Segmented(described.name, chosen, segmenter.class_names, shown))
    metrics = segmentation_metrics(counts.total)
    images, crop = len(counts.of_images), subject.test_crop
    height, width = segmenter.model.image_size
    note = f"windows of {height}x{width}, {crop.interpolation}"
    return [
        Row("segmentation", f"{described.name}, {name}", getattr(metrics, key), None, images, note)
        for name, key in METRICS.items()
    ]


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns a measurement for each data set."""

    def measurement(described: DataSet) -> Measurement:
        @functools.cache
        def opened() -> Source:
            return open_masked(described, options, subject)

        return Measurement(
            tuple(f"{described.name}, {name}" for name in METRICS),
            lambda names: opened(),
            functools.partial(measured, described),
            fingerprint,
            lambda name: fingerprint(opened()),
        )

    if described := options["set"]:
        return list(map(measurement, described))
    return [_without_data()]


def _without_data() -> Measurement:
    """Returns a measurement that requests data sets."""

    def rejected(names: Sequence[str] | str) -> Any:
        raise UserError("give images with masks, such as --set=/data/ade")

    return Measurement(("mIoU",), rejected, lambda subject, opened: [], identify=rejected)


SUITE = Suite(
    name="segmentation",
    title="Semantic segmentation at the images' original size",
    needs="a segmentation run; folders of images and masks by --set",
    measurements=measurements,
    options={"set": SETS, "data_dir": DATA_DIR},
    spoken="segmentation of",
    in_training=False,
)
