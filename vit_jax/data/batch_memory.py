"""Shared memory for batches: several processes write a batch, and one process reads it in place.

The memory is divided into slots, each for one batch. Each writer writes its rows of a batch into
the slot of the batch. The reader returns arrays in the slot without a copy, and reuses the slot
when nothing refers to the arrays any more. Reuse avoids the system's time for new pages of memory.
"""

import math
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Mapping
from typing import IO, NamedTuple

import numpy as np

Batch = dict[str, np.ndarray]

HELD = 8  # Number of batches that the reader's caller can hold without a copy.
# Arrays with smaller rows, such as labels, are always copied. Callers keep labels for long, and a
# reference to the labels would keep the pixels.
MIN_SHARED_ROW = 1024
ALIGNMENT = 64  # Bytes. On a CPU, JAX uses arrays with this alignment without a copy.
MAX_SLOTS = 2**16


class Entry(NamedTuple):
    """An array of a batch."""

    shape: tuple[int, ...]  # Shape of a row.
    dtype: np.dtype | type  # Data type.
    fill: int | None = None  # Initial value; None: undefined, because each row is written.


class BatchMemory:
    """Memory of `ahead + HELD` batches. It can be pickled for processes that write batches.

    Args:
      ahead: maximum number of batches that are being written or wait for the reader.
      path: path of existing memory; None: new memory.
    """

    def __init__(
        self, rows: int, entries: Mapping[str, Entry], ahead: int, path: str | None = None
    ):
        self.rows, self.entries, self.ahead, self.slots = rows, entries, ahead, ahead + HELD
        self._offsets, used = {}, 0
        for name, (shape, dtype, _) in entries.items():
            self._offsets[name] = used
            used += _multiple(rows * math.prod(shape) * np.dtype(dtype).itemsize, ALIGNMENT)
        self._slot_bytes = _multiple(used, ALIGNMENT)
        self._first_slot = _multiple(8 * (1 + ahead), ALIGNMENT)
        size = self._first_slot + self.slots * self._slot_bytes
        if path:
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), size)
        else:
            file, path = _new_file()
            self._close_file = weakref.finalize(self, file.close)
            os.ftruncate(file.fileno(), size)  # Pages that are never written use no memory.
            self._memory = mmap.mmap(file.fileno(), size)
        self._path = path
        numbers = np.frombuffer(self._memory, np.int64, 1 + ahead)
        self._closed, self._table = numbers[:1], numbers[1:]

    def __reduce__(self):
        return BatchMemory, (self.rows, self.entries, self.ahead, self._path)

    def assign(self, step: int, slot: int) -> None:
        """Lets the writers of batch `step` write into a slot."""
        self._table[step % self.ahead] = 1 + step * MAX_SLOTS + slot

    def rows_to_write(self, step: int, start: int, stop: int) -> Batch:
        """Returns the rows `start` to `stop` of batch `step`, when a slot is assigned to it.

        Raises:
          RuntimeError: the memory was closed before.
        """
        pause = 1e-3
        while (assigned := int(self._table[step % self.ahead]) - 1) // MAX_SLOTS != step:
            if self._closed[0]:
                raise RuntimeError("the iterator of batches is closed")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        slot = self.slot(assigned % MAX_SLOTS)
        rows = {name: array[start:stop] for name, array in self.arrays(slot).items()}
        for name, array in rows.items():
            if self.entries[name].fill is not None:
                array[:] = self.entries[name].fill
        return rows

    def slot(self, number: int) -> np.ndarray:
        """Returns the bytes of a slot, as a new array that does not own them."""
        offset = self._first_slot + number * self._slot_bytes
        return np.frombuffer(self._memory, np.uint8, self._slot_bytes, offset)

    def arrays(self, slot: np.ndarray) -> Batch:
        """Returns the arrays of a batch. They are views of the slot and keep a reference to it."""
        arrays = {}
        for name, (shape, dtype, _) in self.entries.items():
            size = self.rows * math.prod(shape) * np.dtype(dtype).itemsize
            data = slot[self._offsets[name] : self._offsets[name] + size]
            arrays[name] = data.view(dtype).reshape(self.rows, *shape)
        return arrays

    def close(self) -> None:
        """Ends the waiting of writers. Batches that were returned stay valid."""
        self._closed[0] = 1
        self._close_file()


class BatchReader:
    """Returns batches in order. The caller must wait until all rows of a batch are written."""

    def __init__(self, memory: BatchMemory, step: int):
        self._memory, self._step = memory, step
        # The slot that was freed last is reused first, so that most slots are never written.
        self._free = list(range(memory.slots))
        self._assigned = {}
        for following in range(step, step + memory.ahead):
            self._assign(following, self._free.pop())

    def take(self) -> Batch:
        """Returns the next batch.

        Arrays with large rows are not copied. Their slot is reused when nothing refers to these
        arrays any more: no NumPy array and no buffer of a JAX array. If the caller holds `HELD`
        such batches, the arrays of the next batch are copies.
        """
        number, following = self._assigned.pop(self._step), self._step + self._memory.ahead
        slot = self._memory.slot(number)
        batch = self._memory.arrays(slot)
        shared = [name for name, array in batch.items() if array[0].nbytes >= MIN_SHARED_ROW]
        if shared and self._free:
            self._assign(following, self._free.pop())
            weakref.finalize(slot, self._free.append, number).atexit = False
            batch |= {name: batch[name].copy() for name in batch.keys() - {*shared}}
        else:
            batch = {name: array.copy() for name, array in batch.items()}
            self._assign(following, number)
        self._step += 1
        return batch

    def _assign(self, step: int, slot: int) -> None:
        self._assigned[step] = slot
        self._memory.assign(step, slot)


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _new_file() -> tuple[IO[bytes], str]:
    """Returns an empty file and a path by which child processes can open it.

    On Linux the file is in memory and does not count against the size of /dev/shm.
    """
    if hasattr(os, "memfd_create"):
        file = open(os.memfd_create("vit_jax_batches"), "r+b", buffering=0)  # noqa: SIM115
        return file, f"/proc/{os.getpid()}/fd/{file.fileno()}"
    file = tempfile.NamedTemporaryFile(prefix="vit_jax_")  # noqa: SIM115
    return file, file.name
