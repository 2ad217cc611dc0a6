"""Learning without labels, at equal compute: python -m vit_jax.experiment self_supervised --out=DIR

A small ViT learns 20,000 centred letters of 64 pixels by each objective, three seeds, in as many steps as
have the compute of 1,000 supervised ones. Then, of its frozen features: least squares of 50 letters of a
class, 10 nearest neighbours, and how the class token's attention covers the letter (Jaccard, as DINO measures
it). Last, fine-tuning on 2,000 labels.
"""

from vit_jax.ledger.laptop import config, fewshot, steps_of_equal_compute
from vit_jax.ledger.looking import attention_jaccard
from vit_jax.ledger.stages import grid
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, means, ranking
from vit_jax.ledger.unlabelled import OBJECTIVES

RUN = dict(model="ViT-64x4/8", collection="letters", size=64)
STEPS, TUNING_STEPS, SET = 1000, 300, "centred:letters@train[:5000],test[:2000]"
SHOWN = ("fewshot/letters/50", "knn/letters/10", "fine-tuned", "covered")
STARTS = {"random parameters": None, "labels": {}} | OBJECTIVES


def pretrained(study, objective, seed):
    """A run; of random parameters one of two steps that change nothing."""
    trained, values = STARTS[objective] is not None, (STARTS[objective] or {}) | {"model__pooling": "cls"}
    steps = steps_of_equal_compute(config(**RUN), values, STEPS) if trained else 2
    values |= fewshot(steps, "letters", shots=50, images=5000) | {"knn__sets": (SET,), "knn__every": steps}
    values |= {"knn__neighbours": (10,), "optimizer__learning_rate": 1e-3 if trained else 1e-9}
    return config(**RUN, images=20_000, steps=steps), values


def finetuned(study, objective, seed):
    """A run on 2,000 labelled images."""
    start = study.workdir("pretrained", objective=objective, seed=seed)
    values = {"finetune__checkpoint": start, "optimizer__learning_rate": 1e-3}
    return start and (config(**RUN, images=2000, steps=TUNING_STEPS), values)


def read(study):
    """Accuracies of each objective, and what its attention covers."""
    tuned = {point["objective"]: point["accuracy"] for point in study.points("finetuned", "accuracy")}
    points = study.points("pretrained", "fewshot/letters/50", "knn/letters/10")
    for point in points:
        runs = study.finished("pretrained", objective=point["objective"])
        point["covered"] = [attention_jaccard(run.job.workdir) for run in runs]
        point["fine-tuned"] = tuned.get(point["objective"], [])
    return points


EXPERIMENT = Experiment(
    claim="At equal compute, learning without labels gives features that are near those of labels.",
    stages=(
        grid("pretrained", {"objective": tuple(STARTS)}, pretrained, (0, 1, 2)),
        grid("finetuned", {"objective": tuple(STARTS)}, finetuned, (0, 1, 2)),
    ),
    read=read,
    table=lambda figures: listing(figures, ("objective",), SHOWN),
    finding=lambda figures: f"{ranking(means(figures, 'objective', figure=SHOWN[1]))} by k-NN.",
    minutes=60,
)
