"""Attention rollout on a few images: python -m vit_jax.experiment figure6 --out=DIR

The runs of figure 7, by attention rollout: heads are averaged, the residual connection is the
identity, and the layers' matrices are multiplied. The paper shows photographs alone; here each
image's labelled object is known, so that the rollout's weight on it can be set against its share of
the image.
"""

import statistics

from vit_jax.inspection.figures import overlay, tiles
from vit_jax.ledger.looking import of_models, on_objects, seen_in
from vit_jax.ledger.tables import markdown_table

SHOWN = 8


def read(study):
    """The rollout's weight of each model on each image's object, and the object's share; None: not
    known.
    """
    return {name: on_objects(seen) for name, seen in seen_in(study).items()}


def table(figures):
    """Means over the images."""
    known = {name: found for name, found in figures.items() if found}
    rows = [
        [name, *(f"{statistics.mean(found[key]):.1%}" for key in ("weight", "share"))]
        for name, found in known.items()
    ]
    return markdown_table(("", "of the rollout on the labelled object", "of the image"), rows)


def draw(study, figures):
    """Images, what the first model sees of them, and where their labelled objects are."""
    seen = next(iter(seen_in(study).values()))
    images = seen.images[:SHOWN]
    rows = [*images, *map(overlay, images, seen.rollout[:SHOWN])]
    if seen.masks is not None:
        rows += [image * mask[..., None] for image, mask in zip(images, seen.masks, strict=False)]
    return {"figure6": tiles(rows, len(images))}


def finding(figures):
    """A sentence: how much of the rollout is on objects, against a look at all of the image
    alike.
    """
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
