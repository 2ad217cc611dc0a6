"""Batches for this process, a function of the seed and the step.

Training reads position n of an endless sequence of epochs, each a seeded permutation of the
source. Global batch k is positions [k B, (k + 1) B); a process reads its contiguous part. So
the k-th batch is the same for any number of processes, and resuming is reading from k.
"""

import grain
import numpy as np

from vit_jax.data.preprocess import Unreadable, central_crop, decode, random_crop
from vit_jax.data.sources import Source
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]

MAX_REPLACEMENTS = 100  # Neighbours tried in the place of an unreadable image.


def training_batches(
    source: Source,
    *,
    seed: int,
    batch_size: int,
    first_step: int,
    image_size: int,
    crop_area: tuple[float, float],
    crop_aspect: tuple[float, float],
    flip: bool,
    workers: int,
    process: int = 0,
    processes: int = 1,
) -> grain.DatasetIterator[Batch]:
    """Endless training batches from step `first_step` on.

    Args:
      batch_size: of all processes together; must divide by `processes`.
      workers: processes that decode; 0 decodes in threads of this one.

    Yields:
      `image` uint8 `[local batch, size, size, 3]`, `labels` int32 `[local batch, max_labels]`
      padded with -1, and `unreadable` int64 `[local batch]`: the index of an image that had to be
      replaced by its next readable neighbour, else -1.
    """

    def load(index: int, rng: np.random.Generator) -> Batch:
        broken = -1
        for candidate in range(index, index + MAX_REPLACEMENTS):
            candidate %= len(source)
            example = source[candidate]
            try:
                image = decode(example.image)
            except Unreadable:
                broken = candidate if broken < 0 else broken
                continue
            pixels = random_crop(image, rng, image_size, crop_area, crop_aspect, flip)
            return _row(pixels, example.labels, source.max_labels, broken)
        raise UserError(f"{MAX_REPLACEMENTS} unreadable images in a row from {source.describe(index)} on")

    data = grain.MapDataset.range(len(source)).shuffle(seed=seed).repeat().seed(seed)
    data = data.random_map(load).batch(batch_size // processes)[process::processes][first_step:]
    return _iterate(data, workers)


def evaluation_batches(
    source: Source,
    *,
    batch_size: int,
    image_size: int,
    resize: int,
    workers: int,
    process: int = 0,
    processes: int = 1,
) -> grain.DatasetIterator[Batch]:
    """Every image once, in order, in equally many batches for every process.

    Yields:
      As `training_batches`, and `mask` bool `[local batch]`: False for an unreadable image and
      for the padding that fills the last batch.
    """
    blank = np.zeros((image_size, image_size, 3), np.uint8)

    def load(index: int) -> Batch:
        if index >= len(source):
            return _row(blank, (), source.max_labels, -1) | {"mask": np.bool_(False)}
        example = source[index]
        try:
            pixels = central_crop(decode(example.image), image_size, resize)
        except Unreadable:
            return _row(blank, (), source.max_labels, index) | {"mask": np.bool_(False)}
        return _row(pixels, example.labels, source.max_labels, -1) | {"mask": np.bool_(True)}

    batches = -(-len(source) // batch_size)
    data = grain.MapDataset.range(batches * batch_size).map(load)
    return _iterate(data.batch(batch_size // processes)[process::processes], workers)


class SkipLog:
    """Names and counts unreadable images of a source, up to a limit."""

    def __init__(self, source: Source, limit: int, say):
        self._source, self._limit, self._say = source, limit, say
        self._seen = set()

    def check(self, batch: Batch) -> Batch:
        """Takes the `unreadable` column out of a batch.

        Raises:
          UserError: more different images than the limit.
        """
        unreadable = batch.pop("unreadable")
        if unreadable.max() >= 0:
            for index in unreadable[unreadable >= 0].tolist():
                if index not in self._seen:
                    self._seen.add(index)
                    self._say(f"unreadable image skipped ({len(self._seen)}): {self._source.describe(index)}")
            if len(self._seen) > self._limit:
                raise UserError(
                    f"more than {self._limit} unreadable images (data.max_unreadable); "
                    f"the last: {self._source.describe(index)}"
                )
        return batch


def _row(pixels, labels, max_labels, unreadable) -> Batch:
    padded = np.full(max_labels, -1, np.int32)
    padded[: len(labels)] = labels
    return {"image": pixels, "labels": padded, "unreadable": np.int64(unreadable)}


def _iterate(data: grain.MapDataset, workers: int) -> grain.DatasetIterator[Batch]:
    if workers:
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        data = data.to_iter_dataset(options).mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    else:
        data = data.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    return iter(data)
