"""Readers of every kind of data set that `vit_jax.prepare` takes: the examples it holds, and their bytes.

`find` recognises a data set and lists its units (a file, a class's folder, a tar inside a tar);
`scan` lists a unit's examples without decoding any; `read` fetches one by file, offset and size.
An index row is 44 bytes and a name: 14 million images fit in 1 GB; nothing is kept as an object.
"""

import dataclasses
import hashlib
import json
import os
import re
import struct
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import numpy as np

from vit_jax.data.decode import Unreadable
from vit_jax.data.sources.folder import IMAGE_SUFFIXES, folders_in, read_file, walk
from vit_jax.errors import UserError, nearest

ENTRY = np.dtype(
    [
        ("unit", "u4"),
        ("offset", "u8"),
        ("size", "u4"),
        ("first_label", "u8"),  # Into the labels of all examples, ...
        ("labels", "u2"),  # ... where it has this many.
        ("name", "u8"),  # Into the names of all examples, as bytes.
        ("name_size", "u2"),
        ("key", "u8"),  # Hash of seed and of what names the example in its data set: decides its place.
    ]
)
_SPLITS = r"(?:^|[-_.])(train|training|validation|valid|val|dev|test)(?=[-_.\d]|$)"
_SYNSET = re.compile(r"n\d{8}")


class Unit(NamedTuple):
    """A part of a data set that is scanned at once: a file, a folder or a tar inside a tar."""

    split: str
    path: str
    start: int = 0  # The bytes of the file that are meant; 0 and 0 are all.
    end: int = 0
    label: int = -1  # The label of all that is in it, where the unit is a class.


@dataclasses.dataclass(frozen=True)
class RawDataSet:
    """A data set as it was recognised, before it is prepared."""

    kind: str
    root: Path
    units: list[Unit]
    class_names: list[str] | None = None  # None: classes are numbers.
    label_key: str | None = None
    index_labels: bool = False  # Read the examples of a TFDS data set for their labels.

    def fingerprint(self) -> str:
        """A hash that changes when a file is added, goes or changes."""
        digest = hashlib.blake2b(digest_size=8)
        times = {path: os.stat(path).st_mtime_ns for path in {unit.path for unit in self.units}}
        for unit in self.units:
            digest.update(repr((*unit, times[unit.path])).encode())
        digest.update(repr((self.kind, self.class_names, self.label_key, self.index_labels)).encode())
        return digest.hexdigest()


class Scan(NamedTuple):
    """The examples of a unit, or of all units."""

    entries: np.ndarray
    labels: np.ndarray
    names: np.ndarray
    multiple: bool  # Some example's label came as a list.


class _Rows:
    """Collects a unit's examples."""

    def __init__(self, unit: int, seed: int):
        self._unit, self._secret = unit, seed.to_bytes(8, "little", signed=True)
        self._rows, self._labels, self._names, self._end = [], [], [], 0
        self.multiple = False

    def add(self, offset: int, size: int, labels: tuple[int, ...], name: str, key: str) -> None:
        encoded = os.fsencode(name)[:65535]
        digest = hashlib.blake2b(os.fsencode(key), digest_size=8, key=self._secret).digest()
        row = (self._unit, offset, size, len(self._labels), len(labels), self._end, len(encoded))
        self._rows.append((*row, int.from_bytes(digest, "little")))
        self._labels.extend(labels)
        self._names.append(encoded)
        self._end += len(encoded)

    def __len__(self):
        return len(self._rows)

    def collected(self) -> Scan:
        names = np.frombuffer(b"".join(self._names), np.uint8)
        return Scan(np.array(self._rows, ENTRY), np.array(self._labels, np.int32), names, self.multiple)


def find(source: str, kind: str | None = None, label_key: str | None = None) -> RawDataSet:
    """Recognises a data set.

    Args:
      source: a folder, a file, or `NAME:DATA_DIR` of a TFDS data set.
      kind: one of `KINDS`; None looks.
      label_key: the Parquet column, JSON key or TFDS feature that holds the label.

    Raises:
      UserError: it is not there, is empty, or is none of the kinds.
    """
    root = Path(source)
    if kind is not None and kind not in KINDS:
        raise UserError(f"unknown --kind={kind}; {nearest(kind, KINDS)}")
    try:
        if not root.exists():
            root = _tfds_folder(source)
        kind = kind or _recognise(root)
        data_set = KINDS[kind].find(root, label_key)
    except PermissionError as error:
        raise UserError(f"no permission to read {error.filename}") from error
    if not data_set.units:
        raise UserError(f"{source} holds nothing of the kind {kind!r}")
    for name, count in Counter(data_set.class_names).most_common(1):
        if count > 1:
            raise UserError(f"{source} has {count} classes of the name {name!r}: TFDS wants them distinct")
    return data_set


