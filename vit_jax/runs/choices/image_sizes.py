"""Sizes of a data set's images, read from their files' headers, and the image size of a run."""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from vit_jax.data.sources.base import Source, spread

SAMPLES = 64


def short_sides(source: Source) -> str:
    """Returns the range of sampled images' shorter sides, such as "200 to 640 pixels"."""
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


def largest_size(
    largest: int,
    step: int,
    least: int,
    patch: int,
    minutes: float | None,
    fits: Callable[[int], bool],
) -> tuple[int, str]:
    """Returns the largest image size (side in pixels) for the available time, and the reason.

    Args:
      largest: the largest size. The others are `largest - step`, `largest - 2 * step`, and so on.
      step: difference between two sizes in pixels.
      least: the smallest size that is tried. If `largest` is smaller, only `largest` is tried.
      patch: the patch size, for the reason.
      minutes: the available time; None: no limit.
      fits: function that returns True if the time is sufficient for a size.
    """
    sizes = [size for size in range(largest, 0, -step) if size >= least] or [largest]
    size = next((size for size in sizes if minutes is None or fits(size)), sizes[-1])
    reason = f"a multiple of the patch's {patch}"
    return size, reason if size == largest else f"{reason}, the largest in {minutes:g} min"
