"""The suite `fewshot`: a linear classifier on frozen features of a few images per class."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.data.sources import DataSet, data_set
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.pairs import DEV
from vit_jax.errors import UserError
from vit_jax.evaluation.fewshot import (
    DATA_SETS,
    PENALTY,
    SEEDS,
    SHOTS,
    FewShotTask,
    TooFewImages,
    cut_in_two,
    fingerprints,
    open_data_set,
    with_test_split,
)
from vit_jax.evaluation.suite import (
    COMPARED_EXAMPLES,
    DATA_DIR,
    LABEL_KEY,
    Impossible,
    Measurement,
    Options,
    Row,
    Stopped,
    Subject,
    Suite,
    SuiteOption,
    in_data_dir,
    whole_numbers_option,
)


def parse_sets(texts: Sequence[str]) -> list[DataSet]:
    """Parses values of the flag `--set`, which describe data sets.

    Their names must be different, because each name labels a row of the result table.
    """
    described = [data_set(text) for text in texts]
    if len({one.name for one in described}) < len(described):
        names = ", ".join(one.name for one in described)
        raise UserError(f"rows are by the sets' names, which must differ: {names}")
    return described


SETS = SuiteOption(
    (),
    "Of fewshot, knn and probes: tfds:cifar100, folder:/data/pets, digits:; by default "
    "big_vision's nine.",
    parse_sets,
    repeated=True,
)


def chosen_sets(subject: Subject, options: Options) -> list[DataSet]:
    """Returns the data sets of the flag `--set`, or the default data sets.

    The option `data_dir` is added to TFDS data sets. The images of a folder without splits are
    divided into training and test images. If a data set has no split `test`, its validation split,
    such as `val`, is the test split.
    """
    chosen = [
        described._replace(path=in_data_dir(described.path, options["data_dir"]))
        if described.kind == "tfds"
        else cut_in_two(described, subject.log)
        for described in options["set"] or DATA_SETS
    ]
    return [with_test_split(described, subject.log) for described in chosen]


def split_note(described: DataSet) -> str:
    """Returns a note with the splits, unless they are the data set's `train` and `test`."""
    train, test = described.train_split, described.test_split
    named = train.startswith("all") or test in DEV
    return f"; {train} to train, {test} to test" if named else ""


def name_of_shots(name: str, shots: int) -> str:
    """Returns the name of a row of the result table, such as `pets, 5 shots`."""
    return f"{name}, {shots} shot{'s' if shots > 1 else ''}"


def shots_of(name: str) -> int:
    """Returns the number of shots in a row's name, such as 5 for `pets, 5 shots`."""
    return int(name.rsplit(", ", 1)[1].split()[0])


def labelled_measurements(
    subject: Subject,
    options: Options,
    names_of: Callable[[DataSet], Sequence[str]],
    open_rows: Callable[[DataSet, tuple[Source, Source], Sequence[str]], Any],
    measure: Callable[[DataSet, Subject, Any], Sequence[Row]],
    fingerprint: Callable[[Any], dict[str, int | str]],
) -> list[Measurement]:
    """Returns a `Measurement` for each data set of the flag `--set`. Each is opened only once.

    Args:
      names_of: function that returns the names of a data set's rows.
      open_rows: function from training images, test images and the names of rows to the data from
        which `measure` computes these rows.
    """

    @functools.cache
    def sources_of(described: DataSet) -> tuple[Source, Source]:
        size = options["image_size"] or 224
        return open_data_set(described, size, options["label_key"], log=subject.log)

    def of_set(described: DataSet) -> Measurement:
        return Measurement(
            tuple(names_of(described)),
            lambda names: open_rows(described, sources_of(described), names),
            functools.partial(measure, described),
            fingerprint,
            lambda name: fingerprints(*sources_of(described), COMPARED_EXAMPLES),
        )

    return list(map(of_set, chosen_sets(subject, options)))


def measurements(subject: Subject, options: Options) -> list[Measurement]:
    """Returns a `Measurement` for each data set, with a result row for each number of shots."""
    seeds, penalty = options["seeds"], options["penalty"]

    def open_task(
        described: DataSet, sources: tuple[Source, Source], names: Sequence[str]
    ) -> FewShotTask:
        shots = [shots_of(name) for name in names]
        try:
            return FewShotTask(described.name, *sources, shots, seeds, subject.log)
        except TooFewImages as error:
            impossible = [name for name in names if shots_of(name) > error.most]
            raise Impossible(
                f"class {error.class_name!r} has {error.most} training images", impossible
            ) from error

    def measure(described: DataSet, subject: Subject, task: FewShotTask) -> list[Row]:
        extractor = subject.extractor()
        accuracies = task.accuracies(
            extractor, subject.params, (penalty,), subject.go_on, subject.log
        )
        if accuracies is None:
            raise Stopped
        note = f"seeds {', '.join(map(str, seeds))}; penalty {penalty:g}{split_note(described)}"
        return [
            Row(
                "fewshot",
                name_of_shots(described.name, one.shots),
                one.mean,
                one.deviation if len(seeds) > 1 else None,
                len(task.test),
                note,
            )
            for one in accuracies
        ]

    def names_of(described: DataSet) -> list[str]:
        return [name_of_shots(described.name, count) for count in options["shots"]]

    fingerprint = FewShotTask.fingerprint
    return labelled_measurements(subject, options, names_of, open_task, measure, fingerprint)


def draw_lines(axes, rows: Sequence[Row], number: Callable[[str], int], label: str) -> None:
    """Plots accuracy and std over the number of a row, such as shots, with a line per data set."""
    lines = {}
    for row in rows:
        point = number(row.name), 100 * row.accuracy, 100 * (row.deviation or 0)
        lines.setdefault(row.name.rsplit(", ", 1)[0], []).append(point)
    for name, points in sorted(lines.items()):
        axes.errorbar(*zip(*sorted(points), strict=True), fmt="o-", capsize=3, label=name)
    ticks = sorted({point[0] for points in lines.values() for point in points})
    axes.set(xscale="log", xlabel=label, ylabel="accuracy, %")
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize="small")


SUITE = Suite(
    name="fewshot",
    title="Few-shot linear evaluation of the frozen network",
    needs="data sets of --set, folders too; by default big_vision's nine of TFDS",
    measurements=measurements,
    options={
        "set": SETS,
        "shots": whole_numbers_option(SHOTS, "Training images of each class.", 1),
        "seeds": whole_numbers_option(SEEDS, "Of the choice of few-shot images.", 0),
        "penalty": SuiteOption(PENALTY, "Penalty of least squares.", float),
        "label_key": LABEL_KEY,
        "data_dir": DATA_DIR,
    },
    settings=lambda subject, options: {
        "seeds": options["seeds"],
        "penalty": options["penalty"],
        "crop": str(subject.transfer_crop),
    },
    draw=lambda axes, rows, printed: draw_lines(
        axes, rows, shots_of, "training images of each class"
    ),
    spoken="few-shot accuracy on",
    short=lambda name: re.sub(", (.*) shots?$", r"/\1", name),
)
