"""Data sets that the caller passes in: arrays, Hugging Face or torch data sets, any sequence."""

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from vit_jax.data.class_names import numbers_by_name
from vit_jax.data.decode import eight_bits, has_idle_alpha
from vit_jax.data.fields import check_captions
from vit_jax.data.labels import check_lists, from_one_hot, one_hot_width
from vit_jax.data.sources.base import Captioned, Example, Source, naming, renumbered, spread
from vit_jax.data.sources.folder import read_file
from vit_jax.data.sources.kind import SourceKind, SourceOptions
from vit_jax.data.sources.slices import shuffled, stratified
from vit_jax.errors import UserError, nearest

IMAGE_KEYS = ("image", "img", "jpg", "png", "pixel_values")
LABEL_KEYS = ("label", "labels", "target")
MOST_CLASSES = 2**24
GREY, GREY_ALPHA, RGB, RGBA = 1, 2, 3, 4  # Number of channels of each kind of image.
PNG_MODES = ("I;16", "P", "L", "LA", "RGB", "RGBA")  # Pillow modes that PNG stores losslessly.


@contextlib.contextmanager
def reading(example: str) -> Iterator[None]:
    """Context that converts errors of the caller's data to UserErrors with the example's name."""
    try:
        with naming(example):
            yield
    except (OSError, UserError):
        raise
    except Exception as error:  # The user's code may raise anything.
        raise UserError(f"cannot read {example}: {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class HandedIn(Captioned):
    """A data set that the caller passes in. Every read of an example must return the same image."""

    name: str
    data: Any  # Supports `len(data)` and `data[index]`.
    # Splits an item, `data[index]`, into the image and the label; the label may be None.
    split: Callable[[Any], tuple[Any, Any]]
    class_names: tuple[str, ...]
    max_labels: int = 1
    # Class indices of all images, int32 [images, max_labels], padded with -1; None: unknown.
    labels: np.ndarray | None = None
    read_label: "LabelReader | None" = None  # Converts an item's label; None: items have no labels.
    captions: tuple[tuple[str, ...], ...] = ()  # Captions of each image; empty: not read.

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        with reading(self.describe(index)):
            image, label = self.split(self.data[index])
            return Example(as_image(image), self._class_indices(index, label))

    def describe(self, index):
        return f"{self.name} example {index}"

    def labels_of(self, index):
        if self.labels is None:
            return self[index].labels
        return tuple(label for label in self.labels[index].tolist() if label >= 0)

    def known_labels(self):
        return self.labels

    def groups(self, key):
        if hasattr(self.data, "column_names"):
            if key not in self.data.column_names:
                raise UserError(
                    f"there is no column {key!r} (data.groups); "
                    f"{nearest(key, self.data.column_names)}"
                )
            return list(self.data[key])
        if not isinstance(self.split, _Keys):
            return super().groups(key)
        try:
            return [self.data[index][key] for index in range(len(self))]
        except KeyError as error:
            raise UserError(f"the {self.name} examples have no {key!r} (data.groups)") from error

    def fair_order(self):
        if self.labels is None:
            return shuffled(len(self))
        return stratified(self.labels[:, 0].tolist(), [str(index) for index in range(len(self))])

    def _class_indices(self, index: int, label: Any) -> tuple[int, ...]:
        """Returns the class indices of an example, whose label has just been read as `label`.

        Raises:
          UserError: `label` differs from the label that was read when the data set was opened. The
            data set is not deterministic.
        """
        if self.labels is None:
            return ()
        known = self.labels_of(index)
        if self.read_label and (read := self.read_label(label)) != known:
            raise UserError(
                f"its label is now {list(read)}, and was {list(known)} when the data were opened "
                "(in a column, .targets, or the item itself); pass data that give the same "
                "each time"
            )
        return known


class LabelReader(NamedTuple):
    """Converts labels to class indices."""

    names: dict[str, int]  # Class index by class name, for labels that are text.
    # Length of one-hot or multi-hot labels. None: a label is a class index or a list of class
    # indices.
    width: int | None = None
    # Dictionary from the integers in the data set's labels to class indices; None: the integers are
    # class indices.
    numbers: dict[int, int] | None = None

    def __call__(self, label: Any) -> tuple[int, ...]:
        """Returns a label's class indices; raises UserError for wrong types and unknown classes."""
        row: list[Any] = label_values(label)
        if self.width and row:
            row = self._indices(row)
        if any(isinstance(value, str) for value in row):
            row = [self._number(value) for value in row]
        elif self.numbers is not None:
            row = [self.numbers.get(value, value) for value in row if value != -1]
        return tuple(dict.fromkeys(value for value in row if value != -1))

    def _indices(self, row: list[Any]) -> list[int]:
        """Returns the class indices of a one-hot or multi-hot row."""
        if len(row) != self.width or not set(row) <= {0, 1}:
            raise UserError(
                f"the label {row[:8]} is not a row of {self.width} zeros and ones, as others are"
            )
        return [index for index, is_set in enumerate(row) if is_set]

    def _number(self, name: Any) -> int:
        """Returns the index of the class with this name."""
        if name not in self.names:
            raise UserError(f"there is no class {name!r}; {nearest(str(name), self.names)}")
        return self.names[name]


def handed_in(
    data: Any,
    name: str,
    *,
    labels: bool = True,
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
    label_key: str = "label",
    caption_key: str | None = None,
) -> Source:
    """Returns a source for a data set in memory, or for a data set of another library.

    Args:
      data: a pair of images and labels; images alone; a `datasets.Dataset`; a torch `Dataset`; a
        sequence (`len(data)`, `data[index]`) of images, of pairs or of mappings; or a `Source`. An
        image is a NumPy array (uint8, or floats in [0, 1]) `[height, width]` or `[height, width,
        channels]`, a torch tensor with channels first, a PIL image, encoded bytes or a path. A
        label is a class index, a class name, a list of class indices or names, or a one-hot or
        multi-hot row.
      name: name of the data in error messages, such as "training".
      labels: labels are required. False: labels are not read.
      class_names: class names of the training data. A class index is a position in this list. None:
        use the data set's own class names. If it has none, text labels are class names, and integer
        labels are class indices.
      num_classes: number of classes of a data set without class names.
      label_key: the column or key of the label, if items are mappings.
      caption_key: the column or key of the captions, if items are mappings. If items are pairs, the
        second element of a pair is the caption. None: captions are not read.

    Raises:
      UserError: the data set has an unsupported type, is empty, has no labels, or returns a
        different image each time.
    """
    if isinstance(data, Source):
        return data if class_names is None else renumbered(data, class_names, name)
    if is_pair_of_columns(data):
        data, target_values = checked_columns(data, name, "captions" if caption_key else "labels")
        split = _alone
    else:
        check_indexable(data, name)
        data, image_key, key = _columns(data, name, label_key if labels else None)
        split = _Keys(image_key, key) if image_key else _pair
        target_values = _known_labels(data, key) if labels else None
    if isinstance(data, np.ndarray):
        _check_array(data, name)
    source = HandedIn(f"{name} data's", data, split, ())
    if caption_key:
        captions = _captions(source, target_values, caption_key, name)
        source = dataclasses.replace(source, captions=captions)
    if labels:
        source = _labelled(source, target_values, tuple(class_names or ()), num_classes, name)
    check_steady(source, name)
    return source


def _captions(source: HandedIn, column: Any, key: str, name: str) -> tuple[tuple[str, ...], ...]:
    """Returns the captions of each example.

    They are passed separately as `column`. None: they are in the items, as the value of `key` in a
    mapping, or as the second element of a pair.

    Raises:
      UserError: an example has no caption, or a caption is not text.
    """
    if column is None and hasattr(source.data, "column_names"):
        if key not in source.data.column_names:
            raise UserError(
                f"the {name} data have no column {key!r} (data.caption_key); "
                f"{nearest(key, source.data.column_names)}"
            )
        column = source.data[key]
    if column is None:
        items = (source.data[index] for index in range(len(source)))
        column = [_caption_of(item, key, name) for item in items]
    lists = (x if isinstance(x, list | tuple | np.ndarray) else [x] for x in column)
    return tuple(check_captions([*x], source.describe(i)) for i, x in enumerate(lists))


def _caption_of(item: Any, key: str, name: str) -> Any:
    """Returns the caption or captions in an item, which is a mapping or a pair."""
    if isinstance(item, Mapping) and key in item:
        return item[key]
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[1]
    raise UserError(
        f"the {name} examples have no {key!r} (data.caption_key): pass a pair (images, captions), "
        "or items (image, caption)"
    )


def as_image(value: Any) -> bytes | np.ndarray:
    """Converts an image to encoded bytes or uint8 `[height, width, 3]`.

    Raises:
      UserError: the value is not an image.
    """
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str | Path):
        return read_file(str(value))
    if isinstance(value, Mapping) and "bytes" in value:  # An undecoded image of Hugging Face.
        return value["bytes"] if value["bytes"] is not None else read_file(value["path"])
    if isinstance(value, Image.Image):
        return _of_pil(value)
    if detach := getattr(value, "detach", None):  # A torch tensor.
        value = detach().cpu().numpy()
        if value.ndim == 3 and value.shape[0] in (GREY, RGB, RGBA):
            value = np.moveaxis(value, 0, -1)
    if not isinstance(value, np.ndarray):
        raise UserError(f"a {type(value).__name__} is not an image")
    return _as_pixels(value)


