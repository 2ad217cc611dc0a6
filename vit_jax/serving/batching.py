"""Images that wait are computed together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vit_jax.serving.engine import Engine, Look
from vit_jax.serving.metrics import Metrics

PATIENCE = (
    1.0  # Seconds for which a request waits for places: to refuse it costs as much as to answer it.
)


class Busy(Exception):
    """The exception for an image for which there is no place."""


class Batcher:
    """The one that gives images to the device: while it computes, others come together in a batch.

    Args:
      most: images that may have a place, from when their bytes are there until they are answered.
      most_pixels: of these images together.

    Attributes:
      waiting: images that have a place.
    """

    def __init__(self, engine: Engine, most: int, most_pixels: int, metrics: Metrics):
        self._engine, self._most, self._most_pixels, self._metrics = (
            engine,
            most,
            most_pixels,
            metrics,
        )
        self._first, self._freed = asyncio.Lock(), asyncio.Event()
        self._pixels = 0
        self._device = ThreadPoolExecutor(
            1, "device"
        )  # One thing at a time, in the order of coming.
        self._queue: asyncio.Queue[tuple[np.ndarray, asyncio.Future]] = asyncio.Queue()
        self.waiting = 0
        metrics.waiting.set_function(lambda: self.waiting)

    @contextlib.asynccontextmanager
    async def places(self, images: int, pixels: int) -> AsyncIterator[None]:
        """The context in which `images` images have a place; places are given in the order of
        arrival.

        Raises:
          Busy: there was no place for `PATIENCE` seconds.
        """
        try:
            async with asyncio.timeout(PATIENCE), self._first:
                while (
                    self.waiting + images > self._most or self._pixels + pixels > self._most_pixels
                ):
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

    async def classify(self, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities and classes of an image, the likeliest first."""
        answer = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((image, answer))
        return await answer

    async def look(self, image: np.ndarray) -> Look:
        """Computes what else there is to show of an image."""
        return await asyncio.get_running_loop().run_in_executor(
            self._device, self._engine.look, image
        )

    async def run(self) -> None:
        """Computes what comes, until it is cancelled."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self._engine.sizes[-1] and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            batch = [(image, answer) for image, answer in batch if not answer.cancelled()]
            if batch:
                await self._answer(*zip(*batch, strict=True))

    async def _answer(
        self, images: tuple[np.ndarray, ...], answers: tuple[asyncio.Future, ...]
    ) -> None:
        self._metrics.batch.observe(len(images))
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                self._device, self._engine.classify, images
            )
        except (
            Exception
        ) as error:  # A fault of ours, or no memory: the next batch may have more luck.
            for answer in answers:
                if not answer.cancelled():
                    answer.set_exception(error)
            return
        self._metrics.images.inc(len(images))
        for answer, value in zip(answers, found, strict=True):
            if not answer.cancelled():
                answer.set_result(value)
