"""A family of models, such as the ViTs: the models' names and the properties of their parameters.

`vit_jax.models.FAMILIES` lists all families. Other modules read the properties in which families
differ, such as names and parameter axes, from a `Family`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vit_jax.models.image_model import ImageModel


class Axes(NamedTuple):
    """The logical axes of a parameter, such as dim, part, heads and head_dim of a projection.

    Along the axis `part`, one parameter stacks several arrays that published code stores
    separately, such as the kernels of q, k and v.
    """

    names: tuple[str, ...]
    inputs: int  # Number of leading axes that a product sums over; 0: not a kernel.


class Change(NamedTuple):
    """A parameter of an adapted model, and the model before and after the adaptation.

    Attributes:
      path: the parameter's path.
      shape: the parameter's shape in the adapted model.
      before, after: the two models; they contain shapes in place of arrays.
    """

    path: str
    shape: tuple[int, ...]
    before: Any
    after: Any


@dataclass(frozen=True)
class Resize:
    """A rule that resizes a parameter whose shape depends on a setting of the model.

    For example, the shape of a table of position embeddings depends on the grid of patches. The
    rule is applied if the setting differs between the checkpoint's model and the adapted model.

    Attributes:
      path: regular expression that matches the whole path of the parameter.
      size: called with a model and the shape of the parameter; returns the model's value of the
        setting, such as the grid.
      resize: called with the checkpoint's values and a `Change`; returns float32 values of the
        shape `Change.shape`. Raises UserError if the values cannot be resized.
      note: called with the setting of the checkpoint's model and of the adapted model; returns a
        log message, or an empty string for no message.
      has_tokens: the parameter also has rows for prefix tokens, such as the class token. The rule
        is then also applied if the models have different prefix tokens, but the same setting.
    """

    path: str
    size: Callable[[Any, tuple[int, ...]], tuple[int, ...]]
    resize: Callable[[np.ndarray, Change], np.ndarray]
    note: Callable[[tuple[int, ...], tuple[int, ...]], str] = lambda before, after: ""
    has_tokens: bool = False


@dataclass(frozen=True)
class Adaptation:
    """Rules that convert a checkpoint's parameters for a model with other arguments.

    Attributes:
      resizes: rules that resize parameters; the first rule that matches a path is used.
      heads: prefixes of the paths of the classification heads.
      new_norms: path prefixes of norms. A norm that the checkpoint lacks is initialized as the
        identity: scale 1, bias 0.
      copied: maps a regular expression to the path of a parameter in the checkpoint. All parameters
        of the adapted model whose path matches the expression are initialized from this parameter.
      computed: called with the checkpoint's model; returns computed arrays, by the path of the
        parameter that they initialize in the adapted model. For example, fixed position embeddings
        initialize learned position embeddings.
      implied: called with the checkpoint's arguments and the changed arguments; returns further
        arguments that must change together with the changed arguments.
    """

    resizes: tuple[Resize, ...] = ()
    heads: tuple[str, ...] = ("head/",)
    new_norms: tuple[str, ...] = ()
    copied: Mapping[str, str] = field(default_factory=dict)
    computed: Callable[[Any], dict[str, np.ndarray]] = lambda model: {}
    implied: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda known, changes: {}

    def resize_of(self, path: str) -> Resize | None:
        """Returns the rule that resizes the parameter with this path; None: no rule matches."""
        return next((rule for rule in self.resizes if re.fullmatch(rule.path, path)), None)

    def source_of(self, path: str, stored: Iterable[str]) -> str:
        """Returns the path of the checkpoint's parameter that initializes the parameter `path`.

        Args:
          path: path of the parameter in the adapted model.
          stored: the paths of all parameters of the checkpoint.
        """
        for pattern, source in self.copied.items():
            if source in stored and re.fullmatch(pattern, path):
                return source
        return path


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
      model: the model class. Its name, such as `ViT`, is also the name of the family, and the
        manifests of workdirs contain it.
      names: the model names of this family in `vit_jax.models.MODELS`.
      parse: returns the model arguments that a name such as "ViT-B/16" implies; None if the name
        belongs to another family.
      spell: inverts `parse`: called with all arguments of a model; returns the model's name. If the
        model has no name, returns a description of its size.
      source: returns the publication of a named model.
      smallest: called with the arguments of a model; returns changes of these arguments (including
        `image_size`) that make the model small but still run all of its code. Used by `:smoke` and
        by tests.
      axes: pairs (expression, axes). The regular expression matches the end of a parameter's path,
        and `axes` lists the parameter's logical axes. For example, "dim -> part heads head_dim" are
        the axes of a kernel, with the inputs before the arrow, and "part heads head_dim" are the
        axes of its bias. Two entries may have the same expression if their numbers of axes differ.
      layer: called with a model; returns a function from a parameter's path to the number of its
        encoder layer: -1 before the encoder, infinity after it. None: the family has no such
        function.
      embedding: path prefixes of the patch embedding and its norm. A config option multiplies the
        learning rate of these parameters. Empty: the family has no patch embedding.
      undecayed: regular expressions for the ends of paths of parameters without weight decay, in
        addition to biases and scales.
      any_size: the shapes of a model's parameters do not depend on the size of its images.
      fixed_size: `vit-jax finetune` keeps the checkpoint's image size, because another image size
        could change arguments of the model, such as Swin's windows.
      loose: names of arguments that may differ between a trained model and the checkpoint that
        initializes it, even if the model name implies their values.
      adaptation: rules that adapt a checkpoint's parameters to other arguments.
    """

    model: type[ImageModel]
    names: tuple[str, ...]
    parse: Callable[[str], dict[str, Any] | None]
    spell: Callable[[dict[str, Any]], str]
    source: Callable[[str], str]
    smallest: Callable[[dict[str, Any]], dict[str, Any]]
    axes: tuple[tuple[str, str], ...]
    layer: Callable[[ImageModel], Callable[[str], float]] | None = None
    embedding: tuple[str, ...] = ()
    undecayed: tuple[str, ...] = ()
    any_size: bool = False
    fixed_size: bool = False
    loose: tuple[str, ...] = ()
    adaptation: Adaptation = Adaptation()

    @property
    def name(self) -> str:
        """The name of the class, such as `ViT`."""
        return self.model.__name__


def parse_axes(text: str) -> Axes:
    """Parses the axes in `Family.axes`, such as "dim -> part heads head_dim"."""
    inputs, arrow, outputs = text.partition("->")
    if not arrow:
        return Axes(tuple(text.split()), 0)
    return Axes((*inputs.split(), *outputs.split()), len(inputs.split()))


def match_axes(table: Iterable[tuple[str, str]], path: str, rank: int) -> Axes | None:
    """Returns the axes of a parameter from a table like `Family.axes`; None: no entry matches.

    The first entry that matches both the path and the number of axes, `rank`, is used.
    """
    for end, text in table:
        axes = parse_axes(text)
        if len(axes.names) == rank and re.search(rf"(^|/){end}$", path):
            return axes
    return None
