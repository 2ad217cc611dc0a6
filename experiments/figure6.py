"""Attention rollout on a few images: python -m vit_jax.experiment figure6 --out=DIR.

It uses the runs of figure 7. Attention rollout averages the heads, adds the identity for the
residual connection, and multiplies the matrices of the layers. The paper only shows photographs.
Here the mask of the labelled object is known, so the experiment also compares the share of rollout
on the object with the object's share of the image.
"""

import statistics

from vit_jax.inspection.figures import overlay, tiles
from vit_jax.ledger.looking import of_models, on_objects, seen_in
from vit_jax.ledger.tables import markdown_table

SHOWN = 8


def read(study):
    """Returns for each model and image the share of rollout on the object, and the object's area.

    The values are None if the objects are unknown.
    """
    return {name: on_objects(seen) for name, seen in seen_in(study).items()}


def table(figures):
    """Returns a table of both shares, averaged over the images."""
    known = {name: found for name, found in figures.items() if found}
    rows = [
        [name, *(f"{statistics.mean(found[key]):.1%}" for key in ("weight", "share"))]
        for name, found in known.items()
    ]
    return markdown_table(("", "of the rollout on the labelled object", "of the image"), rows)


def draw(study, figures):
    """Draws images, the rollout of the first model over them, and the labelled objects."""
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
