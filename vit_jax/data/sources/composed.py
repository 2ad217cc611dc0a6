"""Unlimited composed images of digits or characters: scattered on clutter, or one in the centre.

A scattered image contains one large object, which defines the label, and smaller objects. Behind
the objects are faint fragments and bars, a texture and noise (`vit_jax.data.scenes`). A centred
image has a single large object on texture and noise. A small Transformer learns to classify centred
images within some hundred steps.

A caption lists the objects with their numbers: "a large 7 with two 3s and a 5". In a mask, a pixel
has the class of the object that covers at least half of it. Boxes enclose the visible pixels of
each object.

Image k of a split depends only on k. For example, the first 1,000 images are part of the first
1,000,000. The image size is only the resolution of the drawing; it does not change the scene.
Images are cached in the user's cache folder. Reading a cached image is a hundred times faster than
composing it.
"""

import dataclasses
import functools
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image

from vit_jax.data import scenes
from vit_jax.data.fields import BACKGROUND, BOXES, INSTANCES, MASK, TEXT, Boxes
from vit_jax.data.kept_images import kept_images
from vit_jax.data.scenes import CELL, Layout, Look, Objects, Parts, Scene, compose, draw
from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.digits import digits
from vit_jax.data.sources.kind import SourceKind, SourceOptions
from vit_jax.data.sources.slices import split_range
from vit_jax.errors import UserError, nearest

IMAGES = {"train": 10_000_000, "dev": 10_000, "test": 10_000}
SIZES = range(16, 225)  # Supported image sizes in pixels.
# Collections of objects. The keys of the random generators contain the index of the collection.
# Therefore the order of the collections must not change.
COLLECTIONS = ("digits", "glyphs", "greek", "cyrillic", "armenian", "georgian", "letters")
# The keys of the random generators contain the index of the layout. Therefore the order of the
# layouts must not change.
LAYOUTS = {
    "scattered": Layout(
        (40000, 60000), (1, scenes.FRAGMENTS), (0, scenes.BARS), (1, scenes.SMALLER)
    ),
    "centred": Layout((56000, 64000), (0, 0), (0, 0), (0, 0)),
    "coloured": Layout((56000, 64000), (0, 0), (0, 0), (0, 0)),
}
COUNTS = ("no", "a", "two", "three", "four")  # Words for the numbers 0 to 4 in captions.
GLYPHS = Path(__file__).parent.parent / "glyphs"


@dataclasses.dataclass(frozen=True)
class Composed(Source):
    """Composed images of digits or characters; an image depends only on its index."""

    layout: str  # A name in `LAYOUTS`.
    collection: str  # A name in `COLLECTIONS`: the digits, or an alphabet such as `greek`.
    split: str
    images: range  # Indices of the images in the split.
    image_size: int
    # Names of the examples' fields. With the field `mask`, the first class is the background, and
    # images have no labels.
    fields: tuple[str, ...] = ()

    @property
    def class_names(self):
        return ((BACKGROUND,) if MASK in self.fields else ()) + class_names(self.collection)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        kept = kept_images(self._kept_name(), self.image_size)
        image = kept.read(self._number(index))
        if image is None:
            scene, parts, stream = self._compose(index)
            image = draw(scene, parts, self.image_size, stream)
            kept.write(self._number(index), image)
        return Example(image, self.labels_of(index))

    def describe(self, index):
        return f"{self.layout} {self.collection} {self.split} image {self._number(index)}"

    def labels_of(self, index):
        return () if MASK in self.fields else (self._main_class(index),)

    def known_labels(self):
        if MASK in self.fields:
            return None
        numbers = np.arange(self.images.start, self.images.stop)
        return (numbers % len(self.class_names)).astype(np.int32)[:, None]

    def fields_of(self, index):
        values = {}
        if TEXT in self.fields:
            scene, _, _ = self._compose(index)
            values[TEXT] = (caption_of(scene, class_names(self.collection)),)
        if MASK in self.fields:
            values[MASK] = self._pixels(index)[..., 1]
        if {BOXES, INSTANCES} & {*self.fields}:
            numbers, classes = np.moveaxis(self._pixels(index), -1, 0)
            boxes = boxes_of(numbers, classes if MASK in self.fields else classes - 1)
            values |= {name: boxes for name in (BOXES, INSTANCES) if name in self.fields}
        return values

    def objects(self, index: int) -> Objects:
        """Returns the objects in an image, from back to front, and their visible pixels."""
        scene, parts, _ = self._compose(index)
        return scenes.objects(scene, parts, self.image_size)

    def _pixels(self, index: int) -> np.ndarray:
        """Returns the object and the class at each pixel, uint8 `[size, size, 2]`.

        Objects and classes are counted from 1; 0 is the background.
        """
        kept = kept_images(f"{self._kept_name()}-objects", self.image_size, 2)
        pixels = kept.read(self._number(index))
        if pixels is None:
            shown = self.objects(index)
            classes = np.array([0, *(label + 1 for label in shown.labels)])
            pixels = np.stack([shown.seen + 1, classes[shown.seen + 1]], -1).astype(np.uint8)
            kept.write(self._number(index), pixels)
        return pixels

    def _compose(self, index: int):
        parts = parts_of(self.collection, self.split)
        places = tuple(LAYOUTS).index(self.layout), tuple(IMAGES).index(self.split)
        key = 256 * COLLECTIONS.index(self.collection) + 16 * places[0] + places[1]
        label, number = self._main_class(index), self._number(index)
        look = self._look(index)
        scene, stream = compose(parts, LAYOUTS[self.layout], label, (key, number), look)
        return scene, parts, stream

    def _kept_name(self) -> str:
        place = self.layout, self.collection, self.split, self.image_size
        return _kept_name(*place, sys.modules[type(self).__module__].__file__)

    def _look(self, index: int) -> Look | None:
        """Returns colour and rotation of the main object; None: they are random."""
        return None

    def _main_class(self, index: int) -> int:
        return self._number(index) % len(class_names(self.collection))

    def _number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(
                f"image {index} of {len(self)} of {self.layout} {self.collection} {self.split}"
            )
        return self.images[index]


