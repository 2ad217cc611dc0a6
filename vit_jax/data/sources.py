"""Where labelled images come from: random access, one small interface.

A source has a length; `source[index]` is an `Example`; `describe(index)` names it for a person.
Sources are read by many threads and sent to worker processes, so they hold no open files.
"""

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from vit_jax.errors import UserError, nearest

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


class Example(NamedTuple):
    """An image, encoded (bytes) or as uint8 `[height, width, channels]`, and its class indices."""

    image: bytes | np.ndarray
    labels: tuple[int, ...]


class Source(Protocol):
    """What the pipeline needs of a data set."""

    class_names: tuple[str, ...]
    max_labels: int

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Example: ...
    def describe(self, index: int) -> str: ...


def open_source(
    kind: str,
    split: str,
    *,
    path: str = "",
    label_key: str = "label",
    class_names: tuple[str, ...] | None = None,
    **synthetic,
) -> Source:
    """Opens a split of a data set.

    Args:
      kind: `digits`, `folder`, `tfds`, or `synthetic`.
      split: its name, with TFDS's slices: `train`, `train[:90%]`, `test[100:]`.
      path: the folder, or `name` / `name:data_dir` of a prepared TFDS data set.
      label_key: the TFDS feature that holds the label or the labels.
      class_names: of the training split, whose numbering a folder's test split then shares.
      **synthetic: arguments of `Synthetic`.

    Raises:
      UserError: what does not exist, is empty or cannot be read.
    """
    if kind == "digits":
        return _slice(digits(split.split("[")[0]), split)
    if kind == "folder":
        return _slice(Folder.scan(Path(path), split.split("[")[0], class_names), split)
    if kind == "tfds":
        return Tfds.open(path, split, label_key)
    if kind == "synthetic":
        return Synthetic(**synthetic)
    raise UserError(
        f"unknown data source {kind!r} (data.source); "
        f"{nearest(kind, ('digits', 'folder', 'tfds', 'synthetic'))}"
    )


@dataclasses.dataclass(frozen=True)
class InMemory:
    """Images held as one uint8 array `[images, height, width, channels]`."""

    name: str
    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    max_labels: int = 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return Example(self.images[index], (int(self.labels[index]),))

    def describe(self, index):
        return f"{self.name} image {index}"


def digits(split: str) -> InMemory:
    """Scikit-learn's 1,797 scans of handwritten digits, 8x8 grey, as RGB; 1,437 to train, 360 to test."""
    from sklearn.datasets import load_digits

    if split not in ("train", "test"):
        raise UserError(f"digits has no split {split!r}; there are: test, train")
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[:1437] if split == "train" else order[1437:]
    grey = np.round(data.images[chosen] * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=-1)
    return InMemory(f"digits {split}", images, data.target[chosen], tuple(str(d) for d in range(10)))


