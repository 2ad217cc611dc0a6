"""Readers for all kinds of data sets that `vit_jax.prepare` supports.

A data set consists of units: files, class folders, or tars inside a tar. `find` recognizes a data
set and lists its units. `scan` lists the examples of a unit without decoding images. `read` reads
an example by file, offset and size. An example takes 48 bytes in the index, plus its name and
captions. 14 million images without captions take 1 GB.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import struct
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from vit_jax.data.class_names import shortened
from vit_jax.data.decode import Unreadable
from vit_jax.data.fields import CAPTION_KEYS, TEXT
from vit_jax.data.sources.array_record import caption_values
from vit_jax.data.sources.csv_list import LISTS, CsvList, open_csv, split_files, value_columns
from vit_jax.data.sources.folder import folders_in, read_file, walk
from vit_jax.data.sources.folder_rules import (
    IMAGE_SUFFIXES,
    OUTSIDE,
    Entry,
    check_no_maps,
    is_ignored,
    is_unsupported,
    layout,
    of_system,
    sort_out,
    split_name,
    why_left_out,
)
from vit_jax.data.sources.kind import SourceOptions
from vit_jax.data.sources.tfds import caption_feature, text_features
from vit_jax.errors import UserError, as_text, nearest
from vit_jax.preparation.captions import NO_CAPTIONS, captions_in, text_column
from vit_jax.preparation.captions import encoded as encode_captions

ENTRY = np.dtype(
    [
        ("unit", "u4"),
        ("offset", "u8"),
        ("size", "u4"),
        ("first_label", "u8"),  # Position of the first label in the array of all labels.
        ("labels", "u2"),  # Number of labels.
        ("name", "u8"),  # Position of the name in the bytes of all names.
        ("name_size", "u2"),
        ("captions", "u4"),  # Size of the captions in bytes. They are stored after the name.
        ("key", "u8"),  # Sort key of the order: a hash of the seed and the example's name.
    ]
)
WITH_COLUMNS = ("csv", "webdataset", "parquet", "tfds")  # Kinds with named labels and captions.
OF_FILES = ("folder", "csv")  # Kinds of data sets in which each example is a file.
MOST_CLASSES = 2**22  # Limit for class indices, because the names of all classes are written.
MOST_NOTE = 2**20  # Maximum size of a WebDataset label, in bytes.
MOST_LABELS = 2**16 - 1  # Maximum number of labels of an image.
# Images are already compressed, so a Parquet file with much more content than its own size is
# damaged or malicious.
MOST_EXPANSION, MIN_BYTES, ROW_BYTES = 1000, 2**28, 2**10
PARQUET_ROWS = 16  # Maximum number of rows in memory.
LOOKED_AT = 100  # Number of samples at the start of a tar that are searched for captions.
NOTES = (".cls", ".json")  # Suffixes of files with labels in WebDataset tars.
LABEL_KEYS = ("label", "labels", "cls")  # Usual keys of labels in JSON files.
FURTHER = "further images of a sample"
WITHOUT_IMAGE = "samples without an image"
BESIDE_SPLITS = "images in folders next to the splits"
_SPLITS = re.compile(
    r"(?:^|[-_.])(train|training|validation|valid|val|dev|test|testing)(?=[-_.\d]|$)", re.IGNORECASE
)
_SYNSET = re.compile(r"n\d{8}")


class Unit(NamedTuple):
    """A part of a data set that one task scans: a file, a folder, or a tar inside a tar."""

    split: str
    path: str
    start: int = 0  # First byte of the unit in the file.
    end: int = 0  # End of the unit in the file; 0: the unit is the whole file.
    label: int = -1  # Label of all examples, if the unit is a class; else -1.


@dataclasses.dataclass(frozen=True)
class RawDataSet:
    """A data set whose kind and units were recognized, and which is not prepared yet."""

    kind: str
    root: Path
    units: list[Unit]
    class_names: list[str] | None = None  # None: classes only have indices.
    label_key: str | None = None
    # Where captions are stored: a column, a JSON key, "txt" (text files) or a tf.Example feature.
    # None: no captions.
    caption_key: str | None = None
    index_labels: bool = False  # True: labels are read from the examples of a TFDS data set.
    # Number of skipped files by reason. Files that a task skips while it scans a unit are not
    # included.
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    # Mapping of class indices, for files whose class indices differ from the data set's:
    # `numbers[file][index in the file]` is the index in the data set; -1: the data set does not
    # have this class.
    numbers: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def fingerprint(self) -> str:
        """Returns a hash of the data set. It changes if a file is added, removed or changed."""
        digest = hashlib.blake2b(digest_size=8)
        try:
            times = {path: os.stat(path).st_mtime_ns for path in {unit.path for unit in self.units}}
        except FileNotFoundError as error:
            raise UserError(f"{error.filename} is gone; fetch it again") from error
        for unit in self.units:
            digest.update(repr((*unit, times[unit.path])).encode())
        about = self.kind, self.class_names, self.label_key, self.index_labels
        digest.update(repr(about).encode())
        if self.caption_key is not None:
            digest.update(repr(self.caption_key).encode())
        if self.numbers:
            digest.update(repr(sorted(self.numbers.items())).encode())
        return digest.hexdigest()


class Keys(NamedTuple):
    """The columns or keys with the label and the captions of an example."""

    # The Parquet column, JSON key or TFDS feature with the label. None: the usual names are tried.
    label: str | None = None
    # The column, JSON key or TFDS feature with the captions. `txt`: the captions are text files in
    # a tar. `NO_CAPTIONS`: captions are ignored. None: the usual names are tried.
    caption: str | None = None


class Scan(NamedTuple):
    """The examples in a unit of a data set (a file, a folder, or a tar inside a tar)."""

    entries: np.ndarray
    labels: np.ndarray
    names: np.ndarray
    multiple: bool  # True if labels are lists.
    left_out: dict[str, int]  # Number of skipped files, by reason.


class _Rows:
    """Collects the examples in a unit during a scan."""

    def __init__(self, unit: int, seed: int):
        self._unit, self._secret = unit, seed.to_bytes(8, "little", signed=True)
        self._rows, self._labels, self._names, self._end = [], [], [], 0
        self.multiple = False
        self.left_out = Counter()

    def add(
        self,
        offset: int,
        size: int,
        labels: tuple[int, ...],
        name: str,
        key: str,
        captions: Sequence[str] = (),
    ) -> None:
        if len(labels) > MOST_LABELS:
            raise UserError(f"{name} has {len(labels):,} labels, and may have {MOST_LABELS:,}")
        for label in labels:
            if not -1 <= label < MOST_CLASSES:
                raise UserError(
                    f"{name} has the label {label}; class indices are from 0 to "
                    f"{MOST_CLASSES - 1:,}, or -1 for none"
                )
        encoded = os.fsencode(name)[:65535]
        digest = hashlib.blake2b(os.fsencode(key), digest_size=8, key=self._secret).digest()
        texts = encode_captions(captions, name)
        row = (self._unit, offset, size, len(self._labels), len(labels), self._end, len(encoded))
        self._rows.append((*row, len(texts), int.from_bytes(digest, "little")))
        self._labels.extend(labels)
        self._names.append(encoded + texts)
        self._end += len(encoded) + len(texts)

    def __len__(self):
        return len(self._rows)

    @property
    def text_bytes(self) -> int:
        """Size of the names and captions of all collected examples, in bytes."""
        return self._end

    def collected(self) -> Scan:
        names = np.frombuffer(b"".join(self._names), np.uint8)
        entries, labels = np.array(self._rows, ENTRY), np.array(self._labels, np.int32)
        return Scan(entries, labels, names, self.multiple, dict(self.left_out))


def find(
    source: str,
    kind: str | None = None,
    label_key: str | None = None,
    caption_key: str | None = None,
) -> RawDataSet:
    """Recognizes a data set.

    Args:
      source: a folder, a file, `KIND:PATH`, or `NAME:DATA_DIR` for a TFDS data set.
      kind: one of `KINDS`; None: the kind is recognized by the files.
      label_key: name of the column, JSON key or feature with the label; see `Keys.label`.
      caption_key: name of the column, JSON key or feature with the captions; see `Keys.caption`.

    Raises:
      UserError: the data set does not exist, is empty, or its kind is unsupported.
    """
    if kind is not None and kind not in KINDS:
        raise UserError(f"unknown --kind={kind}; {nearest(kind, KINDS)}")
    try:
        root, kind = _locate(source, kind)
        _check_keys(kind, label_key, caption_key)
        data_set = KINDS[kind].find(root, Keys(label_key, caption_key))
    except PermissionError as error:
        raise UserError(f"no permission to read {error.filename}") from error
    if not data_set.units:
        raise UserError(f"{source} contains nothing of the kind {kind!r}")
    for name, count in Counter(data_set.class_names).most_common(1):
        if count > 1:
            raise UserError(
                f"{source} has {count} classes of the name {name!r}: TFDS requires distinct names"
            )
    return data_set


def _check_keys(kind: str, label_key: str | None, caption_key: str | None) -> None:
    """Raises UserError if a label or captions are chosen by name in data that have no names."""
    if kind in WITH_COLUMNS:
        return
    kinds = f"kinds that may have them are {', '.join(WITH_COLUMNS)}"
    if caption_key:
        raise UserError(
            f"--caption_key={caption_key}: data of the kind {kind!r} have no captions; {kinds}"
        )
    if label_key is not None:
        labels = "no labels" if kind == "images" else "the names of their folders or tars as labels"
        raise UserError(
            f"--label_key={label_key}: data of the kind {kind!r} have {labels}, and no columns or "
            f"keys with labels: remove --label_key; {kinds}"
        )


def _locate(source: str, kind: str | None) -> tuple[Path, str]:
    """Returns the path and the kind of a data set.

    `source` is a folder, a file, `KIND:PATH`, or `NAME:DATA_DIR` for a TFDS data set. `kind` None:
    the kind is recognized by the files.
    """
    root = Path(source)
    if root.exists():
        return root, kind or _recognise(root)
    prefix, _, path = source.partition(":")
    if kind is None and prefix in ("folder", "csv") and os.path.exists(path):
        return Path(path), prefix
    root = _tfds_folder(source.removeprefix("tfds:"))
    return root, kind or _recognise(root)


def _recognise(root: Path) -> str:
    """Recognizes the kind of a data set; raises UserError if it is unsupported or ambiguous."""
    if root.is_file():
        return _recognise_file(root)
    if not root.is_dir():
        raise UserError(f"{root} is neither a folder nor a regular file")
    if (root / "dataset_info.json").exists():
        return "tfds"
    tars, parquet = _files(root, ".tar"), _files(root, ".parquet")
    if tars and parquet:
        raise UserError(
            f"{root} contains tars and Parquet; give --kind=webdataset or --kind=parquet"
        )
    if parquet:
        return "parquet"
    if tars:
        return "imagenet21k" if _SYNSET.fullmatch(tars[0].stem) else "webdataset"
    if split_files(str(root)):
        return "csv"
    return _recognise_images(root)


def _recognise_file(file: Path) -> str:
    _refuse_compressed([file])
    if file.suffix == ".parquet":
        return "parquet"
    if file.suffix == ".tar":
        with file.open("rb") as opened:
            first = next(_members(file, opened, file.stat().st_size), None)
        return "imagenet21k" if first and first.name.endswith(".tar") else "webdataset"
    if file.suffix.lower() in LISTS:
        return "csv"
    raise UserError(
        f"{file} is not a data set: give a folder, a .csv, a .jsonl, a .tar or a .parquet file"
    )


def _recognise_images(root: Path) -> str:
    """Returns `folder` if the images are in subfolders (splits or classes), else `images`."""
    inside = sorted(root.iterdir())
    _refuse_compressed(inside)
    folders = [child.name for child in inside if child.is_dir() and not is_ignored(child.name)]
    loose = sum(not child.is_dir() and not why_left_out(child.name) for child in inside)
    if folders and loose and not any(map(split_name, folders)):
        raise UserError(
            f"{root} can be read in two ways: {loose:,} images next to folders of images, all "
            f"without labels (--kind=images), or the classes {', '.join(folders[:10])} without "
            "these images (--kind=folder)"
        )
    if folders:
        return "folder"
    if loose:
        return "images"
    raise UserError(
        f"{root} is empty or not a data set: it must contain images, a folder for each class (in a "
        "folder for each split), train.csv, .tar or .parquet files, or a prepared TFDS data set"
    )


def _refuse_compressed(files: list[Path]) -> None:
    for file in files:
        if re.search(r"\.(tgz|tar\.\w+)$", file.name):
            raise UserError(
                f"{file} is compressed, so that no image in it is found at once: unpack it first"
            )


def _files(root: Path, suffix: str) -> list[Path]:
    """Returns the files with a suffix in a folder and in two levels of folders below it."""
    if root.is_file():
        return [root]
    below = (file for depth in ("", "*/", "*/*/") for file in root.glob(f"{depth}*{suffix}"))
    files = sorted(file for file in below if not of_system(str(file.relative_to(root))))
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is not a regular file, or is a broken link: remove it")
    return files


def _split(file: Path, root: Path) -> str:
    """Returns the split that is part of the name of a file or its folder.

    Examples: `test-00000-of-00002` (test), `cars-val-3` (val), `test/3` (test).
    """
    if of := re.match(r"(\w+)-\d+-of-\d+", file.stem):
        return split_name(of[1]) or of[1]
    if named := _SPLITS.search(file.stem):
        return split_name(named[1]) or named[1]
    if not root.is_dir() or file.parent == root:
        return "train"
    return split_name(file.parent.name) or re.sub(r"\W", "_", file.parent.name)


def _relative(path: str, root: Path) -> str:
    return os.path.relpath(path, root if root.is_dir() else root.parent)


# Data sets with a folder for each class.


def _find_folder(root: Path, _: Keys) -> RawDataSet:
    """Finds images in class folders, `root/<split>/<class>/...` or `root/<class>/...`.

    Without folders of splits, all images are in the split `train`. Images of a split without class
    folders have no labels.
    """
    found = layout(str(root), [_entry(folder) for folder in _folders(root)])
    splits = {"train": root}
    if found.splits is not None:
        splits = {split: root / folder for split, folder in found.splits.items()}
    classes = {
        split: {as_text(f.name): f for f in _folders(where)} for split, where in splits.items()
    }
    names = sorted(set().union(*classes.values()))
    units = []
    for split, where in splits.items():
        check_no_maps(str(where), classes[split])
        if classes[split]:
            units += _class_units(split, where, classes[split], names)
        else:
            units.append(Unit(split, str(where)))
    folders_of_classes = {root, *(splits[split] for split in splits if classes[split])}
    left_out = _count_left_out(folders_of_classes, [root / name for name in found.others])
    return RawDataSet("folder", root, units, names or None, left_out=left_out)


def _class_units(
    split: str, where: Path, folders: Mapping[str, Path], names: list[str]
) -> list[Unit]:
    """Returns the class folders of a split; raises UserError if it has no folder for a class."""
    if missing := [name for name in names if name not in folders]:
        raise UserError(
            f"{where} lacks {len(missing)} of {len(names)} classes: {', '.join(missing[:10])}; "
            "make an empty folder for each if that is meant"
        )
    return [Unit(split, str(folders[name]), label=label) for label, name in enumerate(names)]


def _count_left_out(folders_of_classes: Collection[Path], others: Collection[Path]) -> dict:
    """Counts the skipped files that are not in a class folder, by the reason for skipping them."""
    loose = [file.name for folder in folders_of_classes for file in _files_in(folder)]
    images, left_out = sort_out(loose)
    left_out[OUTSIDE] += len(images)
    other_files = [path for folder in others for path in walk(str(folder))]
    left_out[BESIDE_SPLITS] += len(sort_out(other_files)[0])
    return dict(+left_out)


def _entry(folder: Path) -> Entry:
    inner = tuple(child.name for child in _folders(folder))
    return Entry(folder.name, inner, any(not why_left_out(file.name) for file in _files_in(folder)))


def _files_in(folder: Path) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.is_dir()]


def _folders(where: Path) -> list[Path]:
    return [folder for folder in map(Path, folders_in(str(where))) if not is_ignored(folder.name)]


def _scan_folder(source: RawDataSet, unit: Unit, rows: _Rows, _: Path) -> None:
    above = os.path.dirname(unit.path)
    start = len(os.path.join(unit.path, ""))
    images, left_out = sort_out(path[start:] for path in walk(unit.path, above))
    rows.left_out += left_out
    for name in sorted(os.path.join(os.path.basename(unit.path), image) for image in images):
        try:
            size = os.stat(os.path.join(above, name)).st_size
        except OSError:  # A broken link. An error will be reported when it is read.
            size = 0
        rows.add(0, size, (unit.label,), name, name)


def _options_of_lists(root: Path, keys: Keys) -> SourceOptions:
    """Returns the options for opening the CSV or CSVs at a path.

    The header of the first CSV determines whether there are captions; labels are then optional.
    """
    names, captions = value_columns(next(iter(split_files(str(root)).values()))), keys.caption
    if captions is None:
        captions = next((name for name in CAPTION_KEYS if name in names), NO_CAPTIONS)
    label = keys.label or "label"
    if captions == NO_CAPTIONS:
        return SourceOptions(str(root), label_key=label)
    others = [name for name in names if name != captions]
    if not keys.label and not any(name.startswith("label") for name in others):
        label = None
    fields = {"fields": (TEXT,), "caption_key": captions}
    return SourceOptions(str(root), label_key=label, labels=label is not None, **fields)


def _open_lists(root: Path, keys: Keys) -> dict[str, CsvList]:
    """Opens the CSVs at a path, by split. All splits use the training split's class indices."""
    splits = [*split_files(str(root))]
    options = _options_of_lists(root, keys)
    first = "train" if "train" in splits else splits[0]
    try:
        opened = {first: open_csv(first, options)}
        options = options._replace(class_names=opened[first].class_names or None)
        return {split: opened.get(split) or open_csv(split, options) for split in splits}
    except UserError as error:
        raise UserError(str(error).replace("--config.data.", "--")) from error


