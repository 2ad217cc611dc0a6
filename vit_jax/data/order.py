"""Order of examples in training: a function from a position to an example, without state.

Position n is the n-th example since the start of training. Each epoch is a new permutation of the
data set. In a mixture of several data sets, each data set has its own epochs, and the data sets are
interleaved in proportion to their weights. With repeated augmentation (Hoffer et al., 2020;
1901.09335) each image is repeated at several consecutive positions. The number of positions in an
epoch does not change. For example, with 1,000 images and 3 repeats, an epoch consists of 1,000
positions and contains the first 334 images of its permutation, as in DeiT's code.
"""

import dataclasses

import numpy as np

from vit_jax.errors import UserError

BLOCK = 2**16  # In each block of 65,536 examples, the shares of a mixture are exact.
ROUNDS = 6
ONE, HALF, BITS = np.uint64(1), np.uint64(32), np.uint64(64)
ODD = np.uint64(0xD6E8FEB86659FD93)


@dataclasses.dataclass(frozen=True)
class Order:
    """Training order of a data source with one or several parts (the data sets of a mixture)."""

    seed: int
    sizes: tuple[int, ...]  # Number of examples in each part.
    # Relative sampling weight of each part; they need not sum to 1. None: the examples of all parts
    # are permuted together.
    weights: tuple[float, ...] | None = None
    repeats: int = 1  # Number of times that an example is sampled in succession.

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Returns the index of the example at each of `positions`, which are int64 below 2^62."""
        turns = positions // self.repeats
        if self.weights is None:
            return self._epochs(turns, sum(self.sizes), 0)
        indices = np.empty_like(turns)
        waiting, left = np.arange(len(turns)), BLOCK
        for part, quota in enumerate(self._quotas()):
            # The loop chooses the turns (see `_epochs`) of one part after the other. Of the turns
            # that no earlier part has, `quota` evenly spaced turns in every `left` turns are
            # assigned to this part.
            before, after = _scaled(turns, quota, left), _scaled(turns + 1, quota, left)
            mine = after > before
            start = sum(self.sizes[:part])
            indices[waiting[mine]] = start + self._epochs(before[mine], self.sizes[part], part)
            waiting, turns, left = waiting[~mine], (turns - before)[~mine], left - quota
        return indices

    def _epochs(self, turns: np.ndarray, size: int, part: int) -> np.ndarray:
        """Returns the example at each turn of a part, as an index within the part.

        A turn is a group of `repeats` consecutive positions with the same example; turns are
        counted from 0 in each part.
        """
        epoch, place = np.divmod(turns * self.repeats, size)
        return permute(place // self.repeats, size, self.seed, part, epoch)

    def _quotas(self) -> np.ndarray:
        """Returns the number of turns of each part in a block of `BLOCK` turns, int64 `[parts]`."""
        ends = np.cumsum(self.weights) / np.sum(self.weights) * BLOCK
        quotas = np.diff(np.round(ends).astype(np.int64), prepend=0)
        if quotas.min() == 0:
            raise UserError(
                f"a weight of {self.weights} (data.weights) is below 1/{BLOCK} of their sum"
            )
        return quotas


@dataclasses.dataclass(frozen=True)
class BalancedOrder:
    """Training order that samples each class with a given frequency.

    The order consists of rounds. A round contains `quotas[c]` examples of class c. The classes of a
    round's examples are in random order. The images of a class are sampled in epochs: all images of
    the class are used once before an image is used again. Each epoch is a new permutation of these
    images.
    """

    seed: int
    members: np.ndarray  # Indices of all examples, sorted by class.
    sizes: np.ndarray  # Number of examples of each class, above 0.
    quotas: np.ndarray  # Number of examples of each class in a round, above 0.
    repeats: int = 1  # Number of times that an example is sampled in succession.

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Returns the index of the example at each of `positions`, which are int64 below 2^62."""
        classes, starts = len(self.sizes), np.cumsum(self.quotas) - self.quotas
        number, place = np.divmod(positions // self.repeats, int(self.quotas.sum()))
        slots = permute(place, int(self.quotas.sum()), self.seed, classes, number)
        part = np.searchsorted(starts, slots, side="right") - 1
        visits = number * self.quotas[part] + slots - starts[part]
        epoch, rest = np.divmod(visits, self.sizes[part])
        examples = np.cumsum(self.sizes)[part] - self.sizes[part]
        for one in np.unique(part).tolist():
            mine = part == one
            examples[mine] += permute(rest[mine], int(self.sizes[one]), self.seed, one, epoch[mine])
        return self.members[examples]


def _scaled(numbers: np.ndarray, by: int, of: int) -> np.ndarray:
    """Returns `numbers * by // of` without overflow."""
    whole, rest = np.divmod(numbers, of)
    return whole * by + rest * by // of


def permute(places: np.ndarray, size: int, *key: int | np.ndarray) -> np.ndarray:
    """Applies a pseudorandom permutation of `range(size)` to each number of `places`, int64.

    The permutation is a Feistel network over the next power of two. It is applied to a number again
    and again until the result is below `size` ("cycle walking").

    Args:
      places: numbers from 0 to `size` - 1.
      *key: numbers that select the permutation, each an int or an array of the shape of `places`.
    """
    # Numbers have at least six bits. Otherwise, some permutations of very small data sets would be
    # rare.
    bits = np.uint64(max(6, (size - 1).bit_length()))
    high, low = bits // 2, bits - bits // 2  # Bits of a number's two halves; each round swaps them.
    secret = np.zeros(len(places), np.uint64)
    for number in key:
        secret = _mix(secret ^ np.asarray(number).astype(np.uint64))
    keys = _mix(secret + np.arange(ROUNDS, dtype=np.uint64)[:, None])
    result, outside = places.astype(np.uint64), slice(None)
    while True:
        values = result[outside]
        for i in range(ROUNDS):
            width = low if i % 2 == 0 else high
            right = values & ((ONE << width) - ONE)
            mixed = (right + keys[i, outside]) * ODD
            mixed = ((mixed ^ (mixed >> HALF)) * ODD) >> (BITS - (bits - width))
            values = (right << (bits - width)) | ((values >> width) ^ mixed)
        result[outside] = values
        outside = np.flatnonzero(result >= size)
        if not len(outside):
            return result.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Hashes each number of `x` by the mixing step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
