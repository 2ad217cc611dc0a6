"""Data source `folder`: image files in a local folder, or in cloud storage (`gs://`, `s3://`)."""

import dataclasses
import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.folder_rules import (
    IMAGE_SUFFIXES,
    OUTSIDE,
    check_classes,
    in_words,
    is_ignored,
    sort_out,
    split_name,
    why_left_out,
)
from vit_jax.data.sources.kind import SourceKind
from vit_jax.data.sources.slices import groups_by_path, stratified
from vit_jax.errors import UserError, as_text

PART = 4096  # Number of files in one task of the threads that read file sizes.


@dataclasses.dataclass(frozen=True)
class Folder(Source):
    """Image files in `<root>/<split>/<class>/`, or in `<root>/<class>/` for the split `all`.

    If labels are not required, images may be in any subfolder. `folder_rules` defines which folders
    and files are skipped. Files are sorted by path. A slice such as `[:90%]` contains this share of
    the images of each class, or of each folder if labels are not required.
    """

    root: str  # Prefix of the paths in `files`. It may differ between copies of the folder.
    files: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    max_labels: int = 1

    def __setstate__(self, state):
        self.__dict__.update(state)
        if "://" in self.root:
            _remote(self.root)  # Import the file system's library before threads start.

    @classmethod
    def scan(
        cls,
        root: str,
        split: str,
        class_names: tuple[str, ...] | None = None,
        labels: bool = True,
        only: tuple[str, ...] = (),
    ) -> "Folder":
        """Lists the files of a split.

        Args:
          root: a local path, or a URL that fsspec reads (`gs://`, `s3://`).
          split: name of a folder in `root`, ignoring case (`train` also finds `Train`), or `all`.
          class_names: class names of the training split; None: the names of the folders.
          labels: True: labels are required. False: images are listed without labels.
          only: names of folders that the user has chosen as classes.

        Raises:
          UserError: the folder does not exist or has no images, or a folder may be a class as well
            as a split.
        """
        where, paths, folders = _listed_split(root, split)
        images, left_out = sort_out(paths)
        if labels:
            found, classes = _labelled(where, images, folders, class_names, only)
            left_out.update({OUTSIDE: len(images) - len(found)} if len(images) > len(found) else {})
        else:
            found, classes = [(-1, file) for file in images], ()
        if not found:
            a_class = "a folder per class with " if labels else ""
            there = f"; found instead: {in_words(left_out)}" if left_out else ""
            raise UserError(
                f"no images in {where}: it must hold {a_class}"
                f"{', '.join(s[1:] for s in IMAGE_SUFFIXES)} files{there}"
            )
        numbers, names = zip(*sorted(found), strict=True)
        root = where if where.endswith("/") else f"{where}/"
        return cls(root, tuple(f"{root}{name}" for name in names), numbers, classes, dict(left_out))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return Example(read_file(self.files[index]), self.labels_of(index))

    def describe(self, index):
        return as_text(self.files[index])

    def labels_of(self, index):
        return (int(self.labels[index]),) if self.class_names else ()

    def known_labels(self):
        return np.array(self.labels, np.int32)[:, None]

    def stored_files(self, indices=None):
        files = self.files if indices is None else [self.files[index] for index in indices]
        names = [file[len(self.root) :] for file in files]
        return zip(names, file_sizes(self.root, files), strict=True)

    def groups(self, key):
        return groups_by_path([file[len(self.root) :] for file in self.files], key)

    def fair_order(self):
        names = [file[len(self.root) :] for file in self.files]
        folders = (name.rpartition("/")[0].split("/")[0] for name in names)
        return stratified(self.labels if self.class_names else [*folders], names)


def file_sizes(root: str, files: Sequence[str]) -> list[int]:
    """Returns the sizes in bytes of a folder's files, local or at a URL; -1 for missing files."""
    if "://" in root:
        system, path = _remote(root)
        entries = system.find(path, detail=True)
        start = path.rstrip("/")
        return [entries.get(f"{start}/{file[len(root) :]}", {}).get("size", -1) for file in files]

    def sizes(part: Sequence[str]) -> list[int]:
        return [*map(_local_size, part)]

    parts = [files[start : start + PART] for start in range(0, len(files), PART)]
    with ThreadPoolExecutor(16) as pool:  # Many threads, because storage may have a high latency.
        return [size for entries in pool.map(sizes, parts) for size in entries]


def _local_size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except OSError:
        return -1


def read_file(file: str) -> bytes:
    """Returns a file's content; the file is local or at a URL that fsspec reads.

    Raises:
      OSError: the file does not exist, is not a regular file, or cannot be read.
    """
    if "://" in file:
        system, path = _remote(file)
        return system.cat_file(path)
    # os.open is three times as fast as pathlib. With O_NONBLOCK, opening a named pipe does not
    # block.
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", file)
        return os.read(opened, status.st_size)
    finally:
        os.close(opened)


def walk(where: str, above: str | None = None) -> Iterator[str]:
    """Yields paths of all files below a folder; links to folders are followed.

    Each folder is visited once, even if there are links to it. Its own path is preferred to the
    path of a link. Links to `above`, a folder that contains `where`, are not followed.

    Raises:
      UserError: a folder cannot be read.
    """
    entered = {_identity(above)} if above else set()
    links = [where]
    while links:
        waiting, links = sorted(links, reverse=True), []
        while waiting:
            folder = waiting.pop()
            if (same := _identity(folder)) in entered:
                continue
            entered.add(same)
            for entry in _entries(folder):
                if not _is_folder(entry):
                    yield entry.path
                else:
                    (links if entry.is_symlink() else waiting).append(entry.path)


