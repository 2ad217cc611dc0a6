"""Corrections for class imbalance: python -m vit_jax.experiment imbalance --out=DIR.

It trains configs/quickstart.py on imbalanced classes of scikit-learn's digits: 139 images of the
digit 0, fewer images of each following digit, and 140 / RATIO images of the digit 9 (--ratios).
There are runs without a correction, runs that sample the classes more evenly (`data.balance`), and
runs that weight the classes in the loss (`loss.class_weights`). Accuracy, balanced accuracy and
macro F1 are computed on all 360 test images after the last step.
"""

import math
import shutil

import numpy as np
from PIL import Image

from vit_jax.data.sources.digits import digits
from vit_jax.ledger.study import Experiment, Study, Trial
from vit_jax.ledger.tables import listing

LARGEST = 140  # Start of the geometric series; only 139 images of the digit 0 exist.
CORRECTIONS = {
    "none": {},
    "data.balance=sqrt": {"data__balance": "sqrt"},
    "data.balance=full": {"data__balance": "full"},
    "loss.class_weights=sqrt": {"loss__class_weights": "sqrt"},
}
FIGURES = ("accuracy", "balanced_accuracy", "macro_f1")


def counts_of(ratio: float) -> list[int]:
    """Returns the training images per digit, a geometric series from 140 to 140 / ratio."""
    return [max(1, round(LARGEST * ratio ** (-digit / 9))) for digit in range(10)]


def lay_out(study: Study, ratio: float) -> str:
    """Writes the images as `images/RATIO/{train,test}/DIGIT/*.png`; returns `images/RATIO`."""
    folder = study.out / "images" / f"{ratio:g}"
    if folder.exists():
        return str(folder)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for split, most in (("train", counts_of(ratio)), ("test", [math.inf] * 10)):
        source = digits(split)
        for digit in range(10):
            chosen = np.flatnonzero(source.labels == digit)
            (part / split / str(digit)).mkdir(parents=True)
            for index in chosen[: min(most[digit], len(chosen))]:
                Image.fromarray(source.images[index]).save(
                    part / split / str(digit) / f"{index}.png"
                )
    part.rename(folder)
    return str(folder)


def trained(study: Study) -> list[Trial]:
    """Returns the training runs: one for each ratio, correction and seed."""
    steps, trials = study.options["train_steps"], []
    values = dict.fromkeys(("steps", "evaluate_every", "checkpoint__every"), steps) | {
        "data__source": "folder"
    }
    for ratio in study.options["ratios"]:
        values["data__path"] = lay_out(study, ratio)
        for correction, changes in CORRECTIONS.items():
            for seed in study.options["seeds"]:
                name = f"trained/{ratio:g}-{correction}-{seed}"
                factors = {"ratio": ratio, "correction": correction, "seed": seed}
                trials.append(
                    Trial("trained", factors, study.job(name, seed=seed, **values, **changes))
                )
    return trials


EXPERIMENT = Experiment(
    claim="Where classes are unequal, sampling them evenly raises balanced accuracy and macro F1.",
    stages=(trained,),
    read=lambda study: study.points("trained", *FIGURES),
    table=lambda figures: listing(figures, ("ratio", "correction"), FIGURES),
    options=dict(
        ratios=dict(type=float, nargs="+", default=[20.0], help="largest class to smallest one"),
        seeds=dict(type=int, nargs="+", default=[0, 1, 2]),
        train_steps=dict(type=int, default=300, help="of each run"),
    ),
    minutes=7,
)
