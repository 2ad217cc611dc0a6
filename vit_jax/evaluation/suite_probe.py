"""The suite `probe`: k-NN and a linear probe on frozen features of all training images."""

import functools
from collections.abc import Sequence

from vit_jax.data.sources import DataSet
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.evaluation.fewshot import open_data_set
from vit_jax.evaluation.knn import knn_accuracy
from vit_jax.evaluation.probe import linear_probe
from vit_jax.evaluation.suite import DATA_DIR, Measurement, Options, Row, Subject, Suite
from vit_jax.evaluation.suite_fewshot import SETS, chosen_sets, split_note


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """One look at each data set, whose features serve both."""

    def open_both(described: DataSet, names: Sequence[str]) -> tuple[Source, Source]:
        return open_data_set(described, options["image_size"] or 224, say=subject.say)

    def measure(described: DataSet, subject: Subject, sources: tuple[Source, Source]) -> list[Row]:
        features = [subject.see(source) for source in sources]
        classes = len(sources[0].class_names)
        nearest = knn_accuracy(*features, classes, subject.mesh)
        probed = linear_probe(*features, classes, subject.mesh)
        notes = split_note(described).lstrip("; "), f"penalty {probed.penalty:g}{split_note(described)}"
        images = len(features[1].values)
        return [
            Row("probe", name, accuracy, None, images, note)
            for name, accuracy, note in zip(
                names_of(described), (nearest, probed.accuracy), notes, strict=True
            )
        ]

    return [
        Measurement(
            names_of(described),
            functools.partial(open_both, described),
            functools.partial(measure, described),
            lambda sources: {
                f"{split} {key}": value
                for split, source in zip(("training", "test"), sources, strict=True)
                for key, value in fingerprint(source).items()
            },
        )
        for described in chosen_sets(subject, options)
    ]


def names_of(described: DataSet) -> tuple[str, str]:
    """The names of a data set's rows."""
    return f"{described.name}, 20-NN", f"{described.name}, linear probe"


SUITE = Suite(
    name="probe",
    title="k-NN and linear probe on all training images",
    needs="data sets of --set, folders too; by default big_vision's nine of TFDS",
    measurements=measurements,
    options={"set": SETS, "data_dir": DATA_DIR},
    settings=lambda subject, options: {"crop": str(subject.transfer_crop)},
)
