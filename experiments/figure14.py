"""Attention rollout on many images: python -m vit_jax.experiment figure14 --out=DIR.

It uses the runs of figure 6 and shows the first test images; they were not selected.
"""

import numpy as np
from matplotlib.figure import Figure

from vit_jax.inspection.figures import mosaic, overlay
from vit_jax.ledger.looking import of_models, on_objects, seen_in
from vit_jax.ledger.tables import markdown_table

COLUMNS = 8


def read(study):
    """Counts the images on which rollout attends to the object.

    These are the images for which the share of rollout on the labelled object is larger than the
    object's share of the area.

    Returns:
      For each model the number of all images, and of these images (None if objects are unknown).
    """
    counts = {}
    for name, seen in seen_in(study).items():
        found = on_objects(seen)
        more = found and sum(map(float.__gt__, found["weight"], found["share"]))
        counts[name] = {"images": len(seen.images), "more": more}
    return counts


def table(figures):
    """Returns a table of the numbers of images."""
    lines = [[name, found["images"], found["more"]] for name, found in figures.items()]
    return markdown_table(("", "images", "of which the object is seen more than its share"), lines)


def draw(study, figures):
    """Draws each image next to the first model's rollout."""
    seen = next(iter(seen_in(study).values()))
    pairs = map(
        lambda *pair: np.concatenate([pair[0], overlay(*pair)], axis=1), seen.images, seen.rollout
    )
    columns = min(COLUMNS, len(seen.images))
    shown = np.stack([*pairs])[: len(seen.images) // columns * columns]
    height, width = shown.shape[1:3]
    figure = Figure(figsize=(2 * columns, len(shown) / columns), layout="constrained")
    axes = figure.subplots()
    axes.imshow(mosaic(shown.reshape(-1, columns, height, width, 3), 1 + height // 16, 255))
    axes.set_axis_off()
    return {"figure14": figure}


def finding(figures):
    """Returns a sentence about the number of images on which rollout attends to the object."""
    known = [
        f"{f['more']} of {f['images']} images in {name}" for name, f in figures.items() if f["more"]
    ]
    return (
        f"More of the rollout than of the image is on the object in {', '.join(known)}."
        if known
        else ""
    )


CLAIM = "The class token attends to what is named, in images as they come."
EXPERIMENT = of_models("Figure 14", CLAIM, read, table, draw, finding)
