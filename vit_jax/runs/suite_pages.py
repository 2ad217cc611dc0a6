"""HTML pages with pictures of evaluation suites, such as `zero_shot_pets.html`."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.decode import Unreadable, decode
from vit_jax.data.fields import BOXES, DEPTH, MASK
from vit_jax.data.preprocess import sides
from vit_jax.evaluation.suite import Classified, Detected, Matched, Outputs, Ranged, Segmented
from vit_jax.inspection.class_maps import Segments
from vit_jax.inspection.html_page import render, write_text
from vit_jax.inspection.page_images import image_address
from vit_jax.models.dense.palette import class_legend, coloured_depth, depth_legend
from vit_jax.object_files import overlay
from vit_jax.runs.answer_sections import answer_figures
from vit_jax.runs.predictions import Predictions, to_show
from vit_jax.runs.retrievals import retrieval_figures, retrievals_of

# Titles of the pages by the name of the suite.
TITLES = {"zero_shot": "Zero-shot classification of {}", "retrieval": "Retrieval of {}"}
TITLES["segmentation"] = "Segmentation of {}, the lowest mIoU first"
TITLES["detection"] = "Objects of {}, the lowest F1 first"
TITLES["depth"] = "Depth of {}, the largest RMSE first"


def write_suite_page(folder: Path, outputs: Outputs) -> Path:
    """Writes the page with a suite's pictures for one data set into a folder; returns the path."""
    values: dict[str, Any] = {"answers": None, "retrievals": None, "segments": None}
    if isinstance(outputs, Segmented):
        suite, values["segments"] = "segmentation", _segments(outputs)
    elif isinstance(outputs, Detected):
        suite, values["segments"] = "detection", _objects(outputs)
    elif isinstance(outputs, Ranged):
        suite, values["segments"] = "depth", _depths(outputs)
    elif isinstance(outputs, Classified):
        found = Predictions("test", 0, **outputs.answers)
        shown = to_show(found)
        found = found._replace(shown=shown, images=_pixels(outputs, shown))
        suite = outputs.suite
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
        suite = outputs.suite
        values["retrievals"] = retrieval_figures(found)
    name = re.sub(r"[^\w.-]", "_", outputs.name)
    title = TITLES[suite].format(outputs.name)
    path = folder / f"{suite}_{name}.html"
    return write_text(path, render("suite.html", title=title, **values))


def _segments(outputs: Segmented) -> dict[str, Any]:
    """Returns the variables of `segments.html`: images with true and with predicted masks."""
    segments = Segments(outputs.class_names)
    for index, iou, predicted in outputs.shown:
        image, mask = decode(outputs.source[index].image), outputs.source.fields_of(index)[MASK]
        caption = f"mIoU {iou:.1%}"
        segments.add(outputs.source.describe(index), image, [mask, predicted], caption)
    return segments.values("image, true and predicted classes")


def _objects(outputs: Detected) -> dict[str, Any]:
    """Returns the variables of `segments.html`: images with true and with predicted boxes."""
    figures, labels = [], set()
    for index, matches, found in outputs.shown:
        image, true = decode(outputs.source[index].image), outputs.source.fields_of(index)[BOXES]
        both = true, found
        labels.update(*(each.labels.tolist() for each in both))
        drawn = (np.asarray(overlay(image, each, outputs.class_names)) for each in both)
        figures.append(
            dict(
                name=outputs.source.describe(index),
                pictures=[image_address(each, most_side=640) for each in drawn],
                caption=f"F1 {matches.f1:.1%}: {matches.found} found, {matches.missed} missed, "
                f"{matches.wrong} wrong",
            )
        )
    note = (
        f"true boxes, and predicted ones with a score of {outputs.threshold:g} or more; F1 at an "
        "IoU of 0.5"
    )
    legend = class_legend(sorted(labels), outputs.class_names, background=False)
    return dict(figures=figures, legend=legend, note=note, card="28rem")


def _depths(outputs: Ranged) -> dict[str, Any]:
    """Returns the variables of `segments.html`: images with true and predicted depths.

    The colour scale spans the image's true depths. Pixels of unknown true depth are black.
    """
    figures, (nearest, farthest) = [], outputs.range
    for index, rmse, predicted in outputs.shown:
        image, true = decode(outputs.source[index].image), outputs.source.fields_of(index)[DEPTH]
        known = (true > nearest) & (true < farthest)
        ends = true[known].min(), true[known].max()
        colours = [np.asarray(coloured_depth(x, *ends)).astype(np.uint8) for x in (true, predicted)]
        colours[0] *= known[..., None]
        figures.append(
            dict(
                name=outputs.source.describe(index),
                pictures=[*map(image_address, (image, *colours))],
                caption=f"RMSE {rmse:.3f} m, from {ends[0]:.2f} to {ends[1]:.2f} m",
            )
        )
    return dict(figures=figures, legend=depth_legend(), note="image, true and predicted depth")


def suite_pages(folder: Path) -> dict[str, str]:
    """Returns the file names of all suite pages in a folder, by data set and suite."""
    return {
        file.stem.replace("_", " ", suite.count("_") + 1): file.name
        for suite in TITLES
        for file in sorted(folder.glob(f"{suite}_*.html"))
    }


def _pixels(outputs: Classified | Matched, numbers: np.ndarray) -> np.ndarray:
    """Returns images after the evaluation transform. A missing file results in a black image."""
    pixels = np.zeros((len(numbers), *sides(outputs.crop.size), 3), np.uint8)
    for row, number in zip(pixels, numbers.tolist(), strict=True):
        try:
            row[:] = outputs.crop(outputs.source[number].image)
        except (OSError, Unreadable):
            continue
    return pixels