def label_values(value: Any) -> list[int] | list[str]:
    """Converts a label to a list of integers or a list of class names.

    Raises:
      UserError: the label is not an integer, a class name, or a list of integers or class names.
    """
    if isinstance(value, int):
        return [int(value)]
    if value is None:
        raise UserError("it has no label")
    values = np.asarray(
        value if isinstance(value, str) or not hasattr(value, "detach") else value.detach().cpu()
    )
    if values.ndim > 1:
        raise UserError(f"the label {values.tolist()!r} is neither a number nor a list of numbers")
    if values.dtype.kind in "UO" and all(isinstance(name, str) for name in values.ravel().tolist()):
        return [str(name) for name in values.ravel().tolist()]
    return _whole_numbers(values)


def _whole_numbers(values: np.ndarray) -> list[int]:
    """Returns a numeric label as integers; raises UserError for numbers that are no integers."""
    is_list_of_floats = values.dtype.kind == "f" and values.ndim > 0
    if is_list_of_floats and np.isin(values, (0, 1)).all():
        values = values.astype(np.int64)  # One-hot labels may be floats, as for loss functions.
    if values.size and values.dtype.kind not in "iub":
        remedy = "give whole numbers or texts"
        if is_list_of_floats:
            remedy = "probabilities are not supported: labels.argmax(-1)"
        raise UserError(
            f"the label {values.tolist()!r} is not a number or a name of a class ({remedy})"
        )
    return values.astype(np.int64).ravel().tolist()


