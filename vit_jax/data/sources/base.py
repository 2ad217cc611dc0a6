"""Interface of a data source; and subsets of a source with fewer images or other class indices."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from vit_jax.data.class_names import numbers_by_name
from vit_jax.data.fields import BOXES, DEPTH, INSTANCES, MASK, TEXT, Boxes
from vit_jax.errors import UserError, nearest


class Example(NamedTuple):
    """An image, encoded (bytes) or as uint8 `[height, width, channels]`, and its class indices."""

    image: bytes | np.ndarray
    labels: tuple[int, ...]


class Source:
    """A data set that the pipeline reads, with a length and random access by index.

    Attributes:
      weights: relative sampling weights in training of the parts of a mixture. The parts are the
        sources that the mixture concatenates. None: all examples are sampled equally often.
      numbered: True if the classes have no names, and `class_names` are numbers.
      shared_classes: class names that occur in several parts of a mixture. Classes with the same
        name are joined to one class.
      left_out: number of skipped files by reason; `folder_rules.in_words` formats it.
      fields: names of further values of each example, such as `text` (captions); see
        `vit_jax.data.fields`.
      recognized: description of the recognized file layout; empty if this kind of source has only
        one layout.
    """

    class_names: tuple[str, ...]
    max_labels: int = 1
    weights: tuple[float, ...] | None = None
    numbered: bool = False
    shared_classes: tuple[str, ...] = ()
    left_out: Mapping[str, int] = {}
    fields: tuple[str, ...] = ()
    recognized: str = ""

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples in each part of a mixture; other sources have one part."""
        return (len(self),)

    @property
    def empty_classes(self) -> tuple[str, ...]:
        """Names of classes without images; () if labels are unknown without reading images."""
        table = self.known_labels()
        if table is None:
            return ()
        present = set(np.unique(table).tolist())
        return tuple(name for label, name in enumerate(self.class_names) if label not in present)

    def __getitem__(self, index: int) -> Example:
        """Returns an example; raises OSError if the image's file cannot be read."""
        raise NotImplementedError

    def describe(self, index: int) -> str:
        """Returns the name of an example, for messages."""
        raise NotImplementedError

    def fair_order(self) -> Sequence[int] | np.ndarray:
        """Returns all indices in an order in which every slice is a representative sample."""
        return range(len(self))

    def groups(self, key: str) -> Sequence:
        """Returns a sequence with the group of each image, such as the patient that it shows.

        When a split is sliced, all images of a group are in the same slice.

        Args:
          key: value of the option `data.groups`.

        Raises:
          UserError: `key` does not define groups of these images, or this kind of source does not
            support groups.
        """
        raise UserError(
            f"data.groups={key!r} is unsupported for these data: folders and CSVs have paths, and "
            "some data sets have columns; vit_jax.train takes groups=..."
        )

    def known_labels(self) -> np.ndarray | None:
        """Returns `label_table()`; None if the labels are unknown without reading images."""
        return None

    def stored_files(self, indices: Sequence[int] | None = None) -> Iterable[tuple[str, int]]:
        """Returns the names and sizes of the stored files of examples, without reading the files.

        The result is the same on every host. The size of an image file is in bytes. For a file that
        contains many examples, the number of examples is returned instead. `indices` None: all
        examples.
        """
        return ()

    def fields_of(self, index: int) -> Mapping[str, Any]:
        """Returns the values of an example's fields (`vit_jax.data.fields`) by name."""
        return {}

    def known_fields(self, indices: Sequence[int] | None = None) -> Iterable[bytes]:
        """Returns the serialized values of examples' fields, to compute a hash of the data.

        The result is empty if the values are unknown without reading images. `indices` None: all
        examples.
        """
        return ()

    def labels_of(self, index: int) -> tuple[int, ...]:
        """Returns the class indices of an example, without reading its image if possible."""
        return self[index].labels

    def label_table(self, on_progress: Callable[[int], None] = lambda read: None) -> np.ndarray:
        """Returns the labels of all images, int32 `[images, max_labels]`, padded with -1.

        Images are not decoded. `on_progress` is called with the number of examples that have been
        read.
        """
        if (known := self.known_labels()) is not None:
            on_progress(len(self))
            return known
        table = np.full((len(self), self.max_labels), -1, np.int32)
        starts = range(0, len(self), 256)

        def read(start: int) -> list[tuple[int, ...]]:
            return [self.labels_of(index) for index in range(start, min(start + 256, len(self)))]

        with ThreadPoolExecutor(16) as pool:  # Storage may have a high latency: use many threads.
            for start, rows in zip(starts, pool.map(read, starts), strict=True):
                for index, labels in enumerate(rows, start):
                    table[index, : len(labels)] = labels
                on_progress(start + len(rows))
        return table


