"""The pictures that a run sees of one image: its views."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.preprocess import sides

Augmentation = Callable[[np.ndarray, np.random.Generator], np.ndarray]


class View(NamedTuple):
    """One picture of an image, or several that are drawn alike; what is None is the run's own.

    Attributes:
      name: of its entry in a batch, uint8 `[batch, size, size, 3]`; the first view's is `image`.
      count: so many pictures: the entry is `[batch, count, size, size, 3]`.
      size: height and width in pixels.
      crop: values of `TrainCrop` in which this view differs, such as `dict(area=(0.4, 1.0))`; how
        an image is decoded (`mode`, `background`) is the same for all views, since it is decoded
        once.
      same_rectangle_as: name of an earlier view whose rectangles this one shows, at its own size.
      augment: what is done to the crop on the host, `(pixels, rng) -> pixels`, or None; "config" is
        what the config says.
      distort: what is done after that, to each of its pictures another thing: so many
        augmentations, each of which may be None; empty: nothing.
    """

    name: str = "image"
    count: int | None = None
    size: int | None = None
    crop: Mapping[str, Any] = {}
    same_rectangle_as: str | None = None
    augment: Augmentation | str | None = "config"
    distort: Sequence[Augmentation | None] = ()

    def shape(self, image_size: int) -> tuple[int, ...]:
        """Shape of one image's entry, in a run of this `image_size`."""
        size = self.size or image_size
        return (*(() if self.count is None else (self.count,)), size, size, 3)


class Picture(NamedTuple):
    """The way the pipeline makes a view: a `View` with nothing left open.

    Attributes:
      crop: `(image, rng, out) -> pixels`.
      stream: which of an image's random sequences the first picture draws from; views of one stream
        see the same rectangles.
      distort: what is done after `augment`, to each picture; empty: nothing.
    """

    name: str
    size: int | tuple[int, int]
    crop: Callable[..., np.ndarray]
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
        """The streams of all its pictures."""
        return range(self.stream, self.stream + (self.count or 1))


def pictures_of(
    views: Sequence[View], crop: Callable[..., Any], size: int, augment: Augmentation | None
) -> tuple[Picture, ...]:
    """The pictures that views ask for.

    Args:
      crop: makes the crop of a size, and of values in which it differs from the run's.
      size: the run's, in pixels.
      augment: the run's.
    """
    made, free = {}, 0
    for view in views:
        if {"mode", "background"} & view.crop.keys():
            raise ValueError(
                f"the view {view.name!r} decodes the image otherwise than the run: {view.crop}"
            )
        if view.distort and len(view.distort) != (view.count or 1):
            raise ValueError(
                f"the view {view.name!r} has {view.count or 1} pictures to {view.distort}"
            )
        pixels = view.size or size
        own = augment if view.augment == "config" else view.augment
        stream = made[view.same_rectangle_as].stream if view.same_rectangle_as else free
        picture = Picture(
            view.name, pixels, crop(pixels, **view.crop), own, view.count, stream, view.distort
        )
        made[view.name], free = picture, max(free, picture.streams.stop)
    return tuple(made.values())


def flips_of(views: Sequence[View]) -> dict[str, str]:
    """Names by which flips are drawn, by the views' names: views of one rectangle share theirs."""
    names = {}
    for view in views:
        own = f"flip {view.name}" if names else "flip"
        names[view.name] = names[view.same_rectangle_as] if view.same_rectangle_as else own
    return names
