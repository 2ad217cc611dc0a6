"""Draws images with an overlay of the classes predicted by segmentation runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import vit_jax
from vit_jax.inspection.class_maps import overlay
from vit_jax.inspection.figures import tiles


def draw_predictions(images: Sequence[np.ndarray], runs: Mapping[str, Path]) -> Figure:
    """Draws a row for each image: the image, and for each run the image with predicted classes.

    Args:
      images: uint8 `[height, width, 3]`, all of the same size.
      runs: workdirs of segmentation runs, by title.
    """
    columns = {"image": images}
    for title, workdir in runs.items():
        masks = vit_jax.load_segmenter(workdir, log=lambda line: None).predict(images)
        columns[title] = [overlay(*pair) for pair in zip(images, masks, strict=True)]
    rows = [image for row in zip(*columns.values(), strict=True) for image in row]
    return tiles(rows, len(columns), [*columns] + [""] * (len(rows) - len(columns)))
