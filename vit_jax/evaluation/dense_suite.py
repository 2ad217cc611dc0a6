"""Shared code of the suites `segmentation`, `depth` and `detection`.

This module opens data sets and predicts masks, depths or boxes at the images' original size.
"""

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
from vit_jax.evaluation.fewshot import no_test_split, with_test_split
from vit_jax.evaluation.suite import (
    Measurement,
    Options,
    Row,
    Stopped,
    Subject,
    in_data_dir,
    measurement,
    unavailable,
)
from vit_jax.progress import Progress

MOST_SHOWN = 24  # Maximum number of images on the page of a data set.
# Names of the split to evaluate, in the order of preference. Many benchmarks only have `val`,
# because the labels of `test` are secret.
TESTED = ("test", *DEV)


def tested_set(
    described: DataSet, kind: str, options: Options, log: Callable[[str], None] = lambda line: None
) -> DataSet:
    """Completes a data set of the flag `--set`: its source kind, its path and its test split.

    The user may name the test split. Otherwise it is the first of the split names in `TESTED`
    (`test`, then validation splits) that the data set has. If a folder has none of these splits,
    its first split is the test split. `kind` is the kind of a folder (`data.source`).
    """
    if described.kind == "tfds":
        path = in_data_dir(described.path, options["data_dir"])
        return with_test_split(described._replace(path=path), log)
    if described.kind == "folder":
        described = described._replace(kind=kind)
    layout_at = SOURCES[described.kind].layout_at
    if described.test_split != "test" or layout_at is None:
        return described
    _, splits = layout_at(described.path)
    split = next(name for name in (*TESTED, *splits) if name in splits)
    if split != "test":
        log(no_test_split(described, split))
    return described._replace(test_split=split)


def check_classes(described: DataSet, source: Source, names: Sequence[str], model: str) -> None:
    """Raises UserError if a data set and the model (`segmenter`, ...) have different classes."""
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
    """Predictions for the images of a data set, as an iterator. They are not stored.

    Args:
      stream: function that yields the index and the prediction of each readable image of a source,
        such as `DenseModel.stream`.
      shown: function that the method `worst` uses in place of `stream`. It may return other
        predictions, for display on a page. None: `stream`.
    """

    def __init__(
        self,
        described: DataSet,
        subject: Subject,
        source: Source,
        stream: Callable[..., Iterator[tuple[int, Any]]],
        shown: Callable[..., Iterator[tuple[int, Any]]] | None = None,
    ):
        self._subject, self._source, self._stream = subject, source, stream
        self._shown = shown or stream
        self._progress = Progress(described.name, len(source), "images", subject.log)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yields the index and the prediction of each readable image.

        Raises:
          Stopped: the evaluation was stopped, because `Subject.go_on` returned False.
        """
        for index, predicted in self._stream(self._source, self._skip):
            if not self._subject.go_on():
                raise Stopped
            yield index, predicted
            self._progress(index + 1)

    def worst(
        self, scores: Sequence[tuple[float, int]]
    ) -> tuple[Subset, list[tuple[int, float, Any]]]:
        """Computes the predictions of the `MOST_SHOWN` images with the lowest scores again.

        Args:
          scores: a tuple `(score, index)` for each image; `index` is the image's index in the data
            set.

        Returns:
          A source with the selected images, in ascending order of their scores, and a list with a
          tuple `(index, score, prediction)` for each readable image. This `index` is the image's
          index in the returned source.
        """
        lowest = heapq.nsmallest(MOST_SHOWN, scores)
        chosen = Subset(self._source, [index for _, index in lowest])
        again = self._shown(chosen, self._skip)
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
    identity: Callable[[DataSet, Options, Subject, Source, int], dict[str, int | str]]
    | None = None,
) -> list[Measurement]:
    """Returns a list with one evaluation (`Measurement`) for each data set of the flag `--set`.

    Without `--set`, the list contains a single `Measurement`. Its method `open` raises UserError.

    Args:
      example: example of `--set` with a description, for the error message.
      identity: function that returns the fingerprint of a data set. The last argument of this
        function is the number of examples whose content is included in the fingerprint. None: the
        fingerprint of the test images.
    """

    def of_set(described: DataSet) -> Measurement:
        def identified(source: Source, samples: int = 16) -> dict[str, int | str]:
            if identity is None:
                return fingerprint(source, samples)
            return identity(described, options, subject, source, samples)

        return measurement(
            [f"{described.name}, {name}" for name in metrics],
            functools.partial(open_set, described, options, subject),
            functools.partial(measured, described, options),
            identified,
        )

    if not options["set"]:
        return [unavailable(metrics[0], UserError(f"give {example}"))]
    return list(map(of_set, options["set"]))
