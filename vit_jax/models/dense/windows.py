"""Sliding windows: pixel-wise prediction for images of any size, by a model with one input size.

The result equals mmsegmentation's slide inference: the scores of each window are bilinearly resized
to the window's pixels, averaged where windows overlap, and bilinearly resized to the original
image. These three steps are linear, and each step treats rows and columns separately. Therefore one
matrix for the rows and one matrix for the columns map the scores of all windows to the pixels of
the original image. The scores of all pixels are never in memory together.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# Maximum length of the resized image's long side, as a multiple of the window's side. A longer side
# is shrunk to this length, although the aspect ratio then changes.
LONGEST = 16
TILE = 128  # Scores are computed for squares of 128x128 pixels at a time.


def bilinear(values: np.ndarray, size: int) -> np.ndarray:
    """Resizes axis 0 of an array to length `size`, by linear interpolation without antialiasing.

    The result equals PyTorch's `interpolate` with `align_corners=False` along this axis.
    """
    places = (np.arange(size) + 0.5) * len(values) / size - 0.5
    places = places.clip(0, len(values) - 1)
    first = np.floor(places).astype(np.int64)
    share = (places - first).astype(values.dtype).reshape(-1, *[1] * (values.ndim - 1))
    following = np.minimum(first + 1, len(values) - 1)
    return values[first] * (1 - share) + values[following] * share


class Axis(NamedTuple):
    """The windows along one side of an image: its height or its width.

    Attributes:
      original: length of this side of the original image in pixels.
      resized: length of this side of the resized image, from which the windows are cut.
      window: length of this side of a window in pixels.
      starts: first pixel of each window.
    """

    original: int
    resized: int
    window: int
    starts: tuple[int, ...]

    def weights(self, places: int, blended: bool = False) -> np.ndarray:
        """Returns the matrix that maps the scores of all windows to pixels of the original image.

        Args:
          places: number of positions of a window's score map along this side of the image.
          blended: True: where windows overlap, scores near the border of a window have a smaller
            weight than scores in its middle, so that the border is not visible in the result.
            False: equal weights.

        Returns:
          The matrix, float32 `[original, windows * places]`.
        """
        inside = bilinear(np.eye(places, dtype=np.float32), self.window)
        share = np.ones((self.window, 1), np.float32)
        if blended:
            pixels = np.arange(1, self.window + 1, dtype=np.float32)
            share = np.minimum(pixels, pixels[::-1])[:, None]
        weights = np.zeros((self.resized, len(self.starts), places), np.float32)
        count = np.zeros((self.resized, 1, 1), np.float32)
        for index, start in enumerate(self.starts):
            weights[start : start + self.window, index] = inside * share
            count[start : start + self.window] += share[:, None]
        return bilinear((weights / count).reshape(self.resized, -1), self.original)


class Windows(NamedTuple):
    """All windows of an image: each position along the height with each position along the width.

    Attributes:
      rows, columns: the windows along the height and along the width.
    """

    rows: Axis
    columns: Axis

    @property
    def resized(self) -> tuple[int, int]:
        """Height and width of the image that the windows are cut from."""
        return self.rows.resized, self.columns.resized

    @property
    def count(self) -> int:
        """Number of windows."""
        return len(self.rows.starts) * len(self.columns.starts)

    def cut(self, image: np.ndarray) -> list[np.ndarray]:
        """Cuts the resized image into windows, in raster order.

        Args:
          image: the resized image, `[height, width, channels]`, with the height and width
            `resized`.

        Returns:
          A list of arrays `[height, width, channels]` with the height and width of a window.
        """
        return [
            image[top : top + self.rows.window, left : left + self.columns.window]
            for top in self.rows.starts
            for left in self.columns.starts
        ]

    def class_map(self, scores: np.ndarray) -> np.ndarray:
        """Returns the class with the highest score at each pixel of the original image.

        Args:
          scores: float32 `[windows, rows, columns, classes]`, in the order of `cut`.

        Returns:
          `[height, width]`, uint8, or uint16 for more than 255 classes.
        """
        dtype = np.uint8 if scores.shape[-1] <= 255 else np.uint16
        return self._merged(scores, dtype, lambda tile: tile.argmax(axis=-1))

    def value_map(self, values: np.ndarray) -> np.ndarray:
        """Returns the predicted value, such as depth, of each pixel of the original image.

        Windows are blended where they overlap. The result is float32 `[height, width]`.

        Args:
          values: float32 `[windows, rows, columns, 1]`, in the order of `cut`.
        """
        return self._merged(values, np.float32, lambda tile: tile[..., 0], blended=True)

    def _merged(
        self,
        scores: np.ndarray,
        dtype: type,
        finish: Callable[[np.ndarray], np.ndarray],
        blended: bool = False,
    ) -> np.ndarray:
        """Merges the scores of all windows to a map of the original image.

        Args:
          scores: float32 `[windows, rows, columns, classes]`, in the order of `cut`.
          finish: called with the scores of pixels, `[..., classes]`; returns the values of the map,
            such as the class with the highest score.
          blended: True: where windows overlap, scores near the border of a window have a smaller
            weight than scores in its middle. False: equal weights.
        """
        _, rows, columns, classes = scores.shape
        across = len(self.columns.starts)
        scores = scores.reshape(-1, across, rows, columns, classes).transpose(0, 2, 1, 3, 4)
        places = scores.reshape(-1, across * columns, classes)
        of_rows = self.rows.weights(rows, blended)
        of_columns = self.columns.weights(columns, blended)
        result = np.empty((self.rows.original, self.columns.original), dtype)
        for top in range(0, len(result), TILE):
            row_weights, used_rows = _used(of_rows[top : top + TILE])
            strip = np.tensordot(row_weights, places[used_rows], axes=1)
            for left in range(0, result.shape[1], TILE):
                column_weights, used_columns = _used(of_columns[left : left + TILE])
                tile = np.matmul(column_weights, strip[:, used_columns])
                result[top : top + TILE, left : left + TILE] = finish(tile)
        return result


def _used(weights: np.ndarray) -> tuple[np.ndarray, slice]:
    """Removes the zero columns at both ends of a matrix.

    Returns the rest of the matrix, and the slice of its columns.
    """
    columns = np.flatnonzero(weights.any(axis=0))
    used = slice(columns[0], columns[-1] + 1)
    return weights[:, used], used


def sliding(sides: tuple[int, int], window: tuple[int, int]) -> Windows:
    """Returns overlapping windows that cover an image, with a stride of two thirds of a window.

    Before windows are cut, the image is resized to the smallest size that covers one window. For
    square windows the image's short side then equals the window's side. The stride is DINOv3's (341
    of 512 pixels). The last window ends at the end of the image. `sides` and `window` are height
    and width in pixels, of the original image and of a window.
    """
    factor = max(length / side for side, length in zip(sides, window, strict=True))
    axes = []
    for side, length in zip(sides, window, strict=True):
        resized = min(max(length, round(side * factor)), LONGEST * length)
        stride = max(1, 2 * length // 3)
        starts = (*range(0, resized - length, stride), resized - length)
        axes.append(Axis(side, resized, length, starts))
    return Windows(*axes)


def whole(sides: tuple[int, int], window: tuple[int, int]) -> Windows:
    """Returns one window that contains the whole image, resized without keeping its aspect ratio.

    `sides` and `window` are height and width in pixels, of the original image and of the window.
    """
    rows, columns = (
        Axis(side, length, length, (0,)) for side, length in zip(sides, window, strict=True)
    )
    return Windows(rows, columns)
