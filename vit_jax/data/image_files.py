"""Image files from command-line arguments: files, folders, glob patterns, standard input."""

import glob
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vit_jax.data.decode import Unreadable, decode, why_unreadable
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.csv_list import open_csv
from vit_jax.data.sources.folder import read_file, walk
from vit_jax.data.sources.folder_rules import IMAGE_SUFFIXES, in_words, sort_out
from vit_jax.data.sources.kind import SourceOptions
from vit_jax.errors import UserError, as_text


def find_images(arguments: Sequence[str]) -> "ImageFiles":
    """Finds image files in files, folders, CSVs that list files, and glob patterns.

    The argument `-` reads standard input: an image, or one path per line.

    Raises:
      UserError: a path does not exist, or a folder contains no images.
    """
    images, left_out = [], Counter()
    for argument in arguments:
        if argument == "-":
            images += _standard_input()
            continue
        paths, skipped = _find_paths(argument)
        images += [(path, None) for path in paths]
        left_out += skipped
    return ImageFiles(images, left_out)


def _find_paths(argument: str) -> tuple[list[str], Counter[str]]:
    """Returns the images that an argument stands for, and the number of skipped files by reason."""
    if os.path.isdir(argument):
        return _find_in_folder(argument)
    if argument.lower().endswith(".csv") and os.path.isfile(argument):
        listed = open_csv("all", SourceOptions(argument, label_key=None, labels=False))
        return [os.path.join(listed.root, file) for file in listed.files], Counter(listed.left_out)
    if os.path.exists(argument):
        return [argument], Counter()
    matching = sorted(glob.glob(argument, recursive=True))
    matching = [path for path in matching if not os.path.isdir(path)]
    if not matching:
        raise UserError(f"there is no {argument}")
    return matching, Counter()


def _find_in_folder(folder: str) -> tuple[list[str], Counter[str]]:
    start = len(os.path.join(folder, ""))
    images, others = sort_out(path[start:] for path in walk(folder))
    if not images:
        there = f"; found instead: {in_words(others)}" if others else ""
        raise UserError(f"no images ({', '.join(IMAGE_SUFFIXES)}) in {folder}{there}")
    return [os.path.join(folder, path) for path in sorted(images)], others


def _standard_input() -> list[tuple[str, bytes | None]]:
    content = sys.stdin.buffer.read()
    try:
        decode(content)
    except Unreadable:
        lines = content.decode(errors="surrogateescape").splitlines()
        if not any(os.path.isfile(line) for line in lines):
            raise UserError("standard input is neither an image nor paths, one a line") from None
        return [(line, None) for line in lines if line]
    return [("-", content)]


class ImageFiles(Source):
    """Data source of images without labels, from files or from bytes in memory."""

    class_names = ()

    def __init__(
        self, images: Sequence[tuple[str, bytes | None]], left_out: Mapping[str, int] | None = None
    ):
        self._images, self.left_out = images, left_out or {}

    def __len__(self):
        return len(self._images)

    def __getitem__(self, index):
        path, content = self._images[index]
        return Example(read_file(path) if content is None else content, ())

    def describe(self, index):
        return as_text(self.path(index))

    def path(self, index: int) -> str:
        """Returns the path of an image: an argument, or a path that an argument stands for."""
        return self._images[index][0]

    def note(self) -> list[str]:
        """Returns a list with a line about skipped files in folders; empty if there are none."""
        return [f"note: skipped: {in_words(self.left_out)}"] if self.left_out else []


def read_images(source: Source, crop: TestCrop, most: int) -> tuple[list[str], np.ndarray]:
    """Reads a representative sample of at most `most` images; unreadable images are skipped.

    Returns:
      The names of the images, and their pixels, uint8 `[images, height, width, 3]`.

    Raises:
      UserError: no image is readable.
    """
    for line in source.note() if isinstance(source, ImageFiles) else ():
        print(line)
    names, images = [], []
    for index in map(int, source.fair_order()):
        if len(images) == most:
            print(f"note: {most} of {len(source)} images are shown (--most)")
            break
        try:
            images.append(crop(source[index].image))
        except (Unreadable, OSError) as error:
            print(f"unreadable image skipped: {source.describe(index)} ({why_unreadable(error)})")
            continue
        names.append(Path(source.describe(index)).name)
    if not images:
        raise UserError(f"none of the {len(source)} files is an image that can be read")
    return names, np.stack(images)
