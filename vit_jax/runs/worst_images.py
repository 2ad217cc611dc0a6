"""Test images with the worst predictions, stored in the workdir for the report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.inspection.html_page import write_text
from vit_jax.inspection.page_images import image_address
from vit_jax.small_files import read_small

WORST_IMAGES = "worst_images.json"
MOST_WORST = 12
SIDE = 480  # Largest side of a picture, in pixels.


class WorstImages(NamedTuple):
    """The images of a split with the worst predictions, the worst first.

    Attributes:
      split: name of the evaluated split.
      step: step of the evaluation.
      metric: name of the metric by which the images are ordered.
      highest: True: images with the highest values are the worst. False: images with the lowest
        values are the worst.
      names: name of each image.
      values: the metric of each image as text.
      pictures: pictures of each image, uint8 `[images, pictures, height, width, 3]`.
      about: description of the pictures.
      legend: HTML colours that the pictures use for labels, such as classes, by label.
    """

    split: str
    step: int
    metric: str
    highest: bool
    names: Sequence[str]
    values: Sequence[str]
    pictures: np.ndarray
    about: str
    legend: dict[str, str]


def keep_worst(workdir: Path, worst: WorstImages) -> None:
    """Writes the worst images to a JSON file in the workdir.

    The file contains the variables of the HTML template `segments.html`.
    """
    end = "highest" if worst.highest else "lowest"
    figures = [
        dict(
            name=name,
            pictures=[image_address(picture, SIDE) for picture in pictures],
            caption=f"{worst.metric} {value}",
        )
        for name, value, pictures in zip(worst.names, worst.values, worst.pictures, strict=True)
    ]
    values = dict(
        title=f"{worst.split.capitalize()} images, the {end} {worst.metric} first",
        note=f"{worst.about}; step {worst.step:,}",
        legend=worst.legend,
        figures=figures,
        card="28rem",
    )
    write_text(workdir / WORST_IMAGES, json.dumps(values))


def kept_worst(workdir: Path) -> dict[str, Any] | None:
    """Reads the worst images from the JSON file in a workdir.

    Returns:
      The variables of the HTML template `segments.html`, as written by `keep_worst`: title, note,
      legend, pictures with captions, and the width of a picture. None if the file does not exist or
      is damaged.
    """
    try:
        values = json.loads(read_small(workdir / WORST_IMAGES))
        return {key: values[key] for key in ("title", "note", "legend", "figures", "card")}
    except (OSError, ValueError, LookupError, TypeError):
        return None
