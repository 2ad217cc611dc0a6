"""The worth of images without labels: python -m vit_jax.experiment self_supervised_digits --out=DIR

The quickstart's model, on scikit-learn's digits. It is pre-trained on all training images without
their labels, by each objective, and then fine-tuned on a tenth of them with labels; beside it the
same fine-tuning from random parameters. There are three seeds of everything. Each start has its own
learning rate, by runs of the first seed on training images held out for this; test images are
looked at once.

There is a picture of each objective's reconstructions too.
"""

import statistics

from vit_jax.ledger.stages import at_best, grid
from vit_jax.ledger.study import Experiment, Study
from vit_jax.ledger.tables import Points, listing, pivot
from vit_jax.ledger.unlabelled import objective_values
from vit_jax.runs.workdir import RECONSTRUCTIONS

SEEDS = (0, 1, 2)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
# Values of each start's run, by its name in the table.
OBJECTIVES = {
    "masked patches, mean colours": objective_values("masked_patch", target="color"),
    "masked patches, 4 x 4 colours": objective_values("masked_patch", target="cells"),
    "masked patches, pixels": objective_values("masked_patch", target="pixels"),
    "masked autoencoder": objective_values("mae", decoder_dim=32, decoder_depth=2, decoder_heads=4),
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


def pretrained(study: Study, start: str, seed: int):
    """A network of an objective, from images without labels."""
    return "quickstart", PRETRAINING | OBJECTIVES[start]


def finetuned(study: Study, start: str, optimizer__learning_rate: float, seed: int):
    """A run on a tenth of the images, with labels; None where its network is missing."""
    values = BUDGET | dict(optimizer__learning_rate=optimizer__learning_rate)
    if start != SCRATCH:
        values["finetune__checkpoint"] = study.workdir("pretrained", start=start, seed=seed)
    return None if values.get("finetune__checkpoint", "") is None else ("quickstart", values)


def read(study: Study) -> dict:
    """Accuracies on held-out training images by start and rate, and on the test images by start."""
    stages = {"held_out": "finetuned-choices", "tests": "finetuned"}
    return {name: study.points(stage, "accuracy") for name, stage in stages.items()}


def table(figures: dict) -> str:
    """The test images' accuracies, and those that chose the rates."""
    tests = listing(figures["tests"], ("start", "optimizer__learning_rate"))
    held_out = pivot(figures["held_out"], "start", "optimizer__learning_rate")
    return f"{tests}\n\nHeld-out training images:\n\n{held_out}"


def draw(study: Study, figures: dict) -> dict:
    """The accuracies, and the last pictures of each objective."""
    networks = {
        trial.factors["start"]: trial.job for trial in study.finished("pretrained", seed=SEEDS[0])
    }
    pictures = {"self_supervised_digits": draw_accuracies(figures["tests"])}
    return pictures | (
        {"reconstructions": draw_reconstructions(networks)} if len(networks) == 4 else {}
    )


def draw_reconstructions(networks: dict):
    """Test images, what is visible of them, what is predicted, by a network of each objective."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, (start, network) in zip(figure.subplots(2, 2).flat, networks.items(), strict=True):
        newest = max(
            (network.workdir / RECONSTRUCTIONS).glob("*.png"), key=lambda file: int(file.stem)
        )
        axes.imshow(Image.open(newest))
        axes.set_title(start, fontsize="medium")
        axes.set_axis_off()
    return figure


def draw_accuracies(tests: Points):
    """A row of points for each start, its mean a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 0.5 * len(tests) + 0.8), layout="constrained")
    axes = figure.subplots()
    for row, point in enumerate(tests):
        values = [100 * accuracy for accuracy in point["accuracy"]]
        axes.plot(values, [row] * len(values), "o", color="tab:blue", alpha=0.7)
        axes.plot([statistics.mean(values)], [row], "|", color="black", markersize=18)
    axes.set_yticks(range(len(tests)), [point["start"] for point in tests])
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy, %")
    axes.grid(axis="x", alpha=0.3)
    return figure


EXPERIMENT = Experiment(
    claim="Pre-training on images without labels helps where few have labels.",
    stages=(
        grid("pretrained", {"start": tuple(OBJECTIVES)}, pretrained, SEEDS),
        *at_best(
            "finetuned",
            {"start": STARTS},
            finetuned,
            {"optimizer__learning_rate": RATES},
            HELD_OUT,
            SEEDS,
        ),
    ),
    read=read,
    table=table,
    draw=draw,
    minutes=25,
)
