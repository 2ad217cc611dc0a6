"""Placements: positions of crops in the original image, for cropping masks and boxes."""

from typing import NamedTuple

import numpy as np

from vit_jax.data.decode import Box
from vit_jax.errors import UserError


class Placement(NamedTuple):
    """The rectangle of an image that a crop shows, and the size of this rectangle in the crop."""

    box: Box  # Rectangle of the original image, in pixels; its edges need not be whole numbers.
    # Height and width of the rectangle after the resize, in pixels of the crop. The rectangle is at
    # the top left of the crop.
    shown: tuple[int, int]
    # Height and width of the crop. The part outside of the rectangle is padding.
    size: tuple[int, int]
    image: tuple[int, int]  # Height and width of the original image.

    def place_map(self, values: np.ndarray, fill: float, out: np.ndarray) -> np.ndarray:
        """Writes the crop of a map into `out`, with nearest-neighbour interpolation.

        Args:
          values: map of the original image, `[height, width, ...]`.
          out: array for the map of the crop, `[height, width, ...]`.

        Raises:
          UserError: map and image differ in size.
        """
        if values.shape[:2] != self.image:
            (height, width), (rows, columns) = self.image, values.shape[:2]
            raise UserError(
                f"the image has {width}x{height} pixels, and its mask or depth map {columns}x{rows}"
                ": save both at one size, and images upright, without an EXIF rotation"
            )
        rows, columns = (
            np.floor(start + (np.arange(shown) + 0.5) * (end - start) / shown).astype(np.int64)
            for start, end, shown in (
                (self.box.top, self.box.bottom, self.shown[0]),
                (self.box.left, self.box.right, self.shown[1]),
            )
        )
        rows, columns = rows.clip(0, len(values) - 1), columns.clip(0, values.shape[1] - 1)
        height, width = self.shown
        out[height:], out[:height, width:] = fill, fill
        out[:height, :width] = values[rows[:, None], columns]
        return out

    def place_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """Converts boxes to pixels of the crop, and clips them; returns float32 `[boxes, 4]`.

        Args:
          boxes: left, top, right and bottom in pixels of the original image, `[boxes, 4]`.
        """
        (height, width), box = self.shown, self.box
        scale = np.array([width / (box.right - box.left), height / (box.bottom - box.top)])
        corners = np.asarray(boxes, np.float64).reshape(-1, 2, 2) - [box.left, box.top]
        return (corners * scale).clip(0, [width, height]).reshape(-1, 4).astype(np.float32)
