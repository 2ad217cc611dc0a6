"""Api overrides: data, a model and callbacks of a program that trains in its own process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.models.image_model import ImageModel


class ApiOverrides(NamedTuple):
    """Overrides of the config by a calling program, such as a notebook.

    Attributes:
      data: data sets by split, `train` and `test`, in the form of `handed_in`; None: the config's.
      model: model from which training starts; None: the config's model or checkpoint.
      on_log: called with step and metrics when a row of `metrics.jsonl` is written.
      groups: the group of each example of `train`; a slice contains all examples of a group or
        none.
    """

    data: Mapping[str, Any] | None = None
    model: ImageModel | None = None
    on_log: Callable[[int, dict[str, float]], None] | None = None
    groups: Sequence | None = None
