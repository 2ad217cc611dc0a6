"""Arranges all attention maps of an image as tiles of one picture (a sheet), for an HTML page."""

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np

from vit_jax.inspection.page_images import levels

# Maximum number of pixels of all maps on a page. A pixel takes about one byte, and a third more in
# base64.
MOST_PIXELS = 10_000_000
MOST_SIDE = 64  # Maximum side of a map, in patches; larger maps are averaged.


class LayerMaps(NamedTuple):
    """Attention maps of a layer."""

    number: int  # Number of the layer, from 1.
    heads: np.ndarray  # Attention map of each head, `[images, heads, rows, columns]`.
    # Attention rollout up to this layer, `[images, rows, columns]`; None: undefined.
    rollout: np.ndarray | None = None


class SheetRow(NamedTuple):
    """Layout of a layer's tiles on a sheet.

    A layer has a tile for each head, a tile for the mean of the heads and, if it is defined, a tile
    for attention rollout.

    Attributes:
      number: number of the layer, from 1.
      heads: number of heads.
      rows, columns: size of a tile in pixels.
      top: vertical position of the tiles' upper edge in `MapSheets.pixels`, in pixels.
      first: index of the layer's first tile in `MapSheets.peaks`.
    """

    number: int
    heads: int
    rows: int
    columns: int
    top: int
    first: int


class MapSheets(NamedTuple):
    """The sheets of all images."""

    rows: list[SheetRow]  # Layout of the layers, from top to bottom.
    # The sheets, uint8 `[images, height, width]`. A pixel shows a patch, or several patches of a
    # map with more than `MOST_SIDE` rows or columns. In each tile, the pixel of the patch with the
    # largest attention is 255 (`page_images.levels`).
    pixels: np.ndarray
    # Maximum divided by the mean of each tile's attention map, `[images, tiles]`.
    peaks: np.ndarray
    rollout: bool  # True if the last tile of each row shows attention rollout.

    def last_map(self, image: int) -> np.ndarray:
        """Returns the pixels of an image's last tile.

        The last tile shows attention rollout or, if rollout is undefined, the mean of the heads.
        """
        row = self.rows[-1]
        left = (self.peaks.shape[1] - row.first - 1) * row.columns
        return self.pixels[image, row.top :, left : left + row.columns]


def map_sheets(layers: Sequence[LayerMaps]) -> MapSheets:
    """Arranges the maps of each image as tiles, with a row for each layer.

    If all maps together have more than `MOST_PIXELS` pixels, only every second (or third, ...)
    layer is used. The last layer is always used.
    """
    every = 1
    while every < len(layers) and sum(map(_count_pixels, _thinned(layers, every))) > MOST_PIXELS:
        every += 1
    rows, bands, peaks, top, first = [], [], [], 0, 0
    for layer in _thinned(layers, every):
        tiles = _tiles(layer)
        images, count, height, width = tiles.shape
        rows.append(SheetRow(layer.number, layer.heads.shape[1], height, width, top, first))
        bands.append(levels(tiles).transpose(0, 2, 1, 3).reshape(images, height, count * width))
        peaks.append(tiles.max(axis=(2, 3)) / np.maximum(tiles.mean(axis=(2, 3)), 1e-12))
        top, first = top + height, first + count
    widest = max(band.shape[2] for band in bands)
    bands = [np.pad(band, ((0, 0), (0, 0), (0, widest - band.shape[2]))) for band in bands]
    rollout = layers[-1].rollout is not None
    return MapSheets(rows, np.concatenate(bands, axis=1), np.concatenate(peaks, axis=1), rollout)


def _thinned(layers: Sequence[LayerMaps], every: int) -> Sequence[LayerMaps]:
    return layers[(len(layers) - 1) % every :: every]


def _count_pixels(layer: LayerMaps) -> int:
    images, heads, rows, columns = layer.heads.shape
    return images * (heads + 2) * min(rows, MOST_SIDE) * min(columns, MOST_SIDE)


def _tiles(layer: LayerMaps) -> np.ndarray:
    """Returns the maps of a layer's heads, their mean and any rollout, `[images, tiles, ...]`."""
    maps = [layer.heads, layer.heads.mean(axis=1, keepdims=True)]
    if layer.rollout is not None:
        maps.append(layer.rollout[:, None])
    tiles = np.nan_to_num(np.concatenate(maps, axis=1, dtype=np.float32), posinf=0, neginf=0)
    *shape, rows, columns = tiles.shape
    if max(rows, columns) <= MOST_SIDE:
        return tiles
    side = (min(columns, MOST_SIDE), min(rows, MOST_SIDE))
    flat = tiles.reshape(-1, rows, columns)
    small = [cv2.resize(tile, side, interpolation=cv2.INTER_AREA) for tile in flat]
    return np.stack(small).reshape(*shape, *side[::-1])
