"""Few-shot accuracy over the pre-training set's size: vit-jax experiment figure4 --out=DIR.

It uses the runs of figure 3. For few-shot evaluation, least squares is fitted to the frozen
features of ten images of each character, for four alphabets that were not in the pre-training set.
Each run is evaluated five times, and the best evaluation counts, as with early stopping. At the
paper's scale models are pre-trained on subsets of JFT-300M, always for the same number of steps,
and evaluated with five images of each class of ImageNet.
"""

from dataclasses import replace

from vit_jax.ledger.charts import lines
from vit_jax.ledger.laptop import DOWNSTREAM, MODELS, mean_fewshot
from vit_jax.ledger.paper_scale import FIVE_SHOT, FIVE_SHOT_FIGURE, JFT_IMAGES, ON_SUBSETS, SUBSETS
from vit_jax.ledger.stages import grid, named_config
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import crossings, pivot


def read(study):
    """Returns the best few-shot accuracy of each run, averaged over the alphabets."""
    names = [f"best fewshot/{name}/10" for name in DOWNSTREAM]
    points = study.points("pretrained", *names)
    return [point | {"accuracy": mean_fewshot(point, "best ")} for point in points]


def pretrained_at_scale(study, model, images, seed):
    """Returns config and overrides of a pre-training run on the first images of JFT-300M.

    It has as many steps as the run on all images.
    """
    name, *values = ON_SUBSETS[model]
    config = named_config(name)
    steps = int(config.epochs * JFT_IMAGES / config.batch_size)
    subset = {"data__train_split": f"train[:{images}]", "steps": steps}
    return name, (values[0] if values else {}) | FIVE_SHOT | subset


def read_at_scale(study):
    """Returns the best few-shot accuracy of each run."""
    name = f"best {FIVE_SHOT_FIGURE}"
    return [point | {"accuracy": point[name]} for point in study.points("pretrained", name)]


def finding_of(models):
    """Returns a function for `Experiment.finding`: the best model for each number of images."""
    return lambda figures: crossings(figures, "images", models)


LAPTOP = Experiment(
    claim="Few-shot, ResNets lead on few pre-training images, and larger Transformers on many.",
    place="Figure 4",
    read=read,
    table=lambda figures: pivot(figures, "model", "images"),
    draw=lambda study, figures: {
        "figure4": lines(figures, "images", by=["model"], ylabel="few-shot accuracy, %")
    },
    finding=finding_of([members[0] for members in MODELS.values()]),
)
STAGE = grid("pretrained", {"model": tuple(ON_SUBSETS), "images": SUBSETS}, pretrained_at_scale)
PAPER = replace(LAPTOP, stages=(STAGE,), read=read_at_scale, finding=finding_of(list(ON_SUBSETS)))
EXPERIMENT = replace(LAPTOP, runs_of="figure3", paper=PAPER)
