"""Images that took long to compose, kept in the user's cache folder for other runs and processes.

A file holds the first GiB of one kind of images, all of one size: image k has its place, so that
nobody waits for anybody, and a place that is not written takes no disk. Beside each image stands
its checksum: what was half written, or damaged, is composed again.
"""

import functools
import os
import zlib
from pathlib import Path

import numpy as np

MOST_BYTES = 2**30  # Of a file.


class KeptImages:
    """The images of one file.

    Args:
      name: of the file, which says what the images are and which code composed them.
      size: height and width in pixels.
    """

    def __init__(self, name: str, size: int):
        self.size, self.record = size, 3 * size * size + 4
        self.most = MOST_BYTES // self.record
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit_jax"
        try:
            home.mkdir(parents=True, exist_ok=True)
            self.file = os.open(home / name, os.O_RDWR | os.O_CREAT, 0o600)
        except (OSError, RuntimeError):  # RuntimeError: the user has no home.
            self.file = None  # Nothing is kept.

    def read(self, number: int) -> np.ndarray | None:
        """Image `number`, uint8 `[size, size, 3]`, or None if it is not kept."""
        if self.file is None or number >= self.most:
            return None
        try:
            found = os.pread(self.file, self.record, number * self.record)
        except OSError:
            return None
        pixels, checksum = found[:-4], found[-4:]
        if len(found) < self.record or zlib.crc32(pixels).to_bytes(4) != checksum:
            return None
        return np.frombuffer(bytearray(pixels), np.uint8).reshape(self.size, self.size, 3)

    def write(self, number: int, image: np.ndarray) -> None:
        """Keeps image `number`, if there is room."""
        if self.file is None or number >= self.most:
            return
        pixels = image.tobytes()
        try:
            os.pwrite(self.file, pixels + zlib.crc32(pixels).to_bytes(4), number * self.record)
        except OSError:  # The disk is full: it is composed again.
            self.file = None


@functools.cache
def kept_images(name: str, size: int) -> KeptImages:
    """The images of a file, which a process opens once."""
    return KeptImages(name, size)
