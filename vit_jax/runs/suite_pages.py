"""Pages of pictures that evaluation suites write: `zero_shot_pets.html`, `retrieval_pairs.html`."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.decode import Unreadable, decode
from vit_jax.data.fields import MASK
from vit_jax.data.preprocess import sides
from vit_jax.evaluation.suite import Classified, Matched, Outputs, Segmented
from vit_jax.inspection.class_maps import Segments
from vit_jax.inspection.html_page import render, write_text
from vit_jax.runs.answer_sections import answer_figures
from vit_jax.runs.predictions import Predictions, to_show
from vit_jax.runs.retrievals import retrieval_figures, retrievals_of

# Titles by the suite's name.
TITLES = {"zero_shot": "Zero-shot classification of {}", "retrieval": "Retrieval of {}"}
TITLES["segmentation"] = "Segmentation of {}, the lowest mIoU first"


def write_suite_page(folder: Path, outputs: Outputs) -> Path:
    """Writes the page of a data set into a folder; returns its path."""
    values: dict[str, Any] = {"answers": None, "retrievals": None, "segments": None}
    if isinstance(outputs, Segmented):
        values["segments"] = _segments(outputs)
    elif isinstance(outputs, Classified):
        found = Predictions("test", 0, **outputs.answers)
        shown = to_show(found)
        found = found._replace(shown=shown, images=_pixels(outputs, shown))
        values["answers"] = answer_figures(found, outputs.class_names)
    else:
        found = retrievals_of(
            outputs.paired,
            outputs.numbers,
            lambda text: outputs.captions[text],
            lambda numbers: _pixels(outputs, numbers),
            "test",
            0,
        )
        values["retrievals"] = retrieval_figures(found)
    name = re.sub(r"[^\w.-]", "_", outputs.name)
    suite = "segmentation" if isinstance(outputs, Segmented) else outputs.suite
    title = TITLES[suite].format(outputs.name)
    path = folder / f"{suite}_{name}.html"
    return write_text(path, render("suite.html", title=title, **values))


def _segments(outputs: Segmented) -> dict[str, Any]:
    """Returns the values of `segments.html`: each image under its true and its predicted mask."""
    segments = Segments(outputs.class_names)
    for index, iou, predicted in outputs.shown:
        image, mask = decode(outputs.source[index].image), outputs.source.fields_of(index)[MASK]
        caption = f"mIoU {iou:.1%}"
        segments.add(outputs.source.describe(index), image, [mask, predicted], caption)
    return segments.values("image, true and predicted classes")


def suite_pages(folder: Path) -> dict[str, str]:
    """Returns the names of the files of all pages in a folder, by data set and suite."""
    return {
        file.stem.replace("_", " ", suite.count("_") + 1): file.name
        for suite in TITLES
        for file in sorted(folder.glob(f"{suite}_*.html"))
    }


def _pixels(outputs: Classified | Matched, numbers: np.ndarray) -> np.ndarray:
    """Returns images after the evaluation transform; black ones where a file is gone."""
    pixels = np.zeros((len(numbers), *sides(outputs.crop.size), 3), np.uint8)
    for row, number in zip(pixels, numbers.tolist(), strict=True):
        try:
            row[:] = outputs.crop(outputs.source[number].image)
        except (OSError, Unreadable):
            continue
    return pixels
