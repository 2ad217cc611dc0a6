"""An index of embeddings by faiss: the most similar of millions."""

from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.preparation.index import replacing

EXACT = 100_000  # Images up to which all are compared with all.
LISTS = 4  # Of a larger index, times the root of how many images it is for.
PROBED = 64  # Lists that are looked through for each image.
SAMPLE = 64  # Images of each list that the lists' centres are computed of.


def need_faiss() -> None:
    """Raises UserError where faiss is not installed."""
    try:
        import faiss  # noqa: F401
    except ImportError as error:
        raise UserError('--retrieve_for needs faiss: pip install -e ".[curate]"') from error


def check_memory(images: int, dim: int) -> None:
    """Raises UserError where an index of so many embeddings is larger than the memory that is
    free.
    """
    from vit_jax.parallel.process_settings import host_memory

    needed, free = images * (4 * dim + 8), host_memory()[1]  # The vectors, and a number of each.
    if needed > free:
        raise UserError(
            f"--retrieve_for: {images:,} images need an index of {needed / 2**30:,.1f} GiB, and "
            f"{free / 2**30:,.1f} GiB of memory are free; give parts of the source, one after the "
            "other"
        )


def lists_for(images: int) -> int:
    """The number of lists of an index for so many images; 0: all are compared with all."""
    return 0 if images <= EXACT else round(LISTS * images**0.5)


class SimilarityIndex:
    """Vectors of length one, and the nearest of them by cosine similarity.

    Args:
      dim: of the vectors.
      lists: 0 compares with all. Otherwise vectors lie in so many lists, by the nearest centre, and
        one is compared with those in the lists of the `PROBED` nearest centres.
      sample: vectors that the centres are computed of, float32 `[n, dim]`, `SAMPLE` for each list.
      file: where the centres are kept, so that the same are used again.
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
        """Adds vectors, float32 `[n, dim]`; they are numbered in the order in which they come."""
        self._index.add(vectors)

    def nearest(self, vectors: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The most similar for each of `[n, dim]`: cosines float32, and numbers int64 or -1, `[n,
        count]`.
        """
        cosines, numbers = self._index.search(vectors, count)
        return np.where(numbers < 0, -1, cosines), numbers
