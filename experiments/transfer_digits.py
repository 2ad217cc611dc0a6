"""Transfer between digits: python -m vit_jax.experiment transfer_digits --out=DIR.

It pre-trains configs/quickstart.py on scikit-learn's digits 0-4. Then the digits 5-9 are learned in
several ways. The network is fine-tuned on a tenth of their training images, and compared with a
network that is trained on the same images, for the same number of steps, from random parameters.
Least squares is fitted to the frozen features of a few images of each class, as in
`vit_jax.evaluate`, for the pre-trained network and for a network with random parameters.

All runs have three seeds, and each network is evaluated by least squares with three choices of
images. The learning rate (by runs of the first seed) and the penalty of least squares are chosen on
held-out training images, separately for pre-trained and random networks. Test images are evaluated
once.
"""

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path

from flax import nnx

import vit_jax
from vit_jax.config import from_json
from vit_jax.data.sources import open_source
from vit_jax.evaluation.fewshot import Accuracy, few_shot
from vit_jax.ledger.charts import lines
from vit_jax.ledger.stages import at_best, grid
from vit_jax.ledger.study import Experiment, Study
from vit_jax.ledger.tables import markdown_table, pivot, spread
from vit_jax.paths import CONFIG
from vit_jax.training.program import model_arguments

SEEDS = (0, 1, 2)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SHOTS = (1, 5, 10, 25)
# The network has only 64 features. The usual penalty of 1,024 is for more features.
PENALTIES = tuple(4.0**power for power in range(-3, 6))
# Initial parameters, and their names in the tables.
STARTS = {"pre-trained": "from 0-4", "random": "from random parameters"}
OLD, NEW = ("0", "1", "2", "3", "4"), ("5", "6", "7", "8", "9")
# Overrides of fine-tuning and of training from scratch: about 14 images per class, and few steps.
BUDGET = {
    "data__train_split": "train[:10%]",
    "steps": 300,
    "batch_size": 32,
    "optimizer__warmup_steps": 30,
    "evaluate_every": 300,
    "checkpoint__every": 300,
}
HELD_OUT = {"data__test_split": "train[10%:]"}
SHOTS_FROM, SHOTS_HELD_OUT = "train[:20%]", "train[20%:]"


def pretrained(study: Study, seed: int):
    """Returns config and overrides of a pre-training run on the digits 0-4."""
    return "quickstart", dict(data__classes=OLD, epochs=60.0)


def transfer(study: Study, start: str, optimizer__learning_rate: float, seed: int):
    """Returns config and overrides of a run on the digits 5-9; None without its checkpoint."""
    values = BUDGET | dict(data__classes=NEW, optimizer__learning_rate=optimizer__learning_rate)
    if start == "pre-trained":
        values["finetune__checkpoint"] = study.workdir("pretrained", seed=seed)
    return None if values.get("finetune__checkpoint", "") is None else ("quickstart", values)


def read(study: Study) -> dict:
    """Returns accuracies of trained networks, and of least squares on frozen ones, by start."""
    networks = {trial.factors["seed"]: trial.job.workdir for trial in study.finished("pretrained")}
    penalties, frozen = {}, {}
    for start in STARTS if len(networks) == len(SEEDS) else ():
        penalties[start], frozen[start] = by_shots(start, tuple(networks[seed] for seed in SEEDS))
    return {
        "held_out": study.points("trained-choices", "accuracy"),
        "tests": study.points("trained", "accuracy"),
        "penalties": penalties,
        "frozen": frozen,
    }


def network(workdir: Path, start: str, seed: int) -> nnx.Module:
    """Returns the model of a run or, for the start `random`, a model with random parameters."""
    if start == "pre-trained":
        return vit_jax.load_model(workdir, log=str)
    arguments = model_arguments(from_json((workdir / CONFIG).read_text()))
    return vit_jax.create_model(num_classes=len(OLD), seed=seed, **arguments)


@functools.cache
def by_shots(start: str, workdirs: tuple[Path, ...]) -> tuple[float, dict[str, list[float]]]:
    """Returns the best penalty, and the accuracies of least squares by number of images per class.

    The accuracies are on the digits 5-9, for all networks and choices of images.

    Args:
      start: a key of `STARTS`.
      workdirs: the pre-training runs of all seeds.
    """
    models = [network(workdir, start, seed) for workdir, seed in zip(workdirs, SEEDS, strict=True)]
    train = open_source("digits", SHOTS_FROM, only=NEW)

    def found(split: str, penalties: Sequence[float]) -> list[Accuracy]:
        scored = open_source("digits", split, only=NEW)
        options = dict(shots=SHOTS, seeds=SEEDS, penalties=penalties)
        return [one for model in models for one in few_shot(model, train, scored, **options)]

    compared = found(SHOTS_HELD_OUT, PENALTIES)
    means = {
        each: statistics.mean(one.mean for one in compared if one.penalty == each)
        for each in PENALTIES
    }
    penalty = max(means, key=means.get)
    tested = found("test", (penalty,))
    return penalty, {
        f"{shots}": [
            right for one in tested if one.shots == shots for right in one.by_seed.values()
        ]
        for shots in SHOTS
    }


def table(figures: dict) -> str:
    """Returns two tables: test accuracies, and held-out accuracies of all learning rates."""
    rows = [
        (
            f"least squares, {shots} images of a class",
            *(spread(by[f"{shots}"]) for by in figures["frozen"].values()),
        )
        for shots in SHOTS
    ]
    trained = pivot(
        [point | {"way": "trained on 14 or 15"} for point in figures["tests"]], "way", "start"
    )
    few = markdown_table(["accuracy, %", *(f"start {start}" for start in figures["frozen"])], rows)
    rates = pivot(figures["held_out"], "start", "optimizer__learning_rate")
    return f"{trained}\n\n{few}\n\nHeld-out training images:\n\n{rates}"


def draw(study: Study, figures: dict) -> dict:
    """Draws the accuracy of least squares over the number of images per class."""
    points = [
        {"start": STARTS[start], "shots": shots, "accuracy": by[f"{shots}"]}
        for start, by in figures["frozen"].items()
        for shots in SHOTS
    ]
    return {
        "transfer_digits": lines(
            points, "shots", by=["start"], xlabel="training images of each of 5-9"
        )
    }


EXPERIMENT = Experiment(
    claim="A network that knows the digits 0-4 learns 5-9 from few images better than "
    "a random one.",
    stages=(
        grid("pretrained", {}, pretrained, SEEDS),
        *at_best(
            "trained",
            {"start": tuple(STARTS)},
            transfer,
            {"optimizer__learning_rate": RATES},
            HELD_OUT,
            SEEDS,
        ),
    ),
    read=read,
    table=table,
    draw=draw,
    minutes=7,
)
