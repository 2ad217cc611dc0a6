"""An evaluation suite: a value that says its rows, and how each gets its figures from a model.

A suite's module makes one `Suite` and has a line in `vit_jax/evaluation/suites.py`. The same value
is run by
`python -m vit_jax.evaluate --suite=NAME`, by `vit_jax.run_suites.run_suites`, and during training
where `config.evaluate.suites` names it.
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
from flax import nnx
from jax.sharding import Mesh

from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.evaluation.features import Extractor, Features, representation
from vit_jax.models.image_model import ImageModel

Compute = Callable[[nnx.Module, jax.Array], jax.Array]
Options = Mapping[str, Any]  # A suite's options by name, each with a value.


class Row(NamedTuple):
    """A figure, or why there is none."""

    suite: str
    name: str
    accuracy: float | None = None  # From 0 to 1; of a suite that measures something else, that.
    deviation: float | None = None  # Standard deviation over seeds (n - 1).
    images: int | None = None  # That were scored.
    note: str = ""


class SuiteOption(NamedTuple):
    """A flag of the command, `--name`, and a line of `config.evaluate.options`, `name=value`."""

    default: Any
    meaning: str
    parse: Callable[[Any], Any] = (
        str  # Its text (all its texts, of an option that is repeated) to its value.
    )
    repeated: bool = False

    @property
    def in_words(self) -> str:
        """The meaning with the default, where that is a number or several."""
        numbers = self.default if isinstance(self.default, list) else [self.default]
        if not numbers or not all(isinstance(x, int | float) for x in numbers):
            return self.meaning
        return f"{self.meaning} By default {','.join(f'{x:g}' for x in numbers)}."


class Stopped(Exception):
    """The evaluation was told not to go on."""


class Impossible(UserError):
    """Some of the rows cannot be had of this data: `names`."""

    def __init__(self, why: str, names: Sequence[str]):
        self.names = tuple(names)
        super().__init__(why)


class Subject:
    """A model that suites evaluate, with parameters that may change from one evaluation to the
    next.

    Args:
      name: the checkpoint, as messages call it.
      transfer_crop, test_crop: make what the model sees of an image, in evaluations of frozen
        features and of predictions. They may raise UserError, and are only called by suites that
        look at images.
      load: makes the model's graph, parameters and shardings; called once, when a suite first needs
        it.
      options: `batch_size` and others of `Extractor`.
      go_on: is asked between batches.
      finetune: trains this checkpoint by a config into a workdir and returns the last evaluation's
        figures; None during training.
      num_classes: width of the model's head; 0: it has none.
      class_names: of the head, by number; none where they are not known.
    """

    def __init__(
        self,
        name: str,
        mesh: Mesh,
        load: Callable[[], tuple[nnx.GraphDef, dict, dict]],
        transfer_crop: Callable[[], TestCrop],
        test_crop: Callable[[], TestCrop],
        *,
        say: Callable[[str], None] = print,
        finetune: Callable | None = None,
        num_classes: int = 0,
        class_names: Sequence[str] = (),
        **options: Any,
    ):
        self.name, self.mesh, self.say, self.finetune = name, mesh, say, finetune
        self.num_classes, self.class_names = num_classes, tuple(class_names)
        self.go_on: Callable[[], bool] = lambda: True
        self._load, self._options, self._extractors = load, options, {}
        self._transfer_crop, self._test_crop = transfer_crop, test_crop
        self._params = None

    @functools.cached_property
    def transfer_crop(self) -> TestCrop:
        """Makes what the frozen network sees of an image, for its features."""
        return self._transfer_crop()

    @functools.cached_property
    def test_crop(self) -> TestCrop:
        """Makes what the model sees of an image whose class it predicts."""
        return self._test_crop()

    @functools.cached_property
    def _loaded(self) -> tuple[nnx.GraphDef, dict, dict]:
        return self._load()

    @property
    def model(self) -> ImageModel:
        """The model with the parameters that are evaluated."""
        return nnx.merge(self._loaded[0], self.params)

    @property
    def params(self) -> dict:
        """The parameters that are evaluated."""
        return self._loaded[1] if self._params is None else self._params

    @params.setter
    def params(self, params: dict) -> None:
        self._params = params

    def extractor(
        self, compute: Compute = representation, crop: TestCrop | None = None
    ) -> Extractor:
        """Computes something of each image, by default its features; compiled once for each
        `compute`.

        Args:
          crop: `transfer_crop` by default.
        """
        key = compute, crop or self.transfer_crop
        if key not in self._extractors:
            graphdef, _, shardings = self._loaded
            options = self._options | {"compute": compute, "say": self.say}
            self._extractors[key] = Extractor(graphdef, shardings, self.mesh, key[1], **options)
        return self._extractors[key]

    def see(
        self, source: Source, compute: Compute = representation, crop: TestCrop | None = None
    ) -> Features:
        """Applies `compute` to every readable image of a source.

        Raises:
          Stopped: it was told not to go on.
          UserError: no image is readable, or too many are not.
        """
        seen = self.extractor(compute, crop)(self.params, source, self.go_on)
        if seen is None:
            raise Stopped
        return seen


@dataclass(frozen=True)
class Measurement:
    """A look at one data set: the names of its rows, and what finds their figures.

    Args:
      names: of the rows.
      open: opens the data for those rows whose names it gets, before the model is needed; a
        UserError says why they cannot be had.
      measure: makes the rows of the model and what was opened.
      fingerprint: short values by which two hosts see whether they opened the same.
      identify: fingerprints the data of a row, by its name, without reading all labels. It raises
        UserError where they cannot be had.
    """

    names: tuple[str, ...]
    open: Callable[[Sequence[str]], Any]
    measure: Callable[[Subject, Any], Sequence[Row]]
    fingerprint: Callable[[Any], Mapping[str, int | str]] = lambda opened: {}
    identify: Callable[[str], Mapping[str, int | str]] = lambda name: {}


@dataclass(frozen=True)
class Suite:
    """An evaluation with a name.

    Args:
      title: heading of its table.
      needs: the data that it needs and where they come from.
      measurements: all its looks at data, with nothing opened yet.
      options: its flags.
      settings: what its figures depend on besides the data; figures of other settings are not mixed
        in.
      published: tables of `vit_jax.published` whose figures stand beside its own.
      means: rows that are means of others: the names of these by the mean's, of those that there
        are.
      draw: a panel on Matplotlib's axes of rows that have figures, and the published figures.
      spoken: how lines of a training run begin.
      short: the name of a row among a training run's metrics, `SUITE/SHORT`.
      in_training: whether it can be run during training.
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
        """The values of options that nobody gave."""
        return {name: option.default for name, option in self.options.items()}


