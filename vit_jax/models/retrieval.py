"""Image-text retrieval: ranks of the correct results, and recall."""

from typing import NamedTuple

import numpy as np

RECALLS = (1, 5, 10)
MOST_COMPARED = 2**22  # Maximum number of similarities in memory.


class Paired(NamedTuple):
    """Embeddings of images and of distinct texts, and their correct pairs.

    Attributes:
      images: embeddings of length 1, float32 `[images, dim]`.
      texts: embeddings of length 1, one for each distinct text, float32 `[texts, dim]`.
      pairs: indices of each image and each of its texts, int `[pairs, 2]`.
    """

    images: np.ndarray
    texts: np.ndarray
    pairs: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Number of images of each text, int `[texts]`."""
        return np.bincount(self.pairs[:, 1], minlength=len(self.texts))

    def ranks_of_texts(self) -> np.ndarray:
        """Returns the rank of each text's best correct image, from 0, int `[texts]`."""
        return ranks(self.texts, self.images, self.pairs[:, ::-1])


def distinct(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the index of each distinct text's first occurrence, and each text's distinct index.

    Args:
      tokens: int `[texts, length]`; texts with the same tokens are equal.
    """
    _, first, each = np.unique(tokens, axis=0, return_index=True, return_inverse=True)
    return first, each.reshape(-1)


def ranks(queries: np.ndarray, keys: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Returns the rank of each query's best correct key: the number of wrong keys before it.

    Wrong keys with the same similarity as the best correct key, or with NaN, count as more similar.
    So a model with constant embeddings retrieves nothing.

    Args:
      queries, keys: embeddings of length 1, float32 `[count, dim]`.
      pairs: indices of each query and each of its correct keys, int `[pairs, 2]`; at least one pair
        for each query.

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

    From image to text, an image counts as correct if one of its texts is among the k most similar
    distinct texts. From text to image each pair is a query; it is correct if one of the text's
    images is among the k most similar images.
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
