"""Takes near-duplicates of test images out of the training split, before it is ordered (paper, section 4.1).

Every training image and every test image is decoded once, for its fingerprint or for its embedding by
a model, and by chunks, so that this goes on where it was.
"""

import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.decode import Box, Unreadable, open_image
from vit_jax.data.preprocess import TestCrop
from vit_jax.errors import UserError
from vit_jax.preparation import duplicates
from vit_jax.preparation.index import Index, Run, WorkItem, load_index, mapped, save
from vit_jax.preparation.readers import RawDataSet, read_image

CHUNK = 4096  # Images of a task.
BATCH = 64  # Images that a model embeds at once.
SHOWN = 200  # Pairs with pictures in the report.
PRINT = np.dtype([("position", "u4"), ("fingerprint", "u8")])
# Position in the index; which test set, and the image in it; the distance in bits, or the similarity.
PAIR = np.dtype([("position", "u4"), ("test", "u4"), ("image", "u4"), ("value", "f4")])


class Embedder(NamedTuple):
    """A model as `near_duplicates` uses it."""

    size: int  # Height and width of its images.
    embed: Callable[[np.ndarray], np.ndarray]  # uint8 [n, size, size, 3] -> float32 [n, dim]
    similarity: float  # The least cosine of near-duplicates.


def near_duplicates(
    source: RawDataSet,
    index: Index,
    tests: tuple[str, ...],
    work: Path,
    run: Run,
    embedder: Embedder | None = None,
) -> np.ndarray:
    """The training examples that look like an image of a test set, as an array of `PAIR`.

    Args:
      source: the data set.
      index: the index of its examples.
      tests: `NAME:DIR/SPLIT` of prepared TFDS data sets.
      work: the folder of working files.
      run: runs tasks; with an embedder, in this process.
      embedder: compares embeddings instead of fingerprints.

    Raises:
      UserError: there is no training split, or no such test set.
    """
    result = work / "duplicates.npy"
    if not result.exists():
        in_train = np.array([unit.split == "train" for unit in source.units])[index.entries["unit"]]
        if not in_train.any():
            raise UserError("--deduplicate_against needs a split named train")
        sizes = [len(open_test(test)) for test in tests]
        save(work / "train.npy", np.flatnonzero(in_train).astype(np.uint32))
        find = _similar if embedder else _alike
        save(result, find(int(in_train.sum()), tests, sizes, work, run, embedder))
    return mapped(result)


def report(
    pairs: np.ndarray, index: Index, tests: tuple[str, ...], work: Path, folder: Path, measure: str
) -> None:
    """Writes `removed.csv` and `removed.html` about the pairs of `near_duplicates` into `folder`.

    Args:
      measure: what the pairs' values are, `distance` or `similarity`.
    """
    sign = {"distance": 1, "similarity": -1}[measure]
    opened = [open_test(test) for test in tests]
    nearest = set(np.argsort(sign * pairs["value"], kind="stable")[:SHOWN].tolist())
    rows = []
    for i, (position, test, image, value) in enumerate(pairs.tolist()):
        value = int(value) if measure == "distance" else value
        entry = index.entries[position]
        images = None
        if i in nearest:
            ours = read_image(index.kind, index.paths[entry["unit"]], entry, index.name(entry))
            images = ours, opened[test][image]["image"]
        rows.append(
            duplicates.Removed(index.describe(entry), f"{tests[test]} example {image}", value, images)
        )
    examples, references = len(mapped(work / "train.npy")), sum(map(len, opened))
    duplicates.write_report(folder, rows, measure=measure, examples=examples, references=references)


def _alike(size: int, tests: tuple[str, ...], sizes: list[int], work: Path, run: Run, _) -> np.ndarray:
    """Finds pairs by fingerprint."""
    candidates = _by_chunks(_print_train, (work,), size, "fingerprinting train", work, run)
    references = [
        _by_chunks(_print_test, (test,), length, f"fingerprinting test {i}", work, run)
        for i, (test, length) in enumerate(zip(tests, sizes, strict=True))
    ]
    sets = np.repeat(np.arange(len(tests)), [len(prints) for prints in references])
    references = np.concatenate(references)
    prints = references["fingerprint"]
    both_ways = np.concatenate([prints, duplicates.mirrored(prints)])
    matches = duplicates.find(candidates["fingerprint"], both_ways)
    near, matches = candidates[matches >= 0], matches[matches >= 0]
    bits = np.bitwise_count(near["fingerprint"] ^ both_ways[matches])
    return _pairs(near["position"], sets, references["position"], matches % len(prints), bits)


