"""Objectives without labels at equal compute: vit-jax experiment self_supervised --out=DIR.

A small ViT is pre-trained on 20,000 centred letters of 64 pixels with each objective and three
seeds. The number of steps differs: each run has the compute of 600 supervised steps of 64 letters.
Three results are computed from the frozen model: the accuracy of a linear probe, the accuracy of 10
nearest neighbours (both with 5,000 labelled images), and how well the class token's attention
covers the letter (Jaccard index, as in DINO). Finally the model is fine-tuned on 2,000 labelled
images.
"""

from vit_jax.ledger.laptop import config_name, steps_of_equal_compute
from vit_jax.ledger.looking import attention_jaccard
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import markdown_table, means, ranking, spread
from vit_jax.ledger.unlabelled import OBJECTIVES
from vit_jax.runs.workdir import saved_run

RUN = dict(model="ViT-64x4/8", collection="letters", size=64)
STEPS, TUNING_STEPS, SET = 600, 200, "centred:letters@train[:5000],test[:2000]"
BATCH = {"batch_size": 64}
PROBE, KNN = "probe/letters/linear probe", "knn/letters/10"
SHOWN = {
    PROBE: "linear probe",
    KNN: "10-NN",
    "tuned": "fine-tuned on a tenth",
    "covered": "Jaccard's index",
}
STARTS = {"random parameters": None, "labels": {}} | OBJECTIVES


def pretrained(study, objective, seed):
    """Returns config and overrides of a pre-training run.

    For random parameters it is a run of two steps with a learning rate near 0.
    """
    trained, values = (
        STARTS[objective] is not None,
        (STARTS[objective] or {}) | {"model__pooling": "cls"},
    )
    steps = steps_of_equal_compute(config_name(**RUN), values, STEPS) if trained else 2
    values |= {
        "evaluate__suites": ("probe", "knn"),
        "evaluate__options": (f"set={SET}", "neighbours=10"),
    }
    values |= {"optimizer__learning_rate": 1e-3 if trained else 1e-9} | BATCH
    return config_name(**RUN, images=20_000, steps=steps), values


def finetuned(study, objective, seed):
    """Returns config and overrides of a fine-tuning run on 2,000 labelled images."""
    start = study.workdir("pretrained", objective=objective, seed=seed)
    values = {"finetune__checkpoint": start, "optimizer__learning_rate": 1e-3} | BATCH
    return start and (config_name(**RUN, images=2000, steps=TUNING_STEPS), values)


def read(study):
    """Returns number of steps, accuracies and Jaccard index of each objective."""
    tuned = {
        point["objective"]: point["accuracy"] for point in study.points("finetuned", "accuracy")
    }
    points = study.points("pretrained", PROBE, KNN)
    for point in points:
        runs = study.finished("pretrained", objective=point["objective"])
        point["steps"] = saved_run(runs[0].job.workdir).config.steps
        point["covered"] = [attention_jaccard(run.job.workdir) for run in runs]
        point["tuned"] = tuned.get(point["objective"], [])
    return points


def table(points):
    """Returns a table: steps of each objective, and mean and std of each result in per cent."""
    lines = [
        [point["objective"], f"{point['steps']:,}", *(spread(point[figure]) for figure in SHOWN)]
        for point in points
    ]
    return markdown_table(["", "steps", *(f"{name}, %" for name in SHOWN.values())], lines)


EXPERIMENT = Experiment(
    claim="At equal compute, learning without labels gives features that are near those of labels.",
    stages=(
        grid("pretrained", {"objective": tuple(STARTS)}, pretrained, (0, 1, 2)),
        grid("finetuned", {"objective": tuple(STARTS)}, finetuned, (0, 1, 2)),
    ),
    read=read,
    table=table,
    finding=lambda figures: f"{ranking(means(figures, 'objective', figure=KNN))} by k-NN.",
    minutes=60,
)
