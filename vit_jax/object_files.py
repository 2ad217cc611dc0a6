"""Writes predicted objects of images as a COCO file, overlays, and a page with the overlays."""

import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vit_jax.data.decode import decode
from vit_jax.data.fields import Boxes
from vit_jax.data.image_files import ImageFiles
from vit_jax.data.map_files import run_lengths
from vit_jax.errors import as_text
from vit_jax.inspection.html_page import render, write_text
from vit_jax.inspection.page_images import image_address
from vit_jax.mask_files import MOST_SHOWN, OVERLAYS, PAGE, predicted, remove_earlier, save_image
from vit_jax.models.dense.detector import Detections, Detector
from vit_jax.models.dense.palette import class_legend, object_colour

OBJECTS = "objects.json"


def write_objects(
    folder: Path,
    detector: Detector,
    images: ImageFiles,
    threshold: float,
    log: Callable[[str], None],
    report: Callable[[str, str], None],
) -> int:
    """Writes the objects of images, overlays and a page; returns the number of images read.

    `objects.json` has COCO's format: `images`, `annotations` with a `score`, and `categories`.
    Masks are run-length encoded.

    Args:
      folder: folder into which `objects.json`, `overlays/` and `index.html` are written.
      report: callback that receives the path of each image and a description of its objects.

    Raises:
      UserError: no image can be read.
    """
    rows: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": []}
    figures, written = [], []
    overwrites = (folder / OBJECTS).is_file()
    stream = functools.partial(detector.stream, threshold=threshold)
    for index, name, objects in predicted(stream, images, log):
        image = decode(images[index].image)
        height, width = image.shape[:2]
        number = len(rows["images"])
        path = as_text(images.path(index))
        rows["images"].append(dict(id=number, file_name=path, height=height, width=width))
        # Ids start at 1, because in ground truth pycocotools interprets the id 0 as "not found".
        rows["annotations"] += annotations(objects, number, len(rows["annotations"]) + 1)
        drawn = overlay(image, objects, detector.class_names)
        written.append(name)
        save_image(drawn, folder / OVERLAYS / f"{name}.jpg")
        words = in_words(objects, detector.class_names)
        report(images.describe(index), words)
        if len(figures) < MOST_SHOWN:
            pictures = [image_address(np.asarray(drawn))]
            figures.append(dict(name=images.describe(index), pictures=pictures, caption=words))
    if overwrites:
        remove_earlier(folder, written, {OVERLAYS: ".jpg"})
    categories = [dict(id=label, name=name) for label, name in enumerate(detector.class_names)]
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / OBJECTS, json.dumps(rows | {"categories": categories}))
    count = len(written)
    note = f"Objects with a score of {threshold:g} or more."
    if count > MOST_SHOWN:
        note += f" The first {MOST_SHOWN} images; the others are in {OVERLAYS}."
    labels = range(len(detector.class_names))
    legend = class_legend(labels, detector.class_names, background=False)
    segments = dict(figures=figures, legend=legend, note=note)
    page = render("masks.html", title=f"Objects in {count:,} images", segments=segments)
    write_text(folder / PAGE, page)
    return count


def annotations(objects: Detections, image: int, first: int) -> list[dict[str, Any]]:
    """Converts objects to annotations of a COCO file, with ids that start at `first`."""
    rows = []
    for place, (corners, label, score) in enumerate(zip(*objects[:3], strict=True)):
        left, top, right, bottom = corners.tolist()
        box = [left, top, right - left, bottom - top]
        row = dict(image_id=image, category_id=int(label), bbox=box, iscrowd=0)
        row |= dict(id=first + place, area=box[2] * box[3], score=float(score))
        if objects.masks is not None:
            mask = objects.masks[place]
            row |= dict(area=int(mask.sum()), segmentation=run_lengths(mask))
        rows.append(row)
    return rows


def overlay(
    image: np.ndarray, objects: Detections | Boxes, class_names: Sequence[str]
) -> Image.Image:
    """Draws objects (masks, boxes, classes, scores) over a uint8 `[height, width, 3]` image."""
    if objects.masks is not None:
        for mask, label in zip(objects.masks[::-1], objects.labels[::-1], strict=True):
            colour = object_colour(int(label))
            image = np.where(mask[..., None], (image + colour.astype(np.uint16)) // 2, image)
        image = image.astype(np.uint8)
    drawn = Image.fromarray(image)
    pen, width = ImageDraw.Draw(drawn), max(1, round(min(drawn.size) / 200))
    font = ImageFont.load_default(max(10, min(drawn.size) / 28))
    for corners, label, more in zip(
        objects.corners, objects.labels, _remarks(objects), strict=True
    ):
        colour = tuple(object_colour(int(label)).tolist())
        left, top, right, bottom = corners.tolist()
        pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), None, colour, width)
        words, place = f"{class_names[label]}{more}", (left + width + 1, top + width)
        pen.rectangle(pen.textbbox(place, words, font), fill=colour)
        pen.text(place, words, "white" if sum(colour) < 384 else "black", font)
    return drawn


def _remarks(objects: Detections | Boxes) -> list[str]:
    """Returns the text after an object's class: its score, `, crowd` for a crowd, or empty."""
    if isinstance(objects, Detections):
        return [f" {score:.0%}" for score in objects.scores.tolist()]
    crowd = [False] * len(objects.labels) if objects.crowd is None else objects.crowd.tolist()
    return [", crowd" if each else "" for each in crowd]


def in_words(objects: Detections, class_names: Sequence[str]) -> str:
    """Returns a text with the number of objects of each class, the most frequent class first."""
    counts = Counter(as_text(str(class_names[label])) for label in objects.labels.tolist())
    return "  ".join(f"{count} {name}" for name, count in counts.most_common()) or "no object"
