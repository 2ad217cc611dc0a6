"""Index of a data set's examples and their order, in a folder for intermediate results.

Preparation is divided into tasks. The result of a task is a file in the folder. If a preparation is
interrupted, the next call only runs tasks whose files do not exist. A task only depends on its
arguments. It writes a temporary file and finally renames it. Tasks can therefore run in any
process, and a task may even run twice.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.class_names import shortened
from vit_jax.data.labels import check_lists, from_one_hot, one_hot_width
from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.folder_rules import in_words
from vit_jax.errors import UserError, as_text
from vit_jax.preparation import captions, readers

CHUNK = 1024  # Number of images in a task that reads images.


class WorkItem(NamedTuple):
    """A task: a call `function(*arguments)`. It is finished when the file `result` exists."""

    function: Callable[..., None]
    arguments: tuple
    result: Path
    weight: int  # Relative amount of work.


# Function `run(tasks, title, unit)` that runs tasks, in any order and in any process. For messages,
# `title` is the name of the tasks, and `unit` the unit of `WorkItem.weight`, such as "images".
Run = Callable[[list[WorkItem], str, str], None]


def in_chunks(
    function: Callable[..., None], arguments: tuple, size: int, name: str, folder: Path, run: Run
) -> list[Path]:
    """Runs a function on consecutive parts of `range(size)`, each as a task.

    Args:
      function: function that is called with `(*arguments, start, stop, file)`. It writes its
        result for `range(start, stop)` to `file`.
      arguments: first arguments of the function.
      name: name of the tasks, also part of the file names.

    Returns:
      The result files, in the order of the parts.
    """
    tasks = []
    for start in range(0, size, CHUNK):
        stop = min(start + CHUNK, size)
        result = folder / f"{name.replace(' ', '-')}-{start:010d}.npy"
        tasks.append(WorkItem(function, (*arguments, start, stop, result), result, stop - start))
    run(tasks, name, "images")
    return [task.result for task in tasks]


def each_file(
    function: Callable[[int, Path], None], files: list[Path], name: str, folder: Path, run: Run
) -> list[Path]:
    """Computes a new file from each of `files`; returns the new files.

    Args:
      function: called as `function(number, new_file)` for each file number 0, 1, ... It computes
        `new_file` from `files[number]`.
      name: name of the tasks, also part of the file names.
    """
    results = [part_file(number, name, folder) for number in range(len(files))]
    tasks = [WorkItem(function, (i, result), result, 1) for i, result in enumerate(results)]
    run(tasks, name, f"parts of {CHUNK:,} images")
    return results


def part_file(number: int, name: str, folder: Path) -> Path:
    """Returns the path of the new file that `each_file` writes for file number `number`."""
    return folder / f"{name.replace(' ', '-')}-{number:06d}.npy"


@contextlib.contextmanager
def locked(work: Path) -> Iterator[None]:
    """Locks a folder against other processes while the context is open.

    If the process is killed, the lock is released.
    """
    import fcntl

    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{work.parent} is being prepared by another process") from error
        for leftover in work.rglob("*.tmp"):  # Temporary files of killed processes.
            leftover.unlink(missing_ok=True)
        yield


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context that yields a temporary path. If no error occurs, the file is renamed to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The temporary name is random: two machines may run the same task with the same process ID.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: dict) -> None:
    """Writes a JSON file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value))


