"""Accuracy over pre-training compute: python -m vit_jax.experiment figure5 --out=DIR.

Models of three families, in three sizes each, are trained on 1,000,000 images of `letters`, for
300, 600 and 1,200 steps, so that no image occurs twice. The compute of a run is counted as in table
6: 6 x multiply-adds of an image x number of images. A power law of the error over the compute is
fitted to each family, with a 90 % bootstrap interval. The learning rate of a family is chosen with
its smallest model, in runs of 600 steps on held-out images. The smallest models have three seeds.
At the paper's scale the models are those of table 6, and accuracies are means over the fine-tuning
tasks.
"""

from vit_jax.ledger.charts import lines, with_laws
from vit_jax.ledger.laptop import (
    DOWNSTREAM,
    MODELS,
    config_name,
    family_of,
    fewshot,
    mean_fewshot,
    shorter,
)
from vit_jax.ledger.paper_scale import scaling
from vit_jax.ledger.power_law import laws, laws_in_words
from vit_jax.ledger.stages import at_best
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing

FACTORS = {
    "model": [model for members in MODELS.values() for model in members],
    "steps": (300, 600, 1200),
}
RATES = {"optimizer__learning_rate": (2e-3, 5e-3)}
SMALL = [members[0] for members in MODELS.values()]


def pretrained(study, model, steps, optimizer__learning_rate, seed):
    """Returns config and overrides of a run; None for further seeds of the larger models."""
    values = fewshot(steps) | {"optimizer__learning_rate": optimizer__learning_rate}
    if seed and model not in SMALL:
        return None
    return config_name(model, images=10**6, steps=steps), values


def read(study):
    """Returns accuracies, compute and time of each model, and the power law of each family."""
    names = [f"fewshot/{name}/10" for name in DOWNSTREAM]
    points = study.points("pretrained", "accuracy", "seconds", "exaflops", *names)
    points = [
        {"family": family_of(point["model"]), "few-shot": mean_fewshot(point)}
        | {key: value for key, value in point.items() if key not in names}
        for point in points
    ]
    return {"points": points, "laws": laws(points, "exaflops", "accuracy", "family")}


def draw(study, figures):
    """Draws the accuracies over the compute, and the power law of each family."""
    chart = lines(figures["points"], "exaflops", by=["model"])
    return {"figure5": with_laws(chart, figures["laws"], figures["points"], "exaflops", "family")}


EXPERIMENT = Experiment(
    claim=(
        "At equal compute Transformers beat ResNets, and hybrids beat both at small compute alone."
    ),
    place="Figure 5",
    stages=at_best(
        *("pretrained", FACTORS, pretrained, RATES, shorter(600)),
        alike=lambda cell: {"model": MODELS[family_of(cell["model"])][0], "steps": 600},
    ),
    read=read,
    table=lambda figures: listing(figures["points"], ("model", "steps"), ("accuracy", "few-shot")),
    draw=draw,
    finding=lambda figures: laws_in_words(figures["laws"]),
    paper=scaling("figure5"),
    minutes=70,
)
