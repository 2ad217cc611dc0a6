"""Transfer between digits: python experiments/transfer_digits.py --out=DIR

Pre-trains configs/quickstart.py on scikit-learn's digits 0-4. Then it learns 5-9 in three ways: by
fine-tuning on a tenth of their training images; from random parameters, with the same images and as many
steps; and by least squares on a few images of each class and the features of the frozen network, as
`vit_jax.evaluate`, beside those of a random network.

There are three seeds of everything, the pre-trained networks too; each network's least squares have three
choices of images. Pre-trained and random networks have each their own learning rate (by a run of the first
seed) and their own penalty of least squares: those that are best on training images held out for this. Test
images are looked at once.

Writes results.md, results.json and results.png into DIR. The same command again goes on where it was stopped.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from flax import nnx

import vit_jax
from vit_jax import command
from vit_jax.config import from_json
from vit_jax.data.sources import open_source
from vit_jax.evaluation.fewshot import Accuracy, few_shot
from vit_jax.runs.jobs import Job, accuracies_of
from vit_jax.runs.workdir import CONFIG
from vit_jax.training.program import model_arguments

SEEDS = (0, 1, 2)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SHOTS = (1, 5, 10, 25)
PENALTIES = tuple(4.0**power for power in range(-3, 6))  # The usual 1,024 is for more features than 64.
# Parameters at the start, and what the tables call them.
STARTS = {"pre-trained": "from 0-4", "random": "from random parameters"}
OLD, NEW = ("0", "1", "2", "3", "4"), ("5", "6", "7", "8", "9")
QUICKSTART = f"--config={Path(__file__).parents[1] / 'configs' / 'quickstart.py'}"
PRETRAINING = {"epochs": 60.0}
# What fine-tuning and training from scratch share: about 14 images of each class, few steps.
BUDGET = {
    "data.train_split": "train[:10%]",
    "steps": 300,
    "batch_size": 32,
    "optimizer.warmup_steps": 30,
    "evaluate_every": 300,
    "checkpoint.every": 300,
}
HELD_OUT = {"data.test_split": "train[10%:]"}
SHOTS_FROM, SHOTS_HELD_OUT = "train[:20%]", "train[20%:]"


def report(out: Path) -> None:
    """All of it, as far as it is not there yet.

    Raises:
      UserError: a run failed.
    """
    networks = {seed: job(out / f"pretrained-{seed}", OLD, seed, PRETRAINING) for seed in SEEDS}
    accuracies_of(networks)

    def transfer(kind: str, start: str, rate: float, seed: int, values: dict) -> Job:
        values = BUDGET | {"optimizer.learning_rate": rate} | values
        if start == "pre-trained":
            values["finetune.checkpoint"] = networks[seed].workdir
        return job(out / f"{start}-{kind}-{rate:g}-seed{seed}", NEW, seed, values)

    held_out, tests, penalties, frozen = {}, {}, {}, {}
    for start in STARTS:
        rates = {rate: transfer("held-out", start, rate, SEEDS[0], HELD_OUT) for rate in RATES}
        held_out[start] = accuracies_of(rates)
        rate = best(held_out[start])
        tests[start] = accuracies_of({seed: transfer("test", start, rate, seed, {}) for seed in SEEDS})
        models = [network(networks[seed].workdir, start, seed) for seed in SEEDS]
        penalties[start], frozen[start] = by_shots(models)
    write(out, held_out, tests, penalties, frozen)


def job(workdir: Path, classes: tuple[str, ...], seed: int, values: dict) -> Job:
    """A run of the quickstart's model on some of the digits."""
    values = {"data.classes": classes, "seed": seed} | values
    return Job(workdir, (QUICKSTART, *(f"--config.{key}={value}" for key, value in values.items())))


def best(accuracies: Mapping[float, float]) -> float:
    """The rate or penalty of the highest accuracy."""
    return max(accuracies, key=accuracies.get)


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


def write(out: Path, held_out: dict, tests: dict, penalties: dict, frozen: dict) -> None:
    """The tables, printed and as results.md, results.json and results.png; all by start."""
    rates = ", ".join(f"{best(held_out[start]):g}" for start in STARTS)
    chosen = ", ".join(f"{penalties[start]:g}" for start in STARTS)
    trained = [spread(tests[start].values()) for start in STARTS]
    lines = [
        f"| accuracy on the test images of 5-9, % | images of a class | {' | '.join(STARTS.values())} |",
        "|---|---|---|---|",
        f"| {BUDGET['steps']} steps of training, learning rates {rates} | 14 or 15 | {' | '.join(trained)} |",
    ]
    for shots in SHOTS:
        cells = " | ".join(spread(frozen[start][shots]) for start in STARTS)
        lines.append(f"| least squares, the network frozen, penalties {chosen} | {shots} | {cells} |")
    header = " | ".join(f"{rate:g}" for rate in RATES)
    lines += ["", f"| held-out training images, learning rate | {header} |", "|---|" + "---|" * len(RATES)]
    for start, name in STARTS.items():
        cells = " | ".join(f"{100 * held_out[start][rate]:.2f}" for rate in RATES)
        lines.append(f"| {name} | {cells} |")
    text = "\n".join(lines)
    (out / "results.md").write_text(text + "\n")
    figures = {"held_out": held_out, "tests": tests, "penalties": penalties, "frozen": frozen}
    (out / "results.json").write_text(json.dumps(figures, indent=2) + "\n")
    draw(out / "results.png", tests, frozen)
    print(f"\n{text}\n\n{out / 'results.md'}, results.json, results.png")


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation (n - 1), in per cent."""
    values = list(values)
    return f"{100 * statistics.mean(values):.2f} ± {100 * statistics.stdev(values):.2f}"


def draw(path: Path, tests: dict, frozen: dict) -> None:
    """Accuracy over the images of a class: least squares as lines, training as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for start, colour in zip(STARTS, ("tab:blue", "tab:orange"), strict=True):
        values = [[100 * right for right in frozen[start][shots]] for shots in SHOTS]
        means, deviations = list(map(statistics.mean, values)), list(map(statistics.stdev, values))
        axes.errorbar(
            SHOTS, means, deviations, fmt="o-", capsize=3, color=colour, label=f"{STARTS[start]}, frozen"
        )
        trained = [100 * right for right in tests[start].values()]
        axes.plot([14] * len(trained), trained, "x", color=colour, label=f"{STARTS[start]}, trained")
    axes.set(xscale="log", xlabel="training images of each of 5-9", ylabel="test accuracy, %")
    axes.set_xticks(SHOTS, [str(shots) for shots in SHOTS])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    command.run_experiment(report)
