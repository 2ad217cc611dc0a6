"""Views of an image: the crops and augmentations that a training step uses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.preprocess import sides

Augmentation = Callable[[np.ndarray, np.random.Generator], np.ndarray]


class View(NamedTuple):
    """One or several crops of an image, as an objective requests them.

    Attributes:
      name: key in a batch, uint8 `[batch, size, size, 3]`; the first view must be `image`.
      count: number of crops: the entry is `[batch, count, size, size, 3]`. None: one crop, without
        this axis.
      size: height and width in pixels; None: the config's image size.
      crop: values of `TrainCrop` that differ from the config, such as `dict(area=(0.4, 1.0))`. The
        decoding (`mode`, `background`) is the same for all views, since an image is decoded once.
      same_rectangle_as: name of an earlier view with the same rectangles and another size; None:
        the view draws its own rectangles.
      augment: augmentation of the crop on the host, `(pixels, rng) -> pixels`; "config": the
        config's; None: no augmentation.
      distort: augmentations after `augment`, one for each crop of the view; None leaves a crop
        unchanged; empty: none.
      training_only: evaluation does not use the view.
    """

    name: str = "image"
    count: int | None = None
    size: int | None = None
    crop: Mapping[str, Any] = {}
    same_rectangle_as: str | None = None
    augment: Augmentation | str | None = "config"
    distort: Sequence[Augmentation | None] = ()
    training_only: bool = False

    def shape(self, image_size: int) -> tuple[int, ...]:
        """Returns the shape of one image's entry; `image_size` is the default size."""
        size = self.size or image_size
        return (*(() if self.count is None else (self.count,)), size, size, 3)


class ViewSpec(NamedTuple):
    """A resolved `View`: all defaults are filled in.

    Attributes:
      crop: `(image, rng, out) -> pixels`, such as a `TrainCrop`.
      stream: index of the random stream of the view's first crop; views with the same stream have
        the same rectangles.
      distort: augmentations after `augment`, one for each crop; empty: none.
    """

    name: str
    size: int | tuple[int, int]
    crop: Any
    augment: Augmentation | None = None
    count: int | None = None
    stream: int = 0
    distort: Sequence[Augmentation | None] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image's entry in a batch."""
        return (*(() if self.count is None else (self.count,)), *sides(self.size), 3)

    @property
    def streams(self) -> range:
        """Streams of all its crops."""
        return range(self.stream, self.stream + (self.count or 1))


def view_specs(
    views: Sequence[View], crop: Callable[..., Any], size: int, augment: Augmentation | None
) -> tuple[ViewSpec, ...]:
    """Resolves views.

    Args:
      views: the requested views.
      crop: returns the crop for a size and for values that override the config's.
      size: the config's image size, in pixels.
      augment: the config's augmentation.

    Raises:
      ValueError: a view overrides the decoding, or has a wrong number of distortions.
    """
    made, next_stream = {}, 0
    for view in views:
        if {"mode", "background"} & view.crop.keys():
            raise ValueError(
                f"the view {view.name!r} decodes the image otherwise than the run: {view.crop}"
            )
        if view.distort and len(view.distort) != (view.count or 1):
            raise ValueError(
                f"the view {view.name!r} has {view.count or 1} crops and {len(view.distort)} "
                "distortions"
            )
        pixels = view.size or size
        own = augment if view.augment == "config" else view.augment
        stream = made[view.same_rectangle_as].stream if view.same_rectangle_as else next_stream
        spec = ViewSpec(
            view.name, pixels, crop(pixels, **view.crop), own, view.count, stream, view.distort
        )
        made[view.name], next_stream = spec, max(next_stream, spec.streams.stop)
    return tuple(made.values())


def flips_of(views: Sequence[View]) -> dict[str, str]:
    """Returns the name of each view's random flip; views with the same rectangles share a flip."""
    names = {}
    for view in views:
        own = f"flip {view.name}" if names else "flip"
        names[view.name] = names[view.same_rectangle_as] if view.same_rectangle_as else own
    return names
