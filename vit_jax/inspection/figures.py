"""The paper's pictures of a model, drawn (figures 6, 7, 11 and 14)."""

from collections.abc import Sequence

import cv2
import numpy as np
from matplotlib.figure import Figure

TILE = 1.5  # Inches.


def overlay(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The image as bright as it is looked at: uint8 `[height, width, 3]`.

    Args:
      image: uint8 `[height, width, 3]`.
      weights: `[rows, columns]` of patches; the largest is shown as it is.
    """
    height, width = image.shape[:2]
    large = cv2.resize(weights.astype(np.float32), (width, height), interpolation=cv2.INTER_LINEAR)
    share = np.clip(large / max(float(large.max()), 1e-12), 0, 1)[..., None]
    return (image * share).round().astype(np.uint8)


def pairs(left: Sequence[np.ndarray], right: Sequence[np.ndarray], names: Sequence[str]) -> Figure:
    """Images beside what was made of them, a row of each pair."""
    figure = Figure(figsize=(4 * TILE, 2 * TILE * len(left)), layout="constrained")
    grid = figure.subplots(len(left), 2, squeeze=False)
    for row, name, *both in zip(grid, names, left, right, strict=True):
        for axes, image in zip(row, both, strict=True):
            axes.imshow(image)
            axes.set_axis_off()
        row[0].set_title(name, fontsize="x-small", loc="left")
    return figure


def tiles(images: Sequence[np.ndarray], columns: int, titles: Sequence[str] = (), **show) -> Figure:
    """Images of one size in rows.

    Args:
      **show: of `imshow`.
    """
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(TILE * columns, TILE * rows * (1.15 if titles else 1)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for number, (axes, image) in enumerate(zip(grid, images, strict=False)):
        axes.imshow(image, **show)
        if titles:
            axes.set_title(titles[number], fontsize="x-small")
    return figure


def similarity_tiles(similarity: np.ndarray) -> Figure:
    """A tile for each patch, of its similarity to all others (figure 7, centre)."""
    rows, columns = similarity.shape[:2]
    figure = Figure(figsize=(6, 6 * rows / columns + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for row in range(rows):
        for column in range(columns):
            shown = grid[row, column].imshow(similarity[row, column], vmin=-1, vmax=1)
            grid[row, column].set(xticks=[], yticks=[])
    for row in range(rows):
        grid[row, 0].set_ylabel(str(row + 1), fontsize="x-small")
    for column in range(columns):
        grid[-1, column].set_xlabel(str(column + 1), fontsize="x-small")
    figure.colorbar(shown, ax=grid, shrink=0.6, label="cosine similarity")
    figure.supxlabel("input patch column")
    figure.supylabel("input patch row")
    return figure


def distance_dots(distances: np.ndarray) -> Figure:
    """Mean attention distance of each head over the layers (figure 7, right)."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for head, values in enumerate(distances.T):
        axes.plot(np.arange(1, len(values) + 1), values, "o", markersize=4, label=f"head {head + 1}")
    axes.set(xlabel="layer", ylabel="mean attention distance, pixels")
    axes.set(xlim=(0.5, len(distances) + 0.5), ylim=(0, max(1.1 * float(distances.max()), 1)))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if distances.shape[1] <= 6:
        axes.legend(frameon=False, fontsize="small")
    return figure
