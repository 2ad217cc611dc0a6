"""Data sets that a program hands in: arrays, a data set of Hugging Face or torch, or anything like a list."""

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.folder import read_file
from vit_jax.data.sources.kind import SourceKind, SourceOptions
from vit_jax.data.sources.slices import stratified
from vit_jax.errors import UserError, nearest

IMAGE_KEYS, LABEL_KEYS = ("image", "img", "jpg", "png", "pixel_values"), ("label", "labels", "target")
MOST_CLASSES = 2**24
GREY, RGB, RGBA = 1, 3, 4  # Channels of an image.


@dataclasses.dataclass(frozen=True)
class HandedIn(Source):
    """A data set of the caller's, each of whose examples gives the same image whenever it is read."""

    name: str
    data: Any  # With `len(data)` and `data[index]`.
    split: Callable[[Any], tuple[Any, Any]]  # Takes an item apart: the image, and the label or None.
    class_names: tuple[str, ...]
    max_labels: int = 1
    labels: np.ndarray | None = None  # int32 [images, max_labels], padded with -1, where they are known.

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        try:
            image, label = self.split(self.data[index])
            return Example(as_image(image), self._checked(index, label))
        except OSError:
            raise
        except UserError as error:
            raise UserError(f"{self.describe(index)}: {error}") from error
        except Exception as error:  # A program of the user's, which may fail in any way.
            raise UserError(f"cannot read {self.describe(index)}: {type(error).__name__}: {error}") from error

    def describe(self, index):
        return f"{self.name} example {index}"

    def labels_of(self, index):
        if self.labels is None:
            return self[index].labels
        return tuple(label for label in self.labels[index].tolist() if label >= 0)

    def known_labels(self):
        return self.labels

    def fair_order(self):
        if self.labels is None:
            return range(len(self))
        return stratified(self.labels[:, 0].tolist(), [str(index) for index in range(len(self))])

    def _checked(self, index: int, label: Any) -> tuple[int, ...]:
        if not self.class_names:
            return ()
        labels = self.labels_of(index) if self.labels is not None else as_labels(label, self.class_names)
        for number in labels:
            if not 0 <= number < len(self.class_names):
                raise UserError(f"label {number} is outside the {len(self.class_names)} classes")
        return labels


def handed_in(
    data: Any,
    name: str,
    *,
    labels: bool = True,
    class_names: Sequence[str] | None = None,
    num_classes: int | None = None,
    label_key: str = "label",
) -> Source:
    """A source of a data set that the caller has.

    Args:
      data: a pair of images and labels, or images alone; a `datasets.Dataset`; a torch `Dataset`; anything
        with `len(data)` whose items are an image, a pair, or a mapping; or a `Source`. Images are NumPy
        arrays uint8 or floats in [0, 1], `[height, width]` or `[height, width, channels]`, torch tensors with
        channels first, PIL images, encoded bytes or paths. Labels are numbers or names of classes, or lists
        of such.
      name: what errors call it, such as "training".
      labels: they are needed; otherwise they are not looked at.
      class_names: of all classes; None: those that the data set says, else the labels themselves.
      num_classes: how many there are, for a data set that does not say it.
      label_key: the column or key that holds the label, where an item is a mapping.

    Raises:
      UserError: it is no such data set, is empty, has no labels, or gives another image each time.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, Mapping):
        raise UserError(
            f"the {name} data are a {type(data).__name__} of {', '.join(map(str, data))}: hand in one"
        )
    if isinstance(data, tuple) and len(data) == 2 and _is_column(data[0]) and _is_column(data[1]):
        data, column = data
        if len(data) != len(column):
            raise UserError(f"the {name} data have {len(data):,} images and {len(column):,} labels")
        split, given = _alone, column
    else:
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise UserError(
                f"the {name} data are a {type(data).__name__}, which has no length and no order of its own: "
                "hand in arrays (images, labels), or an object with __len__ and __getitem__"
            )
        _check_not_empty(data, name)
        data, image_key, key = _columns(data, name, label_key if labels else None)
        split = _Keys(image_key, key) if image_key else _pair
        given = _known_labels(data, key) if labels else None
    _check_not_empty(data, name)
    if isinstance(data, np.ndarray):
        _check_array(data, name)
    source = HandedIn(f"{name} data's", data, split, ())
    if labels:
        source = _labelled(source, given, class_names, num_classes, name)
    _check_steady(source, name)
    return source


def as_image(value: Any) -> bytes | np.ndarray:
    """An image as the pipeline takes it: encoded, or uint8 `[height, width, 3]`.

    Raises:
      UserError: it is none.
    """
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str | Path):
        return read_file(str(value))
    if isinstance(value, Mapping) and "bytes" in value:  # Hugging Face's image, not decoded.
        return value["bytes"] if value["bytes"] is not None else read_file(value["path"])
    if isinstance(value, Image.Image):
        value = ImageOps.exif_transpose(value)
        if value.mode in ("RGB", "L") and not value.has_transparency_data:
            return np.asarray(value.convert("RGB"))
        return _as_png(value)
    if detach := getattr(value, "detach", None):  # A torch tensor.
        value = detach().cpu().numpy()
        if value.ndim == 3 and value.shape[0] in (GREY, RGB, RGBA):
            value = np.moveaxis(value, 0, -1)
    if not isinstance(value, np.ndarray):
        raise UserError(f"a {type(value).__name__} is no image")
    return _as_pixels(value)


def as_labels(value: Any, class_names: Sequence[str]) -> tuple[int, ...]:
    """Class indices of a label: a number, the name of a class, or a list of such.

    Raises:
      UserError: it is neither, or there is no such class.
    """
    if isinstance(value, str):
        if value not in class_names:
            raise UserError(f"there is no class {value!r}; {nearest(value, class_names)}")
        return (class_names.index(value),)
    if value is None:
        raise UserError("it has no label")
    value = np.asarray(value)
    if value.dtype.kind in "US":
        return tuple(label for name in value.ravel().tolist() for label in as_labels(name, class_names))
    if value.dtype.kind not in "iub" or value.ndim > 1:
        raise UserError(f"a label is {value.tolist()!r}, and not a number or a name of a class")
    return tuple(label for label in value.ravel().tolist() if label != -1)


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Takes an item apart that is a mapping."""

    image: str
    label: str | None

    def __call__(self, item):
        return item[self.image], item.get(self.label) if self.label else None


