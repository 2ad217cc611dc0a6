"""Finds a learning rate and trains with it: python -m vit_jax.sweep --config=FILE --workdir=DIR.

The command follows the paper's protocol (appendix B.1.1). First it trains a run with each learning
rate of config.sweep.rates (for a BiT or a hybrid also of config.sweep.resnet_rates) on
config.sweep.train_split, and compares the runs on config.sweep.dev_split. Both splits are slices of
config.data.train_split. Then it trains a run with the best learning rate for each seed of
config.sweep.seeds, on all training images. Each of these runs is evaluated once on the test images.
All flags of vit_jax.main apply to each run. The same command again continues the sweep; finished
runs are not repeated.

--list prints a command for each run. The runs can then be started as separate jobs, on one machine
or on several machines that share DIR. Afterwards, the command without --list writes the table.
"""

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from vit_jax import command
from vit_jax.config import check, given_keys
from vit_jax.errors import UserError
from vit_jax.paths import absolute
from vit_jax.runs.choices.recognised import recognise
from vit_jax.runs.jobs import Job, outcome, run_jobs
from vit_jax.runs.rate_search import (
    best_rate,
    check_begun,
    check_data,
    check_seeds,
    check_sweep,
    claim,
    held_out_config,
    open_held_out,
    rate_jobs,
    seed_jobs,
    write,
)

CONFIG = command.define_config("The job: a file such as configs/finetune.py.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs and the table; again to go on.")
ONLY = flags.DEFINE_string("only", None, "One run by name, such as rate-0.01 or seed-0.")
LIST = flags.DEFINE_bool("list", False, "Print the runs' commands and do nothing.")


def main(arguments: list[str]) -> None:
    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}")
    if not WORKDIR.value or CONFIG.value is None:
        raise UserError("give --config=configs/finetune.py and --workdir=DIR")
    given, folder = CONFIG.value, absolute(WORKDIR.value)
    recognise(given, given_keys(given), lambda line: print(line, file=sys.stderr))
    config = check(given, file=command.as_in_file(given))
    check_sweep(config)
    config_flags = config_flags_of(sys.argv[1:])
    rates = rate_jobs(config, folder, config_flags)
    rate_names = [job.name for job in rates.values()]
    names = [
        *rate_names,
        *(job.name for job in seed_jobs(config, folder, config_flags, rate=0).values()),
    ]
    if LIST.value:
        print_commands(names, config_flags, folder)
        return
    if ONLY.value not in (None, *names):
        raise UserError(f"--only={ONLY.value}: the runs are {', '.join(names)}")
    open_held_out(config)
    claim(folder, config)
    check_data(rates.values(), held_out_config(config))

    jobs = selected(rates)
    run_jobs(jobs, after_each=lambda: check_begun(jobs))
    if ONLY.value in rate_names:
        return
    outcomes = {rate: outcome(job) for rate, job in rates.items()}
    best = best_rate(outcomes)
    seeds = seed_jobs(config, folder, config_flags, best)
    check_seeds(seeds, best)
    check_data(seeds.values(), config)
    run_jobs(selected(seeds))
    write(folder, outcomes, best, {seed: outcome(job) for seed, job in seeds.items()})


def print_commands(names: list[str], config_flags: tuple[str, ...], folder: Path) -> None:
    """Prints, for each run of the sweep, a command that starts only this run."""
    for name in names:
        arguments = (*config_flags, f"--workdir={folder}", f"--only={name}")
        print(shlex.join(("python", "-m", "vit_jax.sweep", *arguments)))


def selected(jobs: Mapping[Any, Job]) -> list[Job]:
    """Returns all jobs; if the flag `--only` is set, only the job with this name."""
    return [job for job in jobs.values() if ONLY.value in (None, job.name)]


def config_flags_of(arguments: list[str]) -> tuple[str, ...]:
    """Returns those arguments of a command that set the config or its values."""
    config_flags = []
    for flag, following in zip(arguments, [*arguments[1:], "-"], strict=True):
        if re.match(r"--?config\b", flag):
            config_flags += (
                [flag] if "=" in flag or following.startswith("-") else [flag, following]
            )
    return tuple(config_flags)


if __name__ == "__main__":
    command.run(main)