def _find_lists(root: Path, keys: Keys) -> RawDataSet:
    """Finds CSVs that list image paths with labels, captions or both, as for the source `csv`.

    Paths of images are relative to the CSV's folder.
    """
    files, opened = split_files(str(root)), _open_lists(root, keys)
    left_out = sum((Counter(split.left_out) for split in opened.values()), Counter())
    units = [Unit("train" if split == "all" else split, files[split]) for split in opened]
    first = next(iter(opened.values()))
    names = [*first.class_names] or None
    captions = _options_of_lists(root, keys).caption_key if first.captions else None
    return RawDataSet("csv", root, units, names, keys.label, captions, left_out=dict(left_out))


def _scan_list(source: RawDataSet, unit: Unit, rows: _Rows, _: Path) -> None:
    opened = _open_lists(source.root, Keys(source.label_key, source.caption_key or NO_CAPTIONS))
    listed = opened.get("all") or opened[unit.split]
    rows.multiple = listed.max_labels > 1
    none = () if rows.multiple else (-1,)
    for index, (name, size) in enumerate(listed.stored_files()):
        captions = listed.captions[index] if listed.captions else ()
        rows.add(0, max(0, size), listed.labels_of(index) or none, name, name, captions)


# Data sets in tars.


class _Header(tarfile.TarInfo):
    """A tar header. Large extended headers are rejected, since they would be read into memory."""

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        info = super().frombuf(buf, encoding, errors)
        if (
            not info.isreg()
            and info.type not in (tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE)
            and info.size > MOST_NOTE
        ):
            raise tarfile.HeaderError("an extended header is too long")
        return info


