"""Removes near-duplicates of test images from the training split (paper, section 4.1).

Near-duplicates are removed before the training images are shuffled. Each training and test image
is decoded once to compute its fingerprint or embedding. Results are saved in chunks, so an
interrupted run can be resumed.
"""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.decode import Unreadable
from vit_jax.data.sources.base import Example, Source, fingerprint
from vit_jax.errors import UserError
from vit_jax.preparation import duplicates
from vit_jax.preparation.index import Indexed, Run, each_file, in_chunks, load_index, mapped, save
from vit_jax.preparation.kept_embeddings import Embeddings, read_embeddings

SHOWN = 200  # Maximum number of pairs in the report that are shown with images.
PRINT = np.dtype([("image", "u4"), ("fingerprint", "u8")])
# A training example and the test image that it resembles: position of the training example in
# `Index.entries`, number of the test set, index of the image in this test set, and the distance in
# bits or the cosine similarity of both.
PAIR = np.dtype([("position", "u4"), ("test", "u4"), ("image", "u4"), ("value", "f4")])


class Embedded(NamedTuple):
    """Embeddings of the training images. They are compared in place of fingerprints."""

    files: list[Path]
    embeddings: Embeddings
    similarity: float  # Minimum cosine similarity of near-duplicates.


def near_duplicates(
    train: Indexed, tests: tuple[str, ...], work: Path, run: Run, embedded: Embedded | None = None
) -> np.ndarray:
    """Finds training examples that are near-duplicates of test images.

    Args:
      tests: `NAME:DIR/SPLIT` of prepared TFDS data sets.
      embedded: embeddings to compare; None: fingerprints are compared.

    Returns:
      Array of dtype `PAIR`, with an element for each near-duplicate.

    Raises:
      UserError: a test set does not exist.
    """
    result = work / "duplicates.npy"
    if not result.exists():
        find = _similar if embedded else _alike
        save(result, find(train, [TestImages(test) for test in tests], work, run, embedded))
    return mapped(result)


def report(
    pairs: np.ndarray, train: Indexed, tests: tuple[str, ...], folder: Path, measure: str
) -> None:
    """Writes `removed.csv` and `removed.html` into a folder: the removed training examples.

    Args:
      pairs: result of `near_duplicates`.
      tests: `NAME:DIR/SPLIT` of the prepared TFDS data sets with the test images.
      measure: meaning of the pairs' values, `distance` or `similarity`.
    """
    sign = {"distance": 1, "similarity": -1}[measure]
    opened = [TestImages(test) for test in tests]
    nearest = set(np.argsort(sign * pairs["value"], kind="stable")[:SHOWN].tolist())
    found = Indexed(train.index, pairs["position"])
    rows = []
    for i, (_, test, image, value) in enumerate(pairs.tolist()):
        value = int(value) if measure == "distance" else value
        images = (found[i].image, opened[test][image].image) if i in nearest else None
        names = found.describe(i), opened[test].describe(image)
        rows.append(duplicates.Removed(*names, value, images))
    sizes = {"examples": len(train), "references": sum(map(len, opened))}
    duplicates.write_report(folder, rows, measure=measure, **sizes)


def _alike(train: Indexed, tests: list["TestImages"], work: Path, run: Run, _) -> np.ndarray:
    """Finds training examples with a fingerprint similar to a test image's; returns `PAIR`s."""
    folder = work / "chunks"
    (candidates,) = _loaded(
        [in_chunks(_print_train, (work,), len(train), "fingerprinting train", folder, run)]
    )
    references = _loaded(
        in_chunks(_print_test, (test.place,), len(test), f"fingerprinting test {i}", folder, run)
        for i, test in enumerate(tests)
    )
    sets = np.repeat(np.arange(len(tests)), [len(prints) for prints in references])
    references = np.concatenate(references)
    prints = references["fingerprint"]
    both_ways = np.concatenate([prints, duplicates.mirrored(prints)])
    matches = duplicates.find(candidates["fingerprint"], both_ways)
    near, matches = candidates[matches >= 0], matches[matches >= 0]
    bits = np.bitwise_count(near["fingerprint"] ^ both_ways[matches])
    positions = train.positions[near["image"]]
    return _pairs(positions, sets, references["image"], matches % len(prints), bits)


def _pairs(positions, sets, images, matches, values) -> np.ndarray:
    pairs = np.empty(len(positions), PAIR)
    pairs["position"], pairs["value"] = positions, values
    pairs["test"], pairs["image"] = sets[matches], images[matches]
    return pairs


def _loaded(sets) -> list[np.ndarray]:
    return [np.concatenate([np.load(file) for file in files]) for files in sets]


def _print_train(work: Path, start: int, stop: int, result: Path) -> None:
    _save_prints(Indexed(load_index(work), mapped(work / "train.npy")), start, stop, result)


def _print_test(test: str, start: int, stop: int, result: Path) -> None:
    _save_prints(TestImages(test), start, stop, result)


def _save_prints(images: Source, start: int, stop: int, result: Path) -> None:
    prints = []
    for i in range(start, stop):
        try:
            prints.append((i, duplicates.fingerprint_of(images[i].image)))
        except Unreadable:  # Unreadable images are logged when the split is written.
            continue
    save(result, np.array(prints, PRINT))


def _similar(
    train: Indexed, tests: list["TestImages"], work: Path, run: Run, embedded: Embedded
) -> np.ndarray:
    """Finds training examples with an embedding similar to a test image's; returns `PAIR`s."""
    files, embeddings, similarity = embedded
    parts = []
    for i, test in enumerate(tests):
        made = embeddings.of(test, f"{test.place} {fingerprint(test)}", f"test {i}")
        parts += [(i, *read_embeddings(file)) for file in made]
    sets = np.repeat([i for i, *_ in parts], [len(images) for _, images, _ in parts])
    images, references = (np.concatenate(column) for column in list(zip(*parts, strict=True))[1:])

    def compare(number: int, result: Path) -> None:
        places, vectors = read_embeddings(files[number])
        matches = duplicates.nearest(vectors, references, similarity)
        near = matches >= 0
        cosines = (vectors[near] * references[matches[near]]).sum(axis=1)
        save(result, _pairs(train.positions[places[near]], sets, images, matches[near], cosines))

    name, folder = "comparing with test images", work / "chunks"
    compared = each_file(compare, files, name, folder, embeddings.run)
    return np.concatenate([np.load(file) for file in compared])


class TestImages(Source):
    """Encoded images of a split of a prepared TFDS data set, `NAME:DIR/SPLIT`.

    Raises:
      UserError: the prepared data set does not exist.
    """

    __test__ = False  # pytest must not collect this class as tests.
    class_names = ()

    def __init__(self, place: str):
        import tensorflow_datasets as tfds

        self.place = place
        if not (parts := re.fullmatch(r"([^:]+(?::[\d.*]+)?):(.+)/([^/]+)", place)):
            raise UserError(
                f"--deduplicate_against={place}: give NAME:DIR/SPLIT of a prepared data set"
            )
        name, data_dir, split = parts.groups()
        try:
            builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
            decoders = {"image": tfds.decode.SkipDecoding()}
            self._examples = builder.as_data_source(split=split, decoders=decoders)
        except (tfds.core.DatasetNotFoundError, ValueError, KeyError, NotImplementedError) as error:
            raise UserError(
                f"--deduplicate_against={place}: {str(error).splitlines()[0]}"
            ) from error

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, index):
        return Example(self._examples[index]["image"], ())

    def describe(self, index):
        return f"{self.place} example {index}"
