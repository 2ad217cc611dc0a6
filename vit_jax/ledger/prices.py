"""Device-days of pre-training at the paper's scale, estimated with the TPU compiler."""

import json
import sys
from functools import partial
from pathlib import Path

from vit_jax.config import leaves
from vit_jax.ledger.study import Experiment, Study, config_of, known_trials
from vit_jax.options.run import RunOptions
from vit_jax.planning import choices, cost
from vit_jax.planning.compile import Slice, find_slice
from vit_jax.planning.estimate import Estimate, estimate, make_workload
from vit_jax.runs.jobs import Job
from vit_jax.runs.memory_check import in_words

SLICES = {"v3": "16x16", "v5e": "16x16"}  # Topologies of 256 chips.
KEPT = "mfu.json"


def pretraining_jobs(experiment: Experiment) -> dict[str, Job]:
    """Returns the runs of an experiment's first stage at the paper's scale.

    The keys are the texts of `flags_text`. Without a paper's scale, the dict is empty.
    """
    if experiment.paper is None or not experiment.paper.stages:
        return {}
    study = Study(Path("nowhere"), experiment.defaults, scale="paper")
    return {flags_text(trial.job): trial.job for trial in known_trials(experiment.paper, study)}


def flags_text(job: Job, *left_out: str) -> str:
    """Returns the config and the flags of a run as a text, such as `vit_b16_jft model.pooling=gap`.

    Flags for folders, seed, few-shot or k-NN evaluation, and keys that start with `left_out`, are
    not included.
    """
    config, *values = (flag.removeprefix("--config") for flag in job.flags)
    name = Path(config.removeprefix("=")).name.replace(".py", "", 1)
    others = tuple(f".{key}" for key in ("seed", "fewshot", "knn", *left_out))
    return " ".join([name, *(value[1:] for value in values if not value.startswith(others))])


# Keys of the config values that determine the MFU of a training step. The step is compiled once for
# all runs that have the same values of these keys.
TELLING = ("model.name", "model.dropout", "model.dtype", "objective.name", "batch_size")


def device_days(job: Job, chip: str, folder: Path) -> float | None:
    """Returns the estimated device-days of a run; None: it does not fit into the slice's memory.

    A device is a core of v3 or a chip of v5e. The estimate is the run's compute divided by the peak
    FLOP/s and by the MFU of a compiled step.

    The MFU is computed once for all runs that have the same values of the config keys `TELLING`. We
    assume that the MFU does not depend on other config values, such as position embeddings, pooling
    and widths.

    Args:
      chip: a key of `SLICES`.
      folder: folder for storing the MFUs, so that each is computed once.

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
    """Returns stored MFUs by chip and step; None: the step does not fit into memory."""
    file = folder / KEPT
    return json.loads(file.read_text()) if file.exists() else {}


def step_of(config: RunOptions) -> str:
    """Returns the config values that determine a step's MFU (`TELLING`), as text.

    Example: `ViT-B/16 model.dropout=0.1 batch_size=4096`.
    """
    values = dict(leaves(config))
    others = (f"{key}={values[key]}" for key in TELLING[1:] if values.get(key))
    return " ".join([values[TELLING[0]], *others])


def first_that_fits(
    config: RunOptions, where: Slice, prices: dict[str, dict]
) -> tuple[str, Estimate]:
    """Estimates a run on a slice, if necessary with a config change that makes it fit into memory.

    Returns:
      The change in words, and the estimate with this change. If no change is needed, or if no
      change makes the run fit, the words are empty and the estimate is for the unchanged config.
    """
    job = make_workload(config, None)
    plan = estimate(config, job, where, prices)
    if not plan.fits:
        print(f"{config.model.name} on {where} does not fit", file=sys.stderr)
        log = partial(print, file=sys.stderr)
        if nearest := choices.nearest_fit(config, job, where, prices, plan, log):
            return f" {in_words(nearest[0])}", nearest[1]
    return "", plan
