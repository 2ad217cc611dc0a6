"""Shared code of the suites for dense prediction: data sets, and predictions at original size."""

import functools
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vit_jax.data.class_names import has_names
from vit_jax.data.decode import Unreadable, why_unreadable
from vit_jax.data.sources import SOURCES, DataSet
from vit_jax.data.sources.base import Source, Subset, fingerprint
from vit_jax.data.sources.pairs import DEV
from vit_jax.errors import UserError
from vit_jax.evaluation.suite import Measurement, Options, Row, Stopped, Subject, in_data_dir
from vit_jax.progress import Progress

MOST_SHOWN = 24  # Images on the page.
# In order of preference. Many benchmarks have only `val`, because labels of `test` are secret.
TESTED = ("test", *DEV)


def tested_set(described: DataSet, kind: str, options: Options) -> DataSet:
    """Completes a data set of `--set` with its source kind, folder and split.

    The default split is the first available one of `TESTED`, else the first one of the data set.

    Args:
      described: the data set.
      kind: source kind of a folder.
      options: the suite's options.
    """
    if described.kind == "tfds":
        return described._replace(path=in_data_dir(described.path, options["data_dir"]))
    if described.kind == "folder":
        described = described._replace(kind=kind)
    layout_at = SOURCES[described.kind].layout_at
    if described.test_split != "test" or layout_at is None:
        return described
    _, splits = layout_at(described.path)
    split = next(name for name in (*TESTED, *splits) if name in splits)
    return described._replace(test_split=split)


def check_classes(described: DataSet, source: Source, names: Sequence[str], model: str) -> None:
    """Raises UserError if a data set and the model have different classes.

    Args:
      described: the data set.
      source: its images.
      names: class names of the model.
      model: the kind of the model.
    """
    there = tuple(source.class_names)
    if len(there) != len(names):
        raise UserError(
            f"{described.name} has {len(there):,} classes, and the {model} {len(names):,}: "
            "evaluate it on data with the classes of its training"
        )
    differing = [pair for pair in zip(there, names, strict=True) if pair[0] != pair[1]]
    if differing and has_names(there) and has_names(names):
        raise UserError(
            f"{described.name} has a class {differing[0][0]!r} where the {model} has "
            f"{differing[0][1]!r}: evaluate it on data with the classes of its training"
        )


class Predicted:
    """Iterates over predictions for the images of a data set, and predicts the worst ones again.

    Args:
      described: the data set.
      subject: the evaluated model.
      source: the images.
      stream: yields the index and the prediction of each readable image of a source, like
        `DenseModel.stream`.
    """

    def __init__(
        self,
        described: DataSet,
        subject: Subject,
        source: Source,
        stream: Callable[..., Iterator[tuple[int, Any]]],
    ):
        self._subject, self._source, self._stream = subject, source, stream
        self._progress = Progress(described.name, len(source), "images", subject.log)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yields the index and the prediction of each readable image.

        Raises:
          Stopped: `go_on` returned False.
        """
        for index, predicted in self._stream(self._source, self._skip):
            if not self._subject.go_on():
                raise Stopped
            yield index, predicted
            self._progress(index + 1)

    def worst(
        self, scores: Sequence[tuple[float, int]]
    ) -> tuple[Subset, list[tuple[int, float, Any]]]:
        """Returns the images with the lowest scores, and the index, score and prediction of each.

        These images are predicted again, to avoid keeping all predictions.

        Args:
          scores: score and index of each image.
        """
        lowest = heapq.nsmallest(MOST_SHOWN, scores)
        chosen = Subset(self._source, [index for _, index in lowest])
        again = self._stream(chosen, self._skip)
        return chosen, [(place, lowest[place][0], predicted) for place, predicted in again]

    def _skip(self, index: int, error: Unreadable | OSError) -> None:
        name = self._source.describe(index)
        self._subject.log(f"unreadable image skipped: {name} ({why_unreadable(error)})")


def dense_measurements(
    subject: Subject,
    options: Options,
    metrics: Sequence[str],
    open_set: Callable[[DataSet, Options, Subject], Source],
    measured: Callable[[DataSet, Options, Subject, Source], list[Row]],
    example: str,
    identity: Callable[[DataSet, Options, Subject, Source], dict[str, int | str]] | None = None,
) -> list[Measurement]:
    """Returns a measurement for each data set; without data sets, one that raises UserError.

    Args:
      subject: the evaluated model.
      options: the suite's options.
      metrics: names of the metrics.
      open_set: opens the test images of a data set.
      measured: returns the rows of a data set.
      example: example of `--set` with a description, for the error without data sets.
      identity: returns the fingerprint of a data set; None: fingerprint of the test images.
    """

    def measurement(described: DataSet) -> Measurement:
        @functools.cache
        def opened() -> Source:
            return open_set(described, options, subject)

        def identified(source: Source) -> dict[str, int | str]:
            if identity is None:
                return fingerprint(source)
            return identity(described, options, subject, source)

        return Measurement(
            tuple(f"{described.name}, {name}" for name in metrics),
            lambda names: opened(),
            functools.partial(measured, described, options),
            identified,
            lambda name: identified(opened()),
        )

    def rejected(names: Sequence[str] | str) -> Any:
        raise UserError(f"give {example}")

    if described := options["set"]:
        return list(map(measurement, described))
    return [Measurement((metrics[0],), rejected, lambda subject, opened: [], identify=rejected)]
