"""Unlimited composed images of one digit or character with a named colour and rotation.

The class of an image is its composition, such as "red 7 turned left", and its caption is "a red 7
turned left". The digits or characters, colours and rotations are the same in all splits, but some
pairs of a digit and a colour are held out: they are only in the split `test`. So a model that
classifies the test images by names has seen each word in training, but not these combinations.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from vit_jax.data.fields import TEXT
from vit_jax.data.scenes import Look
from vit_jax.data.sources import composed
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.composed import IMAGES, Composed
from vit_jax.data.sources.kind import SourceKind, SourceOptions
from vit_jax.errors import UserError

COLOURS = {
    "red": (235, 70, 60),
    "green": (70, 205, 70),
    "blue": (80, 110, 255),
    "yellow": (240, 230, 70),
    "purple": (215, 90, 235),
    "white": (245, 245, 245),
}
# Ranges of the rotation to the right, in 1,024ths of a turn.
TURNS = {"turned left": (-120, -70), "upright": (-25, 25), "turned right": (70, 120)}
HELD_OUT = 5  # One of this number of pairs of a class and a colour is held out.


class Composition(NamedTuple):
    """A class of images: a digit or character with a colour and a rotation."""

    label: int  # Index of the digit or character in its collection (the digits, or an alphabet).
    name: str  # Name of the class, such as "red 7 turned left".
    look: Look  # The colour and rotation.
    held_out: bool  # True: only the split `test` has this class. False: all other splits have it.


@functools.cache
def compositions(collection: str) -> tuple[Composition, ...]:
    """Returns all combinations of a digit or character of a collection, a colour and a rotation."""
    return tuple(
        Composition(label, f"{colour} {name} {turn}", Look(rgb, angles), held_out)
        for label, name in enumerate(composed.class_names(collection))
        for number, (colour, rgb) in enumerate(COLOURS.items())
        for held_out in [(label + number) % HELD_OUT == 0]
        for turn, angles in TURNS.items()
    )


@dataclasses.dataclass(frozen=True)
class Coloured(Composed):
    """Composed images of coloured objects.

    All splits have the same list of classes, although each class has images in some splits only.
    """

    @property
    def class_names(self):
        return tuple(each.name for each in compositions(self.collection))

    def labels_of(self, index):
        return (self._composition(index),)

    def known_labels(self):
        classes = _classes(self.collection, self.split)
        numbers = np.arange(self.images.start, self.images.stop)
        return classes[numbers % len(classes)][:, None]

    def fields_of(self, index):
        name = compositions(self.collection)[self._composition(index)].name
        return {TEXT: (f"a {name}",)} if TEXT in self.fields else {}

    def _composition(self, index: int) -> int:
        classes = _classes(self.collection, self.split)
        return int(classes[self._number(index) % len(classes)])

    def _main_class(self, index):
        return compositions(self.collection)[self._composition(index)].label

    def _look(self, index):
        return compositions(self.collection)[self._composition(index)].look


@functools.cache
def _classes(collection: str, split: str) -> np.ndarray:
    """Returns the indices of the classes (compositions) that have images in a split, int32."""
    held_out = [each.held_out for each in compositions(collection)]
    return np.flatnonzero(np.array(held_out) == (split == "test")).astype(np.int32)


def coloured(split: str, options: SourceOptions) -> Source:
    """Opens composed images of coloured objects.

    Args:
      split: name of the split, with a slice such as `train[:50000]`.
      options: `path` is the name of the collection, such as `digits` or `greek`.

    Raises:
      UserError: fields other than captions are required; the collection, split or slice does not
        exist; or the image size is unsupported.
    """
    if others := [name for name in options.fields if name != TEXT]:
        raise UserError(
            f"coloured images have no {others[0]}: use data.source=scattered or centred"
        )
    opened = composed.composed("coloured", split, options)
    return Coloured(
        **{each.name: getattr(opened, each.name) for each in dataclasses.fields(opened)}
    )


COLOURED = SourceKind(
    "coloured",
    "one digit or character with a named colour and rotation, without end",
    coloured,
    path=f"the collection that is coloured: {', '.join(composed.COLLECTIONS)}",
    reads_slices=True,
    counts=lambda path: (IMAGES["train"], len(compositions(path))),
)
