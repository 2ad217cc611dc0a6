"""The pictures that a run sees of one image: its views."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class View(NamedTuple):
    """One picture of an image, or several that are drawn alike; what is None is the run's own.

    Attributes:
      name: of its entry in a batch, uint8 `[batch, size, size, 3]`; the first view's is `image`.
      count: so many pictures: the entry is `[batch, count, size, size, 3]`.
      size: height and width in pixels.
      crop: values of `TrainCrop` in which this view differs, such as `dict(area=(0.4, 1.0))`.
      same_rectangle_as: name of an earlier view whose rectangles this one shows, at its own size.
      augment: what is done to the crop on the host, `(pixels, rng) -> pixels`, or None; "config" is
        what the config says.
    """

    name: str = "image"
    count: int | None = None
    size: int | None = None
    crop: Mapping[str, Any] = {}
    same_rectangle_as: str | None = None
    augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | str | None = "config"

    def shape(self, image_size: int) -> tuple[int, ...]:
        """Shape of one image's entry, in a run of this `image_size`."""
        size = self.size or image_size
        return (*(() if self.count is None else (self.count,)), size, size, 3)
