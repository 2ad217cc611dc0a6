"""Pre-training without labels on digits: vit-jax experiment self_supervised_digits --out=DIR.

The quickstart's model is pre-trained with each objective on all training images of scikit-learn's
digits, without their labels. Then it is fine-tuned on a tenth of the training images with labels.
The baseline is the same fine-tuning from random parameters. All runs have three seeds. For each
start (an objective, or random parameters) the learning rate of fine-tuning is chosen by runs of the
first seed on held-out training images. Test images are evaluated once.

A plot shows images that each objective reconstructs.
"""

import statistics

from vit_jax.ledger.stages import at_best, grid
from vit_jax.ledger.study import Experiment, Study
from vit_jax.ledger.tables import Points, listing, pivot
from vit_jax.ledger.unlabelled import objective_values
from vit_jax.runs.workdir import RECONSTRUCTIONS

SEEDS = (0, 1, 2)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
# Overrides of each pre-training run, by the name of the start in the table.
OBJECTIVES = {
    "masked patches, mean colours": objective_values("masked_patch", target="color"),
    "masked patches, 4 x 4 colours": objective_values("masked_patch", target="cells"),
    "masked patches, pixels": objective_values("masked_patch", target="pixels"),
    "masked autoencoder": objective_values("mae", decoder_dim=32, decoder_depth=2, decoder_heads=4),
}
SCRATCH = "random parameters"
STARTS = (SCRATCH, *OBJECTIVES)
PRETRAINING = {"epochs": 200.0, "evaluate_every": 1000, "checkpoint__every": 1000}
# Overrides of fine-tuning runs: about 14 images of each class, and few steps.
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
    """Returns config and overrides of a pre-training run without labels."""
    return "quickstart", PRETRAINING | OBJECTIVES[start]


def finetuned(study: Study, start: str, optimizer__learning_rate: float, seed: int):
    """Returns config and overrides of a fine-tuning run; None if its checkpoint is missing."""
    values = BUDGET | dict(optimizer__learning_rate=optimizer__learning_rate)
    if start != SCRATCH:
        values["finetune__checkpoint"] = study.workdir("pretrained", start=start, seed=seed)
    return None if values.get("finetune__checkpoint", "") is None else ("quickstart", values)


def read(study: Study) -> dict:
    """Returns held-out accuracies by start and learning rate, and test accuracies by start."""
    stages = {"held_out": "finetuned-choices", "tests": "finetuned"}
    return {name: study.points(stage, "accuracy") for name, stage in stages.items()}


def table(figures: dict) -> str:
    """Returns two tables: test accuracies, and held-out accuracies of all learning rates."""
    tests = listing(figures["tests"], ("start", "optimizer__learning_rate"))
    held_out = pivot(figures["held_out"], "start", "optimizer__learning_rate")
    return f"{tests}\n\nHeld-out training images:\n\n{held_out}"


def draw(study: Study, figures: dict) -> dict:
    """Draws the accuracies, and the last reconstructions of each objective."""
    networks = {
        trial.factors["start"]: trial.job for trial in study.finished("pretrained", seed=SEEDS[0])
    }
    pictures = {"self_supervised_digits": draw_accuracies(figures["tests"])}
    return pictures | (
        {"reconstructions": draw_reconstructions(networks)} if len(networks) == 4 else {}
    )


def draw_reconstructions(networks: dict):
    """Draws test images, the part of them that a model reads, and its prediction.

    Args:
      networks: the pre-trained model of each objective, by name.
    """
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
    """Draws for each start a row with a point for each seed, and a line at the mean."""
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
