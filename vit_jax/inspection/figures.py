"""Figures of a model, as in the ViT paper (figures 6, 7, 10, 11 and 14)."""

from collections.abc import Mapping, Sequence

import cv2
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

TILE, TITLE = 1.5, 0.2  # Longer side of a tile, and height of its title, in inches.
HEAT = 0.55  # Opacity of a heat map's colours over an image.


def overlay(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Darkens an image where the attention to its patches is low, as in the ViT paper.

    Args:
      image: uint8 `[height, width, 3]`.
      weights: attention to each patch, `[rows, columns]`. The brightness of a patch is multiplied
        by its attention divided by the largest attention.

    Returns:
      uint8 `[height, width, 3]`.
    """
    return (image * _shares(image, weights)[..., None]).round().astype(np.uint8)


def heat_map(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Draws attention as colours over an image; the colours are also visible on dark images.

    Args:
      image: uint8 `[height, width, 3]`.
      weights: attention to each patch, `[rows, columns]`. The largest value has the brightest
        colour, and 0 has the darkest colour.

    Returns:
      uint8 `[height, width, 3]`.
    """
    levels = (255 * _shares(image, weights)).round().astype(np.uint8)
    heat = cv2.applyColorMap(levels, cv2.COLORMAP_INFERNO)[..., ::-1]
    return ((1 - HEAT) * image + HEAT * heat).round().astype(np.uint8)


def _shares(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Resizes patch weights to the image's size, and divides them by the largest weight.

    The result is float32 `[height, width]`, from 0 to 1.
    """
    height, width = image.shape[:2]
    large = cv2.resize(weights.astype(np.float32), (width, height), interpolation=cv2.INTER_LINEAR)
    return np.clip(large / max(float(large.max()), 1e-12), 0, 1)


def pairs(left: Sequence[np.ndarray], right: Sequence[np.ndarray], names: Sequence[str]) -> Figure:
    """Returns a figure with a row for each pair: an image of `left` and one of `right`."""
    width, height = _tile(left[0], 2 * TILE)
    figure = Figure(figsize=(2 * width, (height + TITLE) * len(left)), layout="constrained")
    grid = figure.subplots(len(left), 2, squeeze=False)
    for row, name, *both in zip(grid, names, left, right, strict=True):
        for axes, image in zip(row, both, strict=True):
            axes.imshow(image)
            axes.set_axis_off()
        row[0].set_title(name, fontsize="x-small", loc="left")
    return figure


def tiles(images: Sequence[np.ndarray], columns: int, titles: Sequence[str] = (), **show) -> Figure:
    """Returns a figure of images of the same size, in rows. `show` are arguments of `imshow`."""
    columns = min(columns, len(images))
    rows, (width, height) = -(-len(images) // columns), _tile(images[0], TILE)
    height += TITLE if titles else 0
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for number, (axes, image) in enumerate(zip(grid, images, strict=False)):
        axes.imshow(image, **show)
        if titles:
            axes.set_title(titles[number], fontsize="x-small")
    return figure


def _tile(image: np.ndarray, side: float) -> tuple[float, float]:
    """Returns width and height for drawing an image such that its longer side is `side`."""
    height, width = image.shape[:2]
    return side * width / max(height, width), side * height / max(height, width)


def mosaic(tiles: np.ndarray, gap: int = 1, fill: float = np.nan) -> np.ndarray:
    """Combines tiles `[rows, columns, height, width, ...]` to one image, `gap` pixels apart.

    The pixels between the tiles have the value `fill`. One image is fast to draw; a figure with
    hundreds of axes would take a minute.
    """
    rows, columns, height, width, *channels = tiles.shape
    widths = [(0, 0), (0, 0), (0, gap), (0, gap)] + [(0, 0)] * len(channels)
    padded = np.pad(tiles, widths, constant_values=fill)
    shown = padded.swapaxes(1, 2).reshape(rows * (height + gap), columns * (width + gap), *channels)
    return shown[:-gap, :-gap]


def similarity_tiles(similarity: np.ndarray) -> Figure:
    """Returns a figure with a tile for each patch (ViT paper, figure 7, centre).

    A tile shows the similarity of its patch's position embedding to all position embeddings.
    """
    rows, columns = similarity.shape[:2]
    width, height = 5 * columns / max(rows, columns), 5 * rows / max(rows, columns)
    figure = Figure(figsize=(max(width, 1) + 1.4, max(height, 1) + 0.6), layout="constrained")
    axes = figure.subplots()
    image = draw_similarity(axes, similarity)
    figure.colorbar(image, ax=axes, shrink=0.6, label="cosine similarity")
    return figure


def similarity_panels(similarities: Mapping[str, np.ndarray]) -> Figure:
    """Returns a figure with the `similarity_tiles` of each model (ViT paper, figure 10)."""
    figure = Figure(figsize=(4.6 * len(similarities) + 1, 5), layout="constrained")
    panels = figure.subplots(1, len(similarities), squeeze=False)[0]
    for axes, (name, similarity) in zip(panels, similarities.items(), strict=True):
        image = draw_similarity(axes, similarity)
        axes.set_title(name, fontsize="medium")
    figure.colorbar(image, ax=panels, shrink=0.8, label="cosine similarity")
    return figure


def draw_similarity(axes: Axes, similarity: np.ndarray) -> AxesImage:
    """Draws `similarity_tiles` into `axes`; returns matplotlib's image, to add a colour bar."""
    rows, columns = similarity.shape[:2]
    gap = 1 + max(rows, columns) // 10
    image = axes.imshow(mosaic(similarity, gap), vmin=-1, vmax=1, interpolation="nearest")
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        every = 1 + (count - 1) // 16
        middles = np.arange(0, count, every) * (count + gap) + (count - 1) / 2
        axis.set_ticks(middles, range(1, count + 1, every), fontsize="x-small")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="input patch column", ylabel="input patch row")
    return image


def distance_dots(distances: np.ndarray) -> Figure:
    """Returns a figure of each head's mean attention distance, by layer (ViT paper, figure 7)."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    draw_distances(figure.subplots(), distances)
    return figure


def draw_distances(axes: Axes, distances: np.ndarray) -> None:
    """Draws the dots of `distance_dots` into `axes`."""
    for head, values in enumerate(distances.T):
        label = f"head {head + 1}" if distances.shape[1] <= 6 else None
        axes.plot(np.arange(1, len(values) + 1), values, "o", markersize=4, label=label)
    axes.set(xlabel="layer", ylabel="mean attention distance, pixels")
    axes.set(xlim=(0.5, len(distances) + 0.5), ylim=(0, max(1.1 * float(distances.max()), 1)))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if distances.shape[1] <= 6:
        axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
