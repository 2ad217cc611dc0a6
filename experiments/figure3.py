"""Accuracy over the pre-training set's size: python -m vit_jax.experiment figure3 --out=DIR.

Models of three families, in two sizes each, are pre-trained on the first 1,000, 10,000 and 100,000
images of `letters`, always for the same number of steps. The learning rate is chosen for each
family and number of images. With 1,000 images weight decay, dropout and label smoothing are chosen,
too. The choices are compared with the smaller model of the family, in runs of half the length, on
held-out images. Then each model is fine-tuned on 2,000 images of an unseen alphabet. The smaller
models have three seeds. Figure 4 and table 5 use the same runs. At the paper's scale the shaded
band of ResNets is limited by the smallest and the largest BiT.
"""

from vit_jax.ledger.charts import lines
from vit_jax.ledger.laptop import MODELS, config_name, family_of, fewshot, shorter
from vit_jax.ledger.paper_scale import BAND, BY_SET, TASKS
from vit_jax.ledger.stages import at_best, grid, transfer
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import crossings, pivot

SMALL, LARGER = ([members[size] for members in MODELS.values()] for size in (0, 1))
STEPS, FACTORS = 1200, {"model": SMALL + LARGER, "images": (10**3, 10**4, 10**5)}
# Recipes to choose from: learning rate, weight decay, dropout and label smoothing. The last two are
# only used with 1,000 images.
RECIPES = {"slow": (2e-3, 0.05, 0.0, 0.0), "fast": (5e-3, 0.05, 0.0, 0.0)}
RECIPES |= {"regular": (2e-3, 0.5, 0.1, 0.0), "smooth": (2e-3, 0.5, 0.1, 0.1)}


def pretrained(study, model, images, recipe, seed):
    """Returns config and overrides of a pre-training run.

    Returns None for recipes that are not used, and for further seeds of the larger models.
    """
    rare = recipe in ("regular", "smooth") and images > 1000
    if rare or (seed and model in LARGER):
        return None
    rate, decay, dropout, smoothing = RECIPES[recipe]
    values = fewshot(STEPS // 5) | {
        "evaluate_every": STEPS // 5,
        "loss__label_smoothing": smoothing,
    }
    values |= {"optimizer__learning_rate": rate, "optimizer__weight_decay": decay}
    values |= {} if family_of(model) == "BiT" else {"model__dropout": dropout}
    return config_name(model, images=images, steps=STEPS), values


def finetuned(study, model, images, seed):
    """Returns config and overrides of a fine-tuning run on 2,000 images of another alphabet."""
    start = study.workdir("pretrained", model=model, images=images, seed=seed)
    return start and (config_name(model, "cyrillic", 2000, 300), {"finetune__checkpoint": start})


EXPERIMENT = Experiment(
    claim="Convolutions are ahead on few pre-training images, Transformers on many.",
    place="Figure 3",
    stages=(
        *at_best(
            *("pretrained", FACTORS, pretrained, {"recipe": tuple(RECIPES)}, shorter(STEPS // 2)),
            alike=lambda cell: cell | {"model": MODELS[family_of(cell["model"])][0]},
        ),
        grid("finetuned", FACTORS, finetuned, (0, 1, 2)),
    ),
    read=lambda study: study.points("finetuned", "accuracy"),
    table=lambda figures: pivot(figures, "model", "images"),
    draw=lambda study, figures: {"figure3": lines(figures, "images", by=["model"])},
    finding=lambda figures: crossings(figures, "images", SMALL),
    paper=transfer(BY_SET | BAND, TASKS, "table5"),
    minutes=165,
)
