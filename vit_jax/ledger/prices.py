"""Device-days of pre-training at the paper's scale, as the TPU compiler estimates them."""

import json
import sys
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from vit_jax.config import leaves
from vit_jax.ledger.study import Experiment, Study, config_of, known_trials
from vit_jax.planning import choices, cost
from vit_jax.planning.compile import Slice, find_slice
from vit_jax.planning.estimate import Estimate, estimate, make_workload
from vit_jax.runs.jobs import Job
from vit_jax.runs.memory_check import in_words

SLICES = {"v3": "16x16", "v5e": "16x16"}  # Topologies of 256 chips.
KEPT = "mfu.json"


def pretraining_jobs(experiment: Experiment) -> dict[str, Job]:
    """The runs of the first stage at the paper's scale by what they run; none without that
    scale.
    """
    if experiment.paper is None or not experiment.paper.stages:
        return {}
    study = Study(Path("nowhere"), experiment.defaults, scale="paper")
    return {said(trial.job): trial.job for trial in known_trials(experiment.paper, study)}


def said(job: Job, *left_out: str) -> str:
    """The flags of a run in short, without folders, seed and evaluation: `vit_b16_jft
    model.pooling=gap`.

    Args:
      left_out: how other keys begin that are not wanted.
    """
    config, *values = (flag.removeprefix("--config") for flag in job.flags)
    name = Path(config.removeprefix("=")).name.replace(".py", "", 1)
    others = tuple(f".{key}" for key in ("seed", "fewshot", "knn", *left_out))
    return " ".join([name, *(value[1:] for value in values if not value.startswith(others))])


# Values on which a step's MFU depends: those that a compiled step is known by.
TELLING = ("model.name", "model.dropout", "model.dtype", "objective.name", "batch_size")


def device_days(job: Job, chip: str, folder: Path) -> float | None:
    """The estimated days of one device, a core of v3 or a chip of v5e; None: it fits the slice in
    no way.

    They are the run's compute at the MFU of a compiled step. One is compiled for runs that are
    alike in
    `TELLING`; those that differ in length, data, positions, pooling or a layer's width are taken to
    have its MFU.

    Args:
      folder: keeps the MFUs that were found, so that each is found once.

    Raises:
      UserError: the compiler is not installed.
    """
    known = known_mfus(folder)
    config, where = config_of(job), find_slice(chip, SLICES[chip])
    key = f"{chip}: {step_of(config)}"
    if key not in known:
        print(key, file=sys.stderr)
        _, plan = first_that_fits(config, where, cost.read_prices(cost.PRICES))
        known[key] = plan.mfu
        (folder / KEPT).write_text(json.dumps(known, indent=1) + "\n")
    if known[key] is None:
        return None
    return (
        make_workload(config, None).exaflops * 1e18 / (known[key] * where.chip.peak_flops) / 86_400
    )


def known_mfus(folder: Path) -> dict[str, float | None]:
    """The MFUs that were found so far, by chip and step; None for those that fit in no way."""
    file = folder / KEPT
    return json.loads(file.read_text()) if file.exists() else {}


def step_of(config: ConfigDict) -> str:
    """The values of `TELLING`, as flags say them: `ViT-B/16 model.dropout=0.1 batch_size=4096`."""
    values = dict(leaves(config))
    others = (f"{key}={values[key]}" for key in TELLING[1:] if values.get(key))
    return " ".join([values[TELLING[0]], *others])


def first_that_fits(
    config: ConfigDict, where: Slice, prices: dict[str, dict]
) -> tuple[str, Estimate]:
    """The change that a run needs to fit a slice, in words, and its plan, which may still not
    fit.
    """
    job = make_workload(config, None)
    plan = estimate(config, job, where, prices)
    if not plan.fits:
        print(f"{config.model.name} on {where} does not fit", file=sys.stderr)
        say = partial(print, file=sys.stderr)
        if nearest := choices.nearest_fit(config, job, where, prices, plan, say):
            return f" {in_words(nearest[0])}", nearest[1]
    return "", plan
