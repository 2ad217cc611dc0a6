"""Evaluation suites during training.

The config selects suites by `config.evaluate.suites`, and by sections such as `config.fewshot`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import Mesh

from vit_jax.data.preprocess import TestCrop
from vit_jax.errors import UserError, nearest
from vit_jax.evaluation.features import transfer_crop
from vit_jax.evaluation.suite import Impossible, Measurement, Outputs, Stopped, Subject, Suite
from vit_jax.evaluation.suites import SUITES
from vit_jax.evaluation.text_encoder import TextEncoder
from vit_jax.models.text import tokenizer_of
from vit_jax.options.option import options_of
from vit_jax.options.run import RunOptions
from vit_jax.parallel.peers import Peers

OWN_SECTIONS = ("fewshot", "knn")  # Suites that have a config section of the same name.


class Opened(NamedTuple):
    """A `Measurement` of a suite (evaluation on one data set), and the opened data set."""

    suite: Suite
    measurement: Measurement
    data: Any
    every: int  # Interval in steps; 0: only at the end.


class TrainingSuites:
    """Evaluation suites of a training run. Their data are opened before the model is created.

    Attributes:
      fingerprints: a dict from a description of each data set to the fingerprint of its data.

    Args:
      config: config of the run. Preprocessing options that were None must have been replaced by the
        checkpoint's values.
      peers: the run's processes. The data of all processes are compared and must be equal.
      class_names: names of the classes of the run's head, by index; empty: the run has no classes.

    Raises:
      UserError: a suite or an option does not exist, or data cannot be opened or differ between
        processes.
    """

    def __init__(
        self,
        config: RunOptions,
        mesh: Mesh,
        test_crop: TestCrop,
        peers: Peers,
        class_names: Sequence[str] = (),
    ):
        data = config.data
        self._model: Any = None  # Set by `attach`.
        self._objective: Any = None
        self._texts: TextEncoder | None = None
        self._subject = Subject(
            "the model in training",
            mesh,
            lambda: self._model,
            lambda: transfer_crop(
                data.image_size,
                mode=data.decode,
                interpolation=data.interpolation or "bilinear",
                background=data.background,
            ),
            lambda: test_crop,
            functools.partial(self._text_encoder, config, mesh),
            num_classes=len(class_names),
            class_names=class_names,
            batch_size=config.batch_size,
            workers=data.workers,
            threads=data.threads,
            max_unreadable=data.max_unreadable,
        )
        self._subject.caption_key = data.caption_key
        self._opened: list[Opened] = []
        self.fingerprints: dict[str, dict[str, int | str]] = {}
        for name in OWN_SECTIONS:
            if not (section := getattr(config, name)).every:
                continue
            options = {
                key: getattr(section, key)
                for key in options_of(type(section))
                if key not in ("every", "sets")
            }
            options["set"] = SUITES[name].options["set"].parse(section.sets)
            where = [(f"{name}.sets", text) for text in section.sets]
            self._open(name, options, data.image_size, section.every, where, peers)
        for name in config.evaluate.suites:
            check_suite(name)
        options_by_key = parsed_options(config.evaluate.options, config.evaluate.suites)
        for name in config.evaluate.suites:
            options = {
                key: value for key, value in options_by_key.items() if key in SUITES[name].options
            }
            self._open(name, options, data.image_size, config.evaluate.suites_every, None, peers)

    def _open(
        self,
        name: str,
        options: Mapping[str, Any],
        image_size: int,
        every: int,
        where: Sequence[tuple[str, str]] | None,
        peers: Peers,
    ) -> None:
        """Opens the data of a suite.

        Args:
          every: interval of evaluations in steps; 0: only at the end of the run.
          where: for error messages, a tuple for each data set of the suite. It contains the config
            key and the value that select the data set, such as `("fewshot.sets", "tfds:cifar100")`.
            None: the key is `evaluate.suites`.
        """
        suite = SUITES[name]
        values = {"image_size": image_size} | suite.defaults() | options
        measurements = suite.measurements(self._subject, values)
        places = where or [("evaluate.suites", f"{name}, {one.names[0]}") for one in measurements]
        for measurement, (key, source) in zip(measurements, places, strict=True):
            try:
                opened = measurement.open(measurement.names)
            except Impossible as error:
                raise (error.__cause__ or error) from None
            except UserError as error:
                raise UserError(f"config.{key}: cannot open {source}: {error}") from error
            name = f"the data of config.{key}: {source}"
            self.fingerprints[name] = dict(measurement.fingerprint(opened))
            if peers.count > 1:
                peers.agree(name, self.fingerprints[name])
            self._opened.append(Opened(suite, measurement, opened, every))

    def _text_encoder(self, config: RunOptions, mesh: Mesh) -> TextEncoder:
        """Returns the run's text encoder, or raises UserError if it has none."""
        if config.objective.name != "contrastive":
            raise UserError(
                f"a run with objective.name={config.objective.name!r} has no text tower: train "
                "with configs/siglip.py or configs/clip.py, or remove the suite"
            )
        self._texts = TextEncoder(
            tokenizer_of(config.contrastive),
            "sigmoid" if config.contrastive.loss == "sigmoid" else "softmax",
            mesh,
            lambda: self._objective,
            lambda objective: objective.text,
            self._similarity,
        )
        return self._texts

    def _similarity(self, params: dict) -> tuple[float, float | None]:
        """Returns the scale and the bias (or None) that convert cosine similarities to logits."""
        objective: Any = nnx.merge(self._objective[0], params)
        bias = objective.logit_bias
        return float(objective.scale), None if bias is None else float(bias[...])

    def attach(
        self,
        model: tuple[nnx.GraphDef, dict],
        objective: tuple[nnx.GraphDef, dict],
        log: Callable[[str], None],
        on_outputs: Callable[[Outputs], None],
    ) -> None:
        """Sets the model, the objective and the callbacks of the run.

        Args:
          model: graph definition of the model, and shardings of its parameters.
          objective: graph definition of the objective, and shardings of its parameters.
          on_outputs: callback that receives example outputs of a suite (`Outputs`), such as
            predicted masks, to write them on a page of images.
        """
        self._subject.log, self._subject.on_outputs = log, on_outputs
        self._model, self._objective = ((graph, {}, places) for graph, places in (model, objective))

    def __call__(
        self, params: dict, objective_params: dict, step: int, last: bool, go_on: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Runs the suites that are due after a step, and returns their metrics.

        The name of a metric consists of the suite's name and the short name of the result row. For
        example, `fewshot/cifar100/5` is the accuracy of the suite `fewshot` on CIFAR-100 with 5
        shots.

        Args:
          last: True after the run's last step. All suites are then due.
          go_on: function that is called before each batch and each fit. If it returns False, the
            result is None.
        """
        self._subject.params, self._subject.go_on, figures = params, go_on, {}
        if self._texts:
            self._texts.params = objective_params
        for suite, measurement, data, every in self._opened:
            if not last and (every == 0 or step % every):
                continue
            try:
                rows = measurement.measure(self._subject, data)
            except Stopped:
                return None
            there = [row for row in rows if row.accuracy is not None]
            figures |= {f"{suite.name}/{suite.short(row.name)}": row.accuracy for row in there}
        return figures


def check_suite(name: str) -> None:
    """Raises UserError if the suite does not exist or cannot be run during training."""
    known = [suite.name for suite in SUITES.values() if suite.in_training]
    if name not in known:
        raise UserError(
            f"config.evaluate.suites: no suite {name!r} for training; {nearest(name, known)}"
        )


def parsed_options(texts: Sequence[str], suites: Sequence[str]) -> dict[str, Any]:
    """Parses `config.evaluate.options`, texts such as `shots=1,5`, for the selected suites.

    Raises:
      UserError: none of the suites has the option, or the value is invalid.
    """
    options = {key: option for name in suites for key, option in SUITES[name].options.items()}
    by_key: dict[str, list[str]] = {}
    for line in texts:
        key, _, value = line.partition("=")
        if key not in options:
            raise UserError(f"config.evaluate.options: no option {key!r}; {nearest(key, options)}")
        by_key.setdefault(key, []).append(value)
    values = {}
    for key, each in by_key.items():
        try:
            values[key] = options[key].parse(each if options[key].repeated else each[-1])
        except ValueError as error:
            raise UserError(f"config.evaluate.options: {key}={each[-1]}: {error}") from error
    return values


def in_lines(figures: Mapping[str, float]) -> list[str]:
    """Formats metrics as log lines, one for each pair of a suite and a data set."""
    lines: dict[str, list[str]] = {}
    for key, value in figures.items():
        name, _, rest = key.partition("/")
        of, _, short = rest.rpartition("/")
        spoken = SUITES[name].spoken or name
        lines.setdefault(f"{spoken} {of}".strip(), []).append(f"{short}: {value:.2%}")
    return [" | ".join([heading, *parts]) for heading, parts in lines.items()]
