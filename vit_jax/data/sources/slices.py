"""Slices of a split, such as `train[:90%]`, for sources in any order.

A slice is cut out of a source's `fair_order`. Therefore it is a representative sample even if
images are sorted by class. Data sets of TFDS are an exception: they are stored in random order, and
slices follow this order (`array_record.py`). Therefore slices of TFDS data sets are the same as in
papers.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.data.order import permute
from vit_jax.data.sources.base import Source, Subset
from vit_jax.errors import UserError, as_text

# The golden ratio. Its multiples, modulo 1, are spread more evenly than those of other numbers.
GOLDEN = 0.6180339887498949
BRACKET = r"\[(-?\d+%?)?:(-?\d+%?)?\]"


def split_range(split: str, images: int) -> range:
    """Returns the range of images of a split `name[from:to]`, as TFDS defines and rounds it.

    Slices may be nested: `all[:80%][:90%]` is the first nine tenths of the first four fifths.

    Args:
      split: name of a split with its slices.
      images: number of images in the whole split.

    Raises:
      UserError: the name of the split does not have this form, or the range is empty.
    """
    chosen = range(images)
    for start, stop in _bounds(split):
        size = len(chosen)
        chosen = chosen[_boundary(start, 0, size) : _boundary(stop, size, size)]
    if not chosen:
        raise UserError(f"the split {split!r} of {images} images is empty")
    return chosen


def _bounds(split: str) -> list[tuple[str, str]]:
    """Returns start and stop of each slice of a split, `[("", "80%")]` for `all[:80%]`."""
    if not re.fullmatch(rf"[^\[\]]*({BRACKET})*", split):
        name = split.split("[")[0]
        raise UserError(f"cannot read the split {split!r}; write {name}[:90%] or {name}[100:]")
    return re.findall(BRACKET, split)


def _boundary(text: str, default: int, images: int) -> int:
    if not text:
        return default
    index = round(int(text[:-1]) / 100 * images) if text.endswith("%") else int(text)
    return min(max(index + images if index < 0 else index, 0), images)


def overlap(one: str, other: str, images: int) -> bool:
    """Returns True if two splits are known to share images; a whole split has `images` images."""
    try:
        mine, theirs = (
            [(part.split("[")[0], split_range(part, images)) for part in split.split("+")]
            for split in (one, other)
        )
    except UserError:  # TFDS supports more forms and raises its own errors.
        return False
    return any(
        name == its_name and max(a.start, b.start) < min(a.stop, b.stop)
        for name, a in mine
        for its_name, b in theirs
    )


def cut(split: str, piece: str) -> str:
    """Appends a slice to the name of a split: `all[:80%]` and `[:90%]` become `all[:80%][:90%]`.

    In `train+test` the slice is appended to both splits.
    """
    return "+".join(part + piece for part in split.split("+"))


def chosen(
    source: Source, split: str, in_order: bool = False, groups: Sequence | None = None
) -> Sequence[int] | np.ndarray:
    """Returns the image indices of a split `name[from:to]`.

    Args:
      in_order: True: a slice follows the stored order. False: it is a representative sample.
      groups: the group of each image; all images of a group are in the same slice. None: no groups.
    """
    part = split_range(split, len(source))
    if len(part) == len(source):
        return part
    if groups is not None:
        return _whole_groups(source, split, part, in_order, groups)
    return part if in_order else source.fair_order()[part.start : part.stop]


def _whole_groups(
    source: Source, split: str, part: range, in_order: bool, groups: Sequence
) -> np.ndarray:
    """Returns the indices of the images in a slice that contains only complete groups.

    All groups are concatenated in a fixed order, so each image has a position. It is the stored
    order if `in_order` is True, or else a stratified order. A group belongs to the slice if the
    position of its middle is in the range `part`.

    Raises:
      UserError: the slice contains no group.
    """
    names = list(map(str, groups))
    _, first, group, counts = np.unique(
        names, return_index=True, return_inverse=True, return_counts=True
    )
    if in_order:
        order = np.argsort(first)
    else:
        table = source.known_labels()
        classes = 0 * group if table is None else table[:, 0].astype(np.int64) + 1
        # The stratum of a group is the most frequent class of its images.
        votes = np.unique(np.stack([group, classes]), axis=1, return_counts=True)
        best = np.lexsort((-votes[1], votes[0][0]))
        strata = votes[0][1][best][np.unique(votes[0][0][best], return_index=True)[1]]
        order = stratified(strata, [names[index] for index in first])
    middles = np.empty(len(counts))
    middles[order] = np.cumsum(counts[order]) - counts[order] / 2
    indices = np.flatnonzero(((part.start <= middles) & (middles < part.stop))[group])
    if not len(indices):
        raise UserError(
            f"the split {split!r} contains no complete group: there are {len(counts):,} groups of "
            f"{len(names):,} images (data.groups), the largest of {counts.max():,}; without "
            "groups: --config.data.groups=None"
        )
    return indices


def sliced(
    source: Source, split: str, in_order: bool = False, groups: Sequence | None = None
) -> Source:
    """Returns a source with the images that `chosen` returns for the same arguments."""
    part = chosen(source, split, in_order, groups)
    return source if len(part) == len(source) else Subset(source, part)


def hashed(source: Source, split: str, names: Sequence[str]) -> Source:
    """Returns a slice of a source that is divided by hashes of names.

    The hash of a name is a position in [0, 1), and a slice such as `all[80%:]` contains the images
    whose position is in its range. Therefore an image stays in its slice when other images are
    added or removed. The number of images in a slice is only approximately its share.

    Args:
      names: name of each image, such as its path. Images with the same name are in the same slice.

    Raises:
      UserError: the slice is not given in percent, or contains no image.
    """
    start, stop = 0.0, 1.0
    for low, high in _bounds(split):
        if not (low or "0%").endswith("%") or not (high or "100%").endswith("%"):
            raise UserError(
                f"data.slices='hashed' has slices in percent only, not {split!r}; write "
                f"{split.split('[')[0]}[:90%], or data.slices='stratified'"
            )
        size = stop - start
        start, stop = start + size * _share(low, 0), start + size * _share(high, 1)
    hashes = np.fromiter(map(_hash, names), np.uint64, len(names))
    positions = (hashes >> 11) / 2.0**53  # A float64 has 53 bits: no position is rounded up to 1.
    part = np.flatnonzero((start <= positions) & (positions < stop))
    if not len(part):
        raise UserError(
            f"the split {split!r} of {len(names):,} images is empty: data.slices='hashed' draws "
            "each image independently; take a larger slice, or data.slices='stratified'"
        )
    return Subset(source, part)


def _share(text: str, default: float) -> float:
    """Converts percent to a share in 0 ... 1; a negative value counts from the end."""
    if not text:
        return default
    percent = int(text[:-1])
    # This order of operations gives -90% and 10% the same share.
    return min(max(percent + 100 if percent < 0 else percent, 0), 100) / 100


def groups_by_path(paths: Sequence[str], pattern: str) -> list[str]:
    """Returns the group of each path: the text that the regular expression matches in the path.

    If the expression has parentheses, the group is the text that the parentheses match. For
    example, `(patient[0-9]+)_` assigns `a/patient12_3.png` to the group `patient12`.

    Raises:
      UserError: `pattern` is not a regular expression, or does not match a path.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"data.groups={pattern!r} is not a regular expression: {error}") from error
    groups = []
    for path in paths:
        if (match := compiled.search(path)) is None:
            raise UserError(
                f"data.groups={pattern!r} matches nothing in {as_text(path)!r}: every image must "
                "have a group, as with '(patient[0-9]+)' or '[^/]+/[^/_]+'"
            )
        groups.append("\0".join(x or "" for x in match.groups()) if compiled.groups else match[0])
    return groups


