"""The suite `segmentation`: mIoU of a segmenter on images with masks, at their original size."""

import numpy as np

from vit_jax.data.dense_fields import check_size
from vit_jax.data.fields import MASK
from vit_jax.data.sources import DataSet, open_source
from vit_jax.data.sources.base import Source, check_fields
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import confusion, segmentation_metrics
from vit_jax.evaluation.dense_suite import (
    Predicted,
    check_classes,
    dense_measurements,
    tested_set,
)
from vit_jax.evaluation.suite import (
    DATA_DIR,
    Measurement,
    Options,
    Row,
    Segmented,
    Subject,
    Suite,
)
from vit_jax.evaluation.suite_fewshot import SETS

# Rows of a data set, with the metric's name.
METRICS = {"mIoU": "miou", "mean accuracy": "mean_accuracy", "pixel accuracy": "pixel_accuracy"}


def open_masked(described: DataSet, options: Options, subject: Subject) -> Source:
    """Opens the test images of a data set with their masks, in the segmenter's classes.

    Raises:
      UserError: the checkpoint has no segmentation head, the data cannot be opened or have no
        masks, or their classes are not those of the segmenter.
    """
    names = subject.segmenter.class_names
    described = tested_set(described, "masks", options)
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
    check_classes(described, source, names, "segmenter")
    return source


def measured(described: DataSet, options: Options, subject: Subject, source: Source) -> list[Row]:
    """Returns the rows of a data set, and passes its worst images to `on_outputs`."""
    segmenter = subject.segmenter
    predictions = Predicted(described, subject, source, segmenter.stream)
    classes = len(segmenter.class_names)
    total, scores = np.zeros((classes, classes), np.int64), []
    for index, predicted in predictions:
        mask = source.fields_of(index)[MASK]
        check_size(mask.shape, predicted.shape, source.describe(index))
        counts = confusion(predicted, mask, classes)
        if counts.any():
            total += counts
            scores.append((segmentation_metrics(counts).miou, index))
    if not scores:
        raise UserError(f"{described.name} has no readable image with known pixels in its mask")
    chosen, shown = predictions.worst(scores)
    subject.on_outputs(Segmented(described.name, chosen, segmenter.class_names, shown))
    metrics = segmentation_metrics(total)
    height, width = segmenter.model.image_size
    note = f"windows of {height}x{width}, {subject.test_crop.interpolation}"
    return [
        Row(
            "segmentation",
            f"{described.name}, {name}",
            getattr(metrics, key),
            None,
            len(scores),
            note,
        )
        for name, key in METRICS.items()
    ]


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns a measurement for each data set."""
    example = "images with masks, such as --set=/data/ade"
    return dense_measurements(subject, options, [*METRICS], open_masked, measured, example)


SUITE = Suite(
    name="segmentation",
    title="Semantic segmentation at the images' original size",
    needs="a segmentation run; folders of images and masks by --set",
    measurements=measurements,
    options={"set": SETS, "data_dir": DATA_DIR},
    spoken="segmentation of",
    in_training=False,
)