def _recognise(root: Path) -> str:
    if root.is_file():
        _refuse_compressed([root])
        if root.suffix == ".parquet":
            return "parquet"
        if root.suffix == ".tar":
            with root.open("rb") as file:
                first = next(_members(root, file, root.stat().st_size), None)
            return "imagenet21k" if first and first.name.endswith(".tar") else "webdataset"
        raise UserError(f"{root} is no data set: give a folder, a .tar or a .parquet file")
    if not root.is_dir():
        raise UserError(f"{root} is neither a folder nor a regular file")
    if (root / "dataset_info.json").exists():
        return "tfds"
    tars, parquet = _files(root, ".tar"), _files(root, ".parquet")
    if tars and parquet:
        raise UserError(f"{root} holds tars and Parquet; say --kind=webdataset or --kind=parquet")
    if parquet:
        return "parquet"
    if tars:
        return "imagenet21k" if _SYNSET.fullmatch(tars[0].stem) else "webdataset"
    inside = sorted(root.iterdir())
    _refuse_compressed(inside)
    if any(child.is_dir() for child in inside):
        return "folder"
    if any(_is_image(child.name) for child in inside):
        return "images"
    raise UserError(
        f"{root} is empty or no data set: it must hold images, a folder for each class (in a folder for each "
        "split), .tar or .parquet files, or a prepared TFDS data set"
    )


def _refuse_compressed(files: list[Path]) -> None:
    for file in files:
        if re.search(r"\.(tgz|tar\.\w+)$", file.name):
            raise UserError(f"{file} is compressed, so that no image in it is found at once: unpack it first")


def _files(root: Path, suffix: str) -> list[Path]:
    """The file itself, or those in a folder, down to two folders below."""
    if root.is_file():
        return [root]
    files = sorted(file for depth in ("", "*/", "*/*/") for file in root.glob(f"{depth}*{suffix}"))
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is no regular file, or a link to nothing: take it away")
    return files


def _split(file: Path, root: Path) -> str:
    """The split that a file's name says, or its folder's: `test-00000-of-00002`, `cars-val-3`, `test/3`."""
    if of := re.match(r"(\w+)-\d+-of-\d+", file.stem):
        return of[1]
    if named := re.search(_SPLITS, file.stem):
        return named[1]
    return re.sub(r"\W", "_", file.parent.name) if root.is_dir() and file.parent != root else "train"


def _relative(path: str, root: Path) -> str:
    return os.path.relpath(path, root if root.is_dir() else root.parent)


# A folder for each class.


def _find_folder(root: Path, _: str | None) -> RawDataSet:
    """`root/<split>/<class>/...` where no folder of the first level holds an image itself."""
    first = _folders(root)
    holds_images = any(_is_image(child.name) for folder in first for child in os.scandir(folder))
    splits = {"train": root} if holds_images else {re.sub(r"\W", "_", f.name): f for f in first}
    classes = {split: {folder.name for folder in _folders(where)} for split, where in splits.items()}
    names = sorted(set().union(*classes.values()))
    for split, where in splits.items():
        if missing := [name for name in names if name not in classes[split]]:
            raise UserError(
                f"{where} lacks {len(missing)} of {len(names)} classes: {', '.join(missing[:10])}; "
                "make an empty folder for each if that is meant"
            )
    units = [
        Unit(split, str(where / name), label=label)
        for split, where in splits.items()
        for label, name in enumerate(names)
    ]
    return RawDataSet("folder", root, units, names)


def _folders(where: Path) -> list[Path]:
    return [folder for folder in map(Path, folders_in(str(where))) if not folder.name.startswith(".")]


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _scan_folder(source: RawDataSet, unit: Unit, rows: _Rows, _: Path) -> None:
    above = os.path.dirname(unit.path)
    for path in sorted(filter(_is_image, walk(unit.path, above))):
        name = os.path.relpath(path, above)
        try:
            size = os.stat(path).st_size
        except OSError:  # A link to nothing, which is named when it is read.
            size = 0
        rows.add(0, size, (unit.label,), name, name)