def save(path: Path, array: np.ndarray) -> None:
    """Saves an array like `np.save`, and raises an error if the disk is full."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.view(np.uint8))


# The index contains the location, labels, name and sort key of every example.


class Index(NamedTuple):
    """All examples of a data set. Arrays are memory-mapped, so processes share the memory."""

    kind: str
    paths: list[str]  # The file or folder of each unit (`readers.Unit`).
    multiple: bool
    left_out: dict[str, int]  # Number of skipped files, by reason.
    entries: np.ndarray
    labels: np.ndarray
    names: np.ndarray

    def name(self, entry: np.void) -> str:
        """Returns the name of an example in its data set."""
        start, size = int(entry["name"]), int(entry["name_size"])
        return os.fsdecode(self.names[start : start + size].tobytes())

    def captions(self, entry: np.void) -> list[str]:
        """Returns the captions of an example; empty: the index contains no captions."""
        return captions.decoded(self.stored_captions(entry))

    def stored_captions(self, entry: np.void) -> bytes:
        """Returns the captions of an example as the encoded bytes in the index."""
        start = int(entry["name"]) + int(entry["name_size"])
        return self.names[start : start + int(entry["captions"])].tobytes()

    def describe(self, entry: np.void) -> str:
        """Returns an example's location for messages: `a.jpg`, or `a.tar: 1.jpg` inside a file."""
        path, name = self.paths[entry["unit"]], self.name(entry)
        if self.kind == "parquet":  # The path is that of a temporary copy.
            return as_text(name)
        is_file = self.kind in readers.OF_FILES
        return as_text(str(Path(path).parent / name) if is_file else f"{path}: {name}")


def build_index(
    source: readers.RawDataSet,
    seed: int,
    work: Path,
    run: Run,
    skip_uncaptioned: bool = False,
) -> Index:
    """Indexes a data set in the folder `work`, or loads an existing index.

    Args:
      seed: random seed of the order of examples in the prepared data set.
      skip_uncaptioned: True: skip images without a caption. False: raise an error for them.

    Raises:
      UserError: the data set has no images, a label is not one of its classes, or images of a data
        set with captions have no caption.
    """
    if not (work / "index.json").exists():
        (work / "spool").mkdir(exist_ok=True)
        tasks, paths = [], []
        for i, unit in enumerate(source.units):
            part, spool = work / "index" / f"{i:06d}.npz", work / "spool" / f"{i:06d}"
            one = dataclasses.replace(source, units=[unit], class_names=None)
            tasks.append(WorkItem(_scan, (one, i, seed, spool, part), part, 1))
            paths.append(str(spool) if source.kind == "parquet" else unit.path)
        run(tasks, "indexing", "files")
        classes = None if source.class_names is None else len(source.class_names)
        multiple, left_out = _merge([task.result for task in tasks], work, classes)
        left_out += Counter(source.left_out)
        if skip_uncaptioned:
            left_out += _remove_uncaptioned(source, work)
        described = dict(kind=source.kind, paths=paths, multiple=multiple, left_out=left_out)
        write_json(work / "index.json", described)
    shutil.rmtree(work / "index", ignore_errors=True)
    index = load_index(work)
    if not len(index.entries):
        there = f"; found instead: {in_words(index.left_out)}" if index.left_out else ""
        raise UserError(f"{source.root} contains no image{there}")
    _check_captioned(source, index)
    if source.class_names is not None:
        for position in np.flatnonzero(index.labels >= len(source.class_names))[:1]:
            row = np.searchsorted(index.entries["first_label"], position, side="right") - 1
            entry = index.entries[row]
            raise UserError(
                f"{index.describe(entry)} has the label {index.labels[position]}, "
                f"but there are {len(source.class_names)} classes, from 0"
            )
    return index


def _remove_uncaptioned(source: readers.RawDataSet, work: Path) -> Counter[str]:
    """Removes examples without a caption, if there are captions; returns their number by reason."""
    if source.caption_key is None:
        return Counter()
    entries = mapped(work / "entries.npy")
    captioned = entries[entries["captions"] > 0]
    save(work / "entries.npy", captioned)
    return Counter({captions.MISSING: len(entries) - len(captioned)})


def _check_captioned(source: readers.RawDataSet, index: Index) -> None:
    """Raises UserError if a data set has captions, but an example has no caption."""
    missing = np.flatnonzero(index.entries["captions"] == 0)
    if source.caption_key is not None and len(missing):
        first = [index.describe(index.entries[position]) for position in missing[:3]]
        raise captions.missing_error(first, len(missing), len(index.entries))


