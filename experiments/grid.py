"""A search over four values on few images: python -m vit_jax.experiment grid --out=DIR.

On small pre-training sets the paper tunes not only the learning rate, but also weight decay,
dropout and label smoothing (section 4.3). Here the small ViT is trained on 1,000 images of `digits`
from random parameters, with three seeds: once after a search for the learning rate only, and once
after a search for all four values. The searches train on 800 of the images and evaluate on the
other 200. At the paper's scale B/16 is trained on ImageNet, with one seed; the paper does not list
the values that it compares.
"""

from dataclasses import replace

from vit_jax.ledger.laptop import config_name
from vit_jax.ledger.stages import at_best
from vit_jax.ledger.study import Experiment
from vit_jax.ledger.tables import listing, means, ranking

KEYS = (
    "optimizer__learning_rate",
    "optimizer__weight_decay",
    "model__dropout",
    "loss__label_smoothing",
)
# Choices of learning rate, weight decay, dropout and label smoothing; defaults of the last three.
LAPTOP = ((1e-3, 3e-3), (0.05, 0.5), (0.0, 0.1), (0.0, 0.1)), (0.05, 0.0, 0.0)
PAPER = ((1e-3, 3e-3), (0.1, 0.3), (0.0, 0.1), (1e-4, 0.1)), (0.3, 0.1, 1e-4)
HELD_OUT = {"data__train_split": "train[:800]", "data__test_split": "train[800:1000]"}
HELD_OUT_OF_IMAGENET = {"data__test_split": "train[99%:]", "data__dev_split": None}
FACTORS = {"searched": ("the rate alone", "all four")}


def trained(study, searched, seed, **values):
    """Returns config and overrides of a training run.

    If only the learning rate is searched, the other values have their defaults.
    """
    usual = dict(zip(KEYS[1:], (LAPTOP if study.scale == "laptop" else PAPER)[1], strict=True))
    other = {key: value for key, value in values.items() if usual.get(key) != value}
    if searched == "the rate alone" and len(other) > 1:
        return None
    small = config_name("ViT-32x4/4", "digits", 1000, 300), values
    # At the paper's scale the config contains the defaults.
    return small if study.scale == "laptop" else ("vit_b16_i1k", other)


def stages(choices, held_out, seeds):
    """Returns the stages: runs with all choices, then runs with the best values of each search."""
    return at_best(
        "trained", FACTORS, trained, dict(zip(KEYS, choices, strict=True)), held_out, seeds
    )


def table(figures):
    """Returns tables of test accuracies, and of validation accuracies of all choices."""
    tests, held_out = (
        listing(figures[name], ("searched", *KEYS)) for name in ("tests", "held_out")
    )
    return f"{tests}\n\nHeld-out training images:\n\n{held_out}"


SMALL = Experiment(
    claim=(
        "On few images weight decay, dropout and label smoothing are worth a search, not the "
        "rate alone."
    ),
    place="Section 4.3",
    stages=stages(LAPTOP[0], HELD_OUT, (0, 1, 2)),
    read=lambda study: {
        "held_out": study.points("trained-choices", "accuracy"),
        "tests": study.points("trained", "accuracy"),
    },
    table=table,
    finding=lambda figures: (
        f"{ranking(means(figures['tests'], 'searched'))} of the test images, by what was searched."
    ),
    minutes=5,
)
EXPERIMENT = replace(
    SMALL, paper=replace(SMALL, stages=stages(PAPER[0], HELD_OUT_OF_IMAGENET, (0,)))
)
