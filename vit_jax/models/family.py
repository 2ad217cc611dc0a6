"""A family of models: its names, and the properties of its parameters.

`vit_jax.models.FAMILIES` lists all families. No other code distinguishes a ViT from a BiT.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vit_jax.models.image_model import ImageModel


class Axes(NamedTuple):
    """The logical axes of a parameter, such as dim, part, heads and head_dim of a projection.

    The axis `part` indexes arrays that published code stores separately and that are stacked here
    in one parameter, such as q, k and v.
    """

    names: tuple[str, ...]
    inputs: int  # Number of leading axes that are summed over; 0: not a kernel.


class Change(NamedTuple):
    """A parameter of an adapted model, and the model before and after the adaptation.

    Attributes:
      path: the parameter's path.
      shape: its shape in the adapted model.
      before, after: the models, with shapes in place of arrays.
    """

    path: str
    shape: tuple[int, ...]
    before: Any
    after: Any


@dataclass(frozen=True)
class Resize:
    """A rule that resizes parameters with a size-dependent layout, such as position tables.

    The rule applies if the layout's size (such as the grid) differs between the two models.

    Attributes:
      path: regular expression for whole paths.
      size: returns the layout's size for a model and the shape of its parameter.
      resize: converts the checkpoint's values to float32 of `Change.shape`, for the adapted model.
        Raises UserError if they cannot be resized.
      note: returns a log message for the sizes before and after; empty: none.
      has_tokens: the parameter also has rows for prefix tokens; the rule also applies if only these
        differ.
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
      resizes: rules that resize parameters; the first one that matches a path is used.
      heads: prefixes of the paths of the classification heads.
      new_norms: path prefixes of norms; if the checkpoint lacks them, they start as the identity.
      copied: maps a regular expression to the path of one parameter. If the checkpoint has this
        parameter, it is copied to all matching paths.
      computed: returns, by path, arrays that this model computes but other models of the family
        learn.
      implied: called with the checkpoint's arguments and the changed ones; returns further
        arguments that must change with them.
    """

    resizes: tuple[Resize, ...] = ()
    heads: tuple[str, ...] = ("head/",)
    new_norms: tuple[str, ...] = ()
    copied: Mapping[str, str] = field(default_factory=dict)
    computed: Callable[[Any], dict[str, np.ndarray]] = lambda model: {}
    implied: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda known, changes: {}

    def resize_of(self, path: str) -> Resize | None:
        """Returns the rule for the parameter with this path; None: it cannot be resized."""
        return next((rule for rule in self.resizes if re.fullmatch(rule.path, path)), None)

    def source_of(self, path: str, stored: Iterable[str]) -> str:
        """Returns the checkpoint path of the values that initialize this parameter.

        Args:
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
      model: the class; its name is the family's, and is stored in manifests of workdirs.
      names: names of the listed models.
      parse: returns the class's arguments for a name such as "ViT-B/16"; None: a name of another
        family.
      spell: returns the name for complete arguments, or a description of the sizes if they have no
        name.
      source: returns the publication of a named model.
      smallest: given complete or parsed arguments, returns changes (including `image_size`) that
        make the model small but run all of its code, for `:smoke` and tests.
      axes: logical axes for the end of a parameter's path, a regular expression: "dim -> part heads
        head_dim" for a kernel, inputs before the arrow, and "part heads head_dim" for its bias.
        Two entries may have the same path if they differ in their number of axes.
      layer: given a model, returns a function from a parameter's path to its encoder layer: -1
        before the encoder, infinity after it. None: the family has no such layers.
      embedding: path prefixes of the patch embedding and its norm, whose learning rate can be
        scaled; empty: the family has no patch embedding.
      undecayed: regular expressions for the ends of paths of parameters without weight decay, in
        addition to biases and scales.
      any_size: the shapes of a model's parameters do not depend on the size of its images.
      fixed_size: `vit-jax finetune` keeps the checkpoint's image size instead of choosing one, as
        another size could change the model's arguments, such as Swin's windows.
      loose: arguments of the name that may differ between a run and the checkpoint it starts from.
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
    """Parses a description of axes such as "dim -> part heads head_dim"."""
    inputs, arrow, outputs = text.partition("->")
    if not arrow:
        return Axes(tuple(text.split()), 0)
    return Axes((*inputs.split(), *outputs.split()), len(inputs.split()))


def match_axes(table: Iterable[tuple[str, str]], path: str, rank: int) -> Axes | None:
    """Returns the axes of the first entry of `Family.axes` that matches path and rank, or None."""
    for end, text in table:
        axes = parse_axes(text)
        if len(axes.names) == rank and re.search(rf"(^|/){end}$", path):
            return axes
    return None