def _scan(source: readers.RawDataSet, number: int, seed: int, spool: Path, result: Path) -> None:
    scan = readers.scan(source, number, seed, spool)
    with replacing(result) as temporary, temporary.open("wb") as file:
        np.savez(file, **scan._asdict() | {"left_out": json.dumps(scan.left_out)})


def _merge(parts: list[Path], work: Path, classes: int | None) -> tuple[bool, Counter[str]]:
    """Concatenates the results of all `_scan` tasks, and writes the index of the data set.

    One-hot labels are converted to class indices, and multi-hot labels to lists of class indices.
    Returns True if labels are lists, and the number of skipped files by reason. `classes` is the
    number of classes; None: unknown.

    Raises:
      UserError: labels are neither class indices nor rows of zeros and ones.
    """
    joined = {"entries": [], "labels": [], "names": []}
    labels = names = 0
    multiple, left_out = False, Counter()
    for path in parts:
        with np.load(path) as part:
            entries = part["entries"]
            entries["first_label"] += np.uint64(labels)
            entries["name"] += np.uint64(names)
            joined["entries"].append(entries)
            joined["labels"].append(part["labels"])
            joined["names"].append(part["names"])
            labels += len(joined["labels"][-1])
            names += len(joined["names"][-1])
            multiple |= bool(part["multiple"])
            left_out.update(json.loads(str(part["left_out"])))
    if multiple:
        lists = np.concatenate(joined["entries"]), np.concatenate(joined["labels"])
        entries, flat, multiple = _index_lists(*lists, classes)
        joined["entries"], joined["labels"] = [entries], [flat]
    for name in joined:
        save(work / f"{name}.npy", np.concatenate(joined[name]))
        joined[name].clear()
    return multiple, left_out


