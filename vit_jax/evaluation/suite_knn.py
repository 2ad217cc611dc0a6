"""The suite `knn`: weighted k-NN classification on frozen features."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.data.sources import DataSet
from vit_jax.data.sources.base import Source
from vit_jax.evaluation.fewshot import fingerprints, read_single_labels
from vit_jax.evaluation.knn import NEIGHBOURS, knn_accuracies
from vit_jax.evaluation.suite import (
    DATA_DIR,
    LABEL_KEY,
    Impossible,
    Measurement,
    Options,
    Row,
    Subject,
    Suite,
    whole_numbers_option,
)
from vit_jax.evaluation.suite_fewshot import SETS, draw_lines, labelled_measurements, split_note


class Opened(NamedTuple):
    """Opened images of a data set, and the number of neighbours for each result row."""

    train: Source
    test: Source
    neighbours: list[int]


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns a `Measurement` for each data set, with a result row for each k of k-NN."""

    def open_both(
        described: DataSet, sources: tuple[Source, Source], names: Sequence[str]
    ) -> Opened:
        train, test = sources
        images = len(train)
        if too_many := [name for name in names if neighbours_of(name) > images]:
            why = (
                f"{described.name} has {images} training images, the most neighbours that are "
                "possible"
            )
            raise Impossible(why, too_many)
        read_single_labels(described.name, train, subject.log)
        return Opened(train, test, [neighbours_of(name) for name in names])

    def measure(described: DataSet, subject: Subject, opened: Opened) -> list[Row]:
        train, test = subject.see(opened.train), subject.see(opened.test)
        classes = len(opened.train.class_names)
        accuracies = knn_accuracies(train, test, classes, subject.mesh, opened.neighbours)
        note, images = split_note(described).lstrip("; "), len(test.values)
        return [
            Row("knn", name_of(described, count), accuracy, None, images, note)
            for count, accuracy in accuracies.items()
        ]

    return labelled_measurements(
        subject,
        options,
        lambda described: [name_of(described, count) for count in options["neighbours"]],
        open_both,
        measure,
        lambda opened: fingerprints(opened.train, opened.test),
    )


def name_of(described: DataSet, neighbours: int) -> str:
    """Returns the name of a row of the result table, such as `pets, 20-NN`."""
    return f"{described.name}, {neighbours}-NN"


def neighbours_of(name: str) -> int:
    """Returns the number of neighbours in a row's name, such as 20 for `pets, 20-NN`."""
    return int(name.rsplit(", ", 1)[1].removesuffix("-NN"))


SUITE = Suite(
    name="knn",
    title="k-NN on frozen features of all training images",
    needs="data sets of --set, folders too; by default big_vision's nine of TFDS",
    measurements=measurements,
    options={
        "set": SETS,
        "neighbours": whole_numbers_option(NEIGHBOURS, "Training images that vote.", 1),
        "label_key": LABEL_KEY,
        "data_dir": DATA_DIR,
    },
    settings=lambda subject, options: {"crop": str(subject.transfer_crop)},
    draw=lambda axes, rows, printed: draw_lines(axes, rows, neighbours_of, "neighbours"),
    spoken="k-NN accuracy on",
    short=lambda name: re.sub(", (.*)-NN$", r"/\1", name),
)
