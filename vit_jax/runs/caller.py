"""A program that trains within its own process, such as a notebook, and what it hands to the
run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.models.image_model import ImageModel


class Caller(NamedTuple):
    """Things that a calling program hands in, in place of what the config names.

    Attributes:
      data: data sets by split, `train` and `test`, as of `handed_in`; None: the config's.
      model: starts the run with its parameters; None: the config's model or checkpoint does.
      on_log: is called with the step and its figures, the rows of `metrics.jsonl`, as they are
        written.
      groups: the group of each example of `train`: a slice has all examples of a group or none.
    """

    data: Mapping[str, Any] | None = None
    model: ImageModel | None = None
    on_log: Callable[[int, dict[str, float]], None] | None = None
    groups: Sequence | None = None