def folders_in(where: str) -> list[str]:
    """Returns the sorted paths of the subfolders of a folder, including links to folders.

    Raises:
      UserError: the folder cannot be read.
    """
    return sorted(entry.path for entry in _entries(where) if _is_folder(entry))


def _entries(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError as error:
        raise UserError(f"no permission to read {error.filename}") from error
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from error


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # For example, a link to itself.
        return False


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from error
    return status.st_dev, status.st_ino


def _list(where: str) -> tuple[list[str], set[str]]:
    """Returns the paths of all files below `where`, relative to it, and its subfolders' names."""
    return _list_remote(where) if "://" in where else _list_local(where)


def _list_local(where: str) -> tuple[list[str], set[str]]:
    if not os.path.isdir(where):
        return [], set()
    start = len(os.path.join(where, ""))
    folders = folders_in(where)
    files = []
    for entry in _entries(where):
        if _is_folder(entry):
            continue
        # A broken link is an error only if it seems to be the folder of a class. Broken links to
        # images, and links whose names start with a dot, raise no error.
        is_class_name = not entry.name.startswith(".") and why_left_out(entry.name)
        if is_class_name and not os.path.exists(entry.path):
            raise UserError(f"{entry.path} is a broken link: fix it or remove it")
        files.append(entry.path[start:])
    for folder in folders:  # One walk for each: two classes may link to the same folder.
        files += [file[start:] for file in walk(folder, where)]
    return files, {folder[start:] for folder in folders}


def _list_remote(where: str) -> tuple[list[str], set[str]]:
    system, path = _remote(where)
    try:
        files = [file[len(path) :].lstrip("/") for file in system.find(path)]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot list {where}: {' '.join(str(error).split())}") from error
    return files, {file.split("/")[0] for file in files if "/" in file}


def _remote(url: str):
    """Returns the file system of a URL and the path in it; fsspec caches file systems."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f'cannot read {url}: {error} (pip install "vit_jax[cloud]")') from error
    except ValueError as error:
        raise UserError(f"cannot read {url}: {error}") from error


def _listed_split(root: str, split: str) -> tuple[str, list[str], set[str]]:
    """Finds the folder of a split; returns its path, its files and the names of its subfolders.

    The split's exact name is preferred to a synonym, such as `training` for `train` (`split_name`).
    """
    root = root.rstrip("/")
    where = _path_of_split(root, split)
    paths, folders = _list(where)
    if paths or folders or (split == "all" and os.path.isdir(where)):
        return where, paths, folders
    where = f"{root}/{_folder_of_split(root, split)}"
    return where, *_list(where)


def _path_of_split(root: str, split: str) -> str:
    return (root if split == "all" else f"{root}/{split}").rstrip("/") or "/"


def _folder_of_split(root: str, split: str) -> str:
    """Returns the name of the folder in `root` that is a synonym of `split`, such as `Train`.

    Raises:
      UserError: `root` has no folder with a synonym of the split's name, or several.
    """
    siblings = sorted(_list(root or "/")[1])
    named = [name for name in siblings if split_name(name) == split]
    if len(named) == 1:
        return named[0]
    if named:
        raise UserError(
            f"{root} has no folder {split}, but {' and '.join(named)}: choose one of them"
        )
    where = _path_of_split(root, split)
    there = f"; {root} has: {', '.join(siblings[:20])}" if siblings else ""
    if siblings and not any(map(split_name, siblings)):
        there += (
            "; all its images are the split 'all', which slices divide: "
            "train_split='all[:80%]', test_split='all[80%:]'"
        )
    raise UserError(f"no folder {where} (data.path and the split's name){there}")


def _labelled(
    where: str,
    images: list[str],
    folders: set[str],
    class_names: tuple[str, ...] | None,
    only: tuple[str, ...],
) -> tuple[list[tuple[int, str]], tuple[str, ...]]:
    """Returns the label and the path of each image in a class folder, and all class names.

    The paths in `images` are relative to `where`. The classes are those of the training split
    (`class_names`); None: they are the `folders` in `where`. The user has chosen the folders in
    `only` as classes, so their names may be those of splits.
    """
    names = {folder: as_text(folder) for folder in folders if not is_ignored(folder)}
    check_classes(where, {*names.values()} - {*(class_names or ()), *only})
    classes = class_names or tuple(sorted(names.values()))
    if unknown := sorted({*names.values()} - {*classes}):
        raise UserError(f"{where} has classes that training lacks: {', '.join(unknown[:20])}")
    number = {name: label for label, name in enumerate(classes)}
    labels = {folder: number[name] for folder, name in names.items()}
    return [(labels[file.split("/")[0]], file) for file in images if "/" in file], classes


def _is_whole(path: str) -> bool:
    """Returns True for a local folder with subfolders, none of them a `train` or `test` split."""
    if not os.path.isdir(path):
        return False
    names = [os.path.basename(folder) for folder in folders_in(path)]
    return bool(names) and not {"train", "test"} & {*map(split_name, names)}


def _splits_at(root: str) -> list[str]:
    """Returns the names of the splits that have a folder in `root`; empty if `root` is a URL."""
    if "://" in root or not os.path.isdir(root):
        return []
    names = (split_name(os.path.basename(folder)) for folder in folders_in(root))
    return [name for name in names if name]


FOLDER = SourceKind(
    "folder",
    "image files, in a folder for each class",
    lambda split, options: Folder.scan(
        options.path, split, options.class_names, options.labels, options.only
    ),
    path="the folder, local or at a URL (gs://, s3://)",
    is_whole=_is_whole,
    splits_at=_splits_at,
)
