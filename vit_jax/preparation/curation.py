"""Data curation by similarity to the images of curated sets (DINOv2, section 3).

For each image of a curated set, the most similar images of an uncurated training split are selected
(retrieved). Near-duplicates within the split are removed first, because the neighbours of an image
could be copies of each other. The work is divided into parts, and the result of each part is saved.
An interrupted run can therefore be resumed.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.sources import data_set, open_source
from vit_jax.data.sources.base import Source, fingerprint
from vit_jax.data.sources.mixture import Mixture
from vit_jax.errors import UserError
from vit_jax.preparation.index import Run, each_file, part_file, save
from vit_jax.preparation.kept_embeddings import Embeddings, read_embeddings
from vit_jax.preparation.similarity_index import SAMPLE, SimilarityIndex, lists_for

# Result of comparing an uncurated image with the earlier images that are kept. `nearest` is the
# index of the most similar of these. `similarity` is the cosine similarity of `image` and
# `nearest`. `kept` is False if the image is removed as a near-duplicate.
COMPARED = np.dtype([("image", "u4"), ("nearest", "u4"), ("similarity", "f4"), ("kept", "?")])
# A curated image and one of its neighbours: the indices of both images, and their cosine
# similarity. The neighbours of a curated image are in descending order of similarity.
NEIGHBOUR = np.dtype([("curated", "u4"), ("image", "u4"), ("similarity", "f4")])


def open_curated(text: str) -> Source:
    """Opens the training images of a curated set, or all images of a folder without splits.

    Args:
      text: a folder, `KIND:PATH` or `KIND:PATH@SPLIT,SPLIT`, as in the flag `--set` of evaluations.

    Raises:
      UserError: the data set does not exist.
    """
    found = data_set(f"folder:{text}" if os.path.isdir(text) else text)
    split = found.train_split
    if found.kind == "folder" and "@" not in text and os.path.isdir(found.path):
        split = "train" if os.path.isdir(os.path.join(found.path, "train")) else "all"
    return open_source(found.kind, split, path=found.path, labels=False)


DUPLICATES = "looking for duplicates"


class Pool:
    """Pool of images from which images are retrieved: an uncurated set without near-duplicates.

    Images are processed in order. An image is removed if it is too similar to an earlier image that
    was kept.

    Args:
      files: files with the embeddings of the images, for `read_embeddings`.
      excluded: True for images that must not be in the pool, bool `[images]`.
      similarity: minimum cosine similarity of near-duplicates.
    """

    def __init__(
        self, files: list[Path], excluded: np.ndarray, similarity: float, work: Path, run: Run
    ):
        self._dim = read_embeddings(files[0])[1].shape[1]
        self._files, self._excluded, self._similarity = files, excluded, similarity
        self._work, self._run = work, run
        self._index: SimilarityIndex | None = None
        self._images: list[np.ndarray] = []  # Indices of the indexed images, an array per part.

    def compare(self) -> np.ndarray:
        """Compares each image with the earlier images that are kept; removes near-duplicates.

        Returns:
          Array of dtype `COMPARED`, with an element for each image that is not excluded.
        """
        chunks = self._work / "chunks"
        results = each_file(self._compare, self._files, DUPLICATES, chunks, self._run)
        return np.concatenate([np.load(file) for file in results])

    def neighbours(self, files: list[Path], count: int, name: str) -> np.ndarray:
        """Finds the nearest neighbours of curated images in the pool.

        `compare` must be called first.

        Args:
          files: files with the embeddings of curated images.

        Returns:
          Array of dtype `NEIGHBOUR`, with an element for each neighbour of each curated image.

        Raises:
          UserError: the pool has fewer than `count` images.
        """
        index, images = self._kept_of(len(self._files))
        if len(index) < count:
            raise UserError(
                f"--neighbours={count}: only {len(index)} different images can be retrieved"
            )

        def search(number: int, result: Path) -> None:
            curated, vectors = read_embeddings(files[number])
            cosines, numbers = index.nearest(vectors, count)
            found = np.empty(numbers.shape, NEIGHBOUR)
            found["curated"], found["image"] = curated[:, None], images[numbers]
            found["similarity"] = cosines
            save(result, found[numbers >= 0])

        results = each_file(search, files, name, self._work / "chunks", self._run)
        return np.concatenate([np.load(file) for file in results])

    def _compare(self, number: int, result: Path) -> None:
        index, images = self._kept_of(number)
        places, vectors = self._read(number)
        found = np.empty(len(places), COMPARED)
        found["image"], found["nearest"], found["similarity"] = places, places, -1
        if len(index):
            cosines, numbers = index.nearest(vectors, 1)
            some = numbers[:, 0] >= 0
            found["similarity"][some] = cosines[some, 0]
            found["nearest"][some] = images[numbers[some, 0]]
        found["kept"] = False
        among = vectors @ vectors.T
        for row in range(len(found)):
            kept = np.flatnonzero(found["kept"][:row])
            if len(kept) and among[row, kept].max() > found["similarity"][row]:
                nearest = kept[among[row, kept].argmax()]
                found["similarity"][row] = among[row, nearest]
                found["nearest"][row] = places[nearest]
            found["kept"][row] = found["similarity"][row] < self._similarity
        save(result, found)

    def _kept_of(self, parts: int) -> tuple[SimilarityIndex, np.ndarray]:
        """Returns the embeddings of the kept images, from the first `parts` embedding files.

        Returns:
          The search index of the embeddings, and for each of its vectors the position of the image
          in the data set, uint32 `[vectors]`.
        """
        index = self._index = self._index or self._new_index()
        for number in range(len(self._images), parts):
            found = np.load(part_file(number, DUPLICATES, self._work / "chunks"))
            places, vectors = self._read(number)
            index.add(vectors[found["kept"]])
            self._images.append(places[found["kept"]])
        return index, np.concatenate([np.empty(0, np.uint32), *self._images])

    def _new_index(self) -> SimilarityIndex:
        sizes = [len(np.load(file, mmap_mode="r")) for file in self._files]
        lists = lists_for(sum(sizes))
        sample = None
        if lists:
            step = max(sum(sizes) // (SAMPLE * lists), 1)
            vectors = (self._read(number)[1] for number in range(len(self._files)))
            sample = np.concatenate([part[::step] for part in vectors])
        return SimilarityIndex(self._dim, lists, sample, self._work / "centres.faiss")

    def _read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        places, vectors = read_embeddings(self._files[number])
        allowed = ~self._excluded[places]
        return places[allowed], vectors[allowed]


class Curated(NamedTuple):
    """Images of an uncurated set, selected by similarity to curated images."""

    # Array of dtype `COMPARED`, with an element for each image of the uncurated set that is not
    # excluded.
    compared: np.ndarray
    # Array of dtype `NEIGHBOUR`, with an element for each neighbour of each curated image. The
    # field `curated` is the index of the curated image in `source`.
    neighbours: np.ndarray
    source: Mixture  # The images of all curated sets together.

    @property
    def images(self) -> np.ndarray:
        """Indices of the retrieved images in ascending order, each image once."""
        return np.unique(self.neighbours["image"])


def curate(sets: tuple[str, ...], pool: Pool, embeddings: Embeddings, count: int) -> Curated:
    """Retrieves the nearest images of the pool for each image of the curated sets.

    Args:
      sets: the curated sets; each is a folder, `KIND:PATH` or `KIND:PATH@SPLIT,SPLIT`.
      embeddings: the model that computes embeddings of the curated images.

    Raises:
      UserError: a curated set does not exist, none of its images can be read, or the pool has fewer
        than `count` images.
    """
    sources = [open_curated(text) for text in sets]
    files = [
        embeddings.of(source, f"{text} {fingerprint(source)}", f"set {number}")
        for number, (text, source) in enumerate(zip(sets, sources, strict=True))
    ]
    compared = pool.compare()
    found, before = [], 0
    for number, (text, source) in enumerate(zip(sets, sources, strict=True)):
        part = pool.neighbours(files[number], count, f"retrieving for set {number}")
        if not len(part):
            raise UserError(
                f"--retrieve_for={text}: none of the {len(source):,} images can be read"
            )
        part["curated"] += before
        before += len(source)
        found.append(part)
    return Curated(compared, np.concatenate(found), Mixture.join(sources, None, None))