def _pairs(positions, sets, images, matches, values) -> np.ndarray:
    pairs = np.empty(len(positions), PAIR)
    pairs["position"], pairs["value"] = positions, values
    pairs["test"], pairs["image"] = sets[matches], images[matches]
    return pairs


def _by_chunks(function: Callable, what: tuple, size: int, name: str, work: Path, run: Run) -> np.ndarray:
    """Joins what `function(*what, start, stop, result)` saves for the parts of `range(size)`."""
    tasks = []
    for start in range(0, size, CHUNK):
        stop = min(start + CHUNK, size)
        result = work / "chunks" / f"{name.replace(' ', '-')}-{start:010d}.npy"
        tasks.append(WorkItem(function, (*what, start, stop, result), result, stop - start))
    run(tasks, name, "images")
    return np.concatenate([np.load(task.result) for task in tasks])


def _train(work: Path, start: int, stop: int) -> Iterable[tuple[int, bytes]]:
    index, positions = load_index(work), mapped(work / "train.npy")[start:stop]
    for position, entry in zip(positions.tolist(), index.entries[positions], strict=True):
        try:
            image = read_image(index.kind, index.paths[entry["unit"]], entry, index.name(entry))
        except Unreadable:  # It is named when the split is written.
            continue
        yield position, image


def _test(test: str, start: int, stop: int) -> Iterable[tuple[int, bytes]]:
    data = open_test(test)
    return ((i, data[i]["image"]) for i in range(start, stop))


def _print_train(work: Path, start: int, stop: int, result: Path) -> None:
    _save_prints(_train(work, start, stop), result)


def _print_test(test: str, start: int, stop: int, result: Path) -> None:
    _save_prints(_test(test, start, stop), result)


def _save_prints(images: Iterable[tuple[int, bytes]], result: Path) -> None:
    prints = []
    for position, image in images:
        try:
            opened = open_image(image)  # Detail beyond twice the hash's 32 pixels costs time alone.
            pixels = opened.region(Box(0, 0, opened.width, opened.height), 64)
            prints.append((position, duplicates.fingerprint(pixels)))
        except Unreadable:
            continue
    save(result, np.array(prints, PRINT))


def _similar(
    size: int, tests: tuple[str, ...], sizes: list[int], work: Path, run: Run, embedder: Embedder
) -> np.ndarray:
    """Finds pairs by embedding; only the test images' embeddings are kept."""
    parts = [_embed(_test(test, 0, length), embedder) for test, length in zip(tests, sizes, strict=True)]
    sets = np.repeat(np.arange(len(tests)), [len(positions) for positions, _ in parts])
    images, references = (np.concatenate(column) for column in zip(*parts, strict=True))

    def compare(start: int, stop: int, result: Path) -> None:
        positions, vectors = _embed(_train(work, start, stop), embedder)
        matches = duplicates.nearest(vectors, references, embedder.similarity)
        near = matches >= 0
        ours, theirs = vectors[near], references[matches[near]]
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        save(result, _pairs(positions[near], sets, images, matches[near], (ours * theirs).sum(1) / norms))

    return _by_chunks(compare, (), size, "embedding train", work, run)


def _embed(images: Iterable[tuple[int, bytes]], embedder: Embedder) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the images that can be read, and their embeddings `[n, dim]`."""
    crop = TestCrop(embedder.size, "square", embedder.size)
    positions, vectors = [], []
    images = iter(images)
    while batch := list(itertools.islice(images, BATCH)):
        pixels = np.zeros((BATCH, embedder.size, embedder.size, 3), np.uint8)  # Whole: compiled once.
        read = []
        for position, image in batch:
            try:
                crop(image, pixels[len(read)])
                read.append(position)
            except Unreadable:
                continue
        positions += read
        vectors.append(embedder.embed(pixels)[: len(read)])
    return np.array(positions, np.uint32), np.concatenate(vectors)


def open_test(test: str):
    """The images of `NAME:DIR/SPLIT`, encoded."""
    import tensorflow_datasets as tfds

    if not (parts := re.fullmatch(r"([^:]+(?::[\d.*]+)?):(.+)/([^/]+)", test)):
        raise UserError(f"--deduplicate_against={test}: give NAME:DIR/SPLIT of a prepared data set")
    name, data_dir, split = parts.groups()
    try:
        builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
        return builder.as_data_source(split=split, decoders={"image": tfds.decode.SkipDecoding()})
    except (tfds.core.DatasetNotFoundError, ValueError, KeyError, NotImplementedError) as error:
        raise UserError(f"--deduplicate_against={test}: {str(error).splitlines()[0]}") from error
