"""Evaluation suites: a `Suite` defines the rows of a table and how to compute them for a model.

Each suite has its own module with a `Suite`, which is listed in `vit_jax/evaluation/suites.py`. It
is run by `python -m vit_jax.evaluate --suite=NAME`, by `vit_jax.run_suites.run_suites`, and during
training if `config.evaluate.suites` contains its name.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.evaluation.dense_metrics import Matches
from vit_jax.evaluation.features import Extractor, Features, representation
from vit_jax.evaluation.text_encoder import TextEncoder
from vit_jax.models.dense.depth_model import DepthModel
from vit_jax.models.dense.detector import Detections, Detector
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.models.image_model import ImageModel
from vit_jax.models.retrieval import Paired

Compute = Callable[[nnx.Module, jax.Array], jax.Array]
Options = Mapping[str, Any]  # Values of a suite's options, by name.


class Row(NamedTuple):
    """A metric, or a note why there is none.

    If there is no metric, but `images` is set, the note describes the data, for example that there
    are no small objects. If `images` is None, the measurement failed and will be repeated.
    """

    suite: str
    name: str
    accuracy: float | None = None  # From 0 to 1, or the suite's metric.
    deviation: float | None = None  # Standard deviation over seeds (n - 1).
    images: int | None = None  # Number of evaluated images.
    note: str = ""
    unit: str = "%"  # `m`, or empty, for metrics that are not percentages.


class SuiteOption(NamedTuple):
    """An option of a suite: the flag `--name`, or `name=value` in `config.evaluate.options`."""

    default: Any
    meaning: str
    # Converts the text, or all texts of a repeated option, to the value.
    parse: Callable[[Any], Any] = str
    repeated: bool = False

    @property
    def in_words(self) -> str:
        """The help text, with the default if that is a number or several numbers."""
        numbers = self.default if isinstance(self.default, list) else [self.default]
        if not numbers or not all(isinstance(x, int | float) for x in numbers):
            return self.meaning
        return f"{self.meaning} By default {','.join(f'{x:g}' for x in numbers)}."


class Stopped(Exception):
    """Raised if `go_on` returned False and the evaluation stopped."""


class Impossible(UserError):
    """Error for data from which the rows `names` cannot be computed."""

    def __init__(self, why: str, names: Sequence[str]):
        self.names = tuple(names)
        super().__init__(why)


class Classified(NamedTuple):
    """Predicted classes for the images of a data set, shown on a page of images.

    Attributes:
      suite, name: names of the suite and of the data set.
      source, crop: the images, and their evaluation transform.
      class_names: names of all classes.
      answers: for each readable image: `numbers`, its index in the source; `labels`, `[images, 1]`;
        `answer`, the most probable class; `probability` of this class.
    """

    suite: str
    name: str
    source: Source
    crop: TestCrop
    class_names: Sequence[str]
    answers: dict[str, np.ndarray]


class Matched(NamedTuple):
    """Images and captions of a data set, shown on a page of images.

    Attributes:
      suite, name: names of the suite and of the data set.
      source, crop: the images, and their evaluation transform.
      paired: embeddings of the readable images and of the distinct captions.
      captions: the distinct captions.
      numbers: index of each readable image in the source, int `[images]`.
    """

    suite: str
    name: str
    source: Source
    crop: TestCrop
    paired: Paired
    captions: Sequence[str]
    numbers: np.ndarray


class Segmented(NamedTuple):
    """Predicted masks for a data set's images with the lowest mIoU, shown on a page of images.

    Attributes:
      name: name of the data set.
      source: these images with their masks, in ascending order of mIoU.
      class_names: names of all classes.
      shown: index in the source, mIoU and predicted mask of each image, uint8 `[height, width]`.
    """

    name: str
    source: Source
    class_names: Sequence[str]
    shown: Sequence[tuple[int, float, np.ndarray]]


class Ranged(NamedTuple):
    """Predicted depths for a data set's images with the largest errors, shown on a page of images.

    Attributes:
      name: name of the data set.
      source: these images with their depth maps, in descending order of the error.
      range: nearest and farthest evaluated depth, in metres.
      shown: index in the source, RMSE in metres and predicted depth of each image, float32
        `[height, width]`.
    """

    name: str
    source: Source
    range: tuple[float, float]
    shown: Sequence[tuple[int, float, np.ndarray]]


class Detected(NamedTuple):
    """Predicted objects for a data set's images with the lowest F1, shown on a page of images.

    Attributes:
      name: name of the data set.
      source: these images with their boxes, in ascending order of F1.
      class_names: names of all classes.
      threshold: minimum score of the shown objects.
      shown: for each image: index in the source, match counts, and the predicted objects.
    """

    name: str
    source: Source
    class_names: Sequence[str]
    threshold: float
    shown: Sequence[tuple[int, Matches, Detections]]


Outputs = Classified | Matched | Segmented | Ranged | Detected


class DenseHeads(NamedTuple):
    """Access to a checkpoint's heads of dense prediction.

    Attributes:
      task: task of the checkpoint's dense head; None: it has none.
      load: loads the model with its head for a task; may raise UserError.
      probe: `(config, workdir) -> segmenter`: trains a segmentation head on this checkpoint.
    """

    task: str | None
    load: Callable[[str], Any]
    probe: Callable[[ConfigDict, str], Segmenter]


class Subject:
    """A model to evaluate, with parameters that may change between evaluations.

    Args:
      name: the checkpoint's name in messages.
      mesh: mesh of devices.
      load: returns the model's graph definition, parameters and shardings; called once, when a
        suite first needs it.
      transfer_crop, test_crop: return the evaluation transform for frozen features and for
        predictions. They may raise UserError, and are called only for suites with images.
      log: logs messages.
      texts: opens the text tower of an image-text model without compiling it. It may raise
        UserError, and is called only for suites with texts.
      finetune: `(config, workdir) -> metrics`: trains this checkpoint and returns the metrics of
        the last evaluation; None during training.
      dense: access to the checkpoint's dense heads; None during training.
      num_classes: width of the model's head; 0: it has none.
      class_names: class names of the head, by index; empty if they are unknown.
      options: `batch_size` and other arguments of `Extractor`.

    Attributes:
      go_on: called between batches; the evaluation stops if it returns False.
      on_outputs: callback with outputs for a page of images, such as `Classified`.
    """

    def __init__(
        self,
        name: str,
        mesh: Mesh,
        load: Callable[[], tuple[nnx.GraphDef, dict, dict]],
        transfer_crop: Callable[[], TestCrop],
        test_crop: Callable[[], TestCrop],
        texts: Callable[[], TextEncoder],
        *,
        log: Callable[[str], None] = print,
        finetune: Callable | None = None,
        dense: DenseHeads | None = None,
        num_classes: int = 0,
        class_names: Sequence[str] = (),
        **options: Any,
    ):
        self.name, self.mesh, self.log, self.finetune = name, mesh, log, finetune
        self.num_classes, self.class_names = num_classes, tuple(class_names)
        self.go_on: Callable[[], bool] = lambda: True
        self.on_outputs: Callable[[Outputs], None] = lambda outputs: None
        self._load, self._options, self._extractors = load, options, {}
        self._transfer_crop, self._test_crop, self._texts = transfer_crop, test_crop, texts
        self._dense = dense
        self._params = None

    @functools.cached_property
    def transfer_crop(self) -> TestCrop:
        """Evaluation transform for features of the frozen model."""
        return self._transfer_crop()

    @functools.cached_property
    def test_crop(self) -> TestCrop:
        """Evaluation transform for predictions."""
        return self._test_crop()

    @functools.cached_property
    def texts(self) -> TextEncoder:
        """The text tower of an image-text model.

        Raises:
          UserError: the model has no text tower.
        """
        return self._texts()

    @property
    def dense(self) -> DenseHeads:
        """Access to the checkpoint's heads of dense prediction."""
        assert self._dense is not None  # Suites with dense heads do not run during training.
        return self._dense

    @functools.cached_property
    def segmenter(self) -> Segmenter:
        """The model with its segmentation head.

        Raises:
          UserError: the checkpoint has no such head.
        """
        return self.dense.load("segmentation")

    @functools.cached_property
    def depth_model(self) -> DepthModel:
        """The model with its depth head.

        Raises:
          UserError: the checkpoint has no such head.
        """
        return self.dense.load("depth")

    @functools.cached_property
    def detector(self) -> Detector:
        """The model with its detection head.

        Raises:
          UserError: the checkpoint has no such head.
        """
        return self.dense.load("detection")

    @functools.cached_property
    def _loaded(self) -> tuple[nnx.GraphDef, dict, dict]:
        return self._load()

    @property
    def model(self) -> ImageModel:
        """The model with the parameters to evaluate."""
        return nnx.merge(self._loaded[0], self.params)

    @property
    def params(self) -> dict:
        """The parameters to evaluate."""
        return self._loaded[1] if self._params is None else self._params

    @params.setter
    def params(self, params: dict) -> None:
        self._params = params

    def extractor(
        self, compute: Compute = representation, crop: TestCrop | None = None
    ) -> Extractor:
        """Returns a cached extractor for `compute` and `crop`.

        Args:
          compute: `(model, images) -> outputs`; features by default.
          crop: `transfer_crop` by default.
        """
        key = compute, crop or self.transfer_crop
        if key not in self._extractors:
            graphdef, _, shardings = self._loaded
            options = self._options | {"compute": compute, "log": self.log}
            self._extractors[key] = Extractor(graphdef, shardings, self.mesh, key[1], **options)
        return self._extractors[key]

    def see(
        self, source: Source, compute: Compute = representation, crop: TestCrop | None = None
    ) -> Features:
        """Applies `compute` to every readable image of a source.

        Raises:
          Stopped: `go_on` returned False.
          UserError: no image is readable, or too many images are unreadable.
        """
        seen = self.extractor(compute, crop)(self.params, source, self.go_on)
        if seen is None:
            raise Stopped
        return seen


