"""Attention distance of a ViT beside a hybrid's: python -m vit_jax.experiment figure11 --out=DIR

The runs of figure 7. A dot is a head: pixels between a patch and those that it attends to, weighted
by the attention, over 128 test images. The dotted line is a head that attends to all patches alike.
"""

from matplotlib.figure import Figure

from vit_jax.inspection.figures import draw_distances
from vit_jax.ledger.looking import distance_table, distances, of_models, span


def draw(study, figures):
    """A panel for each model."""
    import numpy as np

    figure = Figure(figsize=(4.5 * len(figures["distance"]), 4), layout="constrained")
    panels = figure.subplots(1, len(figures["distance"]), squeeze=False)[0]
    for axes, (name, distance) in zip(panels, figures["distance"].items(), strict=True):
        draw_distances(axes, np.array(distance))
        axes.axhline(figures["even"][name], color="grey", linestyle=":")
        axes.set(title=name, ylim=(0, 1.2 * max(figures["even"].values())))
    return {"figure11": figure}


def finding(figures):
    """The first layer's distances of each model."""
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
