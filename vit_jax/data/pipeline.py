"""Loads the batches of a process; a batch depends only on the seed and the step.

Training reads an endless sequence of positions (`order.py`). With batch size B, global batch k
contains the positions from k B to (k + 1) B - 1, and each process reads the batch rows that its
devices need. Therefore batch k is the same for any number of processes, and a run that resumes at
step k starts with batch k. The random augmentations at position n depend only on the seed and n.

A batch is split into chunks. All worker processes decode a batch together, and write their chunks
into the same memory (`batch_memory.py`).
"""

import dataclasses
import functools
import itertools
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import grain
import numpy as np

from vit_jax.data.balance import balanced_order, single_labels
from vit_jax.data.batch_memory import Batch, BatchMemory, BatchReader, Entry
from vit_jax.data.decode import Jpeg, Pixels, Unreadable, decode, why_unreadable
from vit_jax.data.fields import Field
from vit_jax.data.order import Order
from vit_jax.data.placement import Placement
from vit_jax.data.preprocess import FixedCrop, TestCrop, TrainCrop
from vit_jax.data.sources.base import Source
from vit_jax.data.views import Augmentation, ViewSpec
from vit_jax.errors import UserError

MAX_CHUNK = 64  # Maximum number of images in a chunk.
MAX_REPLACEMENTS = 100  # Number of neighbours that are tried in place of an unreadable image.
FIELD_STREAM = 2**32  # Number of the first field's random stream; streams of views have lower ones.
# Starting worker processes takes seconds. A data set with fewer images than this is read without
# worker processes.
FEW_IMAGES = 5000
STOPPING = (signal.SIGINT, signal.SIGTERM)  # Worker processes ignore these signals.


def decoders(workers: int | None, threads: int | None, images: int) -> tuple[int, int]:
    """Returns the number of decoding processes (0: this process) and of threads in each process.

    A number that is None is chosen by the number of images and the number of CPU cores. The content
    of the batches does not depend on `workers` and `threads`.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    if threads is None:
        threads = min(cores, 4)
    if workers is None:
        workers = 0 if images < FEW_IMAGES or cores <= 4 else min(cores // 4, 8)
    return workers, threads


def training_batches(
    source: Source,
    *,
    seed: int,
    batch_size: int,
    first_step: int,
    crop: TrainCrop | None = None,
    workers: int | None = None,
    threads: int | None = None,
    views: Sequence[ViewSpec] = (),
    fields: Sequence[Field] = (),
    repeats: int = 1,
    balance: str = "none",
    rows: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yields training batches without end, from step `first_step` on.

    Args:
      batch_size: global batch size, over all processes.
      crop: the random crop, if `views` is empty.
      workers: number of decoding processes. 0: decode in this process; None: see `decoders`.
      threads: number of threads in each decoding process; None: see `decoders`. A few threads are
        faster than the same number of processes, because decoding releases the GIL nine tenths of
        the time.
      views: the views of each image; empty: a single view with `crop`.
      fields: fields that are encoded from each example; the source must have them.
      repeats: number of times that an image is sampled in succession, each time with another random
        augmentation.
      balance: class balancing, a value of `config.data.balance`.
      rows: indices of the rows of the global batch that this process reads, in order; None: all.

    Yields:
      Dictionaries with `image`, uint8 `[local batch, size, size, 3]`; with `labels`, int32 `[local
        batch, max_labels]`, padded with -1; and with an entry for each other view and each field.
        An unreadable image is replaced by its next readable neighbour. The entry `unreadable`,
        int64 `[local batch]`, contains the index of the unreadable image, or -1 for readable
        images.

    Raises:
      UserError: too many consecutive images are unreadable; or, with class balancing, an image does
        not have exactly one label.
    """
    if balance == "none":
        order = Order(seed, source.sizes, source.weights, repeats)
    else:
        order = balanced_order(single_labels(source, "data.balance"), balance, seed, repeats)
    rows = np.arange(batch_size) if rows is None else rows
    views = views or (ViewSpec("image", crop.size, crop),)
    streams = _streams(views, fields)
    reading = _Reading(len(rows), *decoders(workers, threads, len(source)))
    memory = reading.memory(_entries(views, fields, source))

    def load_image(rngs: list[np.random.Generator], index: int, batch: Batch, row: int) -> None:
        for candidate in range(index, index + MAX_REPLACEMENTS):
            candidate %= len(source)
            try:
                example = source[candidate]
                values = functools.cache(functools.partial(source.fields_of, candidate))
                shown, of_views = _accepted(views, fields, values), rngs[: len(rngs) - len(fields)]
                place = _show(example.image, shown, of_views, batch, row, fields)
            except (Unreadable, OSError) as error:
                reason = why_unreadable(error)
                if candidate == index:
                    batch["unreadable"][row] = index
                continue
            batch["labels"][row, : len(example.labels)] = example.labels
            of_fields = rngs[len(rngs) - len(fields) :]
            _encode(source, candidate, values, fields, of_fields, place, batch, row)
            return
        raise UserError(
            f"{MAX_REPLACEMENTS} unreadable images in a row from {source.describe(index)} on "
            f"(the last: {reason})"
        )

    def load(step: int, start: int, stop: int) -> None:
        positions = step * batch_size + rows[start:stop]
        batch = memory.rows_to_write(step, start, stop)
        draws = _generators(seed, positions, streams)
        for row, (rngs, index) in enumerate(zip(draws, order(positions).tolist(), strict=True)):
            load_image(rngs, index, batch, row)

    return reading.batches(load, memory, first_step)


