"""Dynamic batching of images from concurrent requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from vit_jax.serving.engine import Engine
from vit_jax.serving.metrics import Metrics

# Maximum time in seconds that a request waits if the server is full. An immediate rejection would
# save no work, because handling a rejected request costs as much as a prediction.
PATIENCE = 1.0


class Busy(Exception):
    """Exception for a request that cannot be accepted, because the server is full."""


class Batcher:
    """Dynamic batcher: while the device computes, images are collected for the next batch.

    The number of images in the server is limited. An image counts from the arrival of its bytes
    until its response is sent.

    Args:
      most: maximum number of images in the server.
      most_pixels: maximum total number of pixels of the images in the server.

    Attributes:
      waiting: number of images that are now in the server.
    """

    def __init__(self, engine: Engine, most: int, most_pixels: int, metrics: Metrics):
        self._engine, self._metrics = engine, metrics
        self._most, self._most_pixels = most, most_pixels
        self._first, self._freed = asyncio.Lock(), asyncio.Event()
        self._pixels = 0
        # The pool has a single thread, so that computations run one at a time, in their order.
        self._device = ThreadPoolExecutor(1, "device")
        self._queue: asyncio.Queue[tuple[Any, np.ndarray | None, asyncio.Future]] = asyncio.Queue()
        self.waiting = 0
        metrics.waiting.set_function(lambda: self.waiting)

    @contextlib.asynccontextmanager
    async def places(self, images: int, pixels: int) -> AsyncIterator[None]:
        """Counts a request's images among the images in the server, while the context is open.

        If there would be too many images in the server, the request waits before the context is
        opened. Requests wait in the order of their arrival.

        Args:
          images: number of images in the request.
          pixels: total number of their pixels.

        Raises:
          Busy: after `PATIENCE` seconds there are still too many images in the server.
        """
        try:
            async with asyncio.timeout(PATIENCE), self._first:
                most, most_pixels = self._most - images, self._most_pixels - pixels
                while self.waiting > most or self._pixels > most_pixels:
                    self._freed.clear()
                    await self._freed.wait()
                self.waiting, self._pixels = self.waiting + images, self._pixels + pixels
        except TimeoutError:
            raise Busy from None
        try:
            yield
        finally:
            self.waiting, self._pixels = self.waiting - images, self._pixels - pixels
            self._freed.set()

    async def compute(self, image: Any, classes: np.ndarray | None = None) -> Any:
        """Adds an image to the queue, waits until its batch is computed, and returns its result.

        Args:
          image: output of the engine's `decode`.
          classes: embeddings of the class names in the request; None: the server's classes.
        """
        answer = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((image, classes, answer))
        return await answer

    async def on_device(self, function: Callable, *arguments: Any) -> Any:
        """Calls a function in the thread that computes batches, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._device, function, *arguments)

    async def run(self) -> None:
        """Computes queued images until the task is cancelled."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self._engine.sizes[-1] and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            batch = [each for each in batch if not each[-1].cancelled()]
            if batch:
                await self._answer(*zip(*batch, strict=True))

    async def _answer(
        self,
        images: tuple[Any, ...],
        classes: tuple[np.ndarray | None, ...],
        answers: tuple[asyncio.Future, ...],
    ) -> None:
        self._metrics.batch.observe(len(images))
        try:
            found = await self.on_device(self._engine.compute, images, classes)
        # The error may be caused by a bug or a lack of memory. The server continues, because the
        # next batch may succeed.
        except Exception as error:
            for answer in answers:
                if not answer.cancelled():
                    answer.set_exception(error)
            return
        self._metrics.images.inc(len(images))
        for answer, value in zip(answers, found, strict=True):
            if not answer.cancelled():
                answer.set_result(value)