class Captioned(Source):
    """Images that may have captions, which are known without reading the images.

    Attributes:
      captions: captions of each image; empty: captions are not read.
    """

    captions: tuple[tuple[str, ...], ...] = ()

    @property
    def fields(self):
        return (TEXT,) if self.captions else ()

    def fields_of(self, index):
        return {TEXT: self.captions[index]} if self.captions else {}

    def known_fields(self, indices=None):
        chosen = range(len(self)) if indices is None else indices
        return ("\n".join(self.captions[index]).encode() for index in chosen if self.captions)


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Context that adds a place, such as an example's name, to UserErrors that are raised in it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def lacking(images: str, source: Source) -> list[str]:
    """Returns a list with a note on classes without images; empty if all classes have images.

    `images` is an adjective for the note, such as "training".
    """
    empty = source.empty_classes
    more = f" and {len(empty) - 20:,} more" if len(empty) > 20 else ""
    return [f"note: no {images} images of {', '.join(empty[:20])}{more}"] if empty else []


def spread(images: int, most: int) -> list[int]:
    """Returns up to `most` evenly spaced indices, from the first image to the last."""
    return sorted({round(i * (images - 1) / (most - 1)) for i in range(most)})


def fingerprint(source: Source, samples: int = 16) -> dict[str, int | str]:
    """Returns a fingerprint of the data, to detect that a host or a resumed run reads other data.

    The fingerprint contains the number of images and the number of classes. It also contains a hash
    of the class names, a hash of some examples, and a hash of the names and sizes of all files. If
    labels and fields are known without reading images, it contains a hash of all labels and a hash
    of all fields.
    """

    def digest(*parts: bytes) -> str:
        return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()

    def content(index: int) -> bytes:
        try:
            image, labels = source[index]
        except OSError:  # Ignored here: the pipeline counts and replaces unreadable images.
            return b""
        fields = sorted(source.fields_of(index).items()) if source.fields else []
        encoded = repr([(name, plain(value)) for name, value in fields]).encode() if fields else b""
        return bytes(image) + repr(labels).encode() + encoded

    def plain(value: Any) -> Any:
        """Replaces each array in a field by its shape and hash, because `repr` shortens arrays."""
        if isinstance(value, Boxes):
            # `areas` is only included if it is not None, so that fingerprints equal those of older
            # versions, which had no areas.
            known = value if value.areas is not None else value[:-1]
            return [plain(array) for array in known]
        return (value.shape, digest(value.tobytes())) if isinstance(value, np.ndarray) else value

    known, chosen = source.known_labels(), spread(len(source), samples)
    stored = (f"{name}\0{size}" for name, size in source.stored_files())
    values: dict[str, int | str] = {
        "images": len(source),
        "classes": len(source.class_names),
        "class names": digest(*(name.encode() for name in source.class_names)),
        "examples": digest(*map(content, chosen)),
        "labels": digest(b"" if known is None else known.tobytes()),
        "files": digest(*(file.encode(errors="surrogateescape") for file in stored)),
    }
    return values | ({"fields": digest(*source.known_fields())} if source.fields else {})


def _of_source(name: str) -> Any:
    """Returns a property, or a method, whose value is that of the attribute `source`."""
    return property(attrgetter(f"source.{name}"))


@dataclasses.dataclass(frozen=True)
class Subset(Source):
    """A source with some images of another source, in the order of `indices`."""

    source: Source
    indices: Sequence[int] | np.ndarray

    class_names = _of_source("class_names")
    max_labels = _of_source("max_labels")
    numbered = _of_source("numbered")
    left_out = _of_source("left_out")
    fields = _of_source("fields")
    recognized = _of_source("recognized")

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.source[int(self.indices[index])]

    def describe(self, index):
        return self.source.describe(int(self.indices[index]))

    def labels_of(self, index):
        return self.source.labels_of(int(self.indices[index]))

    def known_labels(self):
        known = self.source.known_labels()
        return None if known is None else known[np.asarray(self.indices)]

    def fields_of(self, index):
        return self.source.fields_of(int(self.indices[index]))

    def known_fields(self, indices=None):
        return self.source.known_fields(self._chosen(indices))

    def stored_files(self, indices=None):
        return self.source.stored_files(self._chosen(indices))

    def _chosen(self, indices: Sequence[int] | None) -> list[int]:
        chosen = np.asarray(self.indices)
        return (chosen if indices is None else chosen[indices]).tolist()


