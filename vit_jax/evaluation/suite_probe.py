"""The suite `probe`: a linear probe on frozen features of all training images."""

from vit_jax.data.sources import DataSet
from vit_jax.data.sources.base import Source
from vit_jax.evaluation.fewshot import fingerprints
from vit_jax.evaluation.probe import linear_probe
from vit_jax.evaluation.suite import DATA_DIR, LABEL_KEY, Measurement, Options, Row, Subject, Suite
from vit_jax.evaluation.suite_fewshot import SETS, labelled_measurements, split_note


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns the evaluation (a `Measurement`) of each data set."""

    def measure(described: DataSet, subject: Subject, sources: tuple[Source, Source]) -> list[Row]:
        train, test = map(subject.see, sources)
        probed = linear_probe(train, test, len(sources[0].class_names), subject.mesh)
        note = f"penalty {probed.penalty:g}{split_note(described)}"
        return [Row("probe", name_of(described), probed.accuracy, None, len(test.values), note)]

    return labelled_measurements(
        subject,
        options,
        lambda described: [name_of(described)],
        lambda described, sources, names: sources,
        measure,
        lambda sources: fingerprints(*sources),
    )


def name_of(described: DataSet) -> str:
    """Returns the name of a data set's row in the result table, such as `pets, linear probe`."""
    return f"{described.name}, linear probe"


SUITE = Suite(
    name="probe",
    title="Linear probe on all training images",
    needs="data sets of --set, folders too; by default big_vision's nine of TFDS",
    measurements=measurements,
    options={"set": SETS, "label_key": LABEL_KEY, "data_dir": DATA_DIR},
    settings=lambda subject, options: {"crop": str(subject.transfer_crop)},
)