def is_pair_of_columns(data: Any) -> bool:
    """Returns True for a pair of two columns: all images, and all labels or captions."""
    if not isinstance(data, tuple) or len(data) != 2 or not _is_column(data[0]):
        return False
    return _is_column(data[1]) or isinstance(data[1], tuple)


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Function that returns the image and the label (None without a key) of a mapping."""

    image: str
    label: str | None

    def __call__(self, item):
        return item[self.image], item.get(self.label) if self.label else None


def _alone(item):
    return item, None


def _pair(item):
    return item[:2] if isinstance(item, tuple | list) else (item, None)


def _is_column(value: Any) -> bool:
    """Returns True for an array or a list, which contains many images or labels."""
    return isinstance(value, list) or (hasattr(value, "shape") and hasattr(value, "__len__"))


def checked_columns(data: tuple, name: str, second: str) -> tuple[Any, Any]:
    """Returns the columns of images and of labels or captions, after comparing their lengths."""
    images, values = data
    if len(images) != len(values):
        raise UserError(f"the {name} data have {len(images):,} images and {len(values):,} {second}")
    _check_not_empty(images, name)
    return images, values


def check_indexable(data: Any, name: str) -> None:
    """Raises UserError if the data set has no length, cannot be indexed, or is empty."""
    if isinstance(data, Mapping):
        raise UserError(
            f"the {name} data are a {type(data).__name__} of {', '.join(map(str, data))}: pass "
            "one of them"
        )
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(
            f"the {name} data are a {type(data).__name__}, which has no length and no order "
            "of its own: pass arrays (images, labels), or an object with __len__ and "
            "__getitem__"
        )
    _check_not_empty(data, name)


def _check_not_empty(data: Any, name: str) -> None:
    if not len(data):
        raise UserError(f"the {name} data are empty")


def _check_array(images: np.ndarray, name: str) -> None:
    shape = "x".join(map(str, images.shape))
    no_channels = images.ndim == 4 and images.shape[-1] not in (GREY, RGB, RGBA)
    if images.ndim not in (3, 4) or no_channels or images.shape[-1] == GREY_ALPHA:
        raise UserError(
            f"the {name} images are an array {shape}, and must be [images, height, width, "
            "channels] with 1, 3 or 4 channels, or [images, height, width]"
        )
    first, *_, last = images.shape
    if images.ndim == 3 and first in (RGB, RGBA) and last not in (GREY, RGB, RGBA):
        raise UserError(
            f"the {name} images are an array {shape}: {first} grey images, or one with "
            "its channels first; give [images, height, width, 1], or [height, width, channels]"
        )


def _columns(data: Any, name: str, label_key: str | None) -> tuple[Any, str | None, str | None]:
    """Returns the data set, and the keys of the images and labels in its items.

    The keys are None if items are not mappings. A Hugging Face data set is changed to return
    encoded instead of decoded images.
    """
    features, kinds = getattr(data, "features", None), {}
    if isinstance(features, Mapping):  # A Hugging Face data set.
        keys = list(features)
        kinds = {key: type(feature).__name__ for key, feature in features.items()}
    else:
        item = data[0]
        if not isinstance(item, Mapping):
            return data, None, None
        keys = list(item)
    images = _of_kind(kinds, "Image")
    image_key = next((key for key in (*images, *IMAGE_KEYS) if key in keys), None)
    if image_key is None:
        raise UserError(f"the {name} data have no image: there are {', '.join(map(str, keys))}")
    if image_key in images:
        data = _undecoded(data, image_key)
    if label_key is not None:
        label_key = _label_column(keys, _of_kind(kinds, "ClassLabel"), name, label_key)
    return data, image_key, label_key


def _of_kind(kinds: dict[str, str], kind: str) -> list[str]:
    return [key for key, its_kind in kinds.items() if its_kind == kind]


def _undecoded(data: Any, image_key: str) -> Any:
    """Makes a Hugging Face data set return encoded instead of decoded images.

    The pipeline then decodes only the rectangles that it needs. A data set with a format, such as
    "torch", is returned unchanged.
    """
    has_format = (getattr(data, "format", None) or {}).get("type") is not None
    if has_format or not hasattr(data, "cast_column"):
        return data
    return data.cast_column(image_key, type(data.features[image_key])(decode=False))


def _label_column(keys: list[str], classes: list[str], name: str, label_key: str) -> str:
    """Returns the name of the label column.

    The column `label_key` is preferred. If it does not exist and is the default, the only column of
    `classes` (those with the feature `ClassLabel`) is used, or else the only one of `LABEL_KEYS`.

    Raises:
      UserError: no column or several columns may contain the labels.
    """
    if label_key in keys:
        return label_key
    if label_key != "label":
        raise UserError(
            f"the {name} data have no {label_key!r} (data.label_key): there are {', '.join(keys)}"
        )
    candidates = classes or [key for key in LABEL_KEYS if key in keys]
    if len(candidates) != 1:
        raise UserError(
            f"the {name} data have the columns {', '.join(keys)}: choose the label's "
            "(data.label_key)"
        )
    return candidates[0]


def _known_labels(data: Any, key: str | None) -> Any:
    """Returns the labels of all examples if they are known without reading images, else None."""
    if hasattr(data, "column_names") and key:
        return list(data[key])
    targets = getattr(data, "targets", None)
    if targets is None or getattr(data, "target_transform", None) or len(targets) != len(data):
        return None
    return targets


def _class_names(data: Any, split: Callable) -> tuple[str, ...] | None:
    """Returns the class names from a data set's attributes or features, or None."""
    if isinstance(split, _Keys) and (names := _feature_names(data, split.label)):
        return names
    while data is not None:
        for names in (getattr(data, "class_names", None), getattr(data, "classes", None)):
            if names is not None and not callable(names) and len(names):
                return tuple(map(str, names))
        if parts := getattr(data, "datasets", None):  # A torch `ConcatDataset`.
            return _common_names(parts, split)
        data = getattr(data, "dataset", None)  # A torch `Subset`.
    return None