def _members(path: Path | str, file, end: int) -> Iterator[tarfile.TarInfo]:
    """Yields the files of a tar that starts at the current position of `file`.

    Offsets of the files are positions in `file`. A truncated tar raises an error, because the
    download must be repeated.
    """
    try:
        tar = tarfile.TarFile(fileobj=file, tarinfo=_Header)
    except Exception as error:  # Headers may contain arbitrary bytes.
        raise UserError(f"{path} is empty or not a tar; fetch it again, or remove it") from error
    count = 0
    try:
        while (member := tar.next()) is not None:
            tar.members.clear()  # Otherwise `tarfile` would keep all members in memory.
            if member.offset_data + member.size > end:
                break
            if member.isreg():
                count += 1
                yield member
        else:
            file.seek(tar.offset)
            if file.read(512) == bytes(512):  # A complete tar ends with a block of zeros.
                return
    except Exception:
        # Damaged headers may cause any error. Errors of the calling code are not caught here.
        pass
    raise UserError(
        f"{path} is truncated or damaged after {count} complete files; fetch it again, or remove it"
    )


def _find_imagenet21k(root: Path, _: Keys) -> RawDataSet:
    """Finds ImageNet-21k: one tar per class, in a folder or inside a tar."""
    tars = []  # Tuples (split, path, start, end, synset).
    for path in _files(root, ".tar"):
        size = path.stat().st_size
        if _SYNSET.fullmatch(path.stem):
            tars.append((_split(path, root), str(path), 0, size, path.stem))
            continue
        with path.open("rb") as file:
            for inner in _members(path, file, size):
                if of_system(inner.name):
                    continue
                synset = Path(inner.name).stem
                if not (_SYNSET.fullmatch(synset) and inner.name.endswith(".tar")):
                    raise UserError(
                        f"{path} contains {inner.name!r}, which is not a class's n########.tar"
                    )
                start = inner.offset_data
                tars.append(("train", str(path), start, start + inner.size, synset))
    names = sorted({synset for *_, synset in tars})
    number = {name: label for label, name in enumerate(names)}
    units = [Unit(*where, number[synset]) for *where, synset in tars]
    return RawDataSet("imagenet21k", root, units, names)


