"""Classes for file formats: `Library`, `Format`, `ObjectiveFormat` and `TextFormat`."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.layout import Entry, Rule
from vit_jax.interop.objective_files import Shapes
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models.image_model import ImageModel
from vit_jax.options.text import TextOptions

Tensors = dict[str, Tensor]
Arrays = dict[str, np.ndarray]
Values = dict[str, Any]  # Arguments of a model.

# Model arguments that a new training run does not inherit from a checkpoint.
REGULARISATION = {"dropout", "attention_dropout", "stochastic_depth", "uniform_depth", "depth_by"}
REGULARISATION |= {"rope_rescale"}
# Model arguments that do not change the outputs of a trained model at the model's image size.
TRAINING_ONLY = REGULARISATION | {"position_resize", "head_bias", "head_std", "initialization"}
TRAINING_ONLY |= {"layer_scale", "remat", "scan", "dtype"}
# Arguments whose values formats check by themselves, or that all files store.
_STORED = TRAINING_ONLY | {"channels", "mean", "std", "norm_epsilon", "resnet_epsilons"}

# The `problem_type` in Transformers' configs for each key of `PROBABILITIES`.
PROBLEM_TYPES = {"softmax": "single_label_classification", "sigmoid": "multi_label_classification"}


def read_problem_type(config: dict, num_classes: int) -> str:
    """Returns the kind of probabilities, `softmax` or `sigmoid`, from a config's `problem_type`.

    The default is that of Transformers' pipeline: sigmoid for one class, softmax for several.

    Raises:
      UserError: with this `problem_type`, outputs are not probabilities.
    """
    if (type_name := config.get("problem_type")) is None:
        return "sigmoid" if num_classes == 1 else "softmax"
    for kind, name in PROBLEM_TYPES.items():
        if name == type_name:
            return kind
    known = " and ".join(PROBLEM_TYPES.values())
    raise UserError(
        f"Unsupported: config.json with problem_type={type_name!r}. Supported: {known}."
    )


def problem_type(num_classes: int, probabilities: str) -> dict[str, str]:
    """Returns the entry `problem_type` of a `config.json`, as a dict.

    The dict is empty if the model has no classes, or if `probabilities` is the default kind for
    this number of classes, as in `read_problem_type`.
    """
    is_default = not num_classes or read_problem_type({}, num_classes) == probabilities
    return {} if is_default else {"problem_type": PROBLEM_TYPES[probabilities]}


def read_image_size(size: int | list[int]) -> tuple[int, ...]:
    """Returns an image size of `config.json` as a tuple; models reject lengths other than 2."""
    return (size, size) if isinstance(size, int) else tuple(size)


def write_image_size(values: dict) -> int | list[int]:
    """Returns a model's image size as an entry of `config.json`: one number if it is square."""
    height, width = values["image_size"]
    return height if height == width else [height, width]


class ObjectiveFormat(NamedTuple):
    """A library's format for the parameters of a training objective, such as a decoder.

    Attributes:
      name: name of the objective, as in `config.objective.name`; or `objective_files.MASK`, if the
        only parameter is a mask token.
      owns: regular expression that matches the start of the objective's tensor names.
      values: called with the tensors and the content of `config.json`; returns the values of
        `config.objective`.
      rename: called with the tensors and the content of `config.json`; returns the tensors with the
        names in `rules`. Raises UserError if vit_jax has no objective with the same computation.
      rules: called with the model's arguments; returns the rules for the objective's parameters.
      describe: called with the model's arguments and the values of `config.objective`; returns the
        entries of `config.json` that describe the objective. Raises UserError if the library does
        not support it. None: the format is read, but not written.
      finish: called with the arguments of `describe`; returns additional tensors to write.
      prefix: prefix of the image model's tensor names in files that also contain an objective.
      shapes: called with the model's arguments; returns the shapes of the objective's parameters by
        vit_jax's path. None: the result of `values` determines the shapes.
    """

    name: str
    owns: str
    values: Callable[[Tensors, dict], Values]
    rename: Callable[[Tensors, dict], Tensors]
    rules: Callable[[Values], Sequence[Rule]]
    describe: Callable[[Values, Values], dict] | None = None
    finish: Callable[[Values, Values], Arrays] = lambda values, objective_values: {}
    prefix: str = ""
    shapes: Callable[[Values], Shapes] | None = None


