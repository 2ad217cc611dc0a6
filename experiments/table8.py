"""Position embeddings: python -m vit_jax.experiment table8 --out=DIR.

The runs differ in two properties. Position embeddings are: none, a vector for each patch, a vector
for each row and each column, or relative ones. They are added: once at the stem, before every layer
with separate embeddings, or before every layer with shared ones. The quickstart's ViT learns seven
of scikit-learn's digits, and few-shot accuracy is measured on all ten with ten images of each. The
paper's results are for ViT-B/16 on JFT-300M, so only the gains over no position embedding are
compared.
"""

from vit_jax import published
from vit_jax.ledger.laptop import short_run
from vit_jax.ledger.paper_scale import FIVE_SHOT, FIVE_SHOT_FIGURE
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import against, gains, listing, means

PAPER = published.table("table8")
CELLS = {"position": ("none", "1d", "2d", "relative"), "where": ("stem", "every", "shared")}
STEPS, LAPTOP = 500, "fewshot/digits/10"
FIGURES = ("few-shot", "upstream", "paper, few-shot")


def pretrained(study, position, where, seed):
    """Returns config and overrides of a training run; None if the paper has no such run."""
    if PAPER.figure(where, position=position) is None:
        return None
    values = {"model__position": position, "model__position_at": where}
    if study.scale == "paper":
        return "vit_b16_jft", values | FIVE_SHOT
    return short_run(STEPS, **values)


def read(study):
    """Returns for each run few-shot and upstream accuracy, and the paper's few-shot accuracy."""
    name = LAPTOP if study.scale == "laptop" else FIVE_SHOT_FIGURE
    points = study.points("pretrained", "accuracy", name)
    for point in points:
        point["few-shot"], point["upstream"] = point.pop(name), point.pop("accuracy")
        point["paper, few-shot"] = [PAPER.figure(point["where"], position=point["position"]) / 100]
    return points


def compared(figures):
    """Returns pairs of few-shot gains over no position embedding: the paper's and ours."""
    paper, ours = (means(figures, *CELLS, figure=name) for name in ("paper, few-shot", "few-shot"))
    return gains(paper, ours, "none, stem")


def scaled(seeds, **more):
    """Returns the experiment at one scale; `more` are additional fields of `Experiment`."""
    return Experiment(
        claim="Any position embedding is much better than none, and the kinds hardly differ.",
        stages=(grid("pretrained", CELLS, pretrained, seeds),),
        read=read,
        table=lambda figures: listing(figures, tuple(CELLS), FIGURES),
        finding=lambda figures: against(figures, "position", "none", FIGURES),
        compared=compared,
        **more,
    )


EXPERIMENT = scaled((0, 1, 2), place="Table 8", paper=scaled((0,)), minutes=8)
