"""Similarity search among millions of embeddings, with faiss."""

from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.preparation.index import replacing

EXACT = 100_000  # Up to this number of images, all are compared with all.
LISTS = 4  # A larger index has this times the square root of the number of images as lists.
PROBED = 64  # Lists searched for each image.
SAMPLE = 64  # Images per list from which the lists' centres are computed.


def need_faiss() -> None:
    """Raises UserError if faiss is not installed."""
    try:
        import faiss  # noqa: F401
    except ImportError as error:
        raise UserError('--retrieve_for needs faiss: pip install -e ".[curate]"') from error


def check_memory(images: int, dim: int) -> None:
    """Raises UserError if an index of `images` embeddings is larger than the free memory."""
    from vit_jax.parallel.process_settings import host_memory

    needed, free = images * (4 * dim + 8), host_memory()[1]  # A vector and its index for each.
    if needed > free:
        raise UserError(
            f"--retrieve_for: {images:,} images need an index of {needed / 2**30:,.1f} GiB, and "
            f"{free / 2**30:,.1f} GiB of memory are free; give parts of the source, one after the "
            "other"
        )


def lists_for(images: int) -> int:
    """Returns the number of lists of an index for `images`; 0: all are compared with all."""
    return 0 if images <= EXACT else round(LISTS * images**0.5)


class SimilarityIndex:
    """Index of unit vectors for nearest neighbour search by cosine similarity.

    Args:
      dim: dimension of the vectors.
      lists: number of lists; 0 compares with all vectors. Otherwise a vector is stored in the list
        of its nearest centre, and compared with the lists of the `PROBED` nearest centres.
      sample: vectors for computing the centres, float32 `[n, dim]`, `SAMPLE` for each list.
      file: stores the centres, so that they are reused.
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
        """Adds vectors, float32 `[n, dim]`; they are numbered in order."""
        self._index.add(vectors)

    def nearest(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the most similar vectors for each of `[n, dim]`.

        Returns:
          Cosines, float32 `[n, count]`, and numbers, int64 `[n, count]`, -1 for missing ones.
        """
        cosines, numbers = self._index.search(vectors, count)
        return np.where(numbers < 0, -1, cosines), numbers