def _scan_imagenet21k(source: RawDataSet, unit: Unit, rows: _Rows, _: Path) -> None:
    archive = f"{unit.path}: the tar in it at byte {unit.start}" if unit.start else unit.path
    with open(unit.path, "rb") as file:
        file.seek(unit.start)
        for member in _members(archive, file, unit.end):
            name = os.path.basename(member.name)
            if reason := of_system(member.name):
                rows.left_out[reason] += 1
                continue
            rows.add(member.offset_data, member.size, (unit.label,), name, name)


def _find_webdataset(root: Path, keys: Keys) -> RawDataSet:
    """Finds WebDataset tars, and class names in `classnames.txt`.

    A tar contains `key.jpg` with `key.cls`, `key.json` or `key.txt` for each example.
    """
    tars = _files(root, ".tar")
    units = [Unit(_split(tar, root), str(tar), 0, tar.stat().st_size) for tar in tars]
    listed = (root if root.is_dir() else root.parent) / "classnames.txt"
    try:
        names = listed.read_text("utf-8-sig").splitlines() if listed.is_file() else None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{listed} is not in UTF-8: {error.reason} at byte {error.start}"
        ) from error
    captions = keys.caption or None
    if keys.caption is None and units:
        captions = _captions_of_tar(units[0].path, units[0].end)
    return RawDataSet("webdataset", root, units, names, keys.label, captions)


class _Sample(NamedTuple):
    """Members of a tar whose names are equal up to the last dot, such as `1.jpg` and `1.cls`."""

    stem: str
    parts: dict[str, tarfile.TarInfo]  # Members by suffix.

    @property
    def images(self) -> list[tarfile.TarInfo]:
        """Members of the sample that are images in supported formats."""
        return [self.parts[suffix] for suffix in IMAGE_SUFFIXES if suffix in self.parts]

    def has_note(self, suffixes: Sequence[str]) -> bool:
        """Returns True if the sample has a file with a label or a caption."""
        return not self.parts.keys().isdisjoint(suffixes)


