"""Device-days of pre-training at the paper's scale, as the TPU compiler estimates them."""

import json
import sys
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from vit_jax.ledger.study import Experiment, Study, config_of, known_trials
from vit_jax.planning import choices, cost
from vit_jax.planning.compile import Slice, find_slice
from vit_jax.planning.estimate import Estimate, estimate, make_workload
from vit_jax.runs.jobs import Job
from vit_jax.runs.memory_check import in_words

SLICES = {"v3": "16x16", "v5e": "16x16"}  # Topologies of 256 chips.


def pretraining_jobs(experiment: Experiment) -> dict[str, Job]:
    """The runs of the first stage at the paper's scale by what they run; none without that scale."""
    if experiment.paper is None or not experiment.paper.stages:
        return {}
    options = {name: values.get("default") for name, values in experiment.options.items()}
    study = Study(Path("nowhere"), options, scale="paper")
    return {said(trial.job): trial.job for trial in known_trials(experiment.paper, study)}


def said(job: Job, *left_out: str) -> str:
    """The flags of a run in short, without folders, seed and evaluation: `vit_b16_jft model.pooling=gap`.

    Args:
      left_out: how other keys begin that are not wanted.
    """
    config, *values = (flag.removeprefix("--config") for flag in job.flags)
    name = Path(config.removeprefix("=")).name.replace(".py", "", 1)
    others = tuple(f".{key}" for key in ("seed", "fewshot", "knn", *left_out))
    return " ".join([name, *(value[1:] for value in values if not value.startswith(others))])


def device_days(job: Job, chip: str, folder: Path) -> float | None:
    """The estimated days of one device, a core of v3 or a chip of v5e; None: it fits the slice in no way.

    Args:
      folder: keeps what was found, so that it is found once.

    Raises:
      UserError: the compiler is not installed.
    """
    file = folder / "days.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    # Rates and decay do not change the time of a step.
    key = f"{chip}: {said(job, 'optimizer.learning_rate', 'optimizer.weight_decay')}"
    if key not in known:
        print(key, file=sys.stderr)
        _, plan = first_that_fits(
            config_of(job), find_slice(chip, SLICES[chip]), cost.read_prices(cost.PRICES)
        )
        known[key] = plan.cost.core_days if plan.cost else None
        file.write_text(json.dumps(known, indent=1) + "\n")
    return known[key]


def first_that_fits(config: ConfigDict, where: Slice, prices: dict[str, dict]) -> tuple[str, Estimate]:
    """The change that a run needs to fit a slice, in words, and its plan, which may still not fit."""
    job = make_workload(config, None)
    plan = estimate(config, job, where, prices)
    if not plan.fits:
        print(f"{config.model.name} on {where} does not fit", file=sys.stderr)
        say = partial(print, file=sys.stderr)
        if nearest := choices.nearest_fit(config, job, where, prices, plan, say):
            return f" {in_words(nearest[0])}", nearest[1]
    return "", plan
