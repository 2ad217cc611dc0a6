"""Evaluation suites: a `Suite` defines the rows of a table and how to compute them for a model.

Each suite has its own module, and `vit_jax/evaluation/suites.py` lists all suites. A suite is run
by `python -m vit_jax.evaluate --suite=NAME`, or by `vit_jax.run_suites.run_suites`. It is also run
during training if `config.evaluate.suites` contains its name.
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

from vit_jax.data.fields import CAPTION_KEYS
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
from vit_jax.options.run import RunOptions

Compute = Callable[[nnx.Module, jax.Array], jax.Array]
Options = Mapping[str, Any]  # Values of a suite's options, by name.


class Row(NamedTuple):
    """A row of a suite's table: a metric, or a note why the metric could not be computed.

    There are two kinds of rows without a metric. If the number of evaluated images (`images`) is
    set, the data do not allow the metric, for example because they contain no small objects. If
    `images` is None, the evaluation failed, and the next run of the suite computes the row again.
    """

    suite: str
    name: str
    accuracy: float | None = None  # An accuracy from 0 to 1, or another metric of the suite.
    deviation: float | None = None  # Standard deviation over seeds (n - 1).
    images: int | None = None  # Number of evaluated images.
    note: str = ""
    unit: str = "%"  # For metrics that are not percentages: `m` (metres) or empty.


class SuiteOption(NamedTuple):
    """An option of a suite: the flag `--name`, or `name=value` in `config.evaluate.options`."""

    default: Any
    meaning: str
    # Function from the option's text to its value. If `repeated` is True, the function's argument
    # is a list of texts.
    parse: Callable[[Any], Any] = str
    repeated: bool = False

    @property
    def in_words(self) -> str:
        """The option's help text, followed by the default value if it consists of numbers."""
        numbers = self.default if isinstance(self.default, list) else [self.default]
        if not numbers or not all(isinstance(x, int | float) for x in numbers):
            return self.meaning
        return f"{self.meaning} By default {','.join(f'{x:g}' for x in numbers)}."


class Stopped(Exception):
    """Exception: the evaluation stopped because `go_on` returned False."""


class Impossible(UserError):
    """Error: the result rows with the names `names` cannot be computed from the data."""

    def __init__(self, why: str, names: Sequence[str]):
        self.names = tuple(names)
        super().__init__(why)


class Classified(NamedTuple):
    """Predicted classes for the images of a data set, for a page of images."""

    suite: str  # Name of the suite.
    name: str  # Name of the data set.
    source: Source  # The images.
    crop: TestCrop  # Evaluation transform of the images.
    class_names: Sequence[str]  # Names of all classes.
    # A dict of arrays. Each array has an item for each readable image. `numbers`: index of the
    # image in `source`. `labels`: label of the image, `[images, 1]`. `answer`: the most probable
    # class. `probability`: probability of this class.
    answers: dict[str, np.ndarray]


class Matched(NamedTuple):
    """Images and captions of a data set, for a page of images."""

    suite: str  # Name of the suite.
    name: str  # Name of the data set.
    source: Source  # The images.
    crop: TestCrop  # Evaluation transform of the images.
    # Embeddings of the readable images and of the distinct captions, and the pairs of images and
    # captions.
    paired: Paired
    captions: Sequence[str]  # The distinct captions.
    numbers: np.ndarray  # Index of each readable image in the source, int `[images]`.


class Segmented(NamedTuple):
    """Predicted masks for a data set's images with the lowest mIoU, for a page of images."""

    name: str  # Name of the data set.
    source: Source  # The images with the lowest mIoU, with their masks, in ascending order of mIoU.
    class_names: Sequence[str]  # Names of all classes.
    # For each image, the index in the source, the mIoU, and the predicted mask, uint8 `[height,
    # width]`.
    shown: Sequence[tuple[int, float, np.ndarray]]


class Ranged(NamedTuple):
    """Predicted depths for a data set's images with the largest RMSE, for a page of images."""

    name: str  # Name of the data set.
    # The images with the largest RMSE, with their depth maps, in descending order of RMSE.
    source: Source
    range: tuple[float, float]  # Nearest and farthest evaluated depth, in metres.
    # For each image, the index in the source, the RMSE in metres, and the predicted depth, float32
    # `[height, width]`.
    shown: Sequence[tuple[int, float, np.ndarray]]