def _scan_webdataset(source: RawDataSet, unit: Unit, rows: _Rows, _: Path) -> None:
    tar = _relative(unit.path, source.root)
    notes = NOTES if source.caption_key is None else (*NOTES, ".txt")
    # Images with captions do not need a label.
    labelled = source.caption_key is None or source.label_key is not None
    with open(unit.path, "rb") as file:
        members = _without_system_files(_members(unit.path, file, unit.end), rows.left_out)
        for _, group in itertools.groupby(members, _key):
            for stem, image, parts in _described(_samples(group), notes, rows.left_out):
                where = f"{unit.path}: {stem!r}"
                if labelled and parts.keys().isdisjoint(NOTES):
                    raise UserError(
                        f"{where} has no .cls and no .json with a label (--label_key), and no "
                        "captions (.txt, --caption_key); it has "
                        f"{', '.join(sorted(suffix[1:] for suffix in parts))}"
                    )
                value = _read_label(file, parts, source.label_key, where, labelled)
                labels = _labels(value, rows, where)
                captions = _read_captions(file, parts, source.caption_key, where)
                key = f"{tar}/{stem}"
                rows.add(image.offset_data, image.size, labels, image.name, key, captions)


def _without_system_files(
    members: Iterator[tarfile.TarInfo], left_out: Counter[str]
) -> Iterator[tarfile.TarInfo]:
    """Yields the members of a tar. System files are skipped and counted in `left_out`."""
    for member in members:
        if reason := of_system(member.name):
            left_out[reason] += 1
        else:
            yield member


def _key(member: tarfile.TarInfo) -> str:
    """Returns the key of a member: its name up to the first dot, as in WebDataset."""
    folder, base = os.path.split(member.name)
    return os.path.join(folder, base.partition(".")[0])


def _samples(group: Iterator[tarfile.TarInfo]) -> list[_Sample]:
    """Groups members with the same key into samples, which have at most one member of each suffix.

    If the archive contains another `1.jpg` after the sample `1.jpg`, `1.cls`, a new sample starts.
    """
    samples, latest = [], {}
    for member in group:
        stem, suffix = os.path.splitext(member.name)
        suffix = suffix.lower()
        if stem not in latest or suffix in latest[stem].parts:
            latest[stem] = _Sample(stem, {})
            samples.append(latest[stem])
        latest[stem].parts[suffix] = member
    return samples


def _described(
    samples: list[_Sample], notes: Sequence[str], left_out: Counter[str]
) -> Iterator[tuple[str, tarfile.TarInfo, dict[str, tarfile.TarInfo]]]:
    """Yields (name, image, members by suffix) for each example in samples with the same key.

    Several examples have the same key, the name up to the first dot, if their names contain dots
    (`im.v2.000.jpg`), or if adjacent samples have equal names. An image and a label (or caption,
    both with suffixes in `notes`) belong together in two cases. Their names are equal up to the
    last dot, or they are the only image and the only label of the key (`000.photo.jpg`, `000.cls`).
    An image without a label is an example, too. But if its name extends the name of a sample with a
    label, it is skipped, and counted in `left_out`: `000.side.jpg` is a further image of `000.jpg`,
    `000.cls`.
    """
    if pair := _only_pair(samples, notes):
        image, note = pair
        yield note.stem, image.images[0], note.parts
        samples = [s for s in samples if not (s.images or s.has_note(notes))]
    described = {sample.stem for sample in samples if sample.has_note(notes)}
    for sample in samples:
        left_out[FURTHER] += max(0, len(sample.images) - 1)
        if not sample.images:
            left_out.update(_reasons(sample, notes))
        elif sample.has_note(notes) or described.isdisjoint(_prefixes(sample.stem)):
            yield sample.stem, sample.images[0], sample.parts
        else:
            left_out[FURTHER] += 1


def _only_pair(samples: list[_Sample], notes: Sequence[str]) -> tuple[_Sample, _Sample] | None:
    """Returns the only sample with an image and the only sample with a label or a caption.

    None if both are the same sample, or if there is not exactly one sample of each kind.
    """
    images = [sample for sample in samples if sample.images]
    noted = [sample for sample in samples if sample.has_note(notes)]
    if len(images) != 1 or len(noted) != 1 or images[0] is noted[0]:
        return None
    return images[0], noted[0]


def _reasons(sample: _Sample, notes: Sequence[str]) -> list[str]:
    """Returns the reasons for skipping the members of a sample without an image.

    A sample with a label or a caption counts as one skipped file, so the result has one reason.
    Otherwise, the result has a reason for each member.
    """
    reasons = [why_left_out(member.name) for member in sample.parts.values()]
    if not sample.has_note(notes):
        return reasons
    unsupported = (reason for reason in reasons if is_unsupported(reason))
    return [next(unsupported, WITHOUT_IMAGE)]


def _prefixes(stem: str) -> Iterator[str]:
    """Yields the prefixes of a name that end before a dot: `a.b` and `a` for `a.b.c`."""
    while stem := stem.rpartition(".")[0]:
        yield stem


def _captions_of_tar(path: str, end: int) -> str | None:
    """Returns `txt`, or the JSON key of the captions, from the first sample of a tar with captions.

    None: none of the first `LOOKED_AT` samples with images has captions.
    """
    with open(path, "rb") as file:
        members = _without_system_files(_members(path, file, end), Counter())
        groups = (_samples(group) for _, group in itertools.groupby(members, _key))
        with_images = (group for group in groups if any(sample.images for sample in group))
        for group in itertools.islice(with_images, LOOKED_AT):
            parts = dict(itertools.chain(*(sample.parts.items() for sample in group)))
            if ".txt" in parts:
                return "txt"
            if ".json" in parts and (key := _caption_key(file, parts[".json"])):
                return key
    return None


def _caption_key(file, note: tarfile.TarInfo) -> str | None:
    """Returns the key of the captions in a JSON file; None: no captions, or the file is damaged."""
    try:
        values = _read_json(file, note)
    except (ValueError, RecursionError):
        return None
    values = values if isinstance(values, dict) else {}
    for key in CAPTION_KEYS:
        texts = values.get(key) if isinstance(values.get(key), list) else [values.get(key)]
        if texts and all(isinstance(text, str) for text in texts):
            return key
    return None


