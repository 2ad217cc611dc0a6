"""Transfer between digits: python -m vit_jax.experiment transfer_digits --out=DIR

Pre-trains configs/quickstart.py on scikit-learn's digits 0-4. Then it learns 5-9 in three ways: by
fine-tuning on a tenth of their training images; from random parameters, with the same images and as many
steps; and by least squares on a few images of each class and the features of the frozen network, as
`vit_jax.evaluate`, beside those of a random network.

There are three seeds of everything, the pre-trained networks too; each network's least squares have three
choices of images. Pre-trained and random networks have each their own learning rate (by a run of the first
seed) and their own penalty of least squares: those that are best on training images held out for this. Test
images are looked at once.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from flax import nnx

import vit_jax
from vit_jax.config import from_json
from vit_jax.data.sources import open_source
from vit_jax.evaluation.fewshot import Accuracy, few_shot
from vit_jax.runs.study import Experiment, Study, best, markdown_table, spread
from vit_jax.runs.workdir import CONFIG
from vit_jax.training.program import model_arguments

SEEDS = (0, 1, 2)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SHOTS = (1, 5, 10, 25)
PENALTIES = tuple(4.0**power for power in range(-3, 6))  # The usual 1,024 is for more features than 64.
# Parameters at the start, and what the tables call them.
STARTS = {"pre-trained": "from 0-4", "random": "from random parameters"}
OLD, NEW = ("0", "1", "2", "3", "4"), ("5", "6", "7", "8", "9")
# What fine-tuning and training from scratch share: about 14 images of each class, few steps.
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


def pretraining(study: Study):
    """A network that knows 0-4, for each seed."""
    values = dict(data__classes=OLD, epochs=60.0)
    return {("pretrained", s): study.job(f"pretrained-{s}", **values, seed=s) for s in SEEDS}


def transfer(study: Study, kind: str, start: str, rate: float, seed: int, **values):
    """A run on 5-9."""
    values = BUDGET | dict(data__classes=NEW, optimizer__learning_rate=rate, seed=seed) | values
    if start == "pre-trained":
        values["finetune__checkpoint"] = study.jobs["pretrained", seed].workdir
    return study.job(f"{start}-{kind}-{rate:g}-seed{seed}", **values)


def rates(study: Study):
    """A run of the first seed at each rate, judged by held-out training images."""
    return {
        ("held-out", start, rate): transfer(study, "held-out", start, rate, SEEDS[0], **HELD_OUT)
        for start in STARTS
        for rate in RATES
    }


def tests(study: Study):
    """Runs of each seed at the best rate of each start, judged by the test images."""
    return {
        ("test", start, seed): transfer(study, "test", start, best(study.accuracies("held-out", start)), seed)
        for start in STARTS
        for seed in SEEDS
    }


def read(study: Study) -> dict:
    """Accuracies of training, and of least squares on the frozen networks; all by start."""
    penalties, frozen = {}, {}
    for start in STARTS:
        models = [network(study.jobs["pretrained", seed].workdir, start, seed) for seed in SEEDS]
        penalties[start], frozen[start] = by_shots(models)
    return {
        "held_out": {start: study.accuracies("held-out", start) for start in STARTS},
        "tests": {start: study.accuracies("test", start) for start in STARTS},
        "penalties": penalties,
        "frozen": frozen,
    }


def network(workdir: Path, start: str, seed: int) -> nnx.Module:
    """A run's model, or the same with random parameters."""
    if start == "pre-trained":
        return vit_jax.load_model(workdir, say=str)
    arguments = model_arguments(from_json((workdir / CONFIG).read_text()))
    return vit_jax.create_model(num_classes=len(OLD), seed=seed, **arguments)


def by_shots(models: Sequence[nnx.Module]) -> tuple[float, dict[int, list[float]]]:
    """The best penalty, and few-shot accuracies on the new digits: of all networks and choices of images."""
    train = open_source("digits", SHOTS_FROM, only=NEW)

    def found(split: str, penalties: Sequence[float]) -> list[Accuracy]:
        scored = open_source("digits", split, only=NEW)
        options = dict(shots=SHOTS, seeds=SEEDS, penalties=penalties)
        return [one for model in models for one in few_shot(model, train, scored, **options)]

    compared = found(SHOTS_HELD_OUT, PENALTIES)
    penalty = best(
        {each: statistics.mean(one.mean for one in compared if one.penalty == each) for each in PENALTIES}
    )
    tested = found("test", (penalty,))
    return penalty, {
        shots: [right for one in tested if one.shots == shots for right in one.by_seed.values()]
        for shots in SHOTS
    }


def table(figures: dict) -> str:
    """Training and least squares side by side, and the held-out figures that chose the rates."""
    held_out, trained, frozen = figures["held_out"], figures["tests"], figures["frozen"]
    chosen = ", ".join(f"{best(held_out[start]):g}" for start in STARTS)
    penalties = ", ".join(f"{figures['penalties'][start]:g}" for start in STARTS)
    steps = f"{BUDGET['steps']} steps of training, learning rates {chosen}"
    rows = [(steps, "14 or 15", *(spread(trained[start].values()) for start in STARTS))]
    for shots in SHOTS:
        cells = (spread(frozen[start][shots]) for start in STARTS)
        rows.append((f"least squares, the network frozen, penalties {penalties}", shots, *cells))
    first = "accuracy on the test images of 5-9, %", "images of a class", *STARTS.values()
    second = "held-out training images, learning rate", *(f"{rate:g}" for rate in RATES)
    compared = [
        (name, *(f"{100 * held_out[start][rate]:.2f}" for rate in RATES)) for start, name in STARTS.items()
    ]
    return f"{markdown_table(first, rows)}\n\n{markdown_table(second, compared)}"


def draw(study: Study, figures: dict) -> dict:
    """Accuracy over the images of a class: least squares as lines, training as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for start, colour in zip(STARTS, ("tab:blue", "tab:orange"), strict=True):
        values = [[100 * right for right in figures["frozen"][start][shots]] for shots in SHOTS]
        means, deviations = list(map(statistics.mean, values)), list(map(statistics.stdev, values))
        axes.errorbar(
            SHOTS, means, deviations, fmt="o-", capsize=3, color=colour, label=f"{STARTS[start]}, frozen"
        )
        trained = [100 * right for right in figures["tests"][start].values()]
        axes.plot([14] * len(trained), trained, "x", color=colour, label=f"{STARTS[start]}, trained")
    axes.set(xscale="log", xlabel="training images of each of 5-9", ylabel="test accuracy, %")
    axes.set_xticks(SHOTS, [str(shots) for shots in SHOTS])
    axes.minorticks_off()
    axes.legend(frameon=False)
    return {"results": figure}


EXPERIMENT = Experiment(
    claim="A network that knows the digits 0-4 learns 5-9 from few images better than a random one.",
    stages=(pretraining, rates, tests),
    read=read,
    table=table,
    draw=draw,
    needs="nothing; seven processor minutes",
)
