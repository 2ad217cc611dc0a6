"""Image-text retrieval: the rank of each query's correct result, and recall at 1, 5 and 10."""

from typing import NamedTuple

import numpy as np

RECALLS = (1, 5, 10)
MOST_COMPARED = 2**22  # Maximum number of similarities in memory.


class Paired(NamedTuple):
    """Embeddings of images and of distinct texts, and their correct pairs.

    Attributes:
      images: embeddings of unit norm, float32 `[images, dim]`.
      texts: embeddings of unit norm, one for each distinct text, float32 `[texts, dim]`.
      pairs: index of the image and index of the text of each correct pair, int `[pairs, 2]`.
    """

    images: np.ndarray
    texts: np.ndarray
    pairs: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Number of correct images of each text, int `[texts]`."""
        return np.bincount(self.pairs[:, 1], minlength=len(self.texts))

    def ranks_of_texts(self) -> np.ndarray:
        """Returns, for each text, the rank of its best correct image, from 0, int `[texts]`."""
        return ranks(self.texts, self.images, self.pairs[:, ::-1])


def distinct(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds repeated texts, like `numpy.unique` with `return_index` and `return_inverse`.

    Args:
      tokens: int `[texts, length]`; texts with the same tokens are equal.

    Returns:
      The index of the first occurrence of each distinct text, `[distinct]`; and, for each text, its
      index among the distinct texts, `[texts]`.
    """
    _, first, each = np.unique(tokens, axis=0, return_index=True, return_inverse=True)
    return first, each.reshape(-1)


def ranks(queries: np.ndarray, keys: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Returns the rank of each query's best correct key: the number of wrong keys before it.

    A wrong key is before the best correct key if the wrong key is at least as similar to the query
    as the best correct key, or if the wrong key's similarity is NaN. Therefore a model with
    constant embeddings retrieves nothing.

    Args:
      queries, keys: embeddings of unit norm, float32 `[count, dim]`.
      pairs: index of the query and index of the key of each correct pair, int `[pairs, 2]`. Each
        query has at least one pair.

    Returns:
      Ranks from 0, int64 `[queries]`.
    """
    pairs, found = pairs[np.argsort(pairs[:, 0], kind="stable")], []
    rows = max(1, MOST_COMPARED // max(len(keys), 1))
    for start in range(0, len(queries), rows):
        scores = queries[start : start + rows] @ keys.T
        first, last = np.searchsorted(pairs[:, 0], (start, start + len(scores)))
        right = np.zeros(scores.shape, bool)
        right[pairs[first:last, 0] - start, pairs[first:last, 1]] = True
        best = np.where(right, scores, -np.inf).max(axis=1, keepdims=True)
        found.append((~(scores < best) & ~right).sum(axis=1))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def recalls(paired: Paired) -> dict[str, float]:
    """Returns recall at 1, 5 and 10 in both directions, such as `recall@1_image_to_text`.

    From image to text, each image is a query. The query is correct if one of the image's texts is
    among the k most similar distinct texts. From text to image, the text of each pair is a query.
    The query is correct if one of the text's images is among the k most similar images.
    """
    images, texts, pairs = paired
    ways = {
        "image_to_text": (ranks(images, texts, pairs), np.ones(len(images))),
        "text_to_image": (paired.ranks_of_texts(), paired.counts),
    }
    return {
        f"recall@{k}_{way}": float(weights @ (found < k) / max(weights.sum(), 1))
        for way, (found, weights) in ways.items()
        for k in RECALLS
    }
