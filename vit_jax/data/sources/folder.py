"""Image files in folders, on disks and in buckets."""

import dataclasses
import errno
import os
import re
import stat
from collections.abc import Iterator

import numpy as np

from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.kind import SourceKind
from vit_jax.data.sources.slices import stratified
from vit_jax.errors import UserError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
SPLITS = {"train", "val", "valid", "validation", "dev", "test"}  # What a folder of splits has.


@dataclasses.dataclass(frozen=True)
class Folder(Source):
    """Image files in `<root>/<split>/<class>/`, or in `<root>/<class>/` for the split `all`.

    Without labels they may be anywhere below that. What is in folders that begin with a dot is left out.
    They come in the order of their paths; slices have their share of each class, or each of the folders.
    """

    root: str  # Where the paths of `files` begin to differ between two copies of the folder.
    files: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    max_labels: int = 1

    @classmethod
    def scan(
        cls, root: str, split: str, class_names: tuple[str, ...] | None = None, labels: bool = True
    ) -> "Folder":
        """Lists the files.

        Args:
          root: a local path, or a URL that fsspec reads (`gs://`, `s3://`).
        """
        where = (root if split == "all" else f"{root.rstrip('/')}/{split}").rstrip("/") or "/"
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
        if split == "all" and labels and "train" in folders and folders <= SPLITS:
            raise UserError(
                f"{where} has splits, not classes: {', '.join(sorted(folders))}; name one of them"
            )
        images = [file for file in files if _is_image(file)]
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
        labels, names = zip(*sorted(found), strict=True)
        root = where if where.endswith("/") else f"{where}/"
        return cls(root, tuple(f"{root}{name}" for name in names), labels, classes)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return Example(read_file(self.files[index]), self.labels_of(index))

    def describe(self, index):
        return self.files[index]

    def labels_of(self, index):
        return (int(self.labels[index]),) if self.class_names else ()

    def known_labels(self):
        return np.array(self.labels, np.int32)[:, None]

    def fair_order(self):
        names = [file[len(self.root) :] for file in self.files]
        if self.class_names:
            return stratified(self.labels, names)
        return stratified([name.split("/")[0] if "/" in name else "" for name in names], names)


def read_file(file: str) -> bytes:
    """A file's content, local or at a URL that fsspec reads.

    Raises:
      OSError: it is not there, is no regular file, or cannot be read.
    """
    if "://" in file:
        return _read_remote(file)
    # A third of the time that pathlib takes. Without waiting, should it be a pipe that nobody writes.
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", file)
        return os.read(opened, status.st_size)
    finally:
        os.close(opened)


def walk(where: str, above: str | None = None) -> Iterator[str]:
    """The paths of all below a folder that is no folder itself; links to folders are followed.

    Each folder is visited once, by its own path rather than by a link, however many links lead to it.

    Args:
      above: another folder that is not entered again.

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
    """Paths of the folders in a folder, and of links to such, sorted.

    Raises:
      UserError: it cannot be read.
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


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # A link that leads to itself.
        return False


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from error
    return status.st_dev, status.st_ino


def _list(where: str) -> tuple[list[str], set[str]]:
    """All files below a folder, by their paths from there, and the names of its own folders."""
    if "://" not in where:
        if not os.path.isdir(where):
            return [], set()
        start = len(os.path.join(where, ""))
        folders = folders_in(where)
        others = [entry for entry in _entries(where) if not _is_folder(entry)]
        for entry in others:  # It could have been a class.
            if not (entry.name.startswith(".") or _is_image(entry.name) or os.path.exists(entry.path)):
                raise UserError(f"{entry.path} is a link to nothing: mend it, or take it away")
        files = [entry.path[start:] for entry in others]
        for folder in folders:  # Each by itself: two classes may be links to one folder.
            files += [file[start:] for file in walk(folder, where)]
        return files, {folder[start:] for folder in folders}
    system, path = _remote(where)
    try:
        files = [file[len(path) :].lstrip("/") for file in system.find(path)]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot list {where}: {' '.join(str(error).split())}") from error
    return files, {file.split("/")[0] for file in files if "/" in file}


def _read_remote(file: str) -> bytes:
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


def _is_whole(path: str) -> bool:
    """True where a local folder holds classes, and no splits train and test."""
    if not os.path.isdir(path):
        return False
    split = any(os.path.isdir(os.path.join(path, split)) for split in ("train", "test"))
    return not split and bool(folders_in(path))


FOLDER = SourceKind(
    "folder",
    "image files, in a folder for each class",
    lambda split, options: Folder.scan(options.path, split, options.class_names, options.labels),
    path="the folder, local or at a URL (gs://, s3://)",
    is_whole=_is_whole,
)
