"""Image files in folders, on disks and in buckets."""

import dataclasses
import os
import re

import numpy as np

from vit_jax.data.sources.base import Example, Source
from vit_jax.errors import UserError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


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
