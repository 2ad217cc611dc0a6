"""The suite `detection`: COCO's metrics of a detector, at the original image size."""

import contextlib
import functools

from vit_jax.data.fields import BOXES, INSTANCES
from vit_jax.data.sources import DataSet, open_source
from vit_jax.data.sources.base import Source, check_fields
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import (
    COCO_METRICS,
    check_pycocotools,
    coco_metrics,
    compressed,
    image_matches,
    run_lengths_of,
)
from vit_jax.evaluation.dense_suite import Predicted, check_classes, dense_measurements, tested_set
from vit_jax.evaluation.suite import DATA_DIR, Detected, Measurement, Options, Row, Subject, Suite
from vit_jax.evaluation.suite_fewshot import SETS
from vit_jax.models.dense.detector import LEAST_SCORE


def open_boxed(described: DataSet, options: Options, subject: Subject) -> Source:
    """Opens a data set's test images with their boxes. The classes have the detector's indices.

    Raises:
      UserError: the checkpoint has no detection head, the data cannot be opened or have no boxes,
        their classes differ from the detector's, or pycocotools is not installed.
    """
    names = subject.detector.class_names
    check_pycocotools()
    described = tested_set(described, "coco", options, subject.log)
    source = open_source(
        described.kind,
        described.test_split,
        path=described.path,
        image_size=subject.detector.image_size[0],
        class_names=names,
        num_classes=len(names),
        labels=False,
        fields=_fields(subject),
    )
    check_fields(source, _fields(subject), "test")
    check_classes(described, source, names, "detector")
    return source


def measured(described: DataSet, options: Options, subject: Subject, source: Source) -> list[Row]:
    """Returns a data set's COCO metrics, and passes the worst images to `subject.on_outputs`."""
    detector, predictions = subject.detector, _predictions(described, subject, source)
    numbers, detections = [], []
    for index, found in predictions:
        numbers.append(index)
        detections.append(found)
    objects = [compressed(source.fields_of(index)[BOXES]) for index in numbers]
    classes = len(detector.class_names)
    metrics = coco_metrics(detections, objects, classes)
    if INSTANCES in source.fields:
        of_masks = coco_metrics(detections, objects, classes, masks=True)
        metrics |= {f"mask {name}": value for name, value in of_masks.items()}
    if metrics["AP"] < 0:
        raise UserError(f"{described.name} has no readable image with objects")
    certain = [found.above(LEAST_SCORE) for found in detections]
    matches = dict(zip(numbers, image_matches(certain, objects, classes), strict=True))
    chosen, worst = predictions.worst([(each.f1, index) for index, each in matches.items()])
    shown = [(place, matches[int(chosen.indices[place])], found) for place, _, found in worst]
    subject.on_outputs(Detected(described.name, chosen, detector.class_names, LEAST_SCORE, shown))
    (height, width), crop = detector.image_size, subject.test_crop
    note = f"{crop.kind} {height}x{width}, {crop.interpolation}"
    return [
        Row(
            "detection",
            f"{described.name}, {name}",
            value if value >= 0 else None,
            None,
            len(numbers),
            note if value >= 0 else "no object of this size",
        )
        for name, value in metrics.items()
    ]


def _predictions(described: DataSet, subject: Subject, source: Source) -> Predicted:
    """Returns the predictions for the images of a data set.

    All predicted objects remain in memory until the last image is predicted. Therefore their masks
    are encoded as run lengths, a few hundred bytes for each mask. The masks that `Predicted.worst`
    returns are not encoded.
    """
    detector = subject.detector
    encoded = dict(encode=run_lengths_of) if detector.predicts_masks else {}
    stream = functools.partial(detector.stream, **encoded)
    shown = functools.partial(detector.stream, threshold=LEAST_SCORE)
    return Predicted(described, subject, source, stream, shown)


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns the evaluation (a `Measurement`) of each data set."""
    example = "images with the objects of a COCO file, such as --set=/data/coco"
    names = COCO_METRICS
    # `_fields` raises UserError for a checkpoint without a detection head. The error is suppressed
    # here, because each measurement raises the error when its data are opened.
    with contextlib.suppress(UserError):
        if INSTANCES in _fields(subject):
            names += tuple(f"mask {name}" for name in COCO_METRICS)
    return dense_measurements(subject, options, names, open_boxed, measured, example)


def _fields(subject: Subject) -> tuple[str, ...]:
    """Returns the fields to compare with predictions: boxes and, if predicted, masks."""
    return (BOXES, INSTANCES) if subject.detector.predicts_masks else (BOXES,)


SUITE = Suite(
    name="detection",
    title="Object detection at the images' original size",
    needs="a detection run; folders with COCO's files by --set",
    measurements=measurements,
    options={"set": SETS, "data_dir": DATA_DIR},
    spoken="detection of",
    in_training=False,
)