def _read_label(
    file, parts: Mapping[str, tarfile.TarInfo], label_key: str | None, where: str, required: bool
):
    """Returns the label in the `.cls` or `.json` file of a sample, whose members are `parts`.

    If there is no label, the result is -1, or an error is raised if a label is `required`.
    `label_key` is the key of the label in JSON; None: the usual keys are tried.
    """
    is_json = ".cls" not in parts
    try:
        if is_json and not required:
            values = _read_json(file, parts[".json"]) if ".json" in parts else {}
            labelled = isinstance(values, dict) and not values.keys().isdisjoint(LABEL_KEYS)
            return _json_label(values, None) if labelled else -1
        value = _read_json(file, parts[".json" if is_json else ".cls"])
        return _json_label(value, label_key) if is_json else value
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        of_json = ".json has no label that can be read (--label_key)"
        kind = of_json if is_json else ".cls has no class index"
        raise UserError(f"{where}: its {kind}") from error


def _read_json(file, note: tarfile.TarInfo):
    """Parses a tar member as JSON; raises ValueError or RecursionError if the JSON is invalid."""
    return json.loads(_read_note(file, note))


def _read_note(file, note: tarfile.TarInfo) -> bytes:
    """Returns the bytes of a tar member; raises ValueError if the member is too large."""
    if note.size > MOST_NOTE:
        raise ValueError(f"{note.size:,} bytes; the limit is {MOST_NOTE:,}")
    return os.pread(file.fileno(), note.size, note.offset_data)


def _read_captions(
    file, parts: Mapping[str, tarfile.TarInfo], caption_key: str | None, where: str
) -> tuple[str, ...]:
    """Returns the captions of a sample, whose members are `parts`; empty: it has no captions.

    `caption_key` is `txt`, or the JSON key of the captions; None: captions are not read.

    Raises:
      UserError: the `.txt` or `.json` file is damaged or too large, or does not contain captions.
    """
    note = parts.get(".txt" if caption_key == "txt" else ".json")
    if caption_key is None or note is None:
        return ()
    try:
        if caption_key == "txt":
            value = _read_note(file, note).decode("utf-8-sig", "surrogateescape")
        else:
            value = _read_json(file, note).get(caption_key)
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{where}: its {os.path.splitext(note.name)[1]} has no caption that can be read: "
            f"{error}"
        ) from error
    return captions_in(value, where)


def _json_label(values: dict, label_key: str | None):
    for key in (label_key,) if label_key else LABEL_KEYS:
        if key in values:
            return values[key]
    raise KeyError


def _labels(value, rows: _Rows, where: str) -> tuple[int, ...]:
    """Converts a label (a class index, a list of indices, or -1) to a tuple of class indices."""
    rows.multiple |= isinstance(value, list)
    labels = tuple(value) if isinstance(value, list) else (value,)
    if not all(type(label) is int for label in labels):
        raise UserError(f"{where}: the label {value!r:.100} is not a class index")
    return labels


# Parquet files of the Hugging Face Hub.


class _Columns(NamedTuple):
    """Names of a Parquet file's columns with images, labels and captions, and its class names.

    A value of None means that the file has no such column, or no class names.
    """

    image: str
    label: str | None
    class_names: list[str] | None
    caption: str | None


def _find_parquet(root: Path, keys: Keys) -> RawDataSet:
    """Finds Parquet files. Classes of different files are matched by the names in their schemas."""
    units = [Unit(_split(file, root), str(file)) for file in _files(root, ".parquet")]
    if not units:
        return RawDataSet("parquet", root, [])
    first = _columns(units[0].path, keys)
    same = Keys(first.label, first.caption or keys.caption)
    columns = {unit.path: _columns(unit.path, same) for unit in units}
    _check_same_columns(columns, first)
    names_of = {path: found.class_names or [] for path, found in columns.items()}
    names = _leading_names(units, names_of)
    _check_class_names(names_of, names)
    number = {name: label for label, name in enumerate(names)}
    numbers = {
        path: tuple(number.get(name, -1) for name in file_names)
        for path, file_names in names_of.items()
        if file_names != names
    }
    return RawDataSet(
        "parquet", root, units, names or None, first.label, first.caption, numbers=numbers
    )


def _check_same_columns(columns: Mapping[str, _Columns], first: _Columns) -> None:
    """Raises UserError if a file's label or caption column differs from the first file's."""
    for path, found in columns.items():
        if found.caption != first.caption or found.label != first.label:
            raise UserError(
                f"{path} has the columns {found.label!r} and {found.caption!r} of labels and "
                f"captions, and {next(iter(columns))} has {first.label!r} and {first.caption!r}; "
                "choose them with --label_key and --caption_key"
            )


def _leading_names(units: list[Unit], names_of: Mapping[str, list[str]]) -> list[str]:
    """Returns the class names of the training files, or, without training files, of all files."""
    leading = [names_of[unit.path] for unit in units if unit.split == "train"]
    return list(dict.fromkeys(itertools.chain(*(leading or names_of.values()))))


def _check_class_names(names_of: Mapping[str, list[str]], names: list[str]) -> None:
    """Raises UserError if only some files have class names, or a file has duplicate names.

    `names_of` are the class names of each file, and `names` those of the training files.
    """
    for path, file_names in names_of.items():
        if names and not file_names:
            raise UserError(
                f"{path} has no class names in its schema, and other files have: "
                f"{shortened(names)}; give all files the same features (a ClassLabel), so that "
                "numbers mean the same"
            )
        if file_names and not names:
            raise UserError(
                f"{path} has class names in its schema, and the training files have none"
            )
        if len(set(file_names)) < len(file_names):
            raise UserError(f"{path} has two classes of one name: TFDS requires distinct names")


def _columns(path: str, keys: Keys) -> _Columns:
    """Returns the columns of a Parquet file. If the file has captions, labels are optional."""
    with _reading(path):
        schema = _parquet(path).schema_arrow
        columns = schema.names
        described = (schema.metadata or {}).get(b"huggingface", b"{}")
    there = f"there are: {', '.join(columns)}"
    images, classes = _described_columns(path, described)
    images = images or _present(columns, "image", "img", "jpg")
    if len(images) != 1 or images[0] not in columns:
        raise UserError(f"{path} has no one column of images; {there}")
    caption = text_column(path, schema, keys.caption)
    labels = [keys.label] if keys.label else _present(columns, "label", "labels") or [*classes]
    if caption is not None and not labels:
        return _Columns(images[0], None, None, caption)
    if len(labels) != 1 or labels[0] not in columns:
        raise UserError(
            f"{path}: choose the column of captions with --caption_key, or the label's column with "
            f"--label_key; {there}"
        )
    return _Columns(images[0], labels[0], _names_of_classes(path, labels[0], classes), caption)


