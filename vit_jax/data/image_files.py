"""Images that a user names: files, folders, patterns, standard input."""

import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vit_jax.data.decode import Unreadable, decode
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.base import Example, Source
from vit_jax.data.sources.folder import IMAGE_SUFFIXES, read_file, walk
from vit_jax.errors import UserError


def find_images(arguments: Sequence[str]) -> list[tuple[str, bytes | None]]:
    """Names of image files; what comes by standard input (`-`) is one image, with its bytes, or paths.

    Args:
      arguments: files, folders, patterns; `-` reads standard input: an image, or paths, one a line.

    Raises:
      UserError: a path that does not exist, a folder without images.
    """
    images = []
    for argument in arguments:
        if argument == "-":
            images += _standard_input()
        elif os.path.isdir(argument):
            inside = sorted(path for path in walk(argument) if path.lower().endswith(IMAGE_SUFFIXES))
            if not inside:
                raise UserError(f"no images ({', '.join(IMAGE_SUFFIXES)}) in {argument}")
            images += [(path, None) for path in inside]
        elif os.path.exists(argument):
            images.append((argument, None))
        elif matching := [
            path for path in sorted(glob.glob(argument, recursive=True)) if not os.path.isdir(path)
        ]:
            images += [(path, None) for path in matching]
        else:
            raise UserError(f"there is no {argument}")
    return images


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
    """A source of images that `find_images` found, without labels."""

    class_names = ()

    def __init__(self, images: Sequence[tuple[str, bytes | None]]):
        self._images = images

    def __len__(self):
        return len(self._images)

    def __getitem__(self, index):
        path, content = self._images[index]
        return Example(read_file(path) if content is None else content, ())

    def describe(self, index):
        return self._images[index][0]


def read_images(source: Source, crop: TestCrop, most: int) -> tuple[list[str], np.ndarray]:
    """Names and pixels of readable images, a fair sample: uint8 `[images, height, width, 3]`.

    Raises:
      UserError: none is readable.
    """
    names, images = [], []
    for index in map(int, source.fair_order()):
        if len(images) == most:
            print(f"note: {most} of {len(source)} images are shown (--most)")
            break
        try:
            images.append(crop(source[index].image))
        except (Unreadable, OSError):
            print(f"unreadable image skipped: {source.describe(index)}")
            continue
        names.append(Path(source.describe(index)).name)
    if not images:
        raise UserError(f"none of the {len(source)} files is an image that can be read")
    return names, np.stack(images)
