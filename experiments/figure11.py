"""Attention distance of a ViT and of a hybrid: python -m vit_jax.experiment figure11 --out=DIR.

It uses the runs of figure 7. Each dot is a head: the mean distance in pixels between a patch and
the patches to which it attends, weighted by the attention, over 128 test images. The dotted line is
the distance that a head with uniform attention would have.
"""

from matplotlib.figure import Figure

from vit_jax.inspection.figures import draw_distances
from vit_jax.ledger.looking import distance_table, distances, of_models, span


def draw(study, figures):
    """Draws a panel for each model."""
    import numpy as np

    figure = Figure(figsize=(4.5 * len(figures["distance"]), 4), layout="constrained")
    panels = figure.subplots(1, len(figures["distance"]), squeeze=False)[0]
    for axes, (name, distance) in zip(panels, figures["distance"].items(), strict=True):
        draw_distances(axes, np.array(distance))
        axes.axhline(figures["even"][name], color="grey", linestyle=":")
        axes.set(title=name, ylim=(0, 1.2 * max(figures["even"].values())))
    return {"figure11": figure}


def finding(figures):
    """Returns a sentence about the attention distances in the first layer of each model."""
    looks = [
        f"{span(distance[0])} pixels in {name}" for name, distance in figures["distance"].items()
    ]
    return f"In the first layer heads look {', and '.join(looks)}."


EXPERIMENT = of_models(
    "Figure 11",
    "Heads that look near in the first layers are rarer in hybrids, whose ResNet has done that "
    "already.",
    read=distances,
    table=distance_table,
    draw=draw,
    finding=finding,
)