@dataclass(frozen=True)
class Measurement:
    """Evaluation on one data set: the names of its rows, and the functions that compute them.

    Args:
      names: names of the rows.
      open: opens the data for some rows, given by name, before the model is loaded; raises
        UserError if the data cannot be opened.
      measure: computes the rows from the model and the opened data.
      fingerprint: returns short values that are equal on two hosts if they opened the same data.
      identify: returns the fingerprint of the data of a row, given by name, without reading all
        labels; raises UserError if the data cannot be opened.
    """

    names: tuple[str, ...]
    open: Callable[[Sequence[str]], Any]
    measure: Callable[[Subject, Any], Sequence[Row]]
    fingerprint: Callable[[Any], Mapping[str, int | str]] = lambda opened: {}
    identify: Callable[[str], Mapping[str, int | str]] = lambda name: {}


@dataclass(frozen=True)
class Suite:
    """A named evaluation.

    Args:
      name: name of the suite.
      title: heading of its table.
      needs: description of the required data and their source.
      measurements: returns all measurements, before any data are opened.
      options: options of the suite.
      settings: returns the settings, other than the data, that the metrics depend on; metrics with
        different settings are not mixed.
      published: tables of `vit_jax.published` with values for comparison.
      means: returns rows that are means: for each name, the names of the available rows to average.
      draw: draws rows with metrics, and the published values, on Matplotlib's axes.
      spoken: start of the suite's log lines during training.
      short: returns the name of a row for metrics during training, `SUITE/SHORT`.
      in_training: True if the suite can be run during training.
    """

    name: str
    title: str
    needs: str
    measurements: Callable[[Subject, Options], Sequence[Measurement]]
    options: Mapping[str, SuiteOption] = field(default_factory=dict)
    settings: Callable[[Subject, Options], dict] = lambda subject, options: {}
    published: tuple[str, ...] = ()
    means: Callable[[Collection[str]], Mapping[str, Sequence[str]]] = lambda there: {}
    draw: Callable[[Any, Sequence[Row], Mapping[str, Mapping[str, float]]], None] | None = None
    spoken: str = ""
    short: Callable[[str], str] = lambda name: name.replace(", ", "/")
    in_training: bool = True

    def defaults(self) -> dict[str, Any]:
        """Returns the default values of all options."""
        return {name: option.default for name, option in self.options.items()}