@dataclasses.dataclass(frozen=True)
class Renumbered(Source):
    """The images of another source, with different class indices."""

    source: Source
    class_names: tuple[str, ...]
    number: dict[int, int]  # Maps old to new class indices; labels of other classes are removed.
    empty_classes: tuple[str, ...] = ()

    max_labels = _of_source("max_labels")
    left_out = _of_source("left_out")
    fields = _of_source("fields")
    fair_order = _of_source("fair_order")
    describe = _of_source("describe")
    fields_of = _of_source("fields_of")
    known_fields = _of_source("known_fields")
    stored_files = _of_source("stored_files")

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        example = self.source[index]
        return example._replace(labels=self._renumbered(example.labels))

    def labels_of(self, index):
        return self._renumbered(self.source.labels_of(index))

    def known_labels(self):
        known = self.source.known_labels()
        if known is None:
            return None
        # An index of -1 (padding) selects the last entry of `numbers`, which is -1. So padding
        # remains -1.
        numbers = np.full(len(self.source.class_names) + 1, -1, np.int32)
        numbers[list(self.number)] = list(self.number.values())
        table = numbers[known]
        return np.take_along_axis(table, np.argsort(table < 0, axis=1, kind="stable"), axis=1)

    def _renumbered(self, labels: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.number[label] for label in labels if label in self.number)


def renumbered(source: Source, class_names: Sequence[str], name: str) -> Source:
    """Returns the source with the class indices of the training data, matched by class names.

    Args:
      class_names: class names of the training data.
      name: name of the data in errors, such as "test".

    Raises:
      UserError: the source has a class that is not in `class_names`. Or the classes have no names,
        and the source has more classes than the training data.
    """
    table = source.known_labels()
    classes = range(len(source.class_names))
    used = classes if table is None else np.unique(table[table >= 0]).tolist()
    try:
        number = numbers_by_name(source.class_names, class_names, used)
    except UserError as error:
        raise UserError(f"the {name} data have {error}") from error
    if number is not None:
        empty = set(source.empty_classes)
        without = empty | ({*class_names} - {*source.class_names})
        lacking = tuple(name for name in class_names if name in without)
        return Renumbered(source, tuple(class_names), number, lacking)
    if len(source.class_names) > len(class_names):
        raise UserError(
            f"the {name} data have {len(source.class_names):,} classes, and the training data "
            f"{len(class_names):,}"
        )
    return source


def check_labelled(source: Source, name: str) -> None:
    """Raises UserError if an example has no label.

    If labels are known without reading images, all examples are checked. Otherwise, only a few
    examples are checked.
    """
    table = source.known_labels()
    if table is None:
        for index in spread(len(source), 16):
            if not source.labels_of(index):
                raise UserError(
                    f"{source.describe(index)} ({name}) has no label, and the objective needs one"
                )
    elif len(lacking := np.flatnonzero((table < 0).all(axis=1))):
        raise UserError(
            f"{len(lacking):,} of {len(table):,} {name} images have no label, which the objective "
            f"needs; the first is {source.describe(int(lacking[0]))}"
        )


# For each field: the end of the error message for data that lack the field. It names data formats
# that contain the field.
REMEDIES = {
    TEXT: "captions: give a CSV or JSON lines with a column of captions (data.source=csv), "
    "prepared pairs (data.source=tfds), or pass pairs of images and captions",
    MASK: "masks: give a folder with images and masks (data.source=masks), a COCO file "
    "(data.source=coco), a data set with masks (data.source=tfds), or pass pairs of images and "
    "masks",
    BOXES: "boxes: give a COCO file (data.source=coco), or a data set with boxes "
    "(data.source=tfds)",
    INSTANCES: "masks of objects: give a COCO file with segmentations (data.source=coco)",
    DEPTH: "depth maps: give a folder with images and depth maps (data.source=depth)",
}


def check_fields(source: Source, names: Sequence[str], split: str) -> None:
    """Raises UserError if the examples of a split lack a field with one of these names."""
    for name in names:
        if name not in source.fields:
            raise UserError(f"the {split} data have no {REMEDIES.get(name, name)}")


def of_classes(source: Source, names: Sequence[str]) -> Renumbered:
    """Returns a source with the images of the classes `names`, which get the indices 0, 1, 2, ...

    Raises:
      UserError: a class does not exist or occurs twice in `names`, or these classes have no images.
    """
    names = tuple(map(str, names))  # A config may name the classes of `digits` by numbers.
    if len(set(names)) < len(names):
        raise UserError(f"data.classes names a class twice: {', '.join(names)}")
    for name in names:
        if name not in source.class_names:
            raise UserError(
                f"there is no class {name!r} (data.classes); {nearest(name, source.class_names)}"
            )
    number = {source.class_names.index(name): new for new, name in enumerate(names)}
    table = source.label_table()
    indices = np.flatnonzero(np.isin(table, list(number)).any(axis=1))
    if not len(indices):
        raise UserError(f"no image is of the classes {', '.join(names)} (data.classes)")
    empty = tuple(names[new] for old, new in number.items() if not (table == old).any())
    return Renumbered(Subset(source, indices), names, number, empty)


def before_selection(train: Source) -> tuple[Source, np.ndarray | slice]:
    """Returns the training split before `of_classes`, and the indices of the selected images in it.

    Without a selection of classes, the source itself is returned, and a slice of all indices, which
    needs no memory.
    """
    if isinstance(train, Renumbered) and isinstance(train.source, Subset):
        return train.source.source, np.asarray(train.source.indices)
    return train, slice(None)
