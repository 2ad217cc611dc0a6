"""What images without labels are worth: python experiments/self_supervised_digits.py --out=DIR

The quickstart's model, on scikit-learn's digits. It is pre-trained on all training images without their
labels, by each objective, and then fine-tuned on a tenth of them with labels; beside it the same fine-tuning
from random parameters. There are three seeds of everything. Each start has its own learning rate, by runs of
the first seed on training images held out for this; test images are looked at once.

Writes results.md, results.json, results.png and reconstructions.png into DIR. The same command again goes on
where it was stopped.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

from vit_jax import command
from vit_jax.runs.jobs import Job, accuracies_of, figures_of
from vit_jax.runs.workdir import RECONSTRUCTIONS

SEEDS = (0, 1, 2)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
QUICKSTART = f"--config={Path(__file__).parents[1] / 'configs' / 'quickstart.py'}"
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
PRETRAINING = {"epochs": 200.0, "evaluate_every": 1000, "checkpoint.every": 1000}
# About 14 images of each class, few steps.
BUDGET = {
    "data.train_split": "train[:10%]",
    "steps": 300,
    "batch_size": 32,
    "optimizer.warmup_steps": 30,
    "evaluate_every": 300,
    "checkpoint.every": 300,
}
HELD_OUT = {"data.test_split": "train[10%:]"}


def report(out: Path) -> None:
    """All of it, as far as it is not there yet.

    Raises:
      UserError: a run failed.
    """
    networks = {
        (start, seed): job(out / "pretrained" / f"{slug(start)}-seed{seed}", seed, PRETRAINING | objective)
        for start, values in OBJECTIVES.items()
        for objective in [{f"objective.{key}": value for key, value in values.items()}]
        for seed in SEEDS
    }
    figures_of(networks)

    def finetuned(kind: str, start: str, rate: float, seed: int, values: dict) -> Job:
        values = BUDGET | {"optimizer.learning_rate": rate} | values
        if start != SCRATCH:
            values["finetune.checkpoint"] = networks[start, seed].workdir
        return job(out / kind / f"{slug(start)}-{rate:g}-seed{seed}", seed, values)

    held_out, tests = {}, {}
    for start in STARTS:
        held_out[start] = accuracies_of(
            {rate: finetuned("held-out", start, rate, SEEDS[0], HELD_OUT) for rate in RATES}
        )
        rate = best(held_out[start])
        tests[start] = accuracies_of({seed: finetuned("test", start, rate, seed, {}) for seed in SEEDS})
    write(out, held_out, tests)
    show(out / "reconstructions.png", {start: networks[start, SEEDS[0]] for start in OBJECTIVES})


def job(workdir: Path, seed: int, values: dict) -> Job:
    """A run of the quickstart's model."""
    values = {"seed": seed} | values
    return Job(workdir, (QUICKSTART, *(f"--config.{key}={value}" for key, value in values.items())))


def slug(start: str) -> str:
    """For a folder's name."""
    return start.replace(",", "").replace(" ", "-")


def best(accuracies: Mapping[float, float]) -> float:
    """The rate of the highest accuracy."""
    return max(accuracies, key=accuracies.get)


def write(out: Path, held_out: dict, tests: dict) -> None:
    """The table, printed and as results.md, results.json and results.png; all by start."""
    rates = " | ".join(f"held out, rate {rate:g}" for rate in RATES)
    seeds = ", ".join(map(str, SEEDS))
    lines = [
        f"| start | test accuracy, % (mean ± deviation) | of seeds {seeds} | {rates} |",
        "|---|---|---|" + "---|" * len(RATES),
    ]
    for start in STARTS:
        found = [100 * tests[start][seed] for seed in SEEDS]
        cells = " | ".join(f"{100 * held_out[start][rate]:.2f}" for rate in RATES)
        each = ", ".join(f"{value:.2f}" for value in found)
        lines.append(
            f"| {start} | {statistics.mean(found):.2f} ± {statistics.stdev(found):.2f} | {each} | {cells} |"
        )
    text = "\n".join(lines)
    (out / "results.md").write_text(text + "\n")
    (out / "results.json").write_text(json.dumps({"held_out": held_out, "tests": tests}, indent=2) + "\n")
    draw(out / "results.png", tests)
    print(f"\n{text}\n\n{out / 'results.md'}, results.json, results.png")


def show(path: Path, networks: Mapping[str, Job]) -> None:
    """The last pictures of each objective: test images, what is visible of them, what is predicted."""
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(9, 5), layout="constrained")
    for axes, (start, network) in zip(figure.subplots(2, 2).flat, networks.items(), strict=True):
        newest = max((network.workdir / RECONSTRUCTIONS).glob("*.png"), key=lambda file: int(file.stem))
        axes.imshow(Image.open(newest))
        axes.set_title(start, fontsize="medium")
        axes.set_axis_off()
    figure.savefig(path, dpi=110)


def draw(path: Path, tests: dict) -> None:
    """A row of points for each start, its mean a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 0.5 * len(tests) + 0.8), layout="constrained")
    axes = figure.subplots()
    for row, found in enumerate(tests.values()):
        values = [100 * accuracy for accuracy in found.values()]
        axes.plot(values, [row] * len(values), "o", color="tab:blue", alpha=0.7)
        axes.plot([statistics.mean(values)], [row], "|", color="black", markersize=18)
    axes.set_yticks(range(len(tests)), list(tests))
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy, %")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    command.run_experiment(report)