def _index_lists(
    entries: np.ndarray, labels: np.ndarray, classes: int | None
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Converts labels that are rows of zeros and ones (one-hot, multi-hot) to class indices.

    Returns the changed `entries` and `labels`, and True if labels are lists of class indices.
    `labels` are those of all examples, concatenated.
    """
    counts = entries["labels"].astype(np.int64)
    unlabelled = np.zeros(len(entries), bool)
    unlabelled[counts == 1] = labels[entries["first_label"][counts == 1].astype(np.int64)] == -1
    unlabelled |= counts == 0
    in_lists = ~np.repeat(unlabelled, counts)
    if width := one_hot_width(counts[~unlabelled], labels[in_lists], classes):
        counts[unlabelled] = 0
        counts[~unlabelled], labels = from_one_hot(labels[in_lists], width)
        entries["labels"], entries["first_label"] = counts, np.cumsum(counts) - counts
        return entries, labels.astype(np.int32), bool((counts != 1).any())
    check_lists(counts[~unlabelled], labels[in_lists], classes)
    return entries, labels, True


@dataclasses.dataclass(frozen=True)
class Indexed(Source):
    """Data source without labels: the images at the positions `positions` of `index.entries`."""

    index: Index
    positions: np.ndarray
    class_names = ()

    def __len__(self):
        return len(self.positions)

    def __getitem__(self, index):
        entry = self.index.entries[self.positions[index]]
        path, name = self.index.paths[entry["unit"]], self.index.name(entry)
        return Example(readers.read_image(self.index.kind, path, entry, name), ())

    def describe(self, index):
        return self.index.describe(self.index.entries[self.positions[index]])


def training_images(source: readers.RawDataSet, index: Index, work: Path) -> Indexed:
    """Returns the images of the training split.

    Raises:
      UserError: the data set has no training split.
    """
    file = work / "train.npy"
    if not file.exists():
        in_train = np.array([unit.split == "train" for unit in source.units])[index.entries["unit"]]
        if not in_train.any():
            raise UserError("--deduplicate_against and --retrieve_for need a split named train")
        save(file, np.flatnonzero(in_train).astype(np.uint32))
    return Indexed(index, mapped(file))


def load_index(work: Path) -> Index:
    """Loads the index that `build_index` has written. Arrays are memory-mapped."""
    described = json.loads((work / "index.json").read_text())
    return Index(
        **described,
        **{name: mapped(work / f"{name}.npy") for name in ("entries", "labels", "names")},
    )


def mapped(path: Path) -> np.ndarray:
    """Loads a saved array as a memory map."""
    try:
        return np.load(path, mmap_mode="r")
    except ValueError:  # An empty array cannot be mapped.
        return np.load(path)


def class_names(source: readers.RawDataSet, index: Index) -> list[str]:
    """Returns the class names. If the data set has no names, the indices are the names."""
    if source.class_names is not None:
        return source.class_names
    return [str(number) for number in range(int(index.labels.max(initial=0)) + 1)]


def description(source: readers.RawDataSet, index: Index) -> list[str]:
    """Returns lines that describe a data set: classes, images per split, and skipped files."""
    lines = []
    if source.class_names is not None or (index.labels >= 0).any():
        names = class_names(source, index)
        lines.append(f"{len(names):,} classes: {shortened(names)}")
    images, counts = np.bincount(index.entries["unit"], minlength=len(source.units)), Counter()
    for unit, count in zip(source.units, images.tolist(), strict=True):
        counts[unit.split] += count
    lines.append(", ".join(f"{split} {count:,} images" for split, count in counts.items()))
    if source.caption_key is not None:
        lines.append(f"captions from {source.caption_key!r}")
    if index.left_out:
        lines.append(f"note: skipped: {in_words(index.left_out)}")
    return lines


# The order is a random permutation of each split. The first n examples are thus a random sample.


def order_splits(
    source: readers.RawDataSet, index: Index, removed: np.ndarray, limit: int | None, work: Path
) -> list[str]:
    """Writes a file with the order of each split.

    An order is an array of positions in `index.entries`. Removed examples are excluded.

    Args:
      removed: positions of the examples to remove, in `index.entries`.
      limit: maximum number of examples of a split; None: no limit.

    Returns:
      The names of the splits.
    """
    splits = list(dict.fromkeys(unit.split for unit in source.units))
    of_units = np.array([splits.index(unit.split) for unit in source.units], np.uint8)
    number = of_units[index.entries["unit"]]
    number[removed] = len(splits)
    written = []
    for i, split in enumerate(splits):
        chosen = np.flatnonzero(number == i).astype(np.uint32)
        # TFDS data sets keep their order. They are already shuffled, and papers use slices of this
        # order.
        if source.kind != "tfds":
            chosen = chosen[np.argsort(index.entries["key"][chosen], kind="stable")]
        if len(chosen):
            save(work / f"order-{split}.npy", chosen[:limit])
            written.append(split)
    return written


# Few-shot splits contain the first readable images of each class.


def choose_shots(
    source: readers.RawDataSet, index: Index, shots: tuple[int, ...], skipped, work: Path
) -> list[str]:
    """Chooses the examples of the splits `train_<k>shot`, and writes their order to files.

    A split with k shots contains the images of all splits with fewer shots.

    Returns:
      The names of the splits.

    Raises:
      UserError: images do not have exactly one label, there is no training split, or a class has
        too few training images.
    """
    if index.multiple or not len(index.labels):
        option = " (--label_key)" if source.kind == "tfds" else ""
        raise UserError(f"--shots needs one label for each image{option}")
    if not (work / "order-train.npy").exists():
        raise UserError("--shots needs a split named train")
    positions = np.delete(mapped(work / "order-train.npy"), [place for place, *_ in skipped])
    labels = index.labels[index.entries["first_label"][positions]]
    names = class_names(source, index)
    by_class = np.argsort(labels, kind="stable")
    begins, ends = (
        np.searchsorted(labels[by_class], np.arange(len(names)), side) for side in ("left", "right")
    )
    for k in shots:
        for few in np.flatnonzero(ends - begins < k)[:1]:
            raise UserError(
                f"--shots={k}: class {names[few]!r} has only {(ends - begins)[few]} training images"
            )
        chosen = np.concatenate([by_class[begin : begin + k] for begin in begins])
        save(work / f"order-train_{k}shot.npy", positions[np.sort(chosen)])
    return [f"train_{k}shot" for k in shots]