def composed(layout: str, split: str, options: SourceOptions) -> Composed:
    """Opens composed images.

    Args:
      layout: a name in `LAYOUTS`.
      split: name of the split, with a slice such as `train[:50000]`.
      options: `path` is a name in `COLLECTIONS`: the digits, or an alphabet such as `greek`.

    Raises:
      UserError: the collection, split or slice does not exist, or the image size is unsupported.
    """
    name = split.split("[")[0]
    class_names(options.path)
    if name not in IMAGES:
        raise UserError(
            f"{options.path} has no split {name!r}; there are: {', '.join(sorted(IMAGES))}"
        )
    if options.image_size not in SIZES:
        raise UserError(
            f"{layout} images are of {SIZES.start} to {SIZES.stop - 1} pixels, not "
            f"{options.image_size} (data.image_size)"
        )
    return Composed(
        layout,
        options.path,
        name,
        split_range(split, IMAGES[name]),
        options.image_size,
        tuple(name for name in (TEXT, MASK, BOXES, INSTANCES) if name in options.fields),
    )


def boxes_of(numbers: np.ndarray, classes: np.ndarray) -> Boxes:
    """Returns the boxes and masks of visible objects.

    Args:
      numbers, classes: object (from 1; 0: none) and class at each pixel, `[size, size]`.
    """
    present = np.unique(numbers[numbers > 0])
    masks = numbers == present[:, None, None]
    labels, corners = np.zeros(len(present), np.int32), np.zeros((len(present), 4), np.float32)
    for row, mask in enumerate(masks):
        rows, columns = np.nonzero(mask)
        corners[row] = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        labels[row] = classes[rows[0], columns[0]]
    return Boxes(corners, labels, masks)


def caption_of(scene: Scene, class_names: Sequence[str]) -> str:
    """Returns the caption of a scene, such as "a large 7 with two 3s and a 5"."""
    main = cast("int", scene.items[scene.main].label)
    counts = Counter(item.label for item in scene.items if item.label is not None)
    counts[main] -= 1
    others = [
        f"{COUNTS[count]} {class_names[label]}{'s' if count > 1 else ''}"
        for label, count in sorted(counts.items())
        if count
    ]
    text = f"a large {class_names[main]}"
    if not others:
        return text
    *first, last = others
    return f"{text} with {', '.join(first)}{' and ' if first else ''}{last}"


