"""Transfer between digits: python experiments/transfer_digits.py --out=DIR

Pre-trains configs/quickstart.py on scikit-learn's digits 0-4. Then it learns 5-9 in three ways: by
fine-tuning on a tenth of their training images; from random parameters, with the same images and as many
steps; and by least squares on a few images of each class and the features of the frozen network, as
`vit_jax.evaluate`.

There are three seeds of everything, the pre-trained networks too; each network's least squares have three
choices of images. Fine-tuning and training from scratch have each their own learning rate: the best, by a
run of the first seed, on the nine tenths of the training images that they leave. Test images are looked at
once.

Writes results.md, results.json and results.png into DIR. The same command again goes on where it was stopped.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from flax import nnx

import vit_jax
from vit_jax import command
from vit_jax.config import from_json
from vit_jax.data.sources import open_source
from vit_jax.errors import UserError
from vit_jax.evaluation.fewshot import few_shot
from vit_jax.jobs import Job, outcome, run_jobs
from vit_jax.training.workdir import CONFIG, model_arguments

SEEDS = (0, 1, 2)
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SHOTS = (1, 5, 10, 25)
STARTS = ("pre-trained", "random")  # Parameters at the start.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for all of it; finished runs are kept"
    )
    out = parser.parse_args().out.absolute()
    command.use_compilation_cache()
    try:
        report(out)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


def report(out: Path) -> None:
    """All of it, as far as it is not there yet.

    Raises:
      UserError: a run failed.
    """
    networks = {seed: job(out / f"pretrained-{seed}", OLD, seed, PRETRAINING) for seed in SEEDS}
    accuracies(networks)

    def transfer(name: str, start: str, rate: float, seed: int, values: dict) -> Job:
        values = BUDGET | {"optimizer.learning_rate": rate} | values
        if start == "pre-trained":
            values["finetune.checkpoint"] = networks[seed].workdir
        return job(out / f"{start}-{name}", NEW, seed, values)

    held_out, tests, frozen = {}, {}, {}
    for start in STARTS:
        rates = {rate: transfer(f"rate-{rate:g}", start, rate, SEEDS[0], HELD_OUT) for rate in RATES}
        held_out[start] = accuracies(rates)
        rate = best(held_out[start])
        tests[start] = accuracies({seed: transfer(f"seed-{seed}", start, rate, seed, {}) for seed in SEEDS})
        frozen[start] = by_shots([network(networks[seed].workdir, start, seed) for seed in SEEDS])
    write(out, held_out, tests, frozen)


def job(workdir: Path, classes: tuple[str, ...], seed: int, values: dict) -> Job:
    """A run of the quickstart's model on some of the digits."""
    values = {"data.classes": classes, "seed": seed} | values
    return Job(workdir, (QUICKSTART, *(f"--config.{key}={value}" for key, value in values.items())))


def accuracies(jobs: dict) -> dict:
    """Of runs by anything, which are made where they are not there yet.

    Raises:
      UserError: one failed.
    """
    run_jobs(list(jobs.values()))
    outcomes = {key: outcome(each) for key, each in jobs.items()}
    for key, each in jobs.items():
        if outcomes[key].figures is None:
            raise UserError(f"{each.workdir}: {outcomes[key].failure}")
    return {key: result.figures["accuracy"] for key, result in outcomes.items()}


def best(rates: Mapping[float, float]) -> float:
    """The rate of the highest accuracy."""
    return max(rates, key=rates.get)


def network(workdir: Path, start: str, seed: int) -> nnx.Module:
    """A run's model, or the same with random parameters."""
    if start == "pre-trained":
        return vit_jax.load_model(workdir, say=str)
    arguments = model_arguments(from_json((workdir / CONFIG).read_text()))
    return vit_jax.create_model(num_classes=len(OLD), seed=seed, **arguments)


def by_shots(networks: Sequence[nnx.Module]) -> dict[int, list[float]]:
    """Few-shot accuracies on the new digits: of all networks and choices of images."""
    train, test = (open_source("digits", split, only=NEW) for split in ("train", "test"))
    found = [one for model in networks for one in few_shot(model, train, test, shots=SHOTS, seeds=SEEDS)]
    return {
        shots: [right for one in found if one.shots == shots for right in one.by_seed.values()]
        for shots in SHOTS
    }


def write(out: Path, held_out: dict, tests: dict, frozen: dict) -> None:
    """The tables, printed and as results.md, results.json and results.png; all by start."""
    rates = ", ".join(f"{best(held_out[start]):g}" for start in STARTS)
    trained = [spread(tests[start].values()) for start in STARTS]
    lines = [
        "| accuracy on the test images of 5-9, % | images of a class | from 0-4 | from random parameters |",
        "|---|---|---|---|",
        f"| {BUDGET['steps']} steps of training, learning rates {rates} | 14 or 15 | {' | '.join(trained)} |",
    ]
    for shots in SHOTS:
        cells = " | ".join(spread(frozen[start][shots]) for start in STARTS)
        lines.append(f"| least squares, the network frozen | {shots} | {cells} |")
    lines += [
        "",
        f"| held-out training images, learning rate | {' | '.join(f'{rate:g}' for rate in RATES)} |",
    ]
    lines.append("|---|" + "---|" * len(RATES))
    for start, name in zip(STARTS, ("from 0-4", "from random parameters"), strict=True):
        cells = " | ".join(f"{100 * held_out[start][rate]:.2f}" for rate in RATES)
        lines.append(f"| {name} | {cells} |")
    text = "\n".join(lines)
    (out / "results.md").write_text(text + "\n")
    figures = {"held_out": held_out, "tests": tests, "frozen": frozen}
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
        means, deviations = zip(
            *((statistics.mean(each), statistics.stdev(each)) for each in values), strict=True
        )
        axes.errorbar(SHOTS, means, deviations, fmt="o-", capsize=3, color=colour, label=f"{start}, frozen")
        trained = [100 * right for right in tests[start].values()]
        axes.plot([14] * len(trained), trained, "x", color=colour, label=f"{start}, trained")
    axes.set(xscale="log", xlabel="training images of each of 5-9", ylabel="test accuracy, %")
    axes.set_xticks(SHOTS, [str(shots) for shots in SHOTS])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
