"""The content of a library's folder: how the library writes the models of each family that it has."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.beside import Shapes
from vit_jax.interop.layout import Entry, Rule
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models.image_model import ImageModel

Tensors = dict[str, Tensor]
Arrays = dict[str, np.ndarray]
Values = dict[str, Any]  # Arguments of a model.

# Arguments that belong to the run that trains a model: another run has its own.
REGULARISATION = {"dropout", "attention_dropout", "stochastic_depth", "uniform_depth", "depth_by"}
REGULARISATION |= {"rope_rescale"}
# Arguments that change nothing in what a trained model computes of images of its size.
TRAINING_ONLY = REGULARISATION | {"position_resize", "head_bias", "head_deviation", "initialization"}
TRAINING_ONLY |= {"layer_scale", "remat", "scan", "dtype"}


# The kinds of probabilities by the names that Transformers' configs have for the problem.
PROBLEM_TYPES = {"softmax": "single_label_classification", "sigmoid": "multi_label_classification"}


def read_problem_type(config: dict, num_classes: int) -> str:
    """The kind of probabilities by a config's `problem_type`; without one as Transformers' pipeline has it.

    Raises:
      UserError: the outputs are no probabilities.
    """
    if (said := config.get("problem_type")) is None:
        return "sigmoid" if num_classes == 1 else "softmax"
    for kind, name in PROBLEM_TYPES.items():
        if name == said:
            return kind
    known = " and ".join(PROBLEM_TYPES.values())
    raise UserError(f"Unsupported: config.json with problem_type={said!r}. Supported: {known}.")


def problem_type(num_classes: int, probabilities: str) -> dict[str, str]:
    """Returns the `config.json` entry for a kind of probabilities; empty if it is the default."""
    unsaid = not num_classes or read_problem_type({}, num_classes) == probabilities
    return {} if unsaid else {"problem_type": PROBLEM_TYPES[probabilities]}


class ObjectiveFormat(NamedTuple):
    """A library's way to write what an objective of training has beside a model, such as a decoder.

    Attributes:
      name: of the objective, as in `config.objective.name`, or `beside.MASK`.
      owns: regular expression of how its tensors' names start.
      values: those of `config.objective` that tensors and a `config.json` say.
      rename: brings its tensors to the names that `rules` knows. It raises UserError for tensors that the
        objective would compute otherwise with.
      rules: the names of its parameters, by the model's arguments.
      describe: what `config.json` says of a model with such parameters, by the model's arguments and the
        values of `config.objective`. It raises UserError for what the library does not have; None: nothing is
        written.
      finish: the tensors that are written besides, by the same two.
      prefix: of the model's names where the objective's are beside them.
      shapes: of its parameters by our path, by the model's arguments; None: they follow from the values.
    """

    name: str
    owns: str
    values: Callable[[Tensors, dict], Values]
    rename: Callable[[Tensors, dict], Tensors]
    rules: Callable[[Values], Sequence[Rule]]
    describe: Callable[[Values, Values], dict] | None = None
    finish: Callable[[Values, Values], Arrays] = lambda values, said: {}
    prefix: str = ""
    shapes: Callable[[Values], Shapes] | None = None


class Format(NamedTuple):
    """A library's way to write the models of one family: the family's file in its folder ends with one.

    Attributes:
      model: the family's class.
      claims: whether a `config.json` (or {}) and tensors' names are of such a model.
      arguments: turns tensors (renamed), a `config.json` and the size of the images that are wanted, or None,
        into the model's arguments and, in words, what the files leave open.
      rules: the names of a model's parameters, by its arguments.
      describe: what the library's `config.json` says of a model. It raises UserError for a model that the
        library does not have.
      rename: brings tensors to the names and shapes that `rules` knows, whatever version wrote them.
      number: changes the names of the entries to write.
      finish: changes the arrays to write.
      holds: whether a model of the family, by its arguments, belongs in this format, where there are several.
      objective: what of training such files may hold beside the model; None: nothing.
    """

    model: type[ImageModel]
    claims: Callable[[Mapping, Mapping], bool]
    arguments: Callable[[Tensors, dict, Any], tuple[Values, str]]
    rules: Callable[[Values], Sequence[Rule]]
    describe: Callable[[Values], dict]
    rename: Callable[[Tensors, dict], Tensors] = lambda tensors, config: tensors
    number: Callable[[list[Entry], Values], list[Entry]] = lambda entries, values: entries
    finish: Callable[[Arrays, Values], Arrays] = lambda arrays, values: arrays
    holds: Callable[[Values], bool] = lambda values: True
    objective: ObjectiveFormat | None = None


class Library(NamedTuple):
    """A library whose checkpoints are read and written.

    Attributes:
      title: its name in messages.
      formats: one for each family of models, or several.
      suffix: of its files; empty: a folder.
      claims: whether files are the library's, by their path, `config.json` (or {}) and tensors.
      prepare: what all of the library's models need before `Format.claims`: tensors and config, changed.
      unknown: says why tensors of no known format are refused, by config and tensors.
      preprocessing: mean and deviation of the pixels, what else the model should see of an image, and in
        words what a file does not say; from `config.json`, `preprocessor_config.json` and the channels.
      class_names: the names of the classes in a `config.json`, if they are named.
      probabilities: the kind of probabilities, `softmax` or `sigmoid`, by a `config.json` and the number of
        classes.
      files: the JSON files beside the tensors, by name; None: the library has none.
      written: models are written for it too.
    """

    title: str
    formats: tuple[Format, ...]
    suffix: str
    claims: Callable[[Path, dict, Tensors], bool]
    prepare: Callable[[Path, Tensors, dict], tuple[Tensors, dict]]
    unknown: Callable[[dict, Tensors], str]
    preprocessing: Callable[[dict, dict, int], tuple[dict, Preprocessing | None, str]]
    class_names: Callable[[dict], list]
    files: Callable[[dict, Values, Preprocessing | None, Sequence[str], str], dict[str, dict] | None]
    written: bool = True
    probabilities: Callable[[dict, int], str] = read_problem_type

    def read_format(self, config: dict, tensors: Tensors) -> Format:
        """The format that tensors are in.

        Raises:
          UserError: none of the library's.
        """
        for known in self.formats:
            if known.claims(config, tensors):
                return known
        raise UserError(self.unknown(config, tensors))

    def format_of(self, model: type[ImageModel], values: Values) -> Format:
        """The format of models of a class with these arguments.

        Raises:
          UserError: the library has no such models.
        """
        for known in self.formats:
            if known.model is model and known.holds(values):
                return known
        raise UserError(f"{self.title} has no {model.__name__}")

    def has(self, model: type[ImageModel], values: Values) -> bool:
        """True where the library can describe a model of a class with these arguments."""
        try:
            self.format_of(model, values).describe(values)
        except UserError:
            return False
        return True

    def writes_objective(self, model: type[ImageModel], values: Values, name: str, said: Values) -> bool:
        """True where the library has a place beside such a model for an objective's parameters.

        Args:
          name: of the objective.
          said: values of `config.objective`.
        """
        known = self.format_of(model, values).objective
        if known is None or known.name != name or known.describe is None:
            return False
        try:
            known.describe(values, said)
        except UserError:
            return False
        return True


def refuse_unsaid(title: str, model: type[ImageModel], values: Values, *said: str, **only: Any) -> None:
    """Raises UserError for an argument that a library cannot say, and that is not as it always is there.

    Args:
      title: the library's name of such models.
      values: complete arguments.
      said: names of those that the library says, beside the model's sizes and its pixels' statistics.
      only: what others always are there, where it is not our own default.
    """
    for name, parameter in inspect.signature(model.__init__).parameters.items():
        always = only.get(name, parameter.default)
        free = name in (
            *said,
            *TRAINING_ONLY,
            "channels",
            "mean",
            "deviation",
            "norm_epsilon",
            "resnet_epsilons",
        )
        told = name not in only and (free or always is inspect.Parameter.empty)
        if not told and values[name] != always:
            raise UserError(f"{title} has no {name}={values[name]!r}")


def load_formats(package: str, *modules: str) -> tuple[Format, ...]:
    """The `FORMAT` of each of a library's modules."""
    return tuple(import_module(f"{package}.{module}").FORMAT for module in modules)
