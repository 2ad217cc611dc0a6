"""The suite `segmentation`: mIoU of a segmenter on images with masks, at original size.

For a checkpoint without a segmentation head, a linear probe is trained on the data set: a linear
layer on the frozen checkpoint, by DINOv3's recipe (`configs/segment.py`).
"""

import numpy as np

from vit_jax.config import check
from vit_jax.data.dense_fields import check_size
from vit_jax.data.fields import MASK
from vit_jax.data.sources import SOURCES, DataSet, open_source
from vit_jax.data.sources.base import Source, check_fields, fingerprint
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import confusion, segmentation_metrics
from vit_jax.evaluation.dense_suite import Predicted, check_classes, dense_measurements, tested_set
from vit_jax.evaluation.fewshot import fingerprints
from vit_jax.evaluation.suite import (
    COMPARED_EXAMPLES,
    DATA_DIR,
    Measurement,
    Options,
    Row,
    Segmented,
    Subject,
    Suite,
    SuiteOption,
    digest_of,
)
from vit_jax.evaluation.suite_fewshot import SETS
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.recipes import segmentation

TASK = "segmentation"
# A dict from the name of a result row to the metric's attribute in `SegmentationMetrics`.
METRICS = {"mIoU": "miou", "mean accuracy": "mean_accuracy", "pixel accuracy": "pixel_accuracy"}


def open_masked(described: DataSet, options: Options, subject: Subject) -> Source:
    """Opens a data set's test images with their masks. The classes have the segmenter's indices.

    Raises:
      UserError: the data cannot be opened or have no masks, or their classes differ from the
        segmenter's.
    """
    if subject.dense.task == TASK:
        names = subject.segmenter.class_names
    else:
        names = open_training(described, options, subject).class_names
    described = tested_set(described, "masks", options, subject.log)
    source = opened(described, described.test_split, subject, len(names))
    check_fields(source, (MASK,), "test")
    check_classes(described, source, names, "segmenter")
    return source


def open_training(described: DataSet, options: Options, subject: Subject) -> Source:
    """Opens a data set's training images and masks; raises UserError if it cannot."""
    described = tested_set(described, "masks", options)
    layout_at = SOURCES[described.kind].layout_at
    splits = {} if layout_at is None else layout_at(described.path)[1]
    train = described.train_split
    if train == described.test_split or (splits and train.partition("[")[0] not in splits):
        name = next(iter(splits), "all")
        raise UserError(
            f"{described.path} has no splits to train and to test a linear probe on; give them, as "
            f"by --set='{described.kind}:{described.path}@{name}[:80%],{name}[80%:]'"
        )
    source = opened(described, train, subject)
    check_fields(source, (MASK,), "training")
    return source


def opened(described: DataSet, split: str, subject: Subject, classes: int | None = None) -> Source:
    """Opens a split of a data set, with a mask for each image."""
    return open_source(
        described.kind,
        split,
        path=described.path,
        image_size=subject.test_crop.size[0],
        num_classes=classes,
        labels=False,
        fields=(MASK,),
    )


def identity(
    described: DataSet, options: Options, subject: Subject, source: Source, samples: int
) -> dict[str, int | str]:
    """Returns the fingerprint of the test images; with a linear probe, also of training images."""
    if subject.dense.task == TASK:
        return fingerprint(source, samples)
    return fingerprints(open_training(described, options, subject), source, samples)


def trained_probe(
    described: DataSet, options: Options, subject: Subject, source: Source
) -> Segmenter:
    """Trains a linear probe for segmentation on the checkpoint, or loads a trained one."""
    data = digest_of(identity(described, options, subject, source, COMPARED_EXAMPLES))
    described = tested_set(described, "masks", options)
    (size, _), steps = subject.test_crop.size, int(options["segmentation_steps"])
    config = segmentation("linear", steps)
    config.model.name, config.finetune.checkpoint = "", subject.name
    config.data.update(dict(source=described.kind, path=described.path))
    config.data.update(dict(train_split=described.train_split, test_split=described.test_split))
    config.data.image_size = config.data.test_resize = size
    config.evaluate_every = config.steps
    config = check(config, file=config.copy_and_resolve_references())
    return subject.dense.probe(config, f"segmentation/{described.name}-{size}-{steps}-{data}")


def measured(described: DataSet, options: Options, subject: Subject, source: Source) -> list[Row]:
    """Returns a data set's segmentation metrics, and passes the worst images to `on_outputs`."""
    if subject.dense.task == TASK:
        segmenter, made = subject.segmenter, ""
    else:
        segmenter = trained_probe(described, options, subject, source)
        made = f"linear probe of {int(options['segmentation_steps']):,} steps, "
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
    note = f"{made}windows of {height}x{width}, {segmenter.predictor.crop.interpolation}"
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
    """Returns the evaluation (a `Measurement`) of each data set."""
    example = "images with masks, such as --set=/data/ade"
    return dense_measurements(
        subject, options, [*METRICS], open_masked, measured, example, identity
    )


def parse_steps(text: str) -> int:
    """Parses `--segmentation_steps`, the linear probe's; raises UserError if invalid."""
    if not text.isdecimal() or not int(text):
        raise UserError(f"--segmentation_steps={text!r} must be a number of steps, such as 2000")
    return int(text)


def settings(subject: Subject, options: Options) -> dict[str, str | float]:
    """Returns the options on which the metrics depend: the steps of a linear probe, if any."""
    if subject.dense.task == TASK:
        return {}
    return {"segmentation_steps": int(options["segmentation_steps"])}


SUITE = Suite(
    name="segmentation",
    title="Semantic segmentation at the images' original size",
    needs="folders of images and masks by --set; a checkpoint that is no segmentation run gets a "
    "linear probe",
    measurements=measurements,
    options={
        "set": SETS,
        "data_dir": DATA_DIR,
        "segmentation_steps": SuiteOption(
            40_000, "Steps of a linear probe for segmentation, of 16 images.", parse_steps
        ),
    },
    settings=settings,
    spoken="segmentation of",
    in_training=False,
)