def _find_images(root: Path, _: str | None) -> RawDataSet:
    """Images without labels, anywhere below a folder."""
    return RawDataSet("folder", root, [Unit("train", str(root))])


# Tars.


def _members(path: Path | str, file, end: int) -> Iterator[tarfile.TarInfo]:
    """The files of the tar that begins where `file` stands; their offsets are into `file`.

    A tar that was cut short is refused, not used in part: the download wants to be made again.
    """
    try:
        tar = tarfile.TarFile(fileobj=file)
    except tarfile.ReadError as error:
        raise UserError(f"{path} is empty or no tar; fetch it again, or take it away") from error
    count = 0
    try:
        while (member := tar.next()) is not None:
            tar.members.clear()  # It would keep them all.
            if member.offset_data + member.size > end:
                break
            if member.isreg():
                count += 1
                yield member
        else:
            file.seek(tar.offset)
            if file.read(512) == bytes(512):  # Any whole tar ends so.
                return
    except tarfile.ReadError:
        pass
    raise UserError(
        f"{path} is cut short or damaged after {count} whole files; fetch it again, or take it away"
    )


def _find_imagenet21k(root: Path, _: str | None) -> RawDataSet:
    """A tar for each class, in a folder or inside one tar. The editions differ in their classes."""
    tars = []  # Split, path, start, end, synset.
    for path in _files(root, ".tar"):
        size = path.stat().st_size
        if _SYNSET.fullmatch(path.stem):
            tars.append((_split(path, root), str(path), 0, size, path.stem))
            continue
        with path.open("rb") as file:
            for inner in _members(path, file, size):
                synset = Path(inner.name).stem
                if not (_SYNSET.fullmatch(synset) and inner.name.endswith(".tar")):
                    raise UserError(f"{path} holds {inner.name!r}, which is not a class's n########.tar")
                tars.append(("train", str(path), inner.offset_data, inner.offset_data + inner.size, synset))
    names = sorted({synset for *_, synset in tars})
    number = {name: label for label, name in enumerate(names)}
    return RawDataSet("imagenet21k", root, [Unit(*where, number[synset]) for *where, synset in tars], names)


def _scan_imagenet21k(source: RawDataSet, unit: Unit, rows: _Rows, _: Path) -> None:
    what = f"{unit.path}: the tar in it at byte {unit.start}" if unit.start else unit.path
    with open(unit.path, "rb") as file:
        file.seek(unit.start)
        for member in _members(what, file, unit.end):
            name = os.path.basename(member.name)
            rows.add(member.offset_data, member.size, (unit.label,), name, name)


def _find_webdataset(root: Path, label_key: str | None) -> RawDataSet:
    """`key.jpg` with `key.cls` or `key.json`; `classnames.txt` beside, where there is one."""
    tars = _files(root, ".tar")
    units = [Unit(_split(tar, root), str(tar), 0, tar.stat().st_size) for tar in tars]
    listed = (root if root.is_dir() else root.parent) / "classnames.txt"
    names = listed.read_text().splitlines() if listed.is_file() else None
    return RawDataSet("webdataset", root, units, names, label_key)


def _scan_webdataset(source: RawDataSet, unit: Unit, rows: _Rows, _: Path) -> None:
    tar = _relative(unit.path, source.root)

    def add(key: str, parts: dict[str, tarfile.TarInfo]) -> None:
        image = next((parts[suffix[1:]] for suffix in IMAGE_SUFFIXES if suffix[1:] in parts), None)
        if image is None:
            return  # Notes on the whole, such as a list of classes.
        where = f"{unit.path}: {key!r}"
        try:
            note = parts.get("cls") or parts["json"]
            value = json.loads(os.pread(file.fileno(), note.size, note.offset_data))
            label = value if "cls" in parts else _json_label(value, source.label_key)
        except (KeyError, ValueError, TypeError) as error:
            suffixes = ", ".join(sorted(parts))
            raise UserError(
                f"{where} has no .cls and no .json with a label (--label_key); it has {suffixes}"
            ) from error
        rows.add(image.offset_data, image.size, _labels(label, rows, where), image.name, f"{tar}/{key}")

    with open(unit.path, "rb") as file:
        current, parts = "", {}
        for member in _members(unit.path, file, unit.end):
            folder, base = os.path.split(member.name)
            stem, _, suffix = base.partition(".")
            key = os.path.join(folder, stem)
            if key != current:
                add(current, parts)
                current, parts = key, {}
            parts[suffix.lower()] = member
        add(current, parts)


