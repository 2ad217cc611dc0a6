"""Embeddings of images by a model, kept on the disk in parts.

A run that was killed goes on with them, and no image of a source is embedded twice by one model.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.sources.base import Source, Subset
from vit_jax.preparation.duplicates import directions
from vit_jax.preparation.index import Run, in_chunks, save


class Embedder(NamedTuple):
    """A model as data sets are prepared with it."""

    key: str  # Names the model and what it sees of an image: a hash of both.
    dim: int
    # The images that can be read, int64 `[n]`, and what the model makes of them, float32 `[n,
    # dim]`.
    embed: Callable[[Source], tuple[np.ndarray, np.ndarray]]


class Embeddings(NamedTuple):
    """A model's embeddings of any source, in a folder of the source's own below `folder`."""

    embedder: Embedder
    folder: Path
    run: Run  # Runs tasks in this process.

    def of(self, source: Source, key: str, what: str) -> list[Path]:
        """Files with the embeddings of a source, see `read_embeddings`; those that are not there
        are made.

        Args:
          key: changes when the source does.
          what: the source's name, for the eye.
        """
        digest = hashlib.blake2b(f"{self.embedder.key} {key}".encode(), digest_size=8).hexdigest()

        def embed(start: int, stop: int, result: Path) -> None:
            indices, vectors = self.embedder.embed(Subset(source, range(start, stop)))
            vectors = directions(vectors)
            usable = vectors.any(axis=1)
            row = np.dtype([("index", "u4"), ("vector", "f4", (self.embedder.dim,))])
            rows = np.empty(np.count_nonzero(usable), row)
            rows["index"], rows["vector"] = indices[usable] + start, vectors[usable]
            save(result, rows)

        return in_chunks(
            embed, (), len(source), f"embedding {what}", self.folder / digest, self.run
        )


def read_embeddings(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """A file's images, uint32 `[n]`: their places in the source; and their vectors, float32 `[n,
    dim]`.

    These are of length one. Images that cannot be read or whose embedding has no direction are left
    out.
    """
    rows = np.load(file)
    return rows["index"].copy(), rows["vector"].copy()
