"""Where labelled images come from: random access, one small interface.

A source has a length; `source[index]` is an `Example`; `describe(index)` names it for a person.
Sources are read by many threads and sent to worker processes, so they hold no open files.
"""

import dataclasses
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError, nearest

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
KINDS = ("digits", "folder", "tfds", "vtab", "array_record", "synthetic", "mixture")


class Example(NamedTuple):
    """An image, encoded (bytes) or as uint8 `[height, width, channels]`, and its class indices."""

    image: bytes | np.ndarray
    labels: tuple[int, ...]


class Source:
    """What the pipeline needs of a data set, besides `len(source)`."""

    class_names: tuple[str, ...]
    max_labels: int = 1
    weights: tuple[float, ...] | None = None  # Shares of the parts of a mixture.
    empty_classes: tuple[str, ...] = ()  # Known to have no image in this split.

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples of each part; their sum is the length."""
        return (len(self),)

    def __getitem__(self, index: int) -> Example:
        raise NotImplementedError

    def describe(self, index: int) -> str:
        raise NotImplementedError

    def labels_of(self, index: int) -> tuple[int, ...]:
        """The class indices of an example, without its image where the source can do that."""
        return self[index].labels

    def label_table(self, told: Callable[[int], None] = lambda read: None) -> np.ndarray:
        """Labels of all images, int32 `[images, max_labels]` padded with -1; no image is decoded.

        Args:
          told: is called now and then with how many have been read.
        """
        table = np.full((len(self), self.max_labels), -1, np.int32)
        starts = range(0, len(self), 256)

        def read(start: int) -> list[tuple[int, ...]]:
            return [self.labels_of(index) for index in range(start, min(start + 256, len(self)))]

        with ThreadPoolExecutor(16) as pool:  # For storage that takes long to answer.
            for start, rows in zip(starts, pool.map(read, starts), strict=True):
                for index, labels in enumerate(rows, start):
                    table[index, : len(labels)] = labels
                told(start + len(rows))
        return table


def open_source(
    kind: str,
    split: str,
    *,
    path: str = "",
    label_key: str = "label",
    class_names: tuple[str, ...] | None = None,
    num_classes: int | None = None,
    parts: tuple[str, ...] = (),
    weights: tuple[float, ...] | None = None,
    image_size: int = 224,
    only: Sequence[str] | None = None,
    labels: bool = True,
) -> Source:
    """Opens a split of a data set.

    Args:
      kind: one of `KINDS`.
      split: its name, with TFDS's slices: `train`, `train[:90%]`, `test[100:]`.
      path: of `folder`, where it is (also `gs://`, `s3://`); of `tfds`, `name` or `name:data_dir` of a
        prepared data set or the folder that holds its files; of `vtab`, `task` or `task:data_dir`; of
        `array_record`, a pattern of files.
      label_key: the TFDS feature that holds the label or the labels.
      class_names: of the training split, whose numbering a folder's test split then shares.
      num_classes: of `array_record` files and `synthetic` images, which don't say it.
      parts: of a `mixture`: `kind:path` each.
      weights: shares of the parts in training; None lets every example count the same.
      image_size: of `synthetic` images.
      only: names of classes; the others' images are left out, and these are numbered in this order.
      labels: they are needed; else a folder needs no classes, and a data set no feature for them.

    Raises:
      UserError: what does not exist, is empty or cannot be read.
    """
    if only is not None:
        arguments = dict(path=path, label_key=label_key, num_classes=num_classes, image_size=image_size)
        return of_classes(open_source(kind, split, parts=parts, weights=weights, **arguments), only)
    name = split.split("[")[0]
    if kind == "digits":
        return _slice(digits(name), split)
    if kind == "folder":
        return _slice(Folder.scan(path, name, class_names, labels), split)
    label_key = label_key if labels or only else None
    if kind == "tfds":
        return tfds_records(path, split, label_key)
    if kind == "vtab":
        from vit_jax.data.vtab import open_task

        return open_task(path, split)
    if kind == "array_record":
        return _slice(array_records(path, label_key, num_classes), split)
    if kind == "synthetic":
        return Synthetic(image_size, num_classes or 10)
    if kind == "mixture":
        opened = []
        for part in parts:
            part_kind, _, part_path = part.partition(":")
            arguments = dict(label_key=label_key, class_names=class_names, num_classes=num_classes)
            arguments["labels"] = labels
            opened.append(open_source(part_kind, split, path=part_path, image_size=image_size, **arguments))
        return Mixture.join(opened, weights, class_names)
    raise UserError(f"unknown data source {kind!r} (data.source); {nearest(kind, KINDS)}")


def fingerprint(source: Source, samples: int = 16) -> dict[str, int | str]:
    """Short values by which two hosts see whether they read the same: counts, names, some examples."""

    def digest(*parts: bytes) -> str:
        return hashlib.blake2b(b"\0".join(parts), digest_size=8).hexdigest()

    def content(index: int) -> bytes:
        try:
            image, labels = source[index]
        except OSError:  # Such an image is counted and replaced when it is read.
            return b""
        return bytes(image) + repr(labels).encode()

    chosen = sorted({round(i * (len(source) - 1) / (samples - 1)) for i in range(samples)})
    return {
        "images": len(source),
        "classes": len(source.class_names),
        "class names": digest(*(name.encode() for name in source.class_names)),
        "examples": digest(*map(content, chosen)),
    }


@dataclasses.dataclass(frozen=True)
class InMemory(Source):
    """Images held as one uint8 array `[images, height, width, channels]`."""

    name: str
    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    max_labels: int = 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return Example(self.images[index], self.labels_of(index))

    def describe(self, index):
        return f"{self.name} image {index}"

    def labels_of(self, index):
        return (int(self.labels[index]),)


def digits(split: str) -> InMemory:
    """Scikit-learn's 1,797 scans of handwritten digits, 8x8 grey, as RGB; 1,437 to train, 360 to test."""
    if split not in ("train", "test"):
        raise UserError(f"digits has no split {split!r}; there are: test, train")
    # The file alone: to import scikit-learn takes longer than all else that a short run imports.
    package = Path(importlib.util.find_spec("sklearn").origin).parent
    table = np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.int64)
    order = np.random.default_rng(0).permutation(len(table))
    table = table[order[:1437] if split == "train" else order[1437:]]
    grey = np.round(table[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey[..., None], 3, axis=-1)
    return InMemory(f"digits {split}", images, table[:, 64], tuple(str(d) for d in range(10)))


@dataclasses.dataclass(frozen=True)
class Folder(Source):
    """Image files in `<root>/<split>/<class>/`, or in `<root>/<class>/` for the split `all`.

    Without labels they may be anywhere below that. What is in folders that begin with a dot is left out.
    """

    files: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    max_labels: int = 1

    @classmethod
    def scan(
        cls, root: str, split: str, class_names: tuple[str, ...] | None = None, labels: bool = True
    ) -> "Folder":
        """Lists the files; those of `all` come in a fixed random order, fit for slicing.

        Args:
          root: a local path, or a URL that fsspec reads (`gs://`, `s3://`).
        """
        where = root if split == "all" else f"{root.rstrip('/')}/{split}"
        files, folders = _list(where)
        if not files and not folders:
            siblings = _list(root)[1]
            raise UserError(
                f"no folder {where} (data.path and the split's name)"
                + (f"; {root} has: {', '.join(sorted(siblings)[:20])}" if siblings else "")
            )
        files = [file for file in files if not re.search(r"(^|/)\.[^/]*/", file)]
        folders = {name for name in folders if not name.startswith(".")}
        classes = (class_names or tuple(sorted(folders))) if labels else ()
        if labels and (unknown := sorted(folders - set(classes))):
            raise UserError(f"{where} has classes that training lacks: {', '.join(unknown[:20])}")
        number = {name: label for label, name in enumerate(classes)}
        images = [file for file in files if file.lower().endswith(IMAGE_SUFFIXES)]
        if labels:
            found = [(number[file.split("/")[0]], file) for file in images if "/" in file]
        else:
            found = [(-1, file) for file in images]
        if not found:
            a_class = "a folder per class with " if labels else ""
            more = f"; of the {len(images)} images there none is in such a folder" if images else ""
            raise UserError(
                f"no images in {where}: it must hold {a_class}"
                f"{', '.join(s[1:] for s in IMAGE_SUFFIXES)} files{more}"
            )
        found.sort()
        if split == "all":
            found = [found[i] for i in np.random.default_rng(0).permutation(len(found))]
        labels, names = zip(*found, strict=True)
        return cls(tuple(f"{where.rstrip('/')}/{name}" for name in names), labels, classes)

    @property
    def empty_classes(self) -> tuple[str, ...]:
        """Classes without an image."""
        return tuple(
            self.class_names[label] for label in sorted(set(range(len(self.class_names))) - {*self.labels})
        )

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return Example(_read(self.files[index]), self.labels_of(index))

    def describe(self, index):
        return self.files[index]

    def labels_of(self, index):
        return (int(self.labels[index]),) if self.class_names else ()


def _list(where: str) -> tuple[list[str], set[str]]:
    """All files below a folder, by their paths from there, and the names of its own folders."""
    if "://" not in where:
        files, folders = [], set()

        def refuse(error: OSError):
            if isinstance(error, PermissionError):
                raise UserError(f"no permission to read {error.filename}") from error

        for folder, inner, names in os.walk(where, onerror=refuse, followlinks=True):
            prefix = os.path.relpath(folder, where)
            if prefix == ".":
                folders, prefix = set(inner), ""
            files += [f"{prefix}/{name}" if prefix else name for name in names]
        return files, folders
    system, path = _remote(where)
    try:
        files = [file[len(path) :].lstrip("/") for file in system.find(path)]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot list {where}: {' '.join(str(error).split())}") from error
    return files, {file.split("/")[0] for file in files if "/" in file}


def _read(file: str) -> bytes:
    if "://" not in file:
        try:
            opened = os.open(file, os.O_RDONLY)  # A third of the time that pathlib takes.
        except PermissionError as error:
            raise UserError(f"no permission to read {file}") from error
        try:
            return os.read(opened, os.fstat(opened).st_size)
        finally:
            os.close(opened)
    system, path = _remote(file)
    return system.cat_file(path)


def _remote(url: str):
    """The file system of a URL and the path in it; fsspec keeps one system for each process."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f'cannot read {url}: {error} (pip install "vit_jax[cloud]")') from error
    except ValueError as error:
        raise UserError(f"cannot read {url}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Records(Source):
    """ArrayRecord files of tf.Examples; `read` takes what is wanted of one's features."""

    name: str
    records: object
    read: Callable[[Mapping], Example]
    class_names: tuple[str, ...]
    max_labels: int

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        from tensorflow_datasets.proto.tf_example_generated_pb2 import Example as Message

        try:
            features = Message.FromString(self.records[index]).features.feature
        except Exception as error:  # The C++ reader's, a protocol buffer's, or the file system's.
            raise UserError(f"cannot read {self.describe(index)}: {_first_line(error)}") from error
        example = self.read(features)
        for label in example.labels:
            if not 0 <= label < len(self.class_names):
                raise UserError(
                    f"{self.describe(index)} has the label {label}, outside the data set's "
                    f"{len(self.class_names)} classes"
                )
        return Example(example.image, example.labels[: self.max_labels])

    def describe(self, index):
        return f"{self.name} example {index}"


def image_and_labels(features: Mapping, label_key: str | None) -> Example:
    """The encoded `image` of a tf.Example and its label or labels; none without a key."""
    (image,) = features["image"].bytes_list.value
    return Example(image, tuple(features[label_key].int64_list.value) if label_key else ())


def tfds_records(path: str, split: str, label_key: str | None) -> Records:
    """A TFDS data set prepared as ArrayRecord, read without TensorFlow.

    Args:
      path: `name`, `name:data_dir`, or the folder with its files.
      split: may be sliced and joined as TFDS allows.
    """
    import tensorflow_datasets as tfds

    builder = tfds_builder(path)
    feature = tfds_feature(builder, label_key or "image")
    multiple = label_key is not None and not isinstance(feature, tfds.features.ClassLabel)
    labels = feature.feature if multiple else feature
    # The widest label set is not in a data set's description: 16 holds JFT's with room to spare.
    return Records(
        f"{builder.info.full_name} {split}",
        tfds_split(builder, split),
        partial(image_and_labels, label_key=label_key),
        tuple(labels.names) if label_key else (),
        max_labels=16 if multiple else 1,
    )


def tfds_builder(path: str):
    """The builder of a TFDS data set that is prepared.

    Args:
      path: `name`, `name:data_dir`, or the folder with its files.
    """
    import tensorflow_datasets as tfds

    if not path:
        raise UserError("data.path is empty: give the name of a TFDS data set, such as imagenet2012")
    # A version (imagenet2012:5.1.0) is part of the name, a data_dir starts like a path.
    name, data_dir = re.fullmatch(r"((?:gs://)?[^:]*(?::[\d.*]+)?)(?::(.+))?", path).groups()
    is_folder = name.startswith(("/", ".", "~", "gs://"))
    try:
        if is_folder:
            builder = tfds.builder_from_directory(os.path.expanduser(name))
        else:
            builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
    except FileNotFoundError as error:
        raise UserError(f"no prepared data set in {name} (data.path): {_first_line(error)}") from error
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise UserError(f"TFDS knows no data set {name!r} (data.path): {_first_line(error)}") from error
    if not builder.info.splits:
        by_hand = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
        command = f"tfds build {re.sub(r':.*[*].*', '', name)} --file_format=array_record"
        command += f" --data_dir={data_dir}" if data_dir else ""
        if by_hand:
            page = f"https://www.tensorflow.org/datasets/catalog/{builder.name}"
            command += f" --manual_dir=DIR, with the files that {page} names downloaded by hand into DIR"
        raise UserError(f"data set {name!r} is not prepared in {builder.data_path}; run: {command}")
    return builder


def tfds_feature(builder, key: str):
    """A feature of a TFDS data set, which must have images too."""
    features = builder.info.features
    for needed in ("image", key):
        if needed not in features:
            raise UserError(
                f"data set {builder.info.full_name!r} has no feature {needed!r} (data.label_key is {key!r}); "
                f"{nearest(needed, features)}"
            )
    return features[key]


def tfds_split(builder, split: str):
    """The serialized records of a split of a TFDS data set, by index."""
    import tensorflow_datasets as tfds

    name = builder.info.full_name
    try:
        # Raw: TFDS takes 0.1 ms to decode a record, `Records` 0.01.
        raw = tfds.decode.DeserializeMethod.RAW_BYTES
        return builder.as_data_source(split=split, deserialize_method=raw).data_source
    except (ValueError, KeyError, NotImplementedError) as error:
        if "array_record" in str(error).lower() or "random access" in str(error).lower():
            raise UserError(
                f"data set {name!r} is not stored as ArrayRecord; run: python -m vit_jax.prepare "
                f"{builder.data_path} --out=DIR"
            ) from error
        raise UserError(
            f"data set {name!r} has no split {split!r}; there are: {', '.join(builder.info.splits)}"
        ) from error


def array_records(path: str, label_key: str | None, num_classes: int | None) -> Records:
    """ArrayRecord files without TFDS's description.

    Args:
      path: a pattern of files, `/data/train-*.array_record`, local or `gs://`.
    """
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from etils import epath

    if label_key is None:
        num_classes = 0
    elif num_classes is None:
        raise UserError("array_record files don't say their classes: give data.num_classes")
    pattern = epath.Path(path)
    files = sorted(str(file) for file in pattern.parent.glob(pattern.name))
    if not files:
        raise UserError(f"no files {path} (data.path)")
    try:
        records = ArrayRecordDataSource(files)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from error
    read = partial(image_and_labels, label_key=label_key)
    return Records(path, records, read, tuple(map(str, range(num_classes))), max_labels=16)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@dataclasses.dataclass(frozen=True)
class Mixture(Source):
    """Several sources joined end to end; classes of the same name are one."""

    parts: tuple[Source, ...]
    class_names: tuple[str, ...]
    max_labels: int = 1
    weights: tuple[float, ...] | None = None

    @classmethod
    def join(
        cls, parts: list[Source], weights: tuple[float, ...] | None, class_names: tuple[str, ...] | None
    ) -> "Mixture":
        """`class_names` fixes the numbering; else classes are numbered as the parts bring them."""
        if not parts:
            raise UserError("a mixture needs data.parts, such as ('tfds:imagenet2012', 'folder:/data/pets')")
        if weights is not None and (len(weights) != len(parts) or min(weights) <= 0):
            raise UserError(
                f"data.weights {weights} must be {len(parts)} numbers above 0, one for each of data.parts"
            )
        names = class_names or tuple(dict.fromkeys(name for part in parts for name in part.class_names))
        for part in parts:
            if unknown := sorted(set(part.class_names) - set(names)):
                raise UserError(
                    f"{part.describe(0)} is of a part with classes that training lacks: "
                    f"{', '.join(unknown[:20])}"
                )
        return cls(tuple(parts), names, max(part.max_labels for part in parts), weights)

    @property
    def sizes(self):
        return tuple(len(part) for part in self.parts)

    def __post_init__(self):
        number = {name: label for label, name in enumerate(self.class_names)}
        tables = tuple(tuple(number[name] for name in part.class_names) for part in self.parts)
        object.__setattr__(self, "_tables", tables)
        object.__setattr__(self, "_ends", np.cumsum(self.sizes))

    def __len__(self):
        return int(self._ends[-1])

    def _locate(self, index: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return part, index - (int(self._ends[part - 1]) if part else 0)

    def __getitem__(self, index):
        part, index = self._locate(index)
        image, labels = self.parts[part][index]
        return Example(image, self._renumbered(part, labels))

    def labels_of(self, index):
        part, index = self._locate(index)
        return self._renumbered(part, self.parts[part].labels_of(index))

    def _renumbered(self, part: int, labels: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._tables[part][label] for label in labels)

    def describe(self, index):
        part, index = self._locate(index)
        return self.parts[part].describe(index)


@dataclasses.dataclass(frozen=True)
class Synthetic(Source):
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
class Subset(Source):
    """Some images of another source, in the order given."""

    source: Source
    indices: Sequence[int] | np.ndarray

    @property
    def class_names(self):
        return self.source.class_names

    @property
    def max_labels(self):
        return self.source.max_labels

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.source[int(self.indices[index])]

    def describe(self, index):
        return self.source.describe(int(self.indices[index]))

    def labels_of(self, index):
        return self.source.labels_of(int(self.indices[index]))


@dataclasses.dataclass(frozen=True)
class Renumbered(Source):
    """The images of another source, with other numbers for their classes."""

    source: Source
    class_names: tuple[str, ...]
    number: dict[int, int]  # New by old; classes that are not in it are left out.

    @property
    def max_labels(self):
        return self.source.max_labels

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        image, labels = self.source[index]
        return Example(image, self._renumbered(labels))

    def describe(self, index):
        return self.source.describe(index)

    def labels_of(self, index):
        return self._renumbered(self.source.labels_of(index))

    def _renumbered(self, labels: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.number[label] for label in labels if label in self.number)


def of_classes(source: Source, names: Sequence[str]) -> Renumbered:
    """The images of some classes, which are numbered in the order of `names`.

    Raises:
      UserError: there is no such class, it is named twice, or there is no image of them.
    """
    names = tuple(map(str, names))  # A config may say (5, 6) for digits.
    if len(set(names)) < len(names):
        raise UserError(f"data.classes names a class twice: {', '.join(names)}")
    for name in names:
        if name not in source.class_names:
            raise UserError(f"there is no class {name!r} (data.classes); {nearest(name, source.class_names)}")
    number = {source.class_names.index(name): new for new, name in enumerate(names)}
    indices = np.flatnonzero(np.isin(source.label_table(), list(number)).any(axis=1))
    if not len(indices):
        raise UserError(f"no image is of the classes {', '.join(names)} (data.classes)")
    return Renumbered(Subset(source, indices), names, number)


def split_range(split: str, images: int) -> range:
    """Which of the images of a split `name[from:to]` means, with TFDS's percentages and rounding.

    Raises:
      UserError: it is not written so, or is empty.
    """
    if "[" not in split:
        return range(images)
    parsed = re.fullmatch(r"(\w+)\[(-?\d+%?)?:(-?\d+%?)?\]", split)
    if parsed is None:
        name = split.split("[")[0]
        raise UserError(f"cannot read the split {split!r}; write {name}[:90%] or {name}[100:]")

    def boundary(text: str | None, default: int) -> int:
        if text is None:
            return default
        index = round(int(text[:-1]) / 100 * images) if text.endswith("%") else int(text)
        return min(max(index + images if index < 0 else index, 0), images)

    start, stop = boundary(parsed[2], 0), boundary(parsed[3], images)
    if start >= stop:
        raise UserError(f"the split {split!r} of {images} images is empty")
    return range(start, stop)


def _slice(source: Source, split: str) -> Source:
    """The part of `source` that `name[from:to]` means."""
    chosen = split_range(split, len(source))
    return source if len(chosen) == len(source) else Subset(source, chosen)
