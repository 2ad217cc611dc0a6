"""Shared parts of the suites of dense prediction: data sets, and predictions at original size."""

import functools
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.data.decode import Unreadable, why_unreadable
from vit_jax.data.sources import SOURCES, DataSet
from vit_jax.data.sources.base import Source, Subset, fingerprint
from vit_jax.errors import UserError
from vit_jax.evaluation.suite import Measurement, Options, Row, Stopped, Subject, in_data_dir
from vit_jax.evaluation.window_inference import WindowInference
from vit_jax.progress import Progress

MOST_SHOWN = 24  # Images on the page.
VALIDATION = "val"  # Benchmarks are evaluated on it, because labels of test images are secret.


def tested_set(described: DataSet, kind: str, options: Options) -> DataSet:
    """Returns a data set of `--set` with its kind, folder and split.

    Its default split is `test`, else `val`, else `all`.

    Args:
      described: the data set.
      kind: kind of the source that a folder is.
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
    split = next(name for name in ("test", VALIDATION, *splits) if name in splits)
    return described._replace(test_split=split)


class Predicted:
    """Predictions for the images of a data set, one after the other, and those of the worst.

    Args:
      described: the data set.
      subject: the evaluated model.
      source: the images.
      model: the model with its head.
      inference: predicts its maps.
    """

    def __init__(
        self,
        described: DataSet,
        subject: Subject,
        source: Source,
        model: Any,
        inference: WindowInference,
    ):
        self._subject, self._source = subject, source
        self._inference = functools.partial(inference, model)
        self._progress = Progress(described.name, len(source), "images", subject.log)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the index and the map of each readable image.

        Raises:
          Stopped: `go_on` returned False.
        """
        for index, predicted in self._inference(self._source, self._skip):
            if not self._subject.go_on():
                raise Stopped
            yield index, predicted
            self._progress(index + 1)

    def worst(
        self, scores: Sequence[tuple[float, int]]
    ) -> tuple[Source, list[tuple[int, float, np.ndarray]]]:
        """Returns the images with the lowest scores, and index, score and map of each.

        The maps are predicted again, so that those of all images need not be kept.

        Args:
          scores: a score and an index of each image.
        """
        lowest = heapq.nsmallest(MOST_SHOWN, scores)
        chosen = Subset(self._source, [index for _, index in lowest])
        again = self._inference(chosen, self._skip)
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
) -> list[Measurement]:
    """Returns a measurement for each data set, or one that requests data.

    Args:
      subject: the evaluated model.
      options: the suite's options.
      metrics: names of the metrics.
      open_set: opens the test images of a data set.
      measured: returns the rows of a data set.
      example: a value of `--set`, with what it is.
    """

    def measurement(described: DataSet) -> Measurement:
        @functools.cache
        def opened() -> Source:
            return open_set(described, options, subject)

        return Measurement(
            tuple(f"{described.name}, {name}" for name in metrics),
            lambda names: opened(),
            functools.partial(measured, described, options),
            fingerprint,
            lambda name: fingerprint(opened()),
        )

    def rejected(names: Sequence[str] | str) -> Any:
        raise UserError(f"give {example}")

    if described := options["set"]:
        return list(map(measurement, described))
    return [Measurement((metrics[0],), rejected, lambda subject, opened: [], identify=rejected)]
