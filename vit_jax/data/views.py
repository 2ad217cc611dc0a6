"""Views of an image: the crops and augmentations that a training step uses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.preprocess import sides

Augmentation = Callable[[np.ndarray, np.random.Generator], np.ndarray]


class View(NamedTuple):
    """A view that a training objective requests: one or several crops of an image.

    Attributes:
      name: key of the view in a batch. The first view must be named `image`.
      count: number of crops; the batch entry is uint8 `[batch, count, size, size, 3]`. None: one
        crop; the entry is `[batch, size, size, 3]`.
      size: height and width of a crop in pixels; None: the config's image size.
      crop: arguments of `TrainCrop` that differ from the config, such as `dict(area=(0.4, 1.0))`.
        `mode` and `background` cannot differ, because an image is decoded once for all views.
      same_rectangle_as: name of an earlier view. This view shows the same rectangles of the image
        at another size. None: the view draws its own rectangles.
      augment: augmentation of a crop on the CPU, `(pixels, rng) -> pixels`. It does not change the
        padding of the crop. "config": the config's augmentation. None: no augmentation.
      distort: an augmentation for each crop of the view, applied after `augment`. An entry None
        leaves its crop unchanged. Empty: no such augmentations.
      training_only: the view is used in training, and not in evaluation.
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
        """Returns the shape of the view of one image; `image_size` is the config's image size."""
        size = self.size or image_size
        return (*(() if self.count is None else (self.count,)), size, size, 3)


class ViewSpec(NamedTuple):
    """A `View` whose unset values are replaced by the config's values.

    Each crop of the view has its own stream of random numbers: `stream` for the first crop,
    `stream + 1` for the second crop, and so on. The stream determines the crop's rectangle of the
    image. Two views with the same `stream` therefore show the same rectangles.
    """

    name: str
    size: int | tuple[int, int]
    # Function `(image, rng, out) -> out`, such as a `TrainCrop`. It resizes a rectangle of the
    # image, and writes the pixels into the array `out`, uint8 `[height, width, 3]`.
    crop: Any
    augment: Augmentation | None = None
    count: int | None = None
    stream: int = 0  # Index of the random stream of the view's first crop.
    # An augmentation for each crop, applied after `augment`; empty: no such augmentations.
    distort: Sequence[Augmentation | None] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the view of one image."""
        return (*(() if self.count is None else (self.count,)), *sides(self.size), 3)

    @property
    def streams(self) -> range:
        """Indices of the random streams of the view's crops."""
        return range(self.stream, self.stream + (self.count or 1))


def view_specs(
    views: Sequence[View], crop: Callable[..., Any], size: int, augment: Augmentation | None
) -> tuple[ViewSpec, ...]:
    """Converts requested views to `ViewSpec`s; the config's values are their defaults.

    Args:
      crop: called with a size and with `View.crop`; returns the crop.
      augment: the config's augmentation.

    Raises:
      ValueError: `View.crop` contains `mode` or `background`, or the number of distortions differs
        from the number of crops.
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
        spec = ViewSpec(
            name=view.name,
            size=pixels,
            crop=crop(pixels, **view.crop),
            augment=augment if view.augment == "config" else view.augment,
            count=view.count,
            stream=made[view.same_rectangle_as].stream if view.same_rectangle_as else next_stream,
            distort=view.distort,
        )
        made[view.name], next_stream = spec, max(next_stream, spec.streams.stop)
    return tuple(made.values())


def flips_of(views: Sequence[View]) -> dict[str, str]:
    """Returns a dictionary from each view to the name of the random stream of its flips.

    For example, the view `local` has the name `flip local`. Views that show the same rectangles of
    an image have the same name. Therefore they are flipped together.
    """
    names = {}
    for view in views:
        flip_name = f"flip {view.name}" if names else "flip"
        names[view.name] = names[view.same_rectangle_as] if view.same_rectangle_as else flip_name
    return names