@functools.cache
def class_names(collection: str) -> tuple[str, ...]:
    """Returns the class names of a collection: the digits, or the characters of an alphabet.

    Raises:
      UserError: the collection does not exist.
    """
    if collection not in COLLECTIONS:
        raise UserError(
            f"unknown collection {collection!r} (data.path); {nearest(collection, COLLECTIONS)}"
        )
    if collection == "digits":
        return tuple("0123456789")
    if collection == "letters":
        return tuple(one for one in class_names("glyphs") if one.isascii() and one.isalnum())
    return tuple(kept_characters()[collection])


def kept_characters() -> dict[str, str]:
    """Returns the characters of each alphabet, by its name, in the order of glyphs.png's rows."""
    return json.loads((GLYPHS / "glyphs.json").read_text())["collections"]


@functools.cache
def parts_of(collection: str, split: str) -> Parts:
    """Returns the drawings for the images of a split; each drawing is used in one split only."""
    cells, labels = (scans if collection == "digits" else glyphs)(collection, split)
    order = np.argsort(labels, kind="stable")
    count = np.bincount(labels, minlength=len(class_names(collection)))
    return Parts(scenes.drawings_of(cells[order]), np.cumsum(count) - count, count)


@functools.cache
def _kept_name(layout: str, collection: str, split: str, size: int, file: str) -> str:
    """Returns the name of the cache file, with a hash of the code and the drawings.

    Args:
      layout, collection, split, size: properties of the images; `size` is in pixels.
      file: path of the Python module of the source; its content is part of the hash.
    """
    made_of = hashlib.blake2b(digest_size=8)
    for code in (scenes.__file__, __file__, file):
        made_of.update(Path(code).read_bytes())
    for array in parts_of(collection, split):
        made_of.update(array.tobytes())
    return f"{layout}-{collection}-{split}-{size}-{made_of.hexdigest()}"


def scans(collection: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns scans of handwritten digits, uint8 `[scans, 32, 32]`, and the digit of each scan.

    The split `test` contains the test images of the source `digits`. The splits `train` and `dev`
    contain its training images.
    """
    source = digits("test" if split == "test" else "train")
    chosen = {"train": slice(0, 1257), "dev": slice(1257, None), "test": slice(None)}[split]
    grey = source.images[chosen, :, :, 0].astype(np.int64)
    # Enlarge the scans by four, and sharpen the edges of the ink to a width of two pixels.
    for axis in (1, 2):
        places = 2 * np.arange(CELL) - 3
        near, share = places >> 3, places & 7
        one, other = (np.take(grey, np.clip(near + step, 0, 7), axis) for step in (0, 1))
        share = share.reshape((-1, 1) if axis == 1 else (-1,))
        grey = (one * (8 - share) + other * share) >> 3
    return np.clip(2 * grey - 128, 0, 255).astype(np.uint8), source.labels[chosen]


def glyphs(collection: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns characters drawn in several fonts, uint8 `[drawings, 32, 32]`, and their classes.

    A quarter of a character's drawings is in `test`, one drawing in `dev`, and all others in
    `train`. The fonts in `test` and `dev` vary from character to character.
    """
    sheet = np.asarray(Image.open(GLYPHS / "glyphs.png")).astype(np.uint8)
    sheet = sheet.reshape(sheet.shape[0] // CELL, CELL, -1, CELL).swapaxes(1, 2) * 85
    row_of = {character: row for row, character in enumerate("".join(kept_characters().values()))}
    cells, labels = [], []
    for label, character in enumerate(class_names(collection)):
        row = row_of[character]
        drawn = sheet[row][sheet[row].any((1, 2))]
        drawn = np.roll(drawn, 5 * row, axis=0)
        tests = len(drawn) // 4
        of_split = {
            "test": slice(0, tests),
            "dev": slice(tests, tests + 1),
            "train": slice(tests + 1, None),
        }
        cells.append(drawn[of_split[split]])
        labels += [label] * len(cells[-1])
    return np.concatenate(cells), np.array(labels)


def kind(layout: str, about: str) -> SourceKind:
    """Returns the `SourceKind` of composed images with this layout."""
    return SourceKind(
        layout,
        about,
        functools.partial(composed, layout),
        path=f"the collection that is {layout}: {', '.join(COLLECTIONS)}",
        reads_slices=True,
        counts=lambda path: (IMAGES["train"], len(class_names(path))),
    )


SCATTERED = kind("scattered", "digits or characters scattered on clutter, without end")
CENTRED = kind("centred", "one digit or character that fills the image, without end")