def _alone(item):
    return item, None


def _pair(item):
    return item[:2] if isinstance(item, tuple | list) else (item, None)


def _is_column(value: Any) -> bool:
    """True for an array or a list that is neither an image nor one item of a data set."""
    return isinstance(value, list) or (hasattr(value, "shape") and hasattr(value, "__len__"))


def _check_not_empty(data: Any, name: str) -> None:
    if not len(data):
        raise UserError(f"the {name} data are empty")


def _check_array(images: np.ndarray, name: str) -> None:
    shape = "x".join(map(str, images.shape))
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[-1] not in (GREY, RGB, RGBA)):
        raise UserError(
            f"the {name} images are an array {shape}, and must be [images, height, width, channels] with "
            "1, 3 or 4 channels, or [images, height, width]"
        )


def _columns(data: Any, name: str, label_key: str | None) -> tuple[Any, str | None, str | None]:
    """The data set, and the keys of its items' image and label; None where items are no mappings."""
    features = getattr(data, "features", None)
    if isinstance(features, Mapping):  # A data set of Hugging Face.
        kinds = {key: type(feature).__name__ for key, feature in features.items()}
        images = [key for key, kind in kinds.items() if kind == "Image"]
        classes = [key for key, kind in kinds.items() if kind == "ClassLabel"]
        keys = list(features)
    else:
        item = data[0]
        if not isinstance(item, Mapping):
            return data, None, None
        keys, images, classes = list(item), [], []
    image_key = next((key for key in (*images, *IMAGE_KEYS) if key in keys), None)
    if image_key is None:
        raise UserError(f"the {name} data have no image: there are {', '.join(map(str, keys))}")
    plain = (getattr(data, "format", None) or {}).get("type") is None
    if image_key in images and plain and hasattr(data, "cast_column"):
        # Encoded images: they are decoded in part where that suffices, as files are.
        data = data.cast_column(image_key, type(data.features[image_key])(decode=False))
    if label_key is None or label_key in keys:
        return data, image_key, label_key
    if label_key != "label":
        raise UserError(
            f"the {name} data have no {label_key!r} (data.label_key): there are {', '.join(keys)}"
        )
    candidates = classes or [key for key in LABEL_KEYS if key in keys]
    if len(candidates) != 1:
        raise UserError(
            f"the {name} data have the columns {', '.join(keys)}: say which holds the label (data.label_key)"
        )
    return data, image_key, candidates[0]