def evaluation_batches(
    source: Source,
    *,
    batch_size: int,
    crop: TestCrop | None = None,
    workers: int | None = None,
    threads: int | None = None,
    views: Sequence[ViewSpec] = (),
    fields: Sequence[Field] = (),
    seed: int = 0,
    rows: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yields batches with every image once, in order; all processes get the same number of batches.

    Args:
      batch_size, workers, threads, rows: as in `training_batches`.
      crop: the crop, if `views` is empty.
      views: the views of each image. Their random numbers depend on the seed and the image's index.
        Empty: a single view with `crop`.
      fields: as in `training_batches`; they are encoded without random numbers.

    Yields:
      Dictionaries with the entries of `training_batches` and `valid`, bool `[local batch]`: False
        for unreadable images, and for the padding at the end of the last batch.
    """
    rows = np.arange(batch_size) if rows is None else rows
    views = views or (ViewSpec("image", crop.size, FixedCrop(crop)),)
    streams = _streams(views)
    reading = _Reading(len(rows), *decoders(workers, threads, len(source)))
    entries = _entries(views, fields, source, fill=0) | {"valid": Entry((), np.bool_, 0)}
    memory = reading.memory(entries)

    def load(step: int, start: int, stop: int) -> None:
        indices = step * batch_size + rows[start:stop]
        batch = memory.rows_to_write(step, start, stop)
        draws = _generators(seed, indices, streams)
        for row, (rngs, index) in enumerate(zip(draws, indices.tolist(), strict=True)):
            if index >= len(source):
                break
            try:
                example = source[index]
                place = _show(example.image, views, rngs, batch, row, fields)
            except (Unreadable, OSError):
                batch["unreadable"][row] = index
                continue
            batch["labels"][row, : len(example.labels)] = example.labels
            values = functools.partial(source.fields_of, index)
            _encode(source, index, values, fields, itertools.repeat(None), place, batch, row)
            batch["valid"][row] = True

    return reading.batches(load, memory, 0, -(-len(source) // batch_size))


class SkipLog:
    """Counts and logs a source's unreadable images; raises an error for more than `limit`."""

    def __init__(self, source: Source, limit: int, log):
        self._source, self._limit, self._log = source, limit, log
        self._seen = set()

    def check(self, batch: Batch) -> Batch:
        """Removes the entry `unreadable` from a batch and logs the unreadable images in it.

        Raises:
          UserError: more images than the limit are unreadable.
        """
        unreadable = batch.pop("unreadable")
        if unreadable.max() >= 0:
            for index in unreadable[unreadable >= 0].tolist():
                if index not in self._seen:
                    self._seen.add(index)
                    self._log(
                        f"unreadable image skipped ({len(self._seen)}): "
                        f"{self._source.describe(index)} ({why_skipped(self._source, index)})"
                    )
            if len(self._seen) > self._limit:
                raise UserError(
                    f"more than {self._limit} unreadable images (data.max_unreadable); "
                    f"the last: {self._source.describe(index)} ({why_skipped(self._source, index)})"
                )
        return batch


def why_skipped(source: Source, index: int) -> str:
    """Reads an unreadable image again, and returns the error, which workers do not report."""
    try:
        decode(source[index].image)
    except (Unreadable, OSError) as error:
        return why_unreadable(error)
    return "it can be read now"


def _accepted(
    views: Sequence[ViewSpec], fields: Sequence[Field], values: Callable[[], Mapping[str, Any]]
) -> Sequence[ViewSpec]:
    """Returns views in which the first view's crop is redrawn until it is suitable for all fields.

    For example, a field of masks rejects crops that contain only one class (see `Field.accepts`).
    `values` returns the values of the fields; it is called only if a field can reject crops.
    """
    for field in fields:
        if field.accepts:
            # The result is cached, because the same crop is drawn twice: for the image and for
            # fields.
            accepts = functools.cache(functools.partial(field.accepts, values()[field.name]))
            crop = dataclasses.replace(views[0].crop, accepts=accepts)
            views = (views[0]._replace(crop=crop), *views[1:])
    return views


def _show(
    image: bytes | np.ndarray,
    views: Sequence[ViewSpec],
    rngs: Sequence[np.random.Generator],
    batch: Batch,
    row: int,
    fields: Sequence[Field] = (),
) -> Placement | None:
    """Decodes an image once and writes all its views into a row of a batch.

    `rngs` are a random generator for each crop; a view may consist of several crops. Returns the
    placement of the first view's crop, if a spatial field needs it, else None.

    Raises:
      Unreadable: see `vit_jax.data.decode`.
    """
    if len(rngs) > 1:
        image = views[0].crop.open(image, several=True)
    placement = None
    if any(field.spatial for field in fields):
        image = views[0].crop.open(image)
        placement = _place(views[0], image, rngs[0])
    draws = iter(rngs)
    for view in views:
        outs = batch[view.name][row]
        distortions = view.distort or itertools.repeat(None)
        for out, distort in zip((outs,) if view.count is None else outs, distortions, strict=False):
            changes = [change for change in (view.augment, distort) if change]
            _crop_and_augment(view, image, changes, next(draws), out)
    return placement


def _crop_and_augment(
    view: ViewSpec,
    image: bytes | np.ndarray | Jpeg | Pixels,
    augmentations: Sequence[Augmentation],
    rng: np.random.Generator,
    out: np.ndarray,
) -> None:
    """Writes a crop of a view into `out`. The augmentations change the image, not its padding."""
    height, width = out.shape[:2]
    if augmentations and view.crop.pads:
        image = view.crop.open(image)
        height, width = _place(view, image, rng).shown
    view.crop(image, rng, out)
    pixels = np.ascontiguousarray(out[:height, :width])
    for augment in augmentations:
        pixels = augment(pixels, rng)
    if augmentations:
        out[:height, :width] = pixels


def _place(view: ViewSpec, image: Jpeg | Pixels, rng: np.random.Generator) -> Placement:
    """Returns the placement of the next crop that `rng` would draw; `rng` itself is unchanged."""
    copy = np.random.Generator(np.random.Philox())
    copy.bit_generator.state = rng.bit_generator.state
    return view.crop.place(image.height, image.width, copy)


def _encode(
    source: Source,
    index: int,
    values: Callable[[], Mapping[str, Any]],
    fields: Sequence[Field],
    rngs: Iterable[np.random.Generator | None],
    placement: Placement | None,
    batch: Batch,
    row: int,
) -> None:
    """Encodes the fields of an example and writes them into a row of a batch.

    A spatial field is encoded with the placement of the first view's crop. Another field is encoded
    with its random generator in `rngs`.

    Raises:
      UserError: a field does not match the image, such as a mask of another size.
    """
    of_example = values() if fields else {}
    for field, rng in zip(fields, rngs, strict=False):
        by = placement if field.spatial else rng
        try:
            batch[field.name][row] = field.encode(of_example[field.name], by)
        except UserError as error:
            raise UserError(f"{source.describe(index)}: {error}") from error


def _streams(views: Sequence[ViewSpec], fields: Sequence[Field] = ()) -> list[int]:
    """Returns the numbers that select random streams: one for each crop and one for each field."""
    of_views = [stream for view in views for stream in view.streams]
    return of_views + [FIELD_STREAM + number for number in range(len(fields))]


def _generators(
    seed: int, positions: np.ndarray, streams: Sequence[int]
) -> Iterator[list[np.random.Generator]]:
    """Yields a list with a random generator per stream, for each position of the training order.

    The same generator objects are reset for each position. New objects would take ten times as
    long.
    """
    bits = [np.random.Philox(key=(seed, 0), counter=(0, 0, 0, stream)) for stream in streams]
    fresh, generators = [one.state for one in bits], [np.random.Generator(one) for one in bits]
    for position in positions.tolist():
        for one, state in zip(bits, fresh, strict=True):
            state["state"]["key"][1] = position
            one.state = state
        yield generators


def _entries(
    views: Sequence[ViewSpec], fields: Sequence[Field], source: Source, fill: int | None = None
) -> dict[str, Entry]:
    pixels = {view.name: Entry(view.shape, np.uint8, fill) for view in views}
    values = {field.name: Entry(field.shape, field.dtype, fill) for field in fields}
    labels = Entry((source.max_labels,), np.int32, -1)
    return pixels | values | {"labels": labels, "unreadable": Entry((), np.int64, -1)}


class _Reading(NamedTuple):
    """Division of a batch into chunks, and of the chunks among processes and threads."""

    rows: int  # Number of rows of a batch.
    workers: int  # Number of decoding processes; 0: decode in this process.
    threads: int  # Number of threads in each decoding process.

    @property
    def chunks(self) -> int:
        """Number of chunks of a batch."""
        return -(-self.rows // MAX_CHUNK)

    def memory(self, entries: Mapping[str, Entry]) -> BatchMemory:
        """Returns memory for as many batches as Grain loads before the first of them is taken.

        In addition to its prefetch buffer, Grain keeps two chunks in each worker process and two
        chunks of each worker in this process. With less memory, workers would wait for a slot.
        """
        buffer = 2 * self.threads
        chunks = self.workers * (buffer + 4) if self.workers else buffer
        return BatchMemory(self.rows, entries, ahead=1 + -(-chunks // self.chunks))

    def batches(
        self,
        load: Callable[[int, int, int], None],
        memory: BatchMemory,
        first_step: int,
        steps: int | None = None,
    ) -> Iterator[Batch]:
        """Returns an iterator over batches; the caller must close the iterator.

        Args:
          load: function that loads the rows from one index to another of the batch of a step.
        """

        def load_chunk(number: int) -> int:
            step, chunk = divmod(number, self.chunks)
            start, stop = (i * self.rows // self.chunks for i in (chunk, chunk + 1))
            load(step, start, stop)
            return number

        stop = sys.maxsize if steps is None else (first_step + steps) * self.chunks
        numbers = grain.MapDataset.range(first_step * self.chunks, stop)
        options = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=2 * self.threads)
        if not self.workers:
            data = numbers.map(load_chunk).to_iter_dataset(options)
            return _Batches(iter(data), self.chunks, memory, first_step)
        # Ignore the warning that Python's resource tracker prints after the error if a worker dies.
        sys.warnoptions.append("ignore:resource_tracker")
        handed, processes = _Handed(load_chunk), grain.MultiprocessingOptions(self.workers)
        data = numbers.map(handed).to_iter_dataset(options)
        data = data.mp_prefetch(processes, worker_init_fn=_obey_parent)
        return _OfWorkers(iter(data), self.chunks, memory, first_step, self.workers, handed)


@dataclasses.dataclass(eq=False)
class _Batches(Iterator[Batch]):
    """Batches whose chunks are loaded in order by Grain."""

    numbers: grain.DatasetIterator[int]  # Numbers of the chunks that have been loaded.
    chunks: int  # Number of chunks of a batch.
    memory: BatchMemory
    first_step: int

    def __post_init__(self):
        self._reader = BatchReader(self.memory, self.first_step)

    def __next__(self):
        for _ in range(self.chunks):
            self._wait_for_chunk()
        return self._reader.take()

    def _wait_for_chunk(self) -> None:
        next(self.numbers)

    def close(self) -> None:
        """Ends the threads and processes that load the batches."""
        self.memory.close()
        self.numbers.close()


class _Handed:
    """A function that worker processes load from a temporary file.

    Without the file, Python would send the function to a new process through a pipe with a buffer
    of 64 KiB. The function contains the list of files, or the images of a small data set, and can
    be larger than the buffer. If the new process died before it reads the pipe, the write would
    block forever, because Python keeps the pipe's reading end open.
    """

    def __init__(self, function: Callable[[int], int]):
        self._function = function
        self._file = tempfile.NamedTemporaryFile(prefix="vit_jax_")  # noqa: SIM115
        cloudpickle.dump(function, self._file)
        self._file.flush()

    def __call__(self, number: int) -> int:
        return self._function(number)

    def __reduce__(self):
        return _read_handed, (self._file.name,)

    def remove(self) -> None:
        """Removes the temporary file; all worker processes must have read it before."""
        self._file.close()


def _read_handed(file: str) -> Callable:
    return cloudpickle.loads(Path(file).read_bytes())


@dataclasses.dataclass(eq=False)
class _OfWorkers(_Batches):
    """Batches from worker processes.

    If a worker process dies, all other worker processes are killed, and an error is raised.
    """

    workers: int
    handed: _Handed  # The function that the worker processes run.

    def __post_init__(self):
        super().__post_init__()
        self._loaded = 0
        self._others = {*multiprocessing.active_children()}

    def _wait_for_chunk(self) -> None:
        try:
            next(self.numbers) if self._loaded else self._start_workers()
        except RuntimeError as error:
            # Grain raises RuntimeError for a dead worker and for an exception in a worker. Only the
            # error for a dead worker has this message.
            code = re.search(r"terminated unexpectedly with exit code (-?\d+)", str(error))
            if not code:
                raise
            for process in {*multiprocessing.active_children()} - self._others:
                process.kill()  # Grain would wait up to 25 s for each.
            raise UserError(
                f"a decoding process died ({_cause(int(code[1]))}); use fewer of them "
                "(data.workers, --workers) or more memory; the same command goes on from what "
                "was saved"
            ) from error
        self._loaded += 1
        if self._loaded == self.workers:  # Each has loaded a chunk, so all have read the file.
            self.handed.remove()

    def _start_workers(self) -> None:
        """Starts all worker processes with SIGTERM and SIGINT blocked; waits for the first chunk.

        A worker process inherits the blocked signals from the thread that starts it. Later,
        `_obey_parent` makes the worker process ignore both signals.
        """
        resource_tracker.ensure_running()  # If the thread started it, signals would be unblocked.
        block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, STOPPING)
        with ThreadPoolExecutor(1, initializer=block) as thread:
            thread.submit(self.numbers.__next__).result()

    def close(self) -> None:
        super().close()
        self.handed.remove()


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    memory = -code in (signal.SIGKILL, signal.SIGBUS)
    return f"signal {-code}{': out of memory?' if memory else ''}"


def _obey_parent(worker: int, workers: int) -> None:
    """Makes a worker process exit when the training process has ended, and not before.

    The worker also exits if the training process was ended by SIGKILL. The worker ignores SIGINT
    and SIGTERM. Ctrl-C and job schedulers send these signals to all processes, but the training
    process may still need batches afterwards.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
