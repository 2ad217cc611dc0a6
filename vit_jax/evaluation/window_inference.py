"""Dense prediction for images of any size: windows of a fixed size, which are merged to a map.

A map contains the class or the depth of each pixel.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from vit_jax.data.decode import Box, Unreadable, open_image
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.base import Source
from vit_jax.models.dense.depth_model import DepthModel
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.models.dense.windows import Windows, sliding, whole
from vit_jax.models.layers import placing
from vit_jax.models.pixels import in_channels
from vit_jax.parallel.mesh import place, replicated, split_batch, whole_batch
from vit_jax.parallel.sharding import parameter_shardings, place_activation

WINDOWS = 8  # Number of windows in one call of the model, on all devices together.


class _Image(NamedTuple):
    """An image in progress: the positions of its windows, and the scores of completed windows."""

    windows: Windows
    scores: list[np.ndarray]


def in_windows(
    image: bytes | np.ndarray,
    crop: TestCrop,
    size: tuple[int, int],
    windows_of: Callable[[tuple[int, int], tuple[int, int]], Windows] = sliding,
) -> tuple[Windows, np.ndarray]:
    """Resizes an image and determines the positions of its windows.

    Args:
      image: content of an encoded file, or pixels, uint8 `[height, width, 3]`.
      crop: the evaluation transform, which defines how images are decoded and resized.
      size: height and width of a window in pixels.
      windows_of: function from the image's size and the window's size to the windows. Either
        `sliding` or `whole` of `vit_jax.models.dense.windows`.

    Returns:
      The windows, and the resized image, uint8 `[height, width, 3]`.

    Raises:
      Unreadable: the image is damaged.
    """
    opened = open_image(image, crop.mode, crop.background)
    windows = windows_of((opened.height, opened.width), size)
    resized = np.empty((*windows.resized, 3), np.uint8)
    opened.crop(Box(0, 0, opened.width, opened.height), resized, crop.interpolation)
    return windows, resized


class WindowInference:
    """Computes maps (class or depth of each pixel) of images of any size.

    The model is compiled once, for a fixed size and number of windows.

    Args:
      mesh: mesh of devices of a single process.
      squeezed: True: each image is resized to a single window. False: sliding windows.
      merge: function from the outputs of an image's windows to the image's map.
    """

    def __init__(
        self,
        segmenter: Segmenter | DepthModel,
        mesh: Mesh,
        crop: TestCrop,
        squeezed: bool = False,
        merge: Callable[[Windows, np.ndarray], np.ndarray] = Windows.class_map,
    ):
        graphdef, params = nnx.split(segmenter)
        self._shardings = parameter_shardings(mesh, nnx.to_pure_dict(params))
        self._sharding, self._batch_size = split_batch(mesh), whole_batch(mesh, WINDOWS)
        self._crop, self._windows = crop, whole if squeezed else sliding
        self._size, self._merge = segmenter.image_size, merge

        def scores(params: dict, images: jax.Array) -> jax.Array:
            with placing(partial(place_activation, mesh), mesh.devices.flat[0].platform):
                merged = nnx.merge(graphdef, params)
                return merged(in_channels(images, merged.channels))

        self._scores = jax.jit(
            scores, in_shardings=(self._shardings, self._sharding), out_shardings=replicated(mesh)
        )

    def __call__(
        self,
        segmenter: Segmenter | DepthModel,
        source: Source,
        on_unreadable: Callable[[int, Unreadable | OSError], None],
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the index and the map of each readable image, in the order of the source."""
        params = nnx.to_pure_dict(nnx.state(segmenter))
        params = jax.tree.map(place, params, self._shardings)
        started: deque[tuple[int, _Image]] = deque()

        def cut() -> Iterator[np.ndarray]:
            for index in range(len(source)):
                try:
                    image = source[index].image
                    windows, resized = in_windows(image, self._crop, self._size, self._windows)
                except (Unreadable, OSError) as error:
                    on_unreadable(index, error)
                    continue
                started.append((index, _Image(windows, [])))
                yield from windows.cut(resized)

        waiting = cut()
        while batch := list(islice(waiting, self._batch_size)):
            for scores in self._scores_of(params, batch):
                # Windows are in the order of the images. The output of a window thus belongs to
                # the first image with missing outputs.
                index, image = next(x for x in started if len(x[1].scores) < x[1].windows.count)
                image.scores.append(scores)
            while started and len(started[0][1].scores) == started[0][1].windows.count:
                index, image = started.popleft()
                yield index, self._merge(image.windows, np.stack(image.scores))

    def _scores_of(self, params: dict, batch: list[np.ndarray]) -> np.ndarray:
        """Returns the model's outputs for a batch of windows, `[len(batch), ...]`."""
        padding = [np.zeros_like(batch[0])] * (self._batch_size - len(batch))
        images = jax.device_put(np.stack([*batch, *padding]), self._sharding)
        return jax.device_get(self._scores(params, images))[: len(batch)]
