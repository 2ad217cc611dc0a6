"""Disk cache of image embeddings, in parts, so that each image is embedded once per model."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.sources.base import Source, Subset
from vit_jax.preparation.duplicates import directions
from vit_jax.preparation.index import Run, in_chunks, save


class Embedder(NamedTuple):
    """A model that computes embeddings for data set preparation."""

    key: str  # A hash of the model and its preprocessing.
    dim: int
    # Returns indices of readable images, int64 `[n]`, and their embeddings, float32 `[n, dim]`.
    embed: Callable[[Source], tuple[np.ndarray, np.ndarray]]


class Embeddings(NamedTuple):
    """A model's embeddings of any source; each source has its own folder below `folder`."""

    embedder: Embedder
    folder: Path
    run: Run  # Runs tasks in this process.

    def of(self, source: Source, key: str, what: str) -> list[Path]:
        """Returns the files with a source's embeddings (`read_embeddings`); computes missing ones.

        Args:
          key: identifies the source's content; it must change with the content.
          what: name of the source, for messages.
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
    """Reads indices of images in the source, uint32 `[n]`, and embeddings, float32 `[n, dim]`.

    Embeddings are normalized. Images are missing if they are unreadable, or if their embedding is
    zero or not finite.
    """
    rows = np.load(file)
    return rows["index"].copy(), rows["vector"].copy()
