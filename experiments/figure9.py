"""A class token or pooled patches, by learning rate: vit-jax experiment figure9 --out=DIR.

The small ViT is trained on 100,000 images of `letters`. Its head reads the class token, or the mean
of the patches (GAP). Each variant is trained with four learning rates and three seeds, for enough
steps to be far above chance. Few-shot accuracy is measured on an alphabet that is not in the
training set.
"""

from dataclasses import replace

from vit_jax.ledger.charts import lines
from vit_jax.ledger.laptop import config_name, fewshot
from vit_jax.ledger.paper_scale import FIVE_SHOT, FIVE_SHOT_FIGURE
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import means, pivot, ranking

MODEL, STEPS, RATE = "ViT-32x4/4", 1500, "optimizer__learning_rate"
FACTORS = {"model__pooling": ("cls", "gap"), RATE: (1e-3, 3e-3, 1e-2, 3e-2)}
PAPER = {"model__pooling": ("cls", "gap"), RATE: (8e-4, 3e-4)}


def pretrained(study, seed, **values):
    """Returns config and overrides of a training run at laptop scale."""
    return config_name(MODEL, steps=STEPS), fewshot(STEPS, "cyrillic", images=1000) | values


def pretrained_at_scale(study, seed, **values):
    """Returns config and overrides of a run of B/16 on JFT-300M.

    Returns None for a class token at a learning rate of 3e-4, which is not in the paper.
    """
    pooling, rate = values["model__pooling"], values[RATE]
    return None if (pooling, rate) == ("cls", 3e-4) else ("vit_b16_jft", FIVE_SHOT | values)


def table(figures):
    """Returns two tables: few-shot accuracies and test accuracies."""
    return "\n\n".join(pivot(figures, *FACTORS, figure=name) for name in ("few-shot", "accuracy"))


def read(study):
    """Returns test accuracy and few-shot accuracy of each variant and learning rate."""
    figure = FIVE_SHOT_FIGURE if study.scale == "paper" else "fewshot/cyrillic/10"
    points = study.points("pretrained", "accuracy", figure)
    return [point | {"few-shot": point[figure]} for point in points]


def finding(figures):
    """Returns a sentence with all few-shot accuracies, the highest first."""
    return f"Few-shot, by pooling and rate: {ranking(means(figures, *FACTORS, figure='few-shot'))}."


LAPTOP = Experiment(
    claim="Pooled patches do as well as a class token, but at another learning rate.",
    place="Figure 9",
    stages=(grid("pretrained", FACTORS, pretrained, (0, 1, 2)),),
    read=read,
    table=table,
    draw=lambda study, figures: {
        "figure9": lines(figures, RATE, "few-shot", by=["model__pooling"])
    },
    finding=finding,
    minutes=38,
)
EXPERIMENT = replace(
    LAPTOP, paper=replace(LAPTOP, stages=(grid("pretrained", PAPER, pretrained_at_scale),))
)
