"""The worth of images without labels: python -m vit_jax.experiment self_supervised_digits --out=DIR

The quickstart's model, on scikit-learn's digits. It is pre-trained on all training images without their
labels, by each objective, and then fine-tuned on a tenth of them with labels; beside it the same fine-tuning
from random parameters. There are three seeds of everything. Each start has its own learning rate, by runs of
the first seed on training images held out for this; test images are looked at once.

There is a picture of each objective's reconstructions too.
"""

import statistics

from vit_jax.runs.study import Experiment, Study, best, markdown_table, spread
from vit_jax.runs.workdir import RECONSTRUCTIONS

SEEDS = (0, 1, 2)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
# What the table calls each start, and its objective.
OBJECTIVES = {
    "masked patches, mean colours": {"name": "masked_patch", "target": "color"},
    "masked patches, 4 x 4 colours": {"name": "masked_patch", "target": "cells"},
    "masked patches, pixels": {"name": "masked_patch", "target": "pixels"},
    "masked autoencoder": {
        "name": "mae",
        "decoder_dim": 32,
        "decoder_depth": 2,
        "decoder_heads": 4,
    },
}
SCRATCH = "random parameters"
STARTS = (SCRATCH, *OBJECTIVES)
PRETRAINING = {"epochs": 200.0, "evaluate_every": 1000, "checkpoint__every": 1000}
# About 14 images of each class, few steps.
BUDGET = {
    "data__train_split": "train[:10%]",
    "steps": 300,
    "batch_size": 32,
    "optimizer__warmup_steps": 30,
    "evaluate_every": 300,
    "checkpoint__every": 300,
}
HELD_OUT = {"data__test_split": "train[10%:]"}


def pretraining(study: Study):
    """A network of each objective and seed, from images without labels."""
    return {
        ("pretrained", start, seed): study.job(
            f"pretrained/{slug(start)}-seed{seed}",
            **PRETRAINING,
            **{f"objective__{key}": value for key, value in values.items()},
            seed=seed,
        )
        for start, values in OBJECTIVES.items()
        for seed in SEEDS
    }


def finetuned(study: Study, kind: str, start: str, rate: float, seed: int, **values):
    """A run on a tenth of the images, with labels."""
    values = BUDGET | dict(optimizer__learning_rate=rate, seed=seed) | values
    if start != SCRATCH:
        values["finetune__checkpoint"] = study.jobs["pretrained", start, seed].workdir
    return study.job(f"{kind}/{slug(start)}-{rate:g}-seed{seed}", **values)


def rates(study: Study):
    """A run of the first seed at each rate, judged by held-out training images."""
    return {
        ("held-out", start, rate): finetuned(study, "held-out", start, rate, SEEDS[0], **HELD_OUT)
        for start in STARTS
        for rate in RATES
    }


def tests(study: Study):
    """Runs of each seed at the best rate of each start, judged by the test images."""
    return {
        ("test", start, seed): finetuned(
            study, "test", start, best(study.accuracies("held-out", start)), seed
        )
        for start in STARTS
        for seed in SEEDS
    }


def read(study: Study) -> dict:
    """Accuracies by start, on held-out training images by rate and on the test images by seed."""
    kinds = {"held_out": "held-out", "tests": "test"}
    return {name: {start: study.accuracies(kind, start) for start in STARTS} for name, kind in kinds.items()}


def slug(start: str) -> str:
    """The start as a folder's name."""
    return start.replace(",", "").replace(" ", "-")


def table(figures: dict) -> str:
    """A line for each start."""
    held_out, trained = figures["held_out"], figures["tests"]
    header = [
        "start",
        "test accuracy, % (mean ± deviation)",
        f"of seeds {', '.join(map(str, SEEDS))}",
        *(f"held out, rate {rate:g}" for rate in RATES),
    ]
    return markdown_table(
        header,
        [
            (
                start,
                spread(trained[start].values()),
                ", ".join(f"{100 * trained[start][seed]:.2f}" for seed in SEEDS),
                *(f"{100 * held_out[start][rate]:.2f}" for rate in RATES),
            )
            for start in STARTS
        ],
    )


def draw(study: Study, figures: dict) -> dict:
    """The accuracies, and the last pictures of each objective."""
    networks = {
        start: job
        for (kind, start, seed), job in study.jobs.items()
        if (kind, seed) == ("pretrained", SEEDS[0])
    }
    pictures = {"results": draw_accuracies(figures["tests"])}
    return pictures | ({"reconstructions": draw_reconstructions(networks)} if networks else {})


def draw_reconstructions(networks: dict):
    """Test images, what is visible of them, what is predicted, by a network of each objective."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, (start, network) in zip(figure.subplots(2, 2).flat, networks.items(), strict=True):
        newest = max((network.workdir / RECONSTRUCTIONS).glob("*.png"), key=lambda file: int(file.stem))
        axes.imshow(Image.open(newest))
        axes.set_title(start, fontsize="medium")
        axes.set_axis_off()
    return figure


def draw_accuracies(tests: dict):
    """A row of points for each start, its mean a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 0.5 * len(tests) + 0.8), layout="constrained")
    axes = figure.subplots()
    for row, by_seed in enumerate(tests.values()):
        values = [100 * accuracy for accuracy in by_seed.values()]
        axes.plot(values, [row] * len(values), "o", color="tab:blue", alpha=0.7)
        axes.plot([statistics.mean(values)], [row], "|", color="black", markersize=18)
    axes.set_yticks(range(len(tests)), list(tests))
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy, %")
    axes.grid(axis="x", alpha=0.3)
    return figure


EXPERIMENT = Experiment(
    claim="Pre-training on images without labels helps where few have labels.",
    stages=(pretraining, rates, tests),
    read=read,
    table=table,
    draw=draw,
    needs="nothing; 12 pre-training and 35 fine-tuning runs of minutes",
)