def _present(columns: list[str], *names: str) -> list[str]:
    return [name for name in names if name in columns]


def _described_columns(path: Path | str, described: bytes) -> tuple[list[str], dict[str, dict]]:
    """Returns the names of the columns with images, and the descriptions of columns with classes.

    `described` is the `huggingface` metadata of the Parquet file, as JSON.

    Raises:
      UserError: the metadata is damaged.
    """
    try:
        features = json.loads(described).get("info", {}).get("features", {})
        images = [name for name, feature in features.items() if _kind_of(feature) == "Image"]
        classes = {
            name: class_label for name in features if (class_label := _class_label(features[name]))
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: the description of its columns (metadata huggingface) is damaged"
        ) from error
    return images, classes


def _names_of_classes(
    path: Path | str, label: str, classes: Mapping[str, dict]
) -> list[str] | None:
    """Returns the class names of the column `label`; raises UserError if they are not texts."""
    names = classes.get(label, {}).get("names")
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: the names of the classes of {label!r} are not a list of texts")
    return names


def _kind_of(feature) -> str | None:
    return feature.get("_type") if isinstance(feature, dict) else None


def _class_label(feature) -> dict | None:
    """Returns the `ClassLabel` of a column or of its lists' items; None: it has no classes."""
    if isinstance(feature, list) and feature:
        feature = feature[0]
    if isinstance(feature, dict) and isinstance(feature.get("feature"), dict):
        feature = feature["feature"]
    return feature if _kind_of(feature) == "ClassLabel" else None


def _parquet(path: Path | str):
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path)


@contextlib.contextmanager
def _reading(path: Path | str) -> Iterator[None]:
    """Context that converts errors about damaged Parquet files to a UserError of one line."""
    try:
        yield
    except (UserError, PermissionError):
        raise
    except Exception as error:
        raise UserError(
            f"{path} is truncated or not Parquet; fetch it again, or remove it"
        ) from error


def _scan_parquet(source: RawDataSet, unit: Unit, rows: _Rows, spool: Path) -> None:
    """Lists the rows of a Parquet file, and copies their images to the file `spool`.

    Images are copied because single rows of Parquet cannot be read efficiently.
    """
    columns = _columns(unit.path, Keys(source.label_key, source.caption_key or NO_CAPTIONS))
    name, numbers = _relative(unit.path, source.root), source.numbers.get(unit.path)
    limit = max(MIN_BYTES, MOST_EXPANSION * os.path.getsize(unit.path))
    cells = _rows_of(unit.path, columns, limit)
    with spool.open("wb") as out, contextlib.closing(cells) as values:
        for value, classes, texts in values:
            key, where = f"{name}:{len(rows)}", f"{unit.path}: row {len(rows)}"
            if not isinstance(value, dict):
                value = {"bytes": value}
            content, file = value.get("bytes"), value.get("path")
            if not isinstance(content, bytes):
                there = f", only its path {file!r}" if file else ""
                raise UserError(f"{where} contains no image{there}")
            labels = _labels(-1 if classes is None else classes, rows, where)
            if numbers is not None:
                labels = _by_name(labels, numbers, where)
            file_name = file if isinstance(file, str) and file else key
            captions = captions_in(texts, where)
            rows.add(out.tell(), len(content), labels, file_name, key, captions)
            out.write(content)
            if out.tell() + rows.text_bytes + ROW_BYTES * len(rows) > limit:
                raise _too_large(unit.path, limit)


