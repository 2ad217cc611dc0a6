"""Search for near-duplicates in image folders and between splits, in seconds and without a model.

First, pairs of images with similar fingerprints are found. Then the thumbnails of these pairs are
compared. Fingerprints alone can distinguish photographs. They cannot distinguish drawings, digits
or industrial parts in front of a fixed camera, because such images have similar low frequencies.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import cv2
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from vit_jax.data.decode import Unreadable
from vit_jax.data.sources.base import Source
from vit_jax.errors import as_text
from vit_jax.preparation.duplicates import DISTANCE, fingerprint, mirrored, near_pairs, small_pixels

SIMILARITY = 0.98  # Minimum similarity of near-duplicates, as in `find_pairs`.
PAIR = np.dtype([("first", "i8"), ("second", "i8"), ("similarity", "f4")])

_SIDE = 16  # Side of a thumbnail, in pixels.
# Thumbnails are computed without borders of these widths, in 64ths of a side, to find slightly
# cropped copies.
_BORDERS = (0, 1, 2)
_TYPICAL = 100  # With at least this number of images, the mean image is subtracted.
# Pairs with at least this correlation are copies. For this correlation, the mean image is not
# subtracted. So copies are found even among similar images, such as images of a fixed camera.
_SAME = 0.999
_PART = 256  # Number of images between two checks of the time limit.
_MOST_PAIRS = 2_000_000  # Maximum number of pairs with similar fingerprints: the nearest pairs.


class Looks(NamedTuple):
    """Fingerprints and thumbnails of readable images, for finding near-duplicates."""

    indices: np.ndarray  # Indices of the images in the source, int64 `[images]`.
    fingerprints: np.ndarray  # Perceptual hashes, uint64 `[images]`.
    contents: np.ndarray  # Hash of each image's encoded bytes, `[images]`.
    # Thumbnails, uint8 `[images, borders, side, side, 3]`. An image has a thumbnail for each width
    # in `_BORDERS`: this border is cut off before the image is reduced.
    pictures: np.ndarray


def look(
    source: Source,
    indices: Sequence[int] | np.ndarray | None = None,
    seconds: float = math.inf,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Looks:
    """Decodes images and returns their fingerprints and thumbnails.

    Args:
      indices: indices of the images to decode; None: all images.
      seconds: time limit in seconds. Images that are not decoded in time are skipped.
      on_progress: callback that receives the number of decoded images.
    """
    indices = range(len(source)) if indices is None else indices
    end, found = time.monotonic() + seconds, []
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for start in range(0, len(indices), _PART):
            part = [int(index) for index in indices[start : start + _PART]]
            found += filter(None, pool.map(lambda index: _look_at(source, index), part))
            on_progress(start + len(part))
            if time.monotonic() > end:
                break
    places, prints, contents, pictures = zip(*found, strict=True) if found else ((), (), (), ())
    shape = (-1, len(_BORDERS), _SIDE, _SIDE, 3)
    return Looks(
        np.array(places, np.int64),
        np.array(prints, np.uint64),
        np.array(contents, "S16"),
        np.array(pictures, np.uint8).reshape(shape),
    )


def _look_at(source: Source, index: int) -> tuple | None:
    """Returns the values of `Looks` for a single image; None if the image cannot be read."""
    try:
        image = source[index].image
        pixels = small_pixels(image)
    except (Unreadable, OSError):
        return None
    if pixels.shape[2] != 3:  # Arrays that a program passes may have other numbers of channels.
        pixels = np.repeat(pixels[..., :1], 3, axis=2)
    small = cv2.resize(pixels, (64, 64), interpolation=cv2.INTER_AREA)
    pictures = [
        cv2.resize(small[k : 64 - k, k : 64 - k], (_SIDE, _SIDE), interpolation=cv2.INTER_AREA)
        for k in _BORDERS
    ]
    stored = image if isinstance(image, bytes) else np.ascontiguousarray(image)
    digest = hashlib.blake2b(stored, digest_size=8).hexdigest()
    return index, fingerprint(pixels), digest, pictures


def find_pairs(looks: Looks, similarity: float = SIMILARITY) -> np.ndarray:
    """Finds near-duplicates among images, including mirrored copies.

    Candidates are pairs with similar fingerprints (perceptual hashes). The similarity of two images
    is the correlation of their colours at 16 x 16 pixels. To find cropped copies, one image of the
    pair is also compared after 1.6 % or 3 % are cut off each side. The maximum of these
    correlations is used.

    With 100 images or more, the mean of all images is subtracted from both images of a pair before
    the correlation is computed. So images that share a background, as from a fixed camera, are not
    similar for this reason alone. If the correlation without this subtraction is 0.999 or more, the
    larger of the two correlations is used.

    The search was tested with 31 photographs and nine edits of each photograph (JPEG, size,
    brightness, contrast, crops of 1 % and 2 % per side). 0.7 % of the edits have a similarity below
    0.98, and no two different photographs are found as a pair. With 1,797 digits of 8 x 8 pixels,
    there are 3,326 candidates, and 1 candidate has a similarity of 0.98 or more.

    Identical files have the similarity 1. If more than two files are identical, each of them is
    only paired with the first file.

    Returns:
      Array of dtype `PAIR` with shape `[pairs]`, in descending order of similarity. `first` and
      `second` index the first axis of the arrays in `looks`: `looks.indices[first]` is the index of
      the first image in the source.
    """
    _, first, again = np.unique(looks.contents, return_index=True, return_inverse=True)
    originals = np.sort(first)
    copies = np.flatnonzero(first[again] != np.arange(len(again)))
    exact = np.empty(len(copies), PAIR)
    exact["first"], exact["second"], exact["similarity"] = first[again[copies]], copies, 1
    prints, pictures = looks.fingerprints[originals], looks.pictures[originals]
    typical = 0
    if len(originals) >= _TYPICAL:
        blocks = np.array_split(pictures[:, 0], -(-len(originals) // 4096))
        typical = sum(_directions(block, 0).sum(axis=0) for block in blocks) / len(originals)
    found = [exact]
    for flipped in (False, True):
        rows, columns = _near(prints, mirrored(prints) if flipped else prints)
        near = np.empty(len(rows), PAIR)
        near["first"], near["second"] = originals[rows], originals[columns]
        for start in range(0, len(rows), 1024):
            part = slice(start, start + 1024)
            near["similarity"][part] = _similarity(
                pictures[rows[part]],
                pictures[columns[part], :, :, ::-1] if flipped else pictures[columns[part]],
                typical,
            )
        found.append(near[near["similarity"] >= similarity])
    pairs = np.concatenate(found)
    pairs = pairs[np.argsort(-pairs["similarity"], kind="stable")]
    # A pair of symmetric images is found twice: as copies, and as mirrored copies.
    _, once = np.unique(pairs[["first", "second"]], return_index=True)
    return pairs[np.sort(once)]


def _near(prints: np.ndarray, references: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `_MOST_PAIRS` pairs of similar fingerprints, the most similar pairs.

    The result is the smaller index and the larger index of each pair, two arrays int64 `[pairs]`.
    `references` are the same fingerprints, or those of the mirror images.
    """
    size, distance = max(len(prints), 1), DISTANCE
    # Each pair is stored as two numbers: the distance in bits, and `first * size + second`, where
    # `first` and `second` are the indices of the two fingerprints.
    parts, waiting = [np.empty((0, 2), np.int64)], 0
    for rows, columns, bits in near_pairs(prints, references, distance):
        new = (rows < columns) & (bits <= distance)
        parts.append(
            np.stack([bits[new].astype(np.int64), rows[new] * size + columns[new]], axis=1)
        )
        waiting += len(parts[-1])
        if waiting > _MOST_PAIRS:
            found = np.unique(np.concatenate(parts), axis=0)
            while len(found) > _MOST_PAIRS // 2 and distance:
                distance -= 1
                found = found[found[:, 0] <= distance]
            parts = [found[: _MOST_PAIRS // 2]]
            waiting = len(parts[0])
    return np.divmod(np.unique(np.concatenate(parts)[:, 1]), size)


def _directions(pictures: np.ndarray, typical: np.ndarray | int) -> np.ndarray:
    """Converts images `[..., side, side, 3]` to unit vectors.

    The mean value of each image and the mean image of the data set (`typical`) are subtracted
    first.
    """
    vectors = pictures.reshape(*pictures.shape[:-3], -1).astype(np.float32)
    vectors = vectors - vectors.mean(axis=-1, keepdims=True)
    for common in (0, typical):
        vectors = vectors - common
        length = np.linalg.norm(vectors, axis=-1, keepdims=True)
        vectors = np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 1e-3)
    return vectors


def _similarity(first: np.ndarray, second: np.ndarray, typical: np.ndarray | int) -> np.ndarray:
    """Returns the similarity of each pair of images, `[pairs]`.

    Args:
      first, second: thumbnails, `[pairs, borders, side, side, 3]`. Each image has a thumbnail for
        each width of a border that is cut off.
      typical: the mean image, which is subtracted from the thumbnails; 0: nothing is subtracted.
    """

    def most(common: np.ndarray | int) -> np.ndarray:
        a, b = _directions(first, common), _directions(second, common)
        cut = np.einsum("pd,pkd->pk", a[:, 0], b), np.einsum("pkd,pd->pk", a, b[:, 0])
        return np.concatenate(cut, axis=1).max(axis=1)

    plain, special = most(0), most(typical)
    return np.minimum(np.where(plain >= _SAME, np.maximum(plain, special), special), 1)


def groups(pairs: np.ndarray, images: int) -> list[np.ndarray]:
    """Returns groups of images that are connected by pairs, the largest group first.

    Args:
      pairs: array of dtype `PAIR`.
    """
    edges = np.ones(len(pairs)), (pairs["first"], pairs["second"])
    graph = coo_array(edges, shape=(images, images))
    number = connected_components(graph, directed=False)[1]
    order = np.argsort(number, kind="stable")
    found = np.split(order, np.flatnonzero(np.diff(number[order])) + 1) if images else []
    return sorted(
        (group for group in found if len(group) > 1), key=lambda group: (-len(group), group[0])
    )


class Leaks(NamedTuple):
    """Images of a split (for example, test images) with a near-duplicate among training images.

    Attributes:
      pairs: a tuple for each of these images: index of the training image, index of the image in
        the split, and similarity. The tuples are in descending order of similarity.
      compared: number of compared training images, and number of compared images of the split.
    """

    pairs: list[tuple[int, int, float]]
    compared: tuple[int, int]


def leaks(train: Source, other: Source, seconds: float = 20) -> Leaks:
    """Finds images of another split with a near-duplicate in the training split.

    Args:
      seconds: time limit for decoding in seconds. At most half of the time is used for the other
        split. Images are decoded in the order `Source.fair_order`, and those that are not decoded
        in time are not compared.
    """
    begun = time.monotonic()
    other_looks = look(other, other.fair_order(), seconds / 2)
    train_looks = look(train, train.fair_order(), seconds - (time.monotonic() - begun))
    both = Looks(*(np.concatenate(column) for column in zip(other_looks, train_looks, strict=True)))
    _, first, again = np.unique(both.contents, return_index=True, return_inverse=True)
    content, count = first[again], len(other_looks.indices)
    in_training = {content[place]: place for place in range(len(content) - 1, count - 1, -1)}
    # For each image, identified by the hash of its content: the most similar training image's
    # similarity and its index in the arrays of `both`.
    best: dict[int, tuple[float, int]] = {}
    near = [(content[a], content[b], similarity) for a, b, similarity in find_pairs(both).tolist()]
    same, mirror = [(x, x, 1.0) for x in content], [(b, a, s) for a, b, s in near]
    for a, b, similarity in same + near + mirror:
        if b in in_training and similarity > best.get(a, (0.0, 0))[0]:
            best[a] = similarity, in_training[b]
    found = [(*best[content[place]], place) for place in range(count) if content[place] in best]
    pairs = [
        (int(both.indices[train_row]), int(both.indices[other_row]), similarity)
        for similarity, train_row, other_row in sorted(found, key=lambda row: -row[0])
    ]
    return Leaks(pairs, (len(train_looks.indices), count))


def leak_note(train: Source, other: Source, name: str, seconds: float = 20) -> str:
    """Returns a one-line warning about images with near-duplicates in the training split, else "".

    The time limit for decoding is in seconds.
    """
    found = leaks(train, other, seconds)
    if not found.pairs:
        return ""
    train_index, other_index, _ = found.pairs[0]
    names = f"{as_text(other.describe(other_index))} and {as_text(train.describe(train_index))}"
    return (
        f"{len(found.pairs):,} of {found.compared[1]:,} {name} images have near-duplicates among "
        f"the training images, such as {names}: their accuracy is too high; `vit-jax duplicates "
        "FOLDER` shows all"
    )
