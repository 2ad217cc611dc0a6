"""A search over more than the rate, on few images: python -m vit_jax.experiment grid --out=DIR

On small pre-training sets the paper tunes weight decay, dropout and label smoothing too (section 4.3). Here
the small ViT learns 1,000 images of `digits` from random parameters: by the learning rate that is best on
held-out images of 800, 200, and by the best of all four. Three seeds of both.
"""

from vit_jax.ledger.laptop import config
from vit_jax.ledger.stages import at_best
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, means, ranking

MODEL, IMAGES, STEPS = "ViT-32x4/4", 1000, 300
CHOICES = {
    "optimizer__learning_rate": (1e-3, 3e-3),
    "optimizer__weight_decay": (0.05, 0.5),
    "model__dropout": (0.0, 0.1),
    "loss__label_smoothing": (0.0, 0.1),
}
USUAL = {"optimizer__weight_decay": 0.05, "model__dropout": 0.0, "loss__label_smoothing": 0.0}
HELD_OUT = {"data__train_split": "train[:800]", "data__test_split": "train[800:1000]"}
SEARCHED = ("the rate alone", "all four")


def trained(study, searched, seed, **values):
    """A run; where the rate alone is searched all else is as usual."""
    if searched == SEARCHED[0] and not USUAL.items() <= values.items():
        return None
    return config(MODEL, "digits", IMAGES, STEPS), values


def read(study):
    """Accuracies on held-out images of all choices, and on the test images of the best."""
    return {
        "held_out": study.points("trained-choices", "accuracy"),
        "tests": study.points("trained", "accuracy"),
    }


def table(figures):
    """The test images' accuracies, and those that chose."""
    tests, held_out = (listing(figures[name], ("searched", *CHOICES)) for name in ("tests", "held_out"))
    return f"{tests}\n\nHeld-out training images:\n\n{held_out}"


EXPERIMENT = Experiment(
    claim="On few images weight decay, dropout and label smoothing are worth a search, not the rate alone.",
    place="Section 4.3",
    stages=at_best("trained", {"searched": SEARCHED}, trained, CHOICES, HELD_OUT),
    read=read,
    table=table,
    finding=lambda figures: (
        f"{ranking(means(figures['tests'], 'searched'))} of the test images, by what was searched."
    ),
    minutes=15,
)
