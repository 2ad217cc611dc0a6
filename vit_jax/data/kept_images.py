"""Disk cache of composed (synthetic) images, shared by the runs and processes of a user.

A file of up to one GiB stores images of the same source and size. Each image has a fixed offset in
the file. Therefore processes need no locks, and images that are not yet written take no disk space.
Each image is followed by its checksum. Damaged and incompletely written images are detected by the
checksum, and composed again.
"""

import functools
import os
import zlib
from pathlib import Path

import numpy as np

MOST_BYTES = 2**30  # Limit for a file.


class KeptImages:
    """The cached images in one file.

    Args:
      name: name of the file. It must identify the content of the images and the version of the code
        that composes them.
      size: height and width in pixels.
      channels: number of values per pixel.
    """

    def __init__(self, name: str, size: int, channels: int = 3):
        self.shape, self.record = (size, size, channels), channels * size * size + 4
        self.most = MOST_BYTES // self.record
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit_jax"
        try:
            home.mkdir(parents=True, exist_ok=True)
            self.file = os.open(home / name, os.O_RDWR | os.O_CREAT, 0o600)
        except (OSError, RuntimeError):  # RuntimeError: the user has no home.
            self.file = None  # Nothing is cached.

    def read(self, number: int) -> np.ndarray | None:
        """Returns image `number`, uint8 `[size, size, channels]`, or None if it is not cached."""
        if self.file is None or number >= self.most:
            return None
        try:
            record = os.pread(self.file, self.record, number * self.record)
        except OSError:
            return None
        pixels, checksum = record[:-4], record[-4:]
        if len(record) < self.record or zlib.crc32(pixels).to_bytes(4) != checksum:
            return None
        return np.frombuffer(bytearray(pixels), np.uint8).reshape(self.shape)

    def write(self, number: int, image: np.ndarray) -> None:
        """Stores image `number`, unless the file would exceed `MOST_BYTES` or the disk is full."""
        if self.file is None or number >= self.most:
            return
        pixels = image.tobytes()
        try:
            os.pwrite(self.file, pixels + zlib.crc32(pixels).to_bytes(4), number * self.record)
        except OSError:  # The disk is full: the image will be composed again.
            self.file = None


kept_images = functools.cache(KeptImages)  # Each process opens a file only once.