def _rows_of(path: str, columns: _Columns, limit: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yields (image, label, captions) of each row, few rows at a time; None: no such column."""
    with _reading(path):
        parquet = _parquet(path)
        # Column metadata are not accessed, because damaged metadata would crash the process.
        groups = [parquet.metadata.row_group(group) for group in range(parquet.num_row_groups)]
        if max((group.total_byte_size for group in groups), default=0) > limit:
            raise _too_large(path, limit)
        names = (columns.image, columns.label, columns.caption)
        read = list(dict.fromkeys(name for name in names if name is not None))
        for batch in parquet.iter_batches(PARQUET_ROWS, columns=read):
            none = [None] * batch.num_rows
            cells = (none if name is None else batch[name].to_pylist() for name in names)
            yield from zip(*cells, strict=True)


def _too_large(path: str, limit: int) -> UserError:
    return UserError(
        f"{path} contains more than {limit / 2**20:,.0f} MiB in {os.path.getsize(path):,} bytes: "
        "it is damaged, or made to fill memory"
    )


def _by_name(labels: tuple[int, ...], numbers: tuple[int, ...], where: str) -> tuple[int, ...]:
    """Converts class indices of a file to class indices of the data set.

    `numbers` are the data set's indices of the file's classes; -1: not a class of the data set.

    Raises:
      UserError: a label is not a class of the file or of the data set.
    """
    for label in labels:
        if label >= len(numbers):
            raise UserError(
                f"{where}: the label {label} is outside the file's {len(numbers)} classes"
            )
        if label >= 0 and numbers[label] < 0:
            raise UserError(f"{where}: its class is not among those of the training files")
    return tuple(label if label < 0 else numbers[label] for label in labels)


# TFDS data sets in TFRecord files. A record consists of the length, a CRC of the length, the data,
# and a CRC of the data.


def _tfds_folder(source: str) -> Path:
    """Returns the folder of a TFDS data set, given as `NAME:DATA_DIR`."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import read_only_builder

    if not (parts := re.fullmatch(r"([\w/]+(?::[\d.*]+)?):(.+)", source)):
        raise UserError(f"there is no {source}")
    try:
        return Path(read_only_builder.builder_from_files(parts[1], data_dir=parts[2]).data_dir)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise UserError(f"there is no prepared data set {parts[1]!r} in {parts[2]}") from error


def _find_tfds(root: Path, keys: Keys) -> RawDataSet:
    import tensorflow_datasets as tfds

    try:
        info = tfds.builder_from_directory(root).info
        units = [
            Unit(split.name, str(path), end=length)
            for split in info.splits.values()
            for path, length in zip(split.filepaths, split.shard_lengths, strict=True)
        ]
    except Exception as error:  # TFDS does not validate its JSON files, so any error is possible.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{root} is not a prepared TFDS data set: {reason}") from error
    if info.file_format.value != "tfrecord":
        remedy = "; train on it as it is" if info.file_format.value == "array_record" else ""
        raise UserError(f"{root} is stored as {info.file_format.value}, not as tfrecord{remedy}")
    label_key = keys.label or "label"
    feature = dict(info.features).get(label_key)
    names = list(feature.names or ()) if isinstance(feature, tfds.features.ClassLabel) else ()
    caption_key = _captions_of_tfds(root, info.features, keys.caption)
    return RawDataSet("tfds", root, units, names or None, label_key, caption_key)


def _captions_of_tfds(root: Path, features, caption_key: str | None) -> str | None:
    """Returns the name of the tf.Example feature with captions; None: captions are not read.

    `caption_key` is the name of the feature. None: the usual names are tried. `NO_CAPTIONS`:
    captions are ignored.

    Raises:
      UserError: `caption_key` is not the name of a text feature.
    """
    if caption_key == NO_CAPTIONS:
        return None
    found = caption_feature(features, caption_key or CAPTION_KEYS[0])
    if found is None and caption_key is not None:
        there = ", ".join(text_features(features)) or "none"
        raise UserError(
            f"{root} has no texts {caption_key!r} (--caption_key); features of text are: {there}"
        )
    return found


def _masked_crc(data: bytes) -> int:
    """Returns the masked CRC of data, as TFRecord files contain it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def parse_example(record: bytes, where: str):
    """Parses a serialized tf.Example to its protobuf message.

    Raises:
      UserError: the bytes are not a tf.Example.
    """
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_pb2

    try:
        return tf_example_pb2.Example.FromString(record)
    except DecodeError as error:
        raise UserError(f"{where} is not a tf.Example") from error


def _scan_tfds(source: RawDataSet, unit: Unit, rows: _Rows, _: Path) -> None:
    name = os.path.basename(unit.path)
    with open(unit.path, "rb", buffering=0) as file:
        end, offset = os.fstat(file.fileno()).st_size, 0
        while len(header := os.pread(file.fileno(), 12, offset)) == 12:
            length, crc = struct.unpack("<QI", header)
            if _masked_crc(header[:8]) != crc:
                raise UserError(f"{unit.path} is damaged at byte {offset}; fetch it again")
            if offset + length + 16 > end:
                break
            labels, captions = (), ()
            if source.index_labels or source.caption_key is not None:
                record = os.pread(file.fileno(), length, offset + 12)
                where = f"{unit.path}: the record at byte {offset}"
                labels, captions = _values_of_record(source, record, where)
            rows.add(offset + 12, length, labels, f"{name}:{len(rows)}", "", captions)
            offset += length + 16
    if len(rows) != unit.end:
        raise UserError(
            f"{unit.path} is truncated: {len(rows)} of {unit.end} examples are complete; fetch it "
            "again"
        )


def _values_of_record(
    source: RawDataSet, record: bytes, where: str
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the labels (empty unless `source.index_labels`) and the captions of a tf.Example.

    Raises:
      UserError: the example is damaged; or `source.index_labels` is True, and the example does not
        have exactly one label.
    """
    features = parse_example(record, where).features.feature
    labels, captions = (), ()
    if source.index_labels:
        labels = tuple(features[source.label_key].int64_list.value)
        if len(labels) != 1:
            raise UserError(
                f"{where} has {len(labels)} labels in {source.label_key!r} (--label_key), and "
                "--shots needs one whole number"
            )
    if source.caption_key is not None and source.caption_key in features:
        captions = captions_in([*caption_values(features, source.caption_key)], where)
    return labels, captions


def scan(source: RawDataSet, number: int, seed: int, spool: Path) -> Scan:
    """Lists the examples in a unit of a data set, in the stored order.

    Args:
      source: a data set that contains only this unit.
      number: index of the unit in the whole data set.
      seed: random seed of the sort keys, which determine the order of the prepared data set.
      spool: file for copies of images. It is only used for Parquet files.

    Raises:
      UserError: the unit is truncated or damaged, or an example lacks a label.
    """
    rows = _Rows(number, seed)
    KINDS[source.kind].scan(source, source.units[0], rows, spool)
    return rows.collected()


def read(kind: str, path: str, entry: np.void, name: str) -> bytes:
    """Returns an example's encoded image, or the serialized example of a TFDS data set.

    Args:
      path: the file or folder that contains the example. For Parquet files: the file with copies of
        their images, which `scan` has written.
      name: name of the example in the index.

    Raises:
      Unreadable: the file is missing, or not a regular file.
      UserError: the file is damaged.
    """
    if kind in OF_FILES:
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
    """Returns the encoded image of an example. The arguments are those of `read`.

    Raises:
      Unreadable: the file is missing, or not a regular file; or a TFDS example has no image.
      UserError: the file is damaged.
    """
    data = read(kind, path, entry, name)
    if kind != "tfds":
        return data
    images = parse_example(data, f"{path}: {name}").features.feature["image"].bytes_list.value
    if not images:
        raise Unreadable("it has no image")
    return images[0]


class _Kind(NamedTuple):
    find: Callable[[Path, Keys], RawDataSet]
    scan: Callable[[RawDataSet, Unit, _Rows, Path], None]


KINDS = {
    "folder": _Kind(_find_folder, _scan_folder),
    # Images without labels, in a folder and all its inner folders.
    "images": _Kind(
        lambda root, _: RawDataSet("folder", root, [Unit("train", str(root))]), _scan_folder
    ),
    "csv": _Kind(_find_lists, _scan_list),
    "webdataset": _Kind(_find_webdataset, _scan_webdataset),
    "imagenet21k": _Kind(_find_imagenet21k, _scan_imagenet21k),
    "parquet": _Kind(_find_parquet, _scan_parquet),
    "tfds": _Kind(_find_tfds, _scan_tfds),
}
