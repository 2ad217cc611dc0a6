"""Learning rate search of `python -m vit_jax.sweep`: its runs, its folder and its table.

The protocol is the paper's (appendix B.1.1). Learning rates are compared on images that are
excluded from training (held out). The best learning rate is then used for one run per seed. These
runs are trained on the whole training split, and evaluated on the test images once, at their end.
"""

import itertools
import json
import statistics
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vit_jax.config import differences, from_json, to_json, with_values
from vit_jax.data.sources.base import lacking
from vit_jax.data.sources.slices import cut, overlap
from vit_jax.errors import UserError
from vit_jax.options.run import RunOptions
from vit_jax.paths import CONFIG, MANIFEST
from vit_jax.runs import data_identity, workdir
from vit_jax.runs.jobs import Job, Outcome, outcome
from vit_jax.runs.splits import MANY, open_splits
from vit_jax.runs.warm_start import has_resnet
from vit_jax.training.objectives import objective_of

SWEEP = "sweep.json"  # File with the sweep's config. Two sweeps cannot share a folder.


def check_sweep(config: RunOptions) -> None:
    """Checks that a config allows a sweep.

    Raises:
      UserError: the config has no learning rates or no seeds for the sweep, or its objective has no
        accuracy to compare.
    """
    if not config.sweep.rates or not config.sweep.seeds:
        raise UserError("config.sweep.rates and config.sweep.seeds must name at least one each")
    if not objective_of(config.objective.name).labels:
        raise UserError(
            f"a sweep compares accuracies, which config.objective.name={config.objective.name!r} "
            "lacks"
        )


def rate_jobs(config: RunOptions, folder: Path, flags: tuple[str, ...]) -> dict[float, Job]:
    """Returns the runs that compare learning rates, by rate. They read no test images.

    Raises:
      UserError: the splits share images.
    """
    held_out = _held_out_values(config)
    rates = dict.fromkeys(config.sweep.rates)
    if config.sweep.resnet_rates and has_resnet(config):
        rates |= dict.fromkeys(config.sweep.resnet_rates)
    return {
        rate: changed(
            folder / f"rate-{rate:g}", flags, held_out | {"optimizer.learning_rate": rate}
        )
        for rate in rates
    }


def seed_jobs(
    config: RunOptions, folder: Path, flags: tuple[str, ...], rate: float
) -> dict[int, Job]:
    """Returns the runs at the best learning rate, by seed.

    They train on all training images, and are evaluated on the test images only at their end.
    """
    values = {"optimizer.learning_rate": rate, "evaluate_every": 10**9}
    return {
        seed: changed(folder / f"seed-{seed}", flags, values | {"seed": seed})
        for seed in config.sweep.seeds
    }


def held_out_splits(config: RunOptions) -> tuple[str, str]:
    """Returns the names of the split for training and of the split for comparing learning rates.

    The two splits may be slices of the same split, such as `train[:90%]` and `train[90%:]`.

    Raises:
      UserError: the splits share images with each other or with the test split.
    """
    splits = config.sweep.train_split, config.sweep.dev_split
    train, dev = (
        cut(config.data.train_split, one) if one.startswith("[") else one for one in splits
    )
    named = {
        "sweep.train_split": train,
        "sweep.dev_split": dev,
        "data.test_split": config.data.test_split,
    }
    for one, other in itertools.combinations(named, 2):
        if overlap(named[one], named[other], MANY):
            raise UserError(
                f"config.{one} is {named[one]!r}, and config.{other} has images of it: "
                f"{named[other]!r}"
            )
    return train, dev


def held_out_config(config: RunOptions) -> RunOptions:
    """Returns the config with the splits of `held_out_splits` for training and evaluation."""
    return with_values(config, _held_out_values(config))


def _held_out_values(config: RunOptions) -> dict[str, Any]:
    train_split, dev_split = held_out_splits(config)
    return {"data.train_split": train_split, "data.test_split": dev_split, "data.dev_split": None}


def check_data(jobs: Collection[Job], config: RunOptions) -> None:
    """Raises UserError if a run was started with other data than the config's splits have now."""
    begun = {job.name: saved for job in jobs if (saved := workdir.saved_run(job.workdir))}
    if not begun or config.data.changed == "accepted":
        return
    manifest = json.loads(json.dumps(data_identity.identity_of(open_splits(config))))
    for name, saved in begun.items():
        if changed_data := data_identity.differences(saved.manifest, manifest):
            raise UserError(
                f"{name} was trained on other data ({'; '.join(changed_data)}); give another "
                "--workdir"
            )


def open_held_out(config: RunOptions) -> None:
    """Opens the two splits of `held_out_splits`, to detect errors before any run starts.

    Raises:
      UserError: a split cannot be opened.
    """
    splits = open_splits(held_out_config(config))
    for name, source in {"training": splits.train, "held-out": splits.test}.items():
        for line in lacking(name, source):
            print(line)


def check_begun(jobs: Collection[Job]) -> None:
    """Raises UserError if a run failed before training, because all runs would fail in this way."""
    for job in jobs:
        if (failure := outcome(job).failure) and not (job.workdir / MANIFEST).exists():
            raise UserError(f"{failure} ({job.name}; no other run is started)")


