"""Description of a library's formats: classes `Library`, `Format` and `ObjectiveFormat`."""

import dataclasses
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

# Training arguments that a new training run does not inherit from a checkpoint.
REGULARISATION = {"dropout", "attention_dropout", "stochastic_depth", "uniform_depth", "depth_by"}
REGULARISATION |= {"rope_rescale"}
# Arguments that do not change a trained model's output for images of its own size.
TRAINING_ONLY = REGULARISATION | {
    "position_resize",
    "head_bias",
    "head_std",
    "initialization",
}
TRAINING_ONLY |= {"layer_scale", "remat", "scan", "dtype"}


# The `problem_type` in Transformers' configs for each kind of probabilities.
PROBLEM_TYPES = {"softmax": "single_label_classification", "sigmoid": "multi_label_classification"}


def read_problem_type(config: dict, num_classes: int) -> str:
    """Returns the kind of probabilities from a config's `problem_type`.

    The default is the same as in Transformers' pipeline: sigmoid for one class, else softmax.

    Raises:
      UserError: the outputs are not probabilities.
    """
    if (said := config.get("problem_type")) is None:
        return "sigmoid" if num_classes == 1 else "softmax"
    for kind, name in PROBLEM_TYPES.items():
        if name == said:
            return kind
    known = " and ".join(PROBLEM_TYPES.values())
    raise UserError(f"Unsupported: config.json with problem_type={said!r}. Supported: {known}.")


def problem_type(num_classes: int, probabilities: str) -> dict[str, str]:
    """Returns the `config.json` entry for a kind of probabilities; empty for the default kind."""
    unsaid = not num_classes or read_problem_type({}, num_classes) == probabilities
    return {} if unsaid else {"problem_type": PROBLEM_TYPES[probabilities]}


class ObjectiveFormat(NamedTuple):
    """A library's format for the parameters of a training objective, such as a decoder.

    Attributes:
      name: name of the objective, as in `config.objective.name`, or `beside.MASK`.
      owns: regular expression for the start of the objective's tensor names.
      values: `(tensors, config.json) -> values of config.objective`.
      rename: `(tensors, config.json) -> tensors` with the names in `rules`. It raises UserError for
        tensors of a different computation.
      rules: `model arguments -> rules` for the objective's parameters.
      describe: `(model arguments, values of config.objective) -> content of config.json` for a
        model with such parameters. It raises UserError if the library has no such model. None: the
        format is only read.
      finish: returns additional tensors to write; same arguments as `describe`.
      prefix: prefix of the model's tensor names in files with an objective.
      shapes: `model arguments -> shapes` of the objective's parameters, by our path; None: the
        values determine them.
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
    """A library's format for the models of one family, defined in a module of the library's folder.

    Model arguments are dicts. `config` is the content of `config.json`, or {}.

    Attributes:
      model: the family's class.
      claims: `(config, tensors) -> bool`: True if they are a model of this format.
      arguments: `(renamed tensors, config, image size) -> (model arguments, assumptions as text)`;
        the image size is that for which the model is loaded, or None.
      rules: `model arguments -> rules` for the model's parameters.
      describe: `model arguments -> content of config.json`. It raises UserError if the library has
        no such model.
      rename: `(tensors, config) -> tensors` with the names and shapes in `rules`, for all versions
        of the files.
      number: changes the names of the entries to write.
      finish: changes the arrays to write.
      holds: `model arguments -> bool`: True if this format is used to write the model, in case the
        library has several formats for the family.
      objective: format of an objective's parameters in such files; None: there are none.
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
      title: name of the library in messages.
      formats: one or several formats for each family of models.
      suffix: suffix of the library's files; empty: a folder.
      claims: `(path, config, tensors) -> bool`: True for the library's files.
      prepare: `(path, tensors, config) -> (tensors, config)`: changes that all formats of the
        library need.
      unknown: `(config, tensors) -> error message` for tensors of no known format.
      preprocessing: `(config, preprocessor config, channels) -> (mean and std of pixels,
        preprocessing, assumptions as text)`.
      class_names: `config -> class names`; empty if there are none.
      probabilities: `(config, number of classes) -> kind of probabilities`, `softmax` or `sigmoid`.
      files: returns the JSON files to write, by name; None: the library has none.
      written: True if models can be written in the library's formats.
    """

    title: str
    formats: tuple[Format, ...]
    suffix: str
    claims: Callable[[Path, dict, Tensors], bool]
    prepare: Callable[[Path, Tensors, dict], tuple[Tensors, dict]]
    unknown: Callable[[dict, Tensors], str]
    preprocessing: Callable[[dict, dict, int], tuple[dict, Preprocessing | None, str]]
    class_names: Callable[[dict], list]
    files: Callable[
        [dict, Values, Preprocessing | None, Sequence[str], str], dict[str, dict] | None
    ]
    written: bool = True
    probabilities: Callable[[dict, int], str] = read_problem_type

    def read_format(self, config: dict, tensors: Tensors) -> Format:
        """Returns the format of a config and tensors.

        Raises:
          UserError: the library has no such format.
        """
        for known in self.formats:
            if known.claims(config, tensors):
                return known
        raise UserError(self.unknown(config, tensors))

    def format_of(self, model: type[ImageModel], values: Values) -> Format:
        """Returns the format for models of a class with these arguments.

        Raises:
          UserError: the library has no such models.
        """
        for known in self.formats:
            if known.model is model and known.holds(values):
                return known
        raise UserError(f"{self.title} has no {model.__name__}")

    def has(self, model: type[ImageModel], values: Values) -> bool:
        """Returns True if the library has models of a class with these arguments."""
        try:
            self.format_of(model, values).describe(values)
        except UserError:
            return False
        return True

    def writes_objective(
        self, model: type[ImageModel], values: Values, name: str, said: Values
    ) -> bool:
        """Returns True if the library's files can contain an objective's parameters.

        Args:
          model: class of the model.
          values: arguments of the model.
          name: name of the objective.
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


def refuse_unsaid(
    title: str, model: type[ImageModel], values: Values, *said: str, **only: Any
) -> None:
    """Raises UserError if an argument that a library cannot store differs from the library's value.

    Args:
      title: the library's name for such models.
      values: all arguments of the model.
      said: names of the arguments that the library can store, in addition to sizes and pixel
        statistics.
      only: the library's fixed values of other arguments, if they differ from our defaults.
    """
    for field in dataclasses.fields(model.options_type):
        name, always = field.name, only.get(field.name, field.default)
        free = name in (
            *said,
            *TRAINING_ONLY,
            "channels",
            "mean",
            "std",
            "norm_epsilon",
            "resnet_epsilons",
        )
        told = name not in only and (free or always is dataclasses.MISSING)
        if not told and values[name] != always:
            raise UserError(f"{title} has no {name}={values[name]!r}")


def load_formats(package: str, *modules: str) -> tuple[Format, ...]:
    """Returns the `FORMAT` of each of a library's modules."""
    return tuple(import_module(f"{package}.{module}").FORMAT for module in modules)
