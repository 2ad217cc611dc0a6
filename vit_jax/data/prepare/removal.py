"""Near-duplicates of test images leave the training split, before it is ordered (paper, section 4.1).

Every training image and every test image is decoded once for its fingerprint, in parallel and by
chunks, so that this goes on where it was.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vit_jax.data.decode import Unreadable, decode
from vit_jax.data.prepare import duplicates
from vit_jax.data.prepare.index import Index, Run, Task, load_index, mapped, save
from vit_jax.data.prepare.readers import Source, read_image
from vit_jax.errors import UserError

CHUNK = 4096  # Images of a task.
SHOWN = 200  # Pairs with pictures in the report.
PRINT = np.dtype([("position", "u4"), ("fingerprint", "u8")])
# Position in the index; which test set, and the image in it; in how many bits they differ.
PAIR = np.dtype([("position", "u4"), ("test", "u4"), ("image", "u4"), ("distance", "u4")])


def near_duplicates(source: Source, index: Index, tests: tuple[str, ...], work: Path, run: Run) -> np.ndarray:
    """The training examples that look like an image of a test set, as an array of `PAIR`.

    Args:
      source: the data set.
      index: of its examples.
      tests: `NAME:DIR/SPLIT` of prepared TFDS data sets.
      work: the folder of working files.
      run: runs tasks.

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
        candidates = _fingerprints(_train, work, int(in_train.sum()), "train", work, run)
        references = [
            _fingerprints(_test, test, size, f"test{i}", work, run)
            for i, (test, size) in enumerate(zip(tests, sizes, strict=True))
        ]
        sets = np.repeat(np.arange(len(tests)), [len(prints) for prints in references])
        references = np.concatenate(references)
        prints = references["fingerprint"]
        both_ways = np.concatenate([prints, duplicates.mirrored(prints)])
        found = duplicates.find(candidates["fingerprint"], both_ways)
        near, found = candidates[found >= 0], found[found >= 0]
        pairs = np.empty(len(near), PAIR)
        pairs["position"] = near["position"]
        pairs["test"] = sets[found % len(prints)]
        pairs["image"] = references["position"][found % len(prints)]
        pairs["distance"] = np.bitwise_count(near["fingerprint"] ^ both_ways[found])
        save(result, pairs)
    return mapped(result)


def report(pairs: np.ndarray, index: Index, tests: tuple[str, ...], work: Path, folder: Path) -> None:
    """Writes `removed.csv` and `removed.html` into `folder`, of what `near_duplicates` found."""
    opened = [open_test(test) for test in tests]
    nearest = set(np.argsort(pairs["distance"], kind="stable")[:SHOWN].tolist())
    rows = []
    for i, (position, test, image, distance) in enumerate(pairs.tolist()):
        entry = index.entries[position]
        images = None
        if i in nearest:
            ours = read_image(index.kind, index.paths[entry["unit"]], entry, index.name(entry))
            images = ours, opened[test][image]["image"]
        rows.append(
            duplicates.Removed(index.describe(entry), f"{tests[test]} example {image}", distance, images)
        )
    examples, references = len(mapped(work / "train.npy")), sum(map(len, opened))
    duplicates.write_report(folder, rows, measure="distance", examples=examples, references=references)


def _fingerprints(function: Callable, what, size: int, name: str, work: Path, run: Run) -> np.ndarray:
    """Of all images that can be read."""
    tasks = []
    for start in range(0, size, CHUNK):
        stop, result = min(start + CHUNK, size), work / "fingerprints" / f"{name}-{start:010d}.npy"
        tasks.append(Task(function, (what, start, stop, result), result, stop - start))
    run(tasks, f"fingerprinting {name}", "images")
    return np.concatenate([np.load(task.result) for task in tasks])


def _train(work: Path, start: int, stop: int, result: Path) -> None:
    index, positions = load_index(work), mapped(work / "train.npy")[start:stop]
    images = (
        read_image(index.kind, index.paths[entry["unit"]], entry, index.name(entry))
        for entry in index.entries[positions]
    )
    _save(zip(positions.tolist(), images, strict=True), result)


def _test(test: str, start: int, stop: int, result: Path) -> None:
    data = open_test(test)
    _save(((i, data[i]["image"]) for i in range(start, stop)), result)


def _save(images, result: Path) -> None:
    prints = []
    for position, image in images:
        try:
            prints.append((position, duplicates.fingerprint(decode(image))))
        except Unreadable:
            continue
    save(result, np.array(prints, PRINT))


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
