"""A family of models as a value: its names, and what other parts of the program must know of its parameters.

`vit_jax.models.FAMILIES` lists all of them. Nothing else asks "a ViT or a BiT?".
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from vit_jax.models.image_model import ImageModel


class Axes(NamedTuple):
    """The logical axes of a parameter, such as dim, part, heads and head_dim of a projection.

    An axis called `part` counts arrays that lie side by side in one, and that published code keeps apart.
    """

    names: tuple[str, ...]
    inputs: int  # The first so many are summed over; 0 for what is no kernel.


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
      model: the class; its name is the family's, which manifests of workdirs have.
      names: the models that are listed.
      parse: turns a name such as "ViT-B/16" into arguments of the class; None: it is no name of this family.
      spell: turns complete arguments into the name, or into words for sizes that have none.
      source: the publication of a named model.
      smallest: turns complete or parsed arguments into those, `image_size` too, that make the model small and
        still run every line of it, for `:smoke` and tests.
      axes: logical axes by the end of a parameter's path, a regular expression: "dim -> part heads head_dim"
        of a kernel, inputs before the arrow, and "part heads head_dim" of its bias. Several entries may end
        alike and differ in their number of axes.
      layer: makes of a model the function that gives the number of the encoder layer that a parameter belongs
        to, by its path in the model; -1 before the encoder, infinity behind it. None: the family has no such
        layers.
      embedding: starts of the paths of what turns patches into tokens, a norm on these too, for which the
        learning rate may have a factor; empty: the family has no patch embedding.
      undecayed: ends of the paths, regular expressions, of parameters that weight decay leaves alone, as it
        does biases and scales.
      any_size: a model's parameters do not tell the size of its images.
      loose: arguments that names tell, and that a run may change in the checkpoint from which it starts.
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
    loose: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the class, such as `ViT`."""
        return self.model.__name__


def parse_axes(text: str) -> Axes:
    """Reads "dim -> part heads head_dim"."""
    inputs, arrow, outputs = text.partition("->")
    if not arrow:
        return Axes(tuple(text.split()), 0)
    return Axes((*inputs.split(), *outputs.split()), len(inputs.split()))


def match_axes(table: Iterable[tuple[str, str]], path: str, rank: int) -> Axes | None:
    """The first entry of a family's `axes` that a path ends with and that has so many axes, or None."""
    for end, text in table:
        axes = parse_axes(text)
        if len(axes.names) == rank and re.search(rf"(^|/){end}$", path):
            return axes
    return None
