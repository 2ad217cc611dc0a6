"""API overrides: data, a model and callbacks that a program passes to `vit_jax.train`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.models.image_model import ImageModel


class ApiOverrides(NamedTuple):
    """Overrides of the config by a calling program, such as a notebook.

    Attributes:
      data: the opened data set by split (`train` and `test`), as returned by `sources.handed_in`;
        None: the config's data.
      model: model from which training starts; None: the config's model or checkpoint.
      on_log: function that is called with step and metrics when a row of `metrics.jsonl` is
        written.
      groups: the group of each example of `train`, for example a patient. If `train` is divided
        into slices, such as `train[:90%]`, all examples of a group are in the same slice.
    """

    data: Mapping[str, Any] | None = None
    model: ImageModel | None = None
    on_log: Callable[[int, dict[str, float]], None] | None = None
    groups: Sequence | None = None