def _known_labels(data: Any, key: str | None) -> Any:
    """The labels of all examples where they are known without reading images, else None."""
    if hasattr(data, "column_names") and key:
        return list(data[key])
    targets = getattr(data, "targets", None)
    if targets is None or getattr(data, "target_transform", None) or len(targets) != len(data):
        return None
    return targets


def _class_names(data: Any, split: Callable) -> tuple[str, ...] | None:
    """Names of the classes as the data set says them, or None."""
    if isinstance(split, _Keys):
        feature = (getattr(data, "features", None) or {}).get(split.label)
        for said in (feature, getattr(feature, "feature", None)):  # The latter of several labels.
            if names := getattr(said, "names", None):
                return tuple(names)
    while data is not None:
        for said in (getattr(data, "class_names", None), getattr(data, "classes", None)):
            if said is not None and not callable(said) and len(said):
                return tuple(map(str, said))
        data = getattr(data, "dataset", None)  # Of a torch `Subset`.
    return None


def _labelled(
    source: HandedIn, given: Any, class_names: Sequence[str] | None, num_classes: int | None, name: str
) -> HandedIn:
    """The source with its labels and the names of its classes."""
    if given is None:
        given = []
        for index in range(len(source)):  # No list of them: each example is read once.
            try:
                given.append(source.split(source.data[index])[1])
            except Exception as error:
                place = f"{source.describe(index)}: {type(error).__name__}: {error}"
                raise UserError(f"cannot read the label of {place}") from error
    given = [label.tolist() if hasattr(label, "tolist") else label for label in given]
    names = class_names or _class_names(source.data, source.split)
    texts = {part for label in given for part in (label if isinstance(label, list) else [label])}
    if names is None and texts and all(isinstance(part, str) for part in texts):
        names = sorted(texts)
    known = tuple(names or ())
    try:
        rows = [as_labels(label, known) for label in given]
    except UserError as error:
        raise UserError(f"the {name} data: {error}") from error
    most = max(map(len, rows), default=0)
    if not most:
        raise UserError(f"the {name} data have no labels, which the objective needs")
    highest, limit = max(map(max, filter(None, rows))), len(known) or MOST_CLASSES
    if highest >= limit or min(map(min, filter(None, rows))) < 0:
        raise UserError(f"the {name} data have a label outside the {limit:,} classes, from 0")
    table = np.full((len(rows), most), -1, np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    if not known:
        known = tuple(map(str, range(max(num_classes or 0, highest + 1))))
    return dataclasses.replace(source, class_names=known, max_labels=most, labels=table)


def _check_steady(source: HandedIn, name: str) -> None:
    """Raises UserError where an example is another one each time: a run could not go on as it was."""
    for index in range(0, len(source), max(1, len(source) // 4)):
        try:
            first, second = source[index].image, source[index].image
        except OSError:
            continue
        if not np.array_equal(np.asarray(first), np.asarray(second)):
            raise UserError(
                f"the {name} data give another image each time example {index} is read: leave out what "
                "is random there, and augment by the config (data.crop, augment.level)"
            )


def _as_pixels(array: np.ndarray) -> bytes | np.ndarray:
    """uint8 `[height, width, 3]`, or encoded where it is transparent."""
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (GREY, RGB, RGBA) or 0 in array.shape:
        raise UserError(f"an array of shape {list(array.shape)} is no image [height, width, channels]")
    if array.dtype.kind == "f":
        if not (array.min() >= 0 and array.max() <= 1):
            raise UserError("an image of floats goes beyond [0, 1]: hand in uint8, not normalised")
        array = np.round(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise UserError(f"an image is of {array.dtype}, and must be of uint8, or of floats in [0, 1]")
    if array.shape[-1] == RGBA:
        return _as_png(Image.fromarray(array))
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == GREY else array


def _as_png(image: Image.Image) -> bytes:
    """The image encoded without loss: what is transparent is put on the config's background, as in files."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _nowhere(split: str, options: SourceOptions) -> Source:
    raise UserError(
        "the data of this run were handed in by a program (data.source is 'handed_in'): go on from there, "
        "with vit_jax.train and the same data"
    )


HANDED_IN = SourceKind("handed_in", "what a program hands to vit_jax.train", _nowhere, stands_alone=False)
