"""Brings batches onto the devices before they are asked for."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from vit_jax.data.pipeline import Batch
from vit_jax.parallel.mesh import to_devices


class Feed:
    """An iterator of device batches, placed by a thread of its own while the devices compute.

    Args:
      batches: this process's batches, endless.
      check: applied to each batch first; what it raises, the iterator raises.
      ahead: batches that wait on the devices at most.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        check: Callable[[Batch], Batch],
        mesh: Mesh,
        ahead: int = 2,
    ):
        self._batches = batches
        self._queue = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(check, mesh), name="feed", daemon=True
        )
        self._thread.start()
        self.idle_seconds = 0.0  # Time for which the devices waited for a batch.

    def take(self, running: jax.Array | None = None) -> dict[str, jax.Array]:
        """The next batch.

        Args:
          running: a result of the step that the devices work on; from when it is ready on they are
            idle.
        """
        while True:
            since = time.perf_counter()
            try:
                item = self._queue.get(timeout=0.01)
                break
            except queue.Empty:
                if running is not None and running.is_ready():
                    self.idle_seconds += time.perf_counter() - since
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Ends the thread and the processes that decode for it."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
        self._batches.close()

    def _fill(self, check, mesh):
        try:
            while not self._closed.is_set():
                self._queue.put(to_devices(check(next(self._batches)), mesh))
        except BaseException as error:
            self._queue.put(error)