class Format(NamedTuple):
    """A library's format for the models of one family, defined in a module of the library's folder.

    Most attributes are functions; modules define them as `_arguments`, `_rename` and so on. Their
    arguments are: `tensors`, the tensors of the files by name; `config`, the content of
    `config.json` or {}; and the model's arguments, a dict.

    Attributes:
      model: the class of the models.
      claims: called with `config` and `tensors`; returns True if the files contain a model in this
        format.
      arguments: called with the renamed tensors, `config` and the image size for which the model is
        loaded (or None). Returns the model's arguments, and a text with the assumptions made
        (empty: none). Raises UserError if the model is unsupported.
      rules: called with the model's arguments; returns the rules for the model's parameters.
      describe: called with the model's arguments; returns the content of `config.json`. Raises
        UserError if the library has no model with these arguments.
      rename: called with `tensors` and `config`; returns the tensors with the names and shapes that
        `rules` expect, for all versions of the files.
      number: called before writing with an `Entry` for each parameter and the model's arguments;
        returns the entries with the final tensor names.
      finish: called with the arrays to write and the model's arguments; returns the arrays with the
        final changes.
      holds: called with the model's arguments; returns True if such a model is written in this
        format. If a library has several formats for a family, `holds` selects the format.
      objective: format of a training objective's parameters in these files. None: the files do not
        contain parameters of objectives.
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

    `config` and `tensors` are as in `Format`.

    Attributes:
      title: name of the library in messages.
      formats: one or several formats for each family of models.
      suffix: suffix of the library's files; empty: the library writes folders.
      claims: called with a path, `config` and `tensors`; returns True if the files are the
        library's.
      prepare: called with a path, `tensors` and `config` before a format is selected. Returns the
        changed tensors and config, for example without a common prefix of all names.
      unknown: called with `config` and `tensors` that match no format; returns an error message.
      preprocessing: called with `config`, the content of `preprocessor_config.json` and the number
        of channels. Returns a dict with mean and std of pixels and perhaps `image_size`, the
        preprocessing of images (None: unknown), and a text with the assumptions made.
      class_names: called with `config`; returns the class names, or an empty list.
      probabilities: called with `config` and the number of classes; returns the kind of
        probabilities, `softmax` or `sigmoid`.
      files: returns the JSON files to write, by name; None: the library has no such files. Raises
        UserError if the library does not support the preprocessing's kind of crop.
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
        """Returns the first format whose `claims` returns True for a config and tensors.

        Raises:
          UserError: no format of the library matches.
        """
        for form in self.formats:
            if form.claims(config, tensors):
                return form
        raise UserError(self.unknown(config, tensors))

    def format_of(self, model: type[ImageModel], values: Values) -> Format:
        """Returns the format in which a model with this class and these arguments is written.

        Raises:
          UserError: the library has no format for this class of models.
        """
        for form in self.formats:
            if form.model is model and form.holds(values):
                return form
        raise UserError(f"{self.title} has no {model.__name__}")

    def has(self, model: type[ImageModel], values: Values) -> bool:
        """Returns True if the library can store a model with this class and these arguments."""
        try:
            self.format_of(model, values).describe(values)
        except UserError:
            return False
        return True

    def writes_objective(
        self, model: type[ImageModel], values: Values, name: str, objective_values: Values
    ) -> bool:
        """Returns True if the library's files can contain an objective's parameters.

        `values` are the model's arguments. `name` and `objective_values` are the name of the
        objective and the values of `config.objective`.
        """
        known = self.format_of(model, values).objective
        if known is None or known.name != name or known.describe is None:
            return False
        try:
            known.describe(values, objective_values)
        except UserError:
            return False
        return True


def require_defaults(
    title: str, model: type[ImageModel], values: Values, *stored: str, **only: Any
) -> None:
    """Checks the arguments of a model that a library's files cannot store.

    Each of these arguments must have the value that the library always uses. This value is given by
    `only`, or else is vit_jax's default value of the argument.

    Args:
      title: the library's name for models of this kind, for errors.
      model: class of the model.
      values: all arguments of the model.
      stored: names of the arguments that the library can store, in addition to sizes and to mean
        and std of pixels.
      only: maps arguments that the library cannot store to the values that the library uses.
        Arguments for which the library uses vit_jax's default value can be omitted.

    Raises:
      UserError: an argument has another value.
    """
    for field in dataclasses.fields(model.options_type):
        name, always = field.name, only.get(field.name, field.default)
        free = name in stored or name in _STORED or always is dataclasses.MISSING
        if name in only or not free:
            require_one_of(title, values, **{name: (always,)})


def require_one_of(title: str, values: Values, **supported: Collection) -> None:
    """Raises UserError if a library does not support the value of an argument.

    Args:
      title: the library's name for models of this kind, for errors.
      values: arguments of the model.
      **supported: the supported values of each argument.
    """
    for name, known in supported.items():
        if values[name] not in known:
            raise UserError(f"{title} has no {name}={values[name]!r}")


def load_formats(package: str, *modules: str) -> tuple[Format, ...]:
    """Returns the variable `FORMAT` of each of the modules in a package."""
    return tuple(import_module(f"{package}.{module}").FORMAT for module in modules)


class TextFormat(NamedTuple):
    """A text tower in a file of an image-text model.

    Attributes:
      title: the library's name in messages.
      options: arguments of the text tower.
      rules: rules that map the text tower's parameters to tensor names.
      tensors: tensors of the text tower, with the names in `rules`.
      probabilities: a key of `PROBABILITIES`: `softmax` or `sigmoid`.
      cleaning: kind of text cleaning, as in `open_tokenizer`.
      logit_scale: name of the tensor with the logarithm of the factor that multiplies cosine
        similarities.
      logit_bias: name of the tensor with the bias of the logits; None: the model has no bias.
    """

    title: str
    options: TextOptions
    rules: tuple[Rule, ...]
    tensors: Tensors
    probabilities: str
    cleaning: str
    logit_scale: str = "logit_scale"
    logit_bias: str | None = None