def _json_label(values: dict, label_key: str | None):
    for key in (label_key,) if label_key else ("label", "labels", "cls"):
        if key in values:
            return values[key]
    raise KeyError


def _labels(value, rows: _Rows, where: str) -> tuple[int, ...]:
    """One class number, or a list of them; -1 is none."""
    rows.multiple |= isinstance(value, list)
    labels = tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(label, int) and -1 <= label < 2**31 for label in labels):
        raise UserError(f"{where}: the label {value!r} is no class number")
    return labels


# Parquet of the Hugging Face Hub.


def _find_parquet(root: Path, label_key: str | None) -> RawDataSet:
    """Class names are in the schema's metadata."""
    files = _files(root, ".parquet")
    _, label, names = _columns(files[0], label_key) if files else (None, None, None)
    return RawDataSet("parquet", root, [Unit(_split(file, root), str(file)) for file in files], names, label)


def _columns(path: Path | str, label_key: str | None) -> tuple[str, str, list[str] | None]:
    """The columns of image and label, and the class names."""
    schema = _parquet(path).schema_arrow
    described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = described.get("info", {}).get("features", {})

    def class_label(feature) -> dict | None:
        """The description of the classes, or of those in a list."""
        if isinstance(feature, list):
            feature = feature[0]
        if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
            feature = feature["feature"]
        return feature if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None

    there = f"there are: {', '.join(schema.names)}"
    images = [
        n for n, feature in features.items() if isinstance(feature, dict) and feature.get("_type") == "Image"
    ]
    images = images or [name for name in ("image", "img", "jpg") if name in schema.names]
    if len(images) != 1:
        raise UserError(f"{path} has no one column of images; {there}")
    labels = [label_key] if label_key else [name for name in ("label", "labels") if name in schema.names]
    labels = labels or [name for name, feature in features.items() if class_label(feature)]
    if len(labels) != 1 or labels[0] not in schema.names:
        raise UserError(f"{path}: choose the label's column with --label_key; {there}")
    return images[0], labels[0], (class_label(features.get(labels[0])) or {}).get("names")


def _parquet(path: Path | str):
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is cut short or no Parquet; fetch it again, or take it away") from error


def _scan_parquet(source: RawDataSet, unit: Unit, rows: _Rows, spool: Path) -> None:
    """Also copies the images out, one behind the other, into `spool`: Parquet has no access by row."""
    image, label, _ = _columns(unit.path, source.label_key)
    name = _relative(unit.path, source.root)
    parquet = _parquet(unit.path)
    with spool.open("wb") as out:
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group, columns=[image, label])
            for value, classes in zip(table[image], table[label], strict=True):
                value, classes = value.as_py(), classes.as_py()
                if not isinstance(value, dict):
                    value = {"bytes": value}
                key = f"{name}:{len(rows)}"
                where = f"{unit.path}: row {len(rows)}"
                if value["bytes"] is None:
                    raise UserError(f"{where} holds no image, only its path {value.get('path')!r}")
                labels = _labels(-1 if classes is None else classes, rows, where)
                rows.add(out.tell(), len(value["bytes"]), labels, value.get("path") or key, key)
                out.write(value["bytes"])


# A TFDS data set in TFRecord. A record is: length, CRC of that, data, CRC of that.