class Detected(NamedTuple):
    """Predicted objects for a data set's images with the lowest F1, for a page of images."""

    name: str  # Name of the data set.
    source: Source  # The images with the lowest F1, with their boxes, in ascending order of F1.
    class_names: Sequence[str]  # Names of all classes.
    threshold: float  # Minimum score of the shown objects.
    # For each image, the index in the source, the numbers of matched and unmatched objects
    # (`Matches`), and the predicted objects.
    shown: Sequence[tuple[int, Matches, Detections]]


Outputs = Classified | Matched | Segmented | Ranged | Detected


class DenseHeads(NamedTuple):
    """Access to a checkpoint's heads for segmentation, depth or detection (dense prediction)."""

    task: str | None  # Task of the checkpoint's dense head; None: the checkpoint has no dense head.
    # Function from a task to the model with its head for this task. It may raise UserError.
    load: Callable[[str], Any]
    # Function `(config, workdir) -> segmenter` that trains a segmentation head on this checkpoint.
    probe: Callable[[RunOptions, str], Segmenter]
    # Metres of a unit of the depth maps on which the checkpoint was trained; 0.001 if it is
    # unknown.
    depth_scale: float = 0.001


class Subject:
    """A model to evaluate. Its parameters may change between evaluations.

    Args:
      load: function that returns the model's graph definition, parameters and shardings. It is
        called once, when a suite first needs the model.
      transfer_crop: function that returns the evaluation transform for frozen features.
      test_crop: function that returns the evaluation transform for predictions. Both functions are
        called only for suites that need them, and may raise UserError.
      texts: function that opens the text encoder of an image-text model, without compiling it. It
        is called only for suites with texts, and may raise UserError.
      finetune: function `(config, workdir) -> metrics` that trains this checkpoint and returns the
        metrics of the last evaluation; None during training.
      dense: access to the checkpoint's dense heads; None during training.
      num_classes: width of the model's head; 0: the model has no head.
      class_names: names of the head's classes, by index; empty: unknown.
      options: `batch_size` and other arguments of `Extractor`.

    Attributes:
      go_on: function that is called between batches. If it returns False, the evaluation stops.
      caption_key: column or key of the captions, such as the run's `data.caption_key`.
      on_outputs: callback that receives outputs for a page of images, such as `Classified`.
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
        self.caption_key = CAPTION_KEYS[0]
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
        """The text encoder of an image-text model; raises UserError if it has none."""
        return self._texts()

    @property
    def dense(self) -> DenseHeads:
        """Access to the checkpoint's heads for segmentation, depth or detection."""
        assert self._dense is not None  # Suites with dense heads do not run during training.
        return self._dense

    @functools.cached_property
    def segmenter(self) -> Segmenter:
        """The model with its segmentation head; raises UserError if it has none."""
        return self.dense.load("segmentation")

    @functools.cached_property
    def depth_model(self) -> DepthModel:
        """The model with its depth head; raises UserError if it has none."""
        return self.dense.load("depth")

    @functools.cached_property
    def detector(self) -> Detector:
        """The model with its detection head; raises UserError if it has none."""
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
        """Returns the extractor for `compute` and `crop`. It is created once and then reused.

        Args:
          compute: function `(model, images) -> outputs`; default: the inputs of the model's head.
          crop: evaluation transform; default: `transfer_crop`.
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
        """Returns the outputs of `compute`, by default features, for all readable images.

        Raises:
          Stopped: the evaluation was stopped, because `go_on` returned False.
          UserError: no image is readable, or too many images are unreadable.
        """
        seen = self.extractor(compute, crop)(self.params, source, self.go_on)
        if seen is None:
            raise Stopped
        return seen


# Number of examples whose content is included in the fingerprint of a data set. Saved metrics are
# reused if the fingerprint is unchanged.
COMPARED_EXAMPLES = 256


@dataclass(frozen=True)
class Measurement:
    """Evaluation on one data set: names of the result rows, and functions that compute the rows."""

    names: tuple[str, ...]
    # Function that opens the data for some of the rows, given the rows' names. It is called before
    # the model is loaded. It raises UserError if the data cannot be opened.
    open: Callable[[Sequence[str]], Any]
    measure: Callable[[Subject, Any], Sequence[Row]]
    # Function from opened data to a fingerprint, a dict of hashes and counts. The fingerprints of
    # two hosts are equal if both have opened the same data.
    fingerprint: Callable[[Any], Mapping[str, int | str]] = lambda opened: {}
    # Function that returns the fingerprint of a row's data, given the row's name. The fingerprint
    # includes the content of `COMPARED_EXAMPLES` examples, but not the labels of all examples. The
    # function raises UserError if the data cannot be opened.
    identify: Callable[[str], Mapping[str, int | str]] = lambda name: {}


@dataclass(frozen=True)
class Suite:
    """An evaluation suite, such as k-NN on several data sets.

    Args:
      name: name of the suite.
      title: heading of the suite's table.
      needs: description of the required data and where to get them.
      measurements: function that returns the `Measurement` of each data set. It opens no data.
      options: options of the suite.
      settings: function that returns the settings on which the metrics depend, without the data.
        Metrics with different settings are not stored in the same folder.
      published: names of tables in `vit_jax.published` with values for comparison.
      means: function that defines the rows with means in the table. Its argument contains the names
        of the available rows. The result is a dict from the name of each mean to the names of the
        rows to average.
      draw: function that plots rows with metrics, and published values, on Matplotlib's axes.
      spoken: start of the suite's log lines during training.
      short: function from a row's name to a shorter name. During training, the metric of the row is
        named `SUITE/SHORT`.
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