def absolute(split: str, sizes: Mapping[str, int]) -> str:
    """Converts nested slices, which TFDS does not support, to slices with absolute indices.

    For example, `train[:80%][:90%]+test` becomes `train[0:72]+test[0:10]` if train has 100 images
    and test 10.

    Args:
      split: names of splits with their slices.
      sizes: number of images in each whole split.

    Raises:
      UserError: a split does not exist, or a slice is malformed or empty.
    """
    parts = []
    for part in split.split("+"):
        name = part.split("[")[0]
        if name not in sizes:
            raise UserError(f"there is no split {name!r}; there are: {', '.join(sizes)}")
        images = split_range(part, sizes[name])
        parts.append(f"{name}[{images.start}:{images.stop}]")
    return "+".join(parts)


def shuffled(images: int) -> np.ndarray:
    """Returns a fixed permutation of `range(images)`, int64, as the order of unlabelled images."""
    return permute(np.arange(images), images, 0)


def stratified(strata: Sequence[int] | Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Returns an order of images in which every slice has a proportional share of each stratum.

    If all strata have the same size, the number of images of a stratum in a slice differs from the
    proportional share by less than one. The n images of a stratum are shuffled, and image j gets
    the relative position (j + offset) / n in the order. The offsets of the strata are spread evenly
    over [0, 1). To shuffle, images are sorted by hashes of their names. Therefore the order is the
    same on any machine, file system and library version.

    Args:
      strata: the stratum of each image: its class, or its folder.

    Returns:
      Indices of the images, int64 `[images]`.
    """
    keys = np.fromiter((_hash(name) for name in names), np.uint64, len(names))
    _, strata, counts = np.unique(strata, return_inverse=True, return_counts=True)
    order = np.lexsort((keys, strata))
    strata, starts = strata[order], np.cumsum(counts) - counts
    # Strata of similar size get distant offsets. Therefore their rounding errors cancel.
    ranks = np.argsort(np.lexsort((np.bitwise_xor.reduceat(keys[order], starts), counts)))
    offsets = (ranks + 0.5) * GOLDEN % 1
    position = (np.arange(len(order)) - starts[strata] + offsets[strata]) / counts[strata]
    return order[np.lexsort((ranks[strata], position))]


def _hash(name: str) -> int:
    digest = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