def _feature_names(data: Any, key: str | None) -> tuple[str, ...] | None:
    """Returns the class names from the features of a Hugging Face data set, or None."""
    feature = (getattr(data, "features", None) or {}).get(key)
    # If an image has a list of labels, the feature of the list's items contains the class names.
    for described in (feature, getattr(feature, "feature", None)):
        if names := getattr(described, "names", None):
            return tuple(names)
    return None


def _common_names(parts: Sequence, split: Callable) -> tuple[str, ...] | None:
    """Returns the class names of the parts of a `ConcatDataset`; None: they are unknown.

    Raises:
      UserError: the parts have different class names.
    """
    names = [_class_names(part, split) for part in parts]
    if any(other != names[0] for other in names):
        raise UserError(
            "the parts of the data have different class names: pass class names as labels, "
            "or parts with the same classes"
        )
    return names[0]


def _labelled(
    source: HandedIn,
    labels: Any,
    class_names: tuple[str, ...],
    num_classes: int | None,
    name: str,
) -> HandedIn:
    """Returns the source with its labels and class names.

    `labels` None: the labels are read from the items. `class_names` are those of the training data,
    which define the class indices; empty: unknown. `num_classes` None: unknown.
    """
    labels, items_have_labels = _given_labels(source, labels)
    labels = labels.tolist() if isinstance(labels, np.ndarray) else labels
    rows = _each(label_values, labels, name)
    data_names = _class_names(source.data, source.split) or ()
    if _are_texts(rows, name):
        names = class_names or data_names or tuple(sorted(set().union(*rows)))
        reader = LabelReader({class_name: number for number, class_name in enumerate(names)})
    else:
        names, reader = _numbered(rows, data_names, class_names, num_classes, name)
    table = _table(rows, reader, names, name)
    return dataclasses.replace(
        source,
        class_names=names,
        max_labels=table.shape[1],
        labels=table,
        read_label=reader if items_have_labels else None,
    )