def text_option(meaning: str) -> SuiteOption:
    """Returns an option for a path or a word; the default is empty."""
    return SuiteOption("", meaning)


def whole_numbers_option(default: Sequence[int], meaning: str, least: int) -> SuiteOption:
    """Returns an option for comma-separated whole numbers, without duplicates."""

    def parse(text: str) -> list[int]:
        values = text.split(",")
        if not all(re.fullmatch("[0-9]+", value) and int(value) >= least for value in values):
            raise UserError(f"give whole numbers, {least} or above, separated by commas")
        return list(dict.fromkeys(map(int, values)))

    return SuiteOption(list(default), meaning, parse)


def in_data_dir(path: str, data_dir: str) -> str:
    """Adds the data folder to the path of a TFDS data set, if it has none."""
    named_only = re.fullmatch(r"[\w/-]+(:[\d.*]+)?", path) and not path.startswith("/")
    return f"{path}:{data_dir}" if data_dir and named_only else path


DATA_DIR = text_option("Where TFDS's data sets are, if not in ~/tensorflow_datasets.")


def digest_of(values: Mapping[str, Any]) -> str:
    """Returns a short hash of some values."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def mean(figures: Mapping[str, float], names: Collection[str]) -> float:
    """Returns the mean of the named values."""
    return math.fsum(figures[name] for name in names) / len(names)