@dataclasses.dataclass(frozen=True)
class Folder:
    """Image files in `<root>/<split>/<class>/`, or in `<root>/<class>/` for the split `all`."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    max_labels: int = 1

    @classmethod
    def scan(cls, root: Path, split: str, class_names: tuple[str, ...] | None = None) -> "Folder":
        """Lists the files; those of `all` come in a fixed random order, fit for slicing."""
        where = root if split == "all" else root / split
        try:
            if not where.is_dir():
                found = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
                raise UserError(
                    f"no folder {where} (data.path and the split's name)"
                    + (f"; {root} has: {', '.join(found[:20])}" if found else "")
                )
            here = tuple(sorted(p.name for p in where.iterdir() if p.is_dir()))
            classes = class_names or here
            if unknown := sorted(set(here) - set(classes)):
                raise UserError(f"{where} has classes that training lacks: {', '.join(unknown[:20])}")
            found = [
                (file, label)
                for label, name in enumerate(classes)
                for file in sorted((where / name).rglob("*"))
                if file.suffix.lower() in IMAGE_SUFFIXES
            ]
        except PermissionError as error:
            raise UserError(f"no permission to read {error.filename}") from error
        if not found:
            raise UserError(
                f"no images in {where}: it must hold a folder per class with "
                f"{', '.join(s[1:] for s in IMAGE_SUFFIXES)} files"
            )
        if split == "all":
            found = [found[i] for i in np.random.default_rng(0).permutation(len(found))]
        return cls(tuple(f for f, _ in found), tuple(label for _, label in found), classes)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return Example(self.files[index].read_bytes(), (self.labels[index],))

    def describe(self, index):
        return str(self.files[index])


@dataclasses.dataclass(frozen=True)
class Tfds:
    """A TFDS data set prepared as ArrayRecord, through `tfds.data_source`: no TensorFlow."""

    name: str
    data: object
    label_key: str
    class_names: tuple[str, ...]
    max_labels: int

    @classmethod
    def open(cls, path: str, split: str, label_key: str) -> "Tfds":
        """`path` is `name` or `name:data_dir`; `split` may be sliced and joined as TFDS allows."""
        import tensorflow_datasets as tfds

        # A version (imagenet2012:5.1.0) is part of the name, a data_dir starts like a path.
        name, data_dir = re.fullmatch(r"([^:]*(?::[\d.*]+)?)(?::(.+))?", path).groups()
        if not name:
            raise UserError("data.path is empty: give the name of a TFDS data set, such as imagenet2012")
        try:
            builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
        except (tfds.core.DatasetNotFoundError, ValueError) as error:
            raise UserError(
                f"TFDS knows no data set {name!r} (data.path): {str(error).splitlines()[0]}"
            ) from error
        if not builder.info.splits:
            raise UserError(
                f"data set {name!r} is not prepared in {builder.data_path}; run: tfds build {name} "
                f"--file_format=array_record" + (f" --data_dir={data_dir}" if data_dir else "")
            )
        features = builder.info.features
        for key in ("image", label_key):
            if key not in features:
                raise UserError(
                    f"data set {name!r} has no feature {key!r} (data.label_key is {label_key!r}); "
                    f"{nearest(key, features)}"
                )
        decoders = {"image": tfds.decode.SkipDecoding()}
        try:
            data = builder.as_data_source(split=split, decoders=decoders)
        except (ValueError, KeyError, NotImplementedError) as error:
            if "array_record" in str(error).lower() or "random access" in str(error).lower():
                raise UserError(
                    f"data set {name!r} is not stored as ArrayRecord; run: tfds convert_format "
                    f"--dataset_version_dir={builder.data_path} --out_file_format=array_record"
                ) from error
            raise UserError(
                f"data set {name!r} has no split {split!r}; there are: {', '.join(builder.info.splits)}"
            ) from error
        feature = features[label_key]
        multiple = not isinstance(feature, tfds.features.ClassLabel)
        class_label = feature.feature if multiple else feature
        names = tuple(getattr(class_label, "names", None) or map(str, range(class_label.num_classes)))
        # The widest label set is not in a data set's description: 16 holds JFT's with room to spare.
        return cls(f"{name} {split}", data, label_key, names, max_labels=16 if multiple else 1)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        example = self.data[index]
        labels = np.atleast_1d(example[self.label_key])[: self.max_labels]
        return Example(example["image"], tuple(int(label) for label in labels))

    def describe(self, index):
        return f"{self.name} example {index}"


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Random images, each a function of its index, for checking a set-up without data."""

    image_size: int
    num_classes: int
    size: int = 64
    max_labels: int = 1

    @property
    def class_names(self):
        return tuple(str(label) for label in range(self.num_classes))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        image = rng.integers(256, size=(self.image_size, self.image_size, 3), dtype=np.uint8)
        return Example(image, (int(rng.integers(self.num_classes)),))

    def describe(self, index):
        return f"synthetic image {index}"


@dataclasses.dataclass(frozen=True)
class Slice:
    """A range of another source."""

    source: Source
    start: int
    stop: int

    @property
    def class_names(self):
        return self.source.class_names

    @property
    def max_labels(self):
        return self.source.max_labels

    def __len__(self):
        return self.stop - self.start

    def __getitem__(self, index):
        return self.source[self.start + index]

    def describe(self, index):
        return self.source.describe(self.start + index)


def _slice(source: Source, split: str) -> Source:
    """The part of `source` that `name[from:to]` means, with TFDS's percentages and rounding."""
    if "[" not in split:
        return source
    parsed = re.fullmatch(r"(\w+)\[(-?\d+%?)?:(-?\d+%?)?\]", split)
    if parsed is None:
        name = split.split("[")[0]
        raise UserError(f"cannot read the split {split!r}; write {name}[:90%] or {name}[100:]")
    images = len(source)

    def boundary(text: str | None, default: int) -> int:
        if text is None:
            return default
        index = round(int(text[:-1]) / 100 * images) if text.endswith("%") else int(text)
        return min(max(index + images if index < 0 else index, 0), images)

    start, stop = boundary(parsed[2], 0), boundary(parsed[3], images)
    if start >= stop:
        raise UserError(f"the split {split!r} of {images} images is empty")
    return Slice(source, start, stop)
