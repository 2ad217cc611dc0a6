"""Runs an experiment of experiments/: python -m vit_jax.experiment transfer_digits --out=DIR

  --list          what there is: claims, and what each needs
  NAME --help     an experiment's own flags
  NAME --plan     its runs as far as they are known, with their exaFLOPs; runs nothing
  NAME --out=DIR  runs it, and writes results.md, results.json and its pictures into DIR. The same command
                  again goes on where it was stopped

NAME may also be a file, such as mine/table8.py, that makes one `EXPERIMENT`.
"""

import argparse
import ast
import contextlib
import runpy
import shlex
import sys
from pathlib import Path

from vit_jax import command
from vit_jax.errors import UserError, nearest
from vit_jax.runs.jobs import Job
from vit_jax.runs.study import Experiment, Study, conduct, known_jobs

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def main(arguments: list[str]) -> None:
    """Does what the arguments of the command say.

    Raises:
      UserError: there is no such experiment, data are missing, or a run failed.
    """
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    if not name and {"-h", "--help"} & {*arguments}:
        print(__doc__)
    elif "--list" in arguments:
        for known in names():
            experiment = load(known)
            print(f"{known}: {experiment.claim}" + (f" [{experiment.needs}]" if experiment.needs else ""))
    elif not name:
        raise UserError("give the name of an experiment and --out=DIR, or --list")
    else:
        experiment = load(name)
        given = parse(name, experiment, [argument for argument in arguments if argument != name])
        out, plan = given.pop("out"), given.pop("plan")
        study = Study(out, given, lambda line: print(line, flush=True))
        if plan:
            show_plan(known_jobs(experiment, study))
        else:
            command.use_compilation_cache()
            conduct(experiment, study)


def names() -> list[str]:
    """The experiments that there are."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.py"))


def load(name: str) -> Experiment:
    """The experiment of a name or a file.

    Raises:
      UserError: there is none.
    """
    file = Path(name) if name.endswith(".py") else EXPERIMENTS / f"{name}.py"
    if not file.is_file():
        raise UserError(f"there is no experiment {name!r}; {nearest(name, names())}")
    experiment = runpy.run_path(str(file)).get("EXPERIMENT")
    if not isinstance(experiment, Experiment):
        raise UserError(f"{file} makes no EXPERIMENT, a value of vit_jax.runs.study.Experiment")
    return experiment


def parse(name: str, experiment: Experiment, arguments: list[str]) -> dict:
    """The values of the flags; `--help` ends the program, and so does a flag that there is not."""
    parser = argparse.ArgumentParser(f"python -m vit_jax.experiment {name}", description=experiment.claim)
    parser.add_argument(
        "--out",
        type=lambda path: Path(path).absolute(),
        required=True,
        help="folder for all of it; finished runs are kept",
    )
    parser.add_argument("--plan", action="store_true", help="say which runs there are, and run none")
    for option, values in experiment.options.items():
        parser.add_argument(f"--{option}", **values)
    return vars(parser.parse_args(arguments))


def show_plan(jobs: dict) -> None:
    """A command for each run that is known, with its compute."""
    from vit_jax.planning.estimate import make_workload

    total = 0.0
    for job in jobs.values():
        try:
            cost = make_workload(config_of(job), None).exaflops
            total += cost
            shown = f"{cost:.3g} exaFLOPs"
        except (UserError, OSError) as error:
            shown = f"not known: {error}"
        words = ("python", "-m", "vit_jax.main", *job.flags, f"--workdir={job.workdir}")
        print(f"{shlex.join(words)}  # {shown}")
    print(f"{len(jobs)} runs are known, of {total:.3g} exaFLOPs; later ones may depend on these")


def config_of(job: Job):
    """The config of a run."""
    config = command.read_config(job.flags[0].removeprefix("--config="))
    values = {}
    for flag in job.flags[1:]:
        key, _, text = flag.removeprefix("--config.").partition("=")
        values[key] = text
        with contextlib.suppress(ValueError, SyntaxError):  # A word, such as float32.
            values[key] = ast.literal_eval(text)
    config.update_from_flattened_dict(values)
    return config


if __name__ == "__main__":
    with command.mistakes():
        main(sys.argv[1:])
