"""The suite `sgd_probe`: DINOv2's linear probe by SGD over learning rates and feature sets."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.data.sources import DataSet
from vit_jax.data.sources.base import Source
from vit_jax.evaluation.features import CHOICES, LAYERS, POOLED, choices_of
from vit_jax.evaluation.fewshot import fingerprints, read_single_labels
from vit_jax.evaluation.sgd_probe import STEPS, Fitted, SgdProbe
from vit_jax.evaluation.suite import (
    DATA_DIR,
    LABEL_KEY,
    Measurement,
    Options,
    Row,
    Stopped,
    Subject,
    Suite,
    SuiteOption,
    parse_number,
)
from vit_jax.evaluation.suite_fewshot import SETS, labelled_measurements, split_note

BEST = "best features"


class Opened(NamedTuple):
    """Opened images of a data set, and the feature set of each result row."""

    train: Source
    test: Source
    choices: list[str]


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns a `Measurement` for each data set, with a result row for each feature set."""

    def open_both(
        described: DataSet, sources: tuple[Source, Source], names: Sequence[str]
    ) -> Opened:
        read_single_labels(described.name, sources[0], subject.log)
        return Opened(*sources, [name.rsplit(", SGD on ", 1)[1] for name in names])

    def measure(described: DataSet, subject: Subject, opened: Opened) -> list[Row]:
        compute, choices = choices_of(subject.model)
        requested = [choice for choice in opened.choices if choice in (BEST, *choices)]
        why = f"it has fewer than {LAYERS} layers"
        if POOLED in choices:
            why = "the model has no class token"
        lacking = [choice for choice in opened.choices if choice not in requested]
        notes = [Row(SUITE.name, name_of(described, choice), note=why) for choice in lacking]
        if not requested:
            return notes
        train, test = (subject.see(source, compute) for source in (opened.train, opened.test))
        probe = SgdProbe(
            choices,
            subject.mesh,
            steps=options["probe_steps"],
            go_on=subject.go_on,
            log=subject.log,
        )
        results = probe(train, test, len(opened.train.class_names))
        if results is None:
            raise Stopped
        images, split = len(test.values), split_note(described)
        return [row(described, choice, results, images, split) for choice in requested] + notes

    return labelled_measurements(
        subject,
        options,
        lambda described: [name_of(described, choice) for choice in (BEST, *CHOICES)],
        open_both,
        measure,
        lambda opened: fingerprints(opened.train, opened.test),
    )


def row(
    described: DataSet, choice: str, results: Mapping[str, Fitted], images: int, split: str
) -> Row:
    """Returns a feature set's row; `BEST` is the one with the best validation accuracy."""

    def on_held_out(name: str) -> float:
        return max(results[name].held_out.values())

    chosen = max(results, key=on_held_out) if choice == BEST else choice
    which = f"{chosen}, " if choice == BEST else ""
    fitted = results[chosen]
    note = f"{which}rate {fitted.rate:g}, {on_held_out(chosen):.2%} of a held-out tenth{split}"
    return Row(SUITE.name, name_of(described, choice), fitted.accuracy, None, images, note)


def name_of(described: DataSet, choice: str) -> str:
    """Returns the name of a result row, such as `pets, SGD on class token`."""
    return f"{described.name}, SGD on {choice}"


SUITE = Suite(
    name="sgd_probe",
    title="Linear probe by SGD; learning rate and features chosen on a tenth of the images",
    needs="data sets of --set, folders too; by default big_vision's nine of TFDS",
    measurements=measurements,
    options={
        "set": SETS,
        "probe_steps": SuiteOption(STEPS, "Steps of sgd_probe, of 1,024 images.", parse_number),
        "label_key": LABEL_KEY,
        "data_dir": DATA_DIR,
    },
    settings=lambda subject, options: {
        "steps": options["probe_steps"],
        "crop": str(subject.transfer_crop),
    },
    spoken="linear probe by SGD on",
    short=lambda name: name.replace(", SGD on ", "/"),
)
