"""Transfer to tasks of 1,000 images: python -m vit_jax.experiment table9 --out=DIR.

VTAB has 1,000 training images for each task. At laptop scale the tasks are five collections of
scattered images. The small ViT is pre-trained once on 100,000 images of `letters`, and fine-tuned
on 1,000 images of each collection. The baseline is trained for the same number of steps from random
parameters. The better of two learning rates is chosen by training on 800 of the images and
evaluating on the other 200. Fine-tuning has three seeds.
"""

from vit_jax.data.sources.vtab import TASKS
from vit_jax.ledger.laptop import DOWNSTREAM, config_name
from vit_jax.ledger.paper_scale import LARGEST
from vit_jax.ledger.stages import at_best, grid, transfer
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import means, pivot, ranking

MODEL, STEPS, TUNING_STEPS = "ViT-32x4/4", 2500, 100
FACTORS = {"task": ("digits", *DOWNSTREAM), "start": ("letters", "random parameters")}
HELD_OUT = {"data__train_split": "train[:800]", "data__test_split": "train[800:1000]"}


def pretrained(study, seed):
    """Returns config and overrides of the pre-training run."""
    return config_name(MODEL, steps=STEPS), {}


def finetuned(study, task, start, optimizer__learning_rate, seed):
    """Returns config and overrides of a run on 1,000 images; None if its checkpoint is missing."""
    values = dict(optimizer__learning_rate=optimizer__learning_rate)
    if start == "letters":
        values["finetune__checkpoint"] = study.workdir("pretrained")
    missing = values.get("finetune__checkpoint", "") is None
    return None if missing else (config_name(MODEL, task, 1000, TUNING_STEPS), values)


EXPERIMENT = Experiment(
    claim="Fine-tuned on 1,000 images, what was pre-trained on many is far ahead of what was not.",
    place="Table 9",
    stages=(
        grid("pretrained", {}, pretrained),
        *at_best(
            "finetuned", FACTORS, finetuned, {"optimizer__learning_rate": (1e-3, 3e-3)}, HELD_OUT
        ),
    ),
    read=lambda study: study.points("finetuned", "accuracy"),
    table=lambda figures: pivot(figures, "task", "start"),
    finding=lambda figures: f"{ranking(means(figures, *FACTORS))}.",
    paper=transfer(LARGEST, {task.name: f"vtab/{key}" for key, task in TASKS.items()}, "table9"),
    minutes=25,
)
