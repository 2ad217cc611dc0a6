"""Prefetching: copies batches to the devices before they are needed."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from vit_jax.data.pipeline import Batch
from vit_jax.parallel.mesh import to_devices

AHEAD = 2  # Maximum number of unused batches on the devices.


class Feed:
    """Iterator of device batches. A separate thread copies batches to the devices in advance.

    Args:
      batches: endless iterator of this process's batches.
      check: function that is called with each batch before it is copied. If it raises an error,
        the iterator raises that error.
    """

    def __init__(self, batches: Iterator[Batch], check: Callable[[Batch], Batch], mesh: Mesh):
        self._batches = batches
        self._queue = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(check, mesh), name="feed", daemon=True
        )
        self._thread.start()
        self.idle_seconds = 0.0  # Time during which the devices waited for batches.

    def take(self, running: jax.Array | None = None) -> dict[str, jax.Array]:
        """Returns the next batch.

        Args:
          running: an output array of the current step. The devices are idle from the moment when it
            is ready until the next batch is ready. This time is added to `idle_seconds`.
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
        """Ends the copying thread, and the processes that decode images."""
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
