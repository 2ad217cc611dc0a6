"""Disk cache of image embeddings. A model computes the embedding of each image only once."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.sources.base import Source, Subset
from vit_jax.preparation.duplicates import directions
from vit_jax.preparation.index import Run, in_chunks, save


class Embedder(NamedTuple):
    """A model that computes embeddings of images, for the preparation of a data set."""

    key: str  # Hash of the model and its preprocessing.
    dim: int
    # Function from images to the indices of readable images, int64 `[n]`, and their embeddings,
    # float32 `[n, dim]`.
    embed: Callable[[Source], tuple[np.ndarray, np.ndarray]]


class Embeddings(NamedTuple):
    """Disk cache of one model's embeddings of images, for any data sources."""

    embedder: Embedder  # The model.
    folder: Path  # Folder of the cache. Each source has its own subfolder.
    run: Run  # Function that runs tasks in this process.

    def of(self, source: Source, key: str, title: str) -> list[Path]:
        """Returns the files with a source's embeddings, for `read_embeddings`; makes missing files.

        Args:
          key: identifier of the source's content. It must be different if the content is different.
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
            embed, (), len(source), f"embedding {title}", self.folder / digest, self.run
        )


def read_embeddings(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of embeddings.

    Unreadable images, and images whose embedding is zero or not finite, are missing in the file.

    Returns:
      Indices of the images in the source, uint32 `[n]`, and embeddings of unit norm, float32
      `[n, dim]`.
    """
    rows = np.load(file)
    return rows["index"].copy(), rows["vector"].copy()
