"""Attention rollout on a few images: python -m vit_jax.experiment figure6 --out=DIR.

It uses the runs of figure 7. Attention rollout averages the heads, replaces the residual connection
by the identity, and multiplies the layers' matrices. The paper shows photographs only. Here each
image's labelled object is known, so that the rollout's weight on it can be compared with its share
of the image.
"""

import statistics

from vit_jax.inspection.figures import overlay, tiles
from vit_jax.ledger.looking import of_models, on_objects, seen_in
from vit_jax.ledger.tables import markdown_table

SHOWN = 8


def read(study):
    """Returns each model's rollout weight on each image's object, and the object's area.

    The values are None if the objects are unknown.
    """
    return {name: on_objects(seen) for name, seen in seen_in(study).items()}


def table(figures):
    """Returns a table of means over the images."""
    known = {name: found for name, found in figures.items() if found}
    rows = [
        [name, *(f"{statistics.mean(found[key]):.1%}" for key in ("weight", "share"))]
        for name, found in known.items()
    ]
    return markdown_table(("", "of the rollout on the labelled object", "of the image"), rows)


def draw(study, figures):
    """Draws images, the first model's rollout over them, and their labelled objects."""
    seen = next(iter(seen_in(study).values()))
    images = seen.images[:SHOWN]
    rows = [*images, *map(overlay, images, seen.rollout[:SHOWN])]
    if seen.masks is not None:
        rows += [image * mask[..., None] for image, mask in zip(images, seen.masks, strict=False)]
    return {"figure6": tiles(rows, len(images))}


def finding(figures):
    """Returns a sentence about the rollout on objects, compared with uniform attention."""
    ratios = [
        f"{statistics.mean(found['weight']) / statistics.mean(found['share']):.2f} times in {name}"
        for name, found in figures.items()
        if found
    ]
    words = "The rollout's weight on the labelled object, over the object's share of the image: "
    return words + ", ".join(ratios) + "." if ratios else "Where the objects are is not known."


EXPERIMENT = of_models(
    "Figure 6", "The class token attends to the object that is named.", read, table, draw, finding
)
