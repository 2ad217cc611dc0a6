r"""Filters, positions and attention distance of a ViT: vit-jax experiment figure7 --out=DIR.

A ViT and a hybrid are trained on scattered digits; figures 6, 11 and 14 use the same runs. The left
panel shows principal components of the patch embedding's filters. The panel in the centre shows the
cosine similarity of each position embedding to all others, and the right panel the attention
distance of each head. To draw the paper's own figure from a released checkpoint:

    python -m vit_jax.experiment figure7 --scale=paper --out=DIR \
        --checkpoint=ViT-L_32.npz --images=FOLDER
"""

from matplotlib.figure import Figure

from vit_jax.inspection.embeddings import filters, position_similarity
from vit_jax.inspection.figures import draw_distances, draw_similarity, mosaic
from vit_jax.ledger.looking import distance_table, distances, nearness, of_models, seen_in, span


def read(study):
    """Returns attention distances, and the similarity of the first model's position embeddings."""
    seen = next(iter(seen_in(study).values()))
    return distances(study) | {"near": nearness(position_similarity(seen.model))}


def draw(study, figures):
    """Draws the three panels of the first model."""
    seen, even = next(iter(seen_in(study).values())), next(iter(figures["even"].values()))
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    left, centre, right = figure.subplots(1, 3)
    components = filters(seen.model, 28)
    left.imshow(mosaic(components.reshape(4, 7, *components.shape[1:]), fill=1.0))
    left.set_axis_off()
    left.set_title("28 principal components of the filters", fontsize="medium")
    image = draw_similarity(centre, position_similarity(seen.model))
    figure.colorbar(image, ax=centre, shrink=0.7, label="cosine similarity")
    draw_distances(right, seen.distance)
    right.axhline(even, color="grey", linestyle=":")
    return {"figure7": figure}


def finding(figures):
    """Returns a sentence about the similarity of neighbouring positions, and about distances."""
    alike = ", ".join(f"{value:.2f} ({name})" for name, value in figures["near"].items())
    (distance, *_), (even, *_) = (figures[name].values() for name in ("distance", "even"))
    return (
        f"Position embeddings' mean cosine similarity: {alike}. Heads look {span(distance[0])} "
        f"pixels far in the first layer, {span(distance[-1])} in the last; all patches alike "
        f"would be {even:.1f}."
    )


EXPERIMENT = of_models(
    "Figure 7",
    "Positions learn the grid, and some heads see all of the image in the first layer already.",
    read=read,
    table=distance_table,
    draw=draw,
    finding=finding,
    runs_of="",
)