def _given_labels(source: HandedIn, labels: Any) -> tuple[Any, bool]:
    """Returns the label of each example, and True if the items of the data set contain labels.

    If `labels` and the items contain different labels, the labels in the items are returned.
    `labels` None: only the items contain labels.
    """
    items_have_labels = labels is None or (
        source.split is not _alone and _item_label(source, 0) is not None
    )
    if labels is None or (items_have_labels and not _agree(source, labels)):
        # Each item is read only once, and no two items are read at the same time.
        labels = [_item_label(source, index) for index in range(len(source))]
    return labels, items_have_labels


def _each(function: Callable, values: Sequence, name: str) -> list:
    """Applies a function to each example's value; adds the example to a UserError's message."""
    results = []
    for index, value in enumerate(values):
        try:
            results.append(function(value))
        except UserError as error:
            raise UserError(f"the {name} data: example {index}: {error}") from error
    return results


def _are_texts(rows: list, name: str) -> bool:
    """Returns True if all labels are class names; raises UserError if only some of them are."""
    texts = {isinstance(row[0], str) for row in rows if row}
    if len(texts) > 1:
        raise UserError(
            f"the {name} data have labels of both numbers and names of classes: give one kind"
        )
    return texts == {True}


def _numbered(
    rows: list[list[int]],
    data_names: tuple[str, ...],
    class_names: tuple[str, ...],
    num_classes: int | None,
    name: str,
) -> tuple[tuple[str, ...], LabelReader]:
    """Returns the class names for integer labels, and the `LabelReader` for these labels.

    `data_names` are the data set's own class names, and `class_names` those of the training data;
    empty: there are none. `num_classes` None: unknown.
    """
    names = data_names or class_names
    counts, values = _flattened(rows, name)
    width = one_hot_width(counts, values, len(names) or None)
    if width is None:
        _check_numbers(counts, values, len(names), name)
    if not names:
        names = tuple(map(str, range(max(num_classes or 0, width or int(values.max()) + 1))))
    target = class_names or names
    used = from_one_hot(values, width)[1] if width else values
    try:
        numbers = numbers_by_name(names, target, set(np.unique(used).tolist()))
    except UserError as error:
        raise UserError(f"the {name} data have {error}") from error
    return target, LabelReader({}, width, numbers)