def text_option(meaning: str) -> SuiteOption:
    """A path or a word; empty by default."""
    return SuiteOption("", meaning)


def whole_numbers_option(default: Sequence[int], meaning: str, least: int) -> SuiteOption:
    """Whole numbers with commas, each taken once."""

    def parse(text: str) -> list[int]:
        values = text.split(",")
        if not all(re.fullmatch("[0-9]+", value) and int(value) >= least for value in values):
            raise UserError(f"give whole numbers, {least} or above, with commas")
        return list(dict.fromkeys(map(int, values)))

    return SuiteOption(list(default), meaning, parse)


def in_data_dir(path: str, data_dir: str) -> str:
    """The name of a TFDS data set with the folder where it is, unless it says that itself."""
    named_only = re.fullmatch(r"[\w/-]+(:[\d.*]+)?", path) and not path.startswith("/")
    return f"{path}:{data_dir}" if data_dir and named_only else path


DATA_DIR = text_option("Where TFDS's data sets are, if not in ~/tensorflow_datasets.")


def digest_of(values: Mapping[str, Any]) -> str:
    """A short name of some values, for the same ones and no others."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def mean(figures: Mapping[str, float], names: Collection[str]) -> float:
    """The mean of some of the figures."""
    return math.fsum(figures[name] for name in names) / len(names)