def measurement(
    names: Sequence[str],
    open_data: Callable[[], Any],
    measure: Callable[[Subject, Any], Sequence[Row]],
    fingerprint: Callable[..., Mapping[str, int | str]],
) -> Measurement:
    """Returns a `Measurement` whose data are opened only once, for all rows.

    Args:
      fingerprint: function from opened data and, optionally, a number of examples to a fingerprint.
    """
    opened = functools.cache(open_data)
    return Measurement(
        tuple(names),
        lambda names: opened(),
        measure,
        fingerprint,
        lambda name: fingerprint(opened(), COMPARED_EXAMPLES),
    )


def unavailable(name: str, error: UserError) -> Measurement:
    """Returns a `Measurement` of one row. It raises `error`, since its data are not available."""

    def refuse(_: Sequence[str] | str) -> Any:
        raise error

    return Measurement((name,), refuse, lambda subject, opened: [], identify=refuse)


def text_option(meaning: str) -> SuiteOption:
    """Returns an option whose value is a text, such as a path. The default is empty."""
    return SuiteOption("", meaning)


def whole_numbers_option(default: Sequence[int], meaning: str, least: int) -> SuiteOption:
    """Returns an option for a list of whole numbers of at least `least`, such as `1,5,10`."""

    def parse(text: str) -> list[int]:
        values = text.split(",")
        if not all(re.fullmatch("[0-9]+", value) and int(value) >= least for value in values):
            raise UserError(f"give whole numbers, {least} or above, separated by commas")
        return list(dict.fromkeys(map(int, values)))

    return SuiteOption(list(default), meaning, parse)


def parse_number(text: str | int) -> int:
    """Parses a whole number above 0."""
    if not re.fullmatch("[1-9][0-9]*", str(text)):
        raise UserError("give a whole number, 1 or above")
    return int(text)


def in_data_dir(path: str, data_dir: str) -> str:
    """Adds `data_dir` to a TFDS data set given by name, as `cifar100:3.*`; others are unchanged."""
    named_only = re.fullmatch(r"[\w/-]+(:[\d.*]+)?", path) and not path.startswith("/")
    return f"{path}:{data_dir}" if data_dir and named_only else path


DATA_DIR = text_option("Where TFDS's data sets are, if not in ~/tensorflow_datasets.")
LABEL_KEY = SuiteOption("label", "CSV column or TFDS feature of the labels; by default label.")


def digest_of(values: Mapping[str, Any]) -> str:
    """Returns a short hash of the given values."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def mean(figures: Mapping[str, float], names: Collection[str]) -> float:
    """Returns the mean of the values `figures[name]` for all `names`."""
    return math.fsum(figures[name] for name in names) / len(names)
