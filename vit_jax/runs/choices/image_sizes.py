"""Sizes of the images of a data set, read from the headers of the image files."""

import io

import numpy as np
from PIL import Image

from vit_jax.data.sources.base import Source, spread

SAMPLES = 64


def short_sides(source: Source) -> str:
    """Returns the range of the images' shorter sides, such as "200 to 640 pixels".

    Only a sample of the images is read.
    """
    sides = []
    for index in spread(len(source), min(SAMPLES, len(source))) if len(source) > 1 else [0]:
        image = source[index].image
        if isinstance(image, np.ndarray):
            sides.append(min(image.shape[:2]))
            continue
        try:
            with Image.open(io.BytesIO(image)) as opened:
                sides.append(min(opened.size))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            continue  # Unreadable images are skipped; training will report them.
    if not sides:
        return "unknown"
    low, high = min(sides), max(sides)
    return f"{low} pixels" if low == high else f"{low} to {high} pixels"
