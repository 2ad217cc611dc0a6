"""Figure 3 up to a million images: python -m vit_jax.experiment figure3_million --out=DIR.

The two smaller ViTs and the smallest BiT are trained on the first 1,000, 10,000, 100,000 and
1,000,000 images of `letters`. Each run has 3,900 steps, three times as many as in figure 3; in a
run on a million images, half of the images occur once. The learning rate of a family is chosen in
short runs of its smallest model on held-out images. The models are evaluated on other alphabets,
few-shot and by fine-tuning, with one seed.
"""

from vit_jax.ledger.charts import lines
from vit_jax.ledger.laptop import (
    DOWNSTREAM,
    MODELS,
    config_name,
    family_of,
    fewshot,
    mean_fewshot,
    shorter,
)
from vit_jax.ledger.stages import at_best, grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import crossings, pivot

STEPS, RATES = 3900, {"optimizer__learning_rate": (2e-3, 5e-3)}
FACTORS = {"model": (*MODELS["ViT"][:2], MODELS["BiT"][0]), "images": (10**3, 10**4, 10**5, 10**6)}


def pretrained(study, model, images, seed, **rate):
    """Returns config and overrides of a pre-training run on the first images of `letters`."""
    return config_name(model, images=images, steps=STEPS), fewshot(STEPS) | rate


def finetuned(study, model, images, seed):
    """Returns config and overrides of a fine-tuning run on 2,000 images of another alphabet."""
    start = study.workdir("pretrained", model=model, images=images, seed=seed)
    return start and (config_name(model, "cyrillic", 2000, 300), {"finetune__checkpoint": start})


def read(study):
    """Returns accuracies of each model: on letters, few-shot, and after fine-tuning."""
    points = study.points("pretrained", "accuracy", *(f"fewshot/{name}/10" for name in DOWNSTREAM))
    kept = (*FACTORS, "seeds", "accuracy")
    pretrained = [
        {key: point[key] for key in kept} | {"few-shot": mean_fewshot(point)} for point in points
    ]
    return {"pretrained": pretrained, "finetuned": study.points("finetuned", "accuracy")}


def table(figures):
    """Returns three tables of accuracies: on letters, few-shot, and after fine-tuning."""
    pretrained = [point | {"letters": point["accuracy"]} for point in figures["pretrained"]]
    finetuned = [point | {"fine-tuned": point["accuracy"]} for point in figures["finetuned"]]
    shown = {"letters": pretrained, "few-shot": pretrained, "fine-tuned": finetuned}
    return "\n\n".join(pivot(points, *FACTORS, name) for name, points in shown.items())


EXPERIMENT = Experiment(
    claim=(
        "Convolutions are ahead on few pre-training images, Transformers on many: up to a million."
    ),
    place="Figure 3",
    stages=(
        *at_best(
            *("pretrained", FACTORS, pretrained, RATES, shorter(600), (0,)),
            alike=lambda cell: {"model": MODELS[family_of(cell["model"])][0], "images": 10**5},
        ),
        grid("finetuned", FACTORS, finetuned),
    ),
    read=read,
    table=table,
    draw=lambda study, figures: {
        "figure3_million": lines(figures["finetuned"], "images", by=["model"])
    },
    finding=lambda figures: crossings(figures["finetuned"], "images", FACTORS["model"]),
    minutes=31,
)