def best_rate(outcomes: dict[float, Outcome]) -> float:
    """Prints and returns the learning rate with the highest accuracy, the first of equal ones.

    Raises:
      UserError: a run is not finished, or all runs have failed.
    """
    if waiting := [f"rate-{rate:g}" for rate, result in outcomes.items() if result.pending]:
        raise UserError(f"{', '.join(waiting)} must be finished first")
    accuracies = {
        rate: result.figures["accuracy"] for rate, result in outcomes.items() if result.figures
    }
    if not accuracies:
        reasons = "; ".join(f"rate-{rate:g}: {result.failure}" for rate, result in outcomes.items())
        raise UserError(f"no run of the sweep finished: {reasons}")
    best = max(accuracies, key=accuracies.get)
    ties = [f"{rate:g}" for rate, accuracy in accuracies.items() if accuracy == accuracies[best]]
    equal = f" (first of {', '.join(ties)}, which are equal)" if len(ties) > 1 else ""
    print(
        f"== best of {len(accuracies)} learning rates: {best:g}{equal}, {accuracies[best]:.2%} "
        "accuracy on held-out images"
    )
    return best


def check_seeds(seeds: dict[int, Job], rate: float) -> None:
    """Raises UserError if a seed's run was trained with another learning rate than the best one.

    This happens if the user adds rates to a finished sweep, and one of them is better.
    """
    for job in seeds.values():
        file = job.workdir / CONFIG
        if file.exists():
            begun = from_json(file.read_text()).optimizer.learning_rate
            if begun != rate:
                raise UserError(
                    f"{job.workdir} was trained at the learning rate {begun:g}, but the best one "
                    f"is {rate:g}: move the folders of the seeds away to train them again"
                )


def changed(path: Path, flags: tuple[str, ...], values: dict[str, Any]) -> Job:
    """Returns a training run, not started yet, with config values, by dotted key, that differ."""
    return Job(path, (*flags, *(f"--config.{key}={value}" for key, value in values.items())))


def claim(folder: Path, config: RunOptions) -> None:
    """Writes the sweep's config into `folder`; raises UserError if it is another sweep's."""
    file = folder / SWEEP
    if file.exists():
        saved = from_json(file.read_text()).sweep
        differing = differences(file.read_text(), config) + [
            # All runs of a sweep must have the same splits. Otherwise their accuracies could not
            # be compared.
            f"sweep.{key}: {getattr(saved, key)} -> {getattr(config.sweep, key)}"
            for key in ("train_split", "dev_split")
            if getattr(saved, key) != getattr(config.sweep, key)
        ]
        if differing:
            raise UserError(
                f"{folder} belongs to a sweep with another config ({'; '.join(differing)}); "
                "give another --workdir"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} contains files but no sweep; give a new or empty --workdir")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(to_json(config) + "\n")


def write(
    folder: Path, rates: dict[float, Outcome], best: float, seeds: dict[int, Outcome]
) -> None:
    """Writes a sweep's results to results.md, results.json and results.png; prints the table."""
    lines = ["| run | learning rate | images | accuracy |", "|---|---|---|---|"]
    for rate, result in rates.items():
        lines.append(f"| held-out training images | {rate:g} | {cells(result)} |")
    for seed, result in seeds.items():
        lines.append(f"| test, seed {seed} | {best:g} | {cells(result)} |")
    tests = [result.figures["accuracy"] for result in seeds.values() if result.figures]
    if tests:
        deviation = f" ± {100 * statistics.stdev(tests):.2f}" if len(tests) > 1 else ""
        mean = f"{statistics.mean(tests):.2%}{deviation}"
        lines.append(f"| **test, mean of {len(tests)}** | {best:g} | | **{mean}** |")
    text = "\n".join(lines)
    (folder / "results.md").write_text(text + "\n")
    results = {
        "rates": {f"{rate:g}": as_json(result) for rate, result in rates.items()},
        "best_rate": best,
        "seeds": {str(seed): as_json(result) for seed, result in seeds.items()},
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(folder / "results.png", rates, best, tests)
    print(f"\n{text}\n\n{folder / 'results.md'}, results.json, results.png")


def as_json(result: Outcome) -> dict:
    """Converts the outcome of a run (metrics, or reason of its failure) to a JSON object."""
    return {"figures": result.figures, "failure": result.failure}


def cells(result: Outcome) -> str:
    """Returns table cells for a run in Markdown: number of images and accuracy, or the failure."""
    if result.figures is None:
        return f"| {result.failure or 'not run'}"
    return f"{result.figures['images']:,.0f} | {result.figures['accuracy']:.2%}"


def draw(path: Path, rates: dict[float, Outcome], best: float, tests: list[float]) -> None:
    """Draws held-out accuracies by learning rate and test accuracies at the best one into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    known = {
        rate: 100 * result.figures["accuracy"] for rate, result in rates.items() if result.figures
    }
    axes.plot(list(known), list(known.values()), "o-", label="held-out training images")
    axes.plot(
        [best] * len(tests), [100 * accuracy for accuracy in tests], "x", label="test, each seed"
    )
    axes.set(xscale="log", xlabel="learning rate", ylabel="accuracy, %", xticks=list(known))
    axes.set_xticks(list(known), [f"{rate:g}" for rate in known])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
