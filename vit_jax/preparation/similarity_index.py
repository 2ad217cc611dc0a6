"""Similarity search among millions of embeddings, with faiss."""

from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.preparation.index import replacing

EXACT = 100_000  # Maximum number of images for exact search. A larger index has inverted lists.
LISTS = 4  # An index of n images has LISTS * sqrt(n) inverted lists.
PROBED = 64  # Number of lists that are searched for each query.
SAMPLE = 64  # Number of images per inverted list from which the lists' centres are computed.


def need_faiss() -> None:
    """Raises UserError if faiss is not installed."""
    try:
        import faiss  # noqa: F401
    except ImportError as error:
        raise UserError('--retrieve_for needs faiss: pip install -e ".[curate]"') from error


def check_memory(images: int, dim: int) -> None:
    """Raises UserError if an index of `images` embeddings is larger than the free memory."""
    from vit_jax.parallel.process_settings import host_memory

    # The index stores a float32 vector and an int64 number for each image.
    needed, free = images * (4 * dim + 8), host_memory()[1]
    if needed > free:
        raise UserError(
            f"--retrieve_for: {images:,} images need an index of {needed / 2**30:,.1f} GiB, and "
            f"{free / 2**30:,.1f} GiB of memory are free; give parts of the source, one after the "
            "other"
        )


def lists_for(images: int) -> int:
    """Returns the number of inverted lists for an index of `images` images; 0: exact search."""
    return 0 if images <= EXACT else round(LISTS * images**0.5)


class SimilarityIndex:
    """Index of unit vectors for nearest neighbour search by cosine similarity.

    Args:
      lists: number of inverted lists (faiss's IVF); 0: exact search. Each list has a centre. A
        vector is stored in the list of its nearest centre, and a query searches the lists of its
        `PROBED` nearest centres.
      sample: vectors from which the centres are computed, float32 `[n, dim]`, `SAMPLE` for each
        list.
      file: file for the centres. If it exists, the centres are read from it.
    """

    def __init__(
        self, dim: int, lists: int = 0, sample: np.ndarray | None = None, file: Path | None = None
    ):
        import faiss

        if not lists:
            self._index = faiss.IndexFlatIP(dim)
        elif file is not None and file.exists():
            self._index = faiss.read_index(str(file))
        else:
            self._index = faiss.index_factory(dim, f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
            self._index.train(sample)
            if file is not None:
                with replacing(file) as temporary:
                    faiss.write_index(self._index, str(temporary))
        if lists:
            self._index.nprobe = PROBED

    def __len__(self):
        return self._index.ntotal

    def add(self, vectors: np.ndarray) -> None:
        """Adds vectors, float32 `[n, dim]`. Vectors are numbered consecutively from 0."""
        self._index.add(vectors)

    def nearest(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the most similar vectors for each query.

        Args:
          vectors: queries, float32 `[n, dim]`.
          count: number of vectors to return for each query.

        Returns:
          Cosine similarities, float32 `[n, count]`, and numbers of the vectors, int64 `[n, count]`.
          If fewer than `count` vectors are found, the remaining numbers are -1.
        """
        cosines, numbers = self._index.search(vectors, count)
        return np.where(numbers < 0, -1, cosines), numbers