def _flattened(rows: list[list[int]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of values in each label, and the values of all labels, concatenated.

    Values of -1, and labels without other values, are removed.
    """
    labels = [[value for value in row if value != -1] for row in rows]
    labels = [row for row in labels if row]
    if not labels:
        raise UserError(f"the {name} data have no labels, which the objective needs")
    return np.array([len(row) for row in labels]), np.concatenate(labels)


def _check_numbers(counts: np.ndarray, values: np.ndarray, num_names: int, name: str) -> None:
    """Raises UserError for values in labels that are not class indices.

    `counts` and `values` are the results of `_flattened`. `num_names` 0: there are no class names.
    """
    with naming(f"the {name} data"):
        check_lists(counts, values, num_names or None)
    limit = num_names or MOST_CLASSES
    if values.max() >= limit or values.min() < 0:
        wrong = values[(values >= limit) | (values < 0)][0]
        raise UserError(
            f"the {name} data have a label {wrong}, outside the {limit:,} classes, from 0"
        )


def _table(rows: list, reader: LabelReader, class_names: tuple[str, ...], name: str) -> np.ndarray:
    """Returns the class indices of all examples, int32 `[images, max_labels]`, padded with -1."""
    indices = _each(reader, rows, name)
    counts = np.array([len(row) for row in indices])
    if not (most := counts.max()):
        raise UserError(f"the {name} data have no labels, which the objective needs")
    values = np.concatenate([np.array(row, np.int64) for row in indices])
    if values.max() >= len(class_names):
        raise UserError(
            f"the {name} data have a label {values.max()}, outside the {len(class_names):,} "
            "classes, from 0"
        )
    table = np.full((len(rows), most), -1, np.int32)
    table[np.arange(most) < counts[:, None]] = values
    return table


def _agree(source: HandedIn, labels: Any) -> bool:
    """Returns False if the labels in a sample of the items differ from `labels`.

    They may differ if `labels` is the attribute `targets` of a torch data set whose `__getitem__`
    changes the labels.
    """
    keys = [_comparable(label) for label in labels]
    # An example of each distinct label is compared, because a `__getitem__` that changes labels
    # often depends on the label.
    seen: dict[str, int] = {}
    for index, key in enumerate(keys):
        seen.setdefault(key, index)
    chosen = sorted({*list(seen.values())[:32], *spread(len(source), 16)})
    return all(_comparable(_item_label(source, index)) == keys[index] for index in chosen)


def _item_label(source: HandedIn, index: int) -> Any:
    """Returns the label that an item contains, or None."""
    try:
        return source.split(source.data[index])[1]
    except Exception as error:
        place = f"{source.describe(index)}: {type(error).__name__}: {error}"
        raise UserError(f"cannot read the label of {place}") from error


def _comparable(label: Any) -> str:
    """Converts a label, which may be a tensor, to a text that is equal for equal labels."""
    return repr(np.asarray(label.tolist() if hasattr(label, "tolist") else label).tolist())


def check_steady(source: HandedIn, name: str) -> None:
    """Raises UserError if two reads of the same example return different images.

    Training with such data could not resume deterministically.
    """
    for index in range(0, len(source), max(1, len(source) // 4)):
        try:
            first, second = source[index].image, source[index].image
        except OSError:
            continue
        if not np.array_equal(np.asarray(first), np.asarray(second)):
            raise UserError(
                f"the {name} data give another image each time example {index} is read: remove "
                "random transforms there, and augment by the config (data.crop, augment.level)"
            )


def _as_pixels(array: np.ndarray) -> bytes | np.ndarray:
    """Converts an array to uint8 `[height, width, 3]`, or to a PNG if it is transparent."""
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (GREY, RGB, RGBA) or 0 in array.shape:
        raise UserError(
            f"an array of shape {list(array.shape)} is not an image [height, width, channels]"
        )
    if array.dtype.kind == "f":
        if not (array.min() >= 0 and array.max() <= 1):
            raise UserError(
                f"an image of floats from {array.min():.4g} to {array.max():.4g} goes beyond [0, "
                "1]: pass uint8, or floats in [0, 1]: (x + 1) / 2 of those in [-1, 1], which "
                "models take"
            )
        array = np.round(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise UserError(
            f"an image is of {array.dtype}, and must be of uint8, or of floats in [0, 1]"
        )
    if array.shape[-1] == RGBA:
        return _as_png(Image.fromarray(array))
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == GREY else array


def _of_pil(image: Image.Image) -> bytes | np.ndarray:
    """Converts a PIL image to uint8 `[height, width, 3]`, or to a PNG if it is transparent."""
    idle = has_idle_alpha(image)
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data and not idle:
        return _as_png(image if image.mode in PNG_MODES else image.convert("RGBA"))
    if image.mode == "F":
        return _as_pixels(np.asarray(image))
    if not image.mode.startswith("I"):
        return np.asarray(image.convert("RGB"))
    levels = np.asarray(image)
    least, most = levels.min(), levels.max()
    if image.mode == "I" and most != 0 and not (least >= 0 and 255 < most < 2**16):
        raise UserError(
            f"an image of 32 bits (mode I) has levels from {least} to {most}, and "
            'is read as 16 bits: pass image.convert("I;16"), or image.convert("L") if they '
            "are of 8 bits"
        )
    return _as_pixels(eight_bits(levels))


def _as_png(image: Image.Image) -> bytes:
    """Encodes a transparent image as PNG; decoding it later applies the config's background."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _nowhere(split: str, options: SourceOptions) -> Source:
    raise UserError(
        "the data of this run were passed by a program (data.source is 'handed_in'): resume "
        "it there, with vit_jax.train and the same data"
    )


HANDED_IN = SourceKind(
    "handed_in", "data that a program passes to vit_jax.train", _nowhere, stands_alone=False
)