def _tfds_folder(source: str) -> Path:
    """The folder of a prepared data set, given as `NAME:DATA_DIR`."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import read_only_builder

    if not (parts := re.fullmatch(r"([\w/]+(?::[\d.*]+)?):(.+)", source)):
        raise UserError(f"there is no {source}")
    try:
        return Path(read_only_builder.builder_from_files(parts[1], data_dir=parts[2]).data_dir)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise UserError(f"there is no prepared data set {parts[1]!r} in {parts[2]}") from error


def _find_tfds(root: Path, label_key: str | None) -> RawDataSet:
    import tensorflow_datasets as tfds

    try:
        info = tfds.builder_from_directory(root).info
    except (ValueError, FileNotFoundError, tfds.core.DatasetNotFoundError) as error:
        raise UserError(f"{root} is no prepared TFDS data set: {str(error).splitlines()[0]}") from error
    if info.file_format.value != "tfrecord":
        remedy = "; train on it as it is" if info.file_format.value == "array_record" else ""
        raise UserError(f"{root} is stored as {info.file_format.value}, not as tfrecord{remedy}")
    label_key = label_key or "label"
    feature = dict(info.features).get(label_key)
    names = list(feature.names) if isinstance(feature, tfds.features.ClassLabel) and feature.names else None
    units = [
        Unit(split.name, str(path), end=length)
        for split in info.splits.values()
        for path, length in zip(split.filepaths, split.shard_lengths, strict=True)
    ]
    return RawDataSet("tfds", root, units, names, label_key)


def _masked_crc(data: bytes) -> int:
    """The checksum as TFRecord has it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _scan_tfds(source: RawDataSet, unit: Unit, rows: _Rows, _: Path) -> None:
    from tensorflow_datasets.proto import tf_example_pb2

    name = os.path.basename(unit.path)
    with open(unit.path, "rb", buffering=0) as file:
        end, offset = os.fstat(file.fileno()).st_size, 0
        while len(header := os.pread(file.fileno(), 12, offset)) == 12:
            length, crc = struct.unpack("<QI", header)
            if _masked_crc(header[:8]) != crc:
                raise UserError(f"{unit.path} is damaged at byte {offset}; fetch it again")
            if offset + length + 16 > end:
                break
            labels = ()
            if source.index_labels:
                example = tf_example_pb2.Example.FromString(os.pread(file.fileno(), length, offset + 12))
                labels = tuple(example.features.feature[source.label_key].int64_list.value)
            rows.add(offset + 12, length, labels, f"{name}:{len(rows)}", "")
            offset += length + 16
    if len(rows) != unit.end:
        raise UserError(
            f"{unit.path} is cut short: {len(rows)} of {unit.end} examples are whole; fetch it again"
        )


def scan(source: RawDataSet, number: int, seed: int, spool: Path) -> Scan:
    """The examples of a unit, in the order they lie there.

    Args:
      source: the data set with this unit alone.
      number: the unit's number in the whole data set.
      seed: the seed of the order that the keys give.
      spool: a file to write, should the images have to be copied out (Parquet).

    Raises:
      UserError: cut short, damaged, or without a label.
    """
    rows = _Rows(number, seed)
    KINDS[source.kind].scan(source, source.units[0], rows, spool)
    return rows.collected()


def read(kind: str, path: str, entry: np.void, name: str) -> bytes:
    """An example's bytes: an image, or of a TFDS data set the serialized example.

    Args:
      kind: the kind of the data set.
      path: the path of its unit, or of the unit's spool.
      entry: its row of the index.
      name: its name in the index.

    Raises:
      Unreadable: it is a file that is gone, or no regular one.
      UserError: it is damaged.
    """
    if kind == "folder":
        file = os.path.join(os.path.dirname(path), name)
        try:
            return read_file(file)
        except OSError as error:
            raise Unreadable(f"{error.strerror}: {file}") from error
    offset, size = int(entry["offset"]), int(entry["size"])
    with open(path, "rb", buffering=0) as file:
        if kind != "tfds":
            return os.pread(file.fileno(), size, offset)
        data = os.pread(file.fileno(), size + 4, offset)
    if _masked_crc(data[:size]) != int.from_bytes(data[size:], "little"):
        raise UserError(f"{path} is damaged in the example at byte {offset}; fetch it again")
    return data[:size]


def read_image(kind: str, path: str, entry: np.void, name: str) -> bytes:
    """An example's image, encoded; it is taken out of a TFDS data set's example. Raises what `read` does."""
    from tensorflow_datasets.proto import tf_example_pb2

    data = read(kind, path, entry, name)
    if kind != "tfds":
        return data
    return tf_example_pb2.Example.FromString(data).features.feature["image"].bytes_list.value[0]


class _Kind(NamedTuple):
    find: Callable[[Path, str | None], RawDataSet]
    scan: Callable[[RawDataSet, Unit, _Rows, Path], None]


KINDS = {
    "folder": _Kind(_find_folder, _scan_folder),
    "images": _Kind(_find_images, _scan_folder),
    "webdataset": _Kind(_find_webdataset, _scan_webdataset),
    "imagenet21k": _Kind(_find_imagenet21k, _scan_imagenet21k),
    "parquet": _Kind(_find_parquet, _scan_parquet),
    "tfds": _Kind(_find_tfds, _scan_tfds),
}
