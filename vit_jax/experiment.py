"""Runs an experiment of experiments/: python -m vit_jax.experiment figure3 --out=DIR.

  --list          lists every table, figure and claim: requirements, duration, recorded results
  NAME --help     lists the experiment's own flags
  NAME --out=DIR --plan  lists the runs that are known in advance, with their exaFLOPs; runs nothing
  NAME --out=DIR  runs the experiment, and writes NAME.md, NAME.json and plots into DIR.
                  DIR/progress.html shows the progress. The same command continues the
                  experiment. Several machines with a shared DIR divide the runs
  NAME --steps=4 --out=DIR  the same with four steps per run, to test that everything works
  NAME --scale=paper --out=DIR  runs the experiment with the paper's own recipe and data
  NAME --scale=paper --out=DIR --data=jft=folder:/data/mine  replaces a data set by your own images
  record NAME DIR ... --verdict="agrees: At 16 pixels, 1,200 steps: why"
                  writes the record of the runs in these folders into experiments/records. The
                  verdict is agrees, agrees in part, contradicts, not seen at this scale or cannot
                  tell. Without --verdict, the earlier verdict is kept if the results are the same
  ledger          writes LEDGER.md, and the recorded tables in README.md and docs/

NAME may also be a file, such as mine/table8.py, that defines one `EXPERIMENT`.
"""

import argparse
import runpy
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from vit_jax import command
from vit_jax.errors import UserError, nearest
from vit_jax.ledger import ledger_page
from vit_jax.ledger.other_data import FORM, check_names, in_words
from vit_jax.ledger.records import (
    how_far,
    keep_pictures,
    make_record,
    records,
    verdict_of,
    with_verdict,
    write_record,
)
from vit_jax.ledger.study import (
    Experiment,
    Study,
    Trial,
    conduct,
    config_of,
    data_sets_of,
    known_trials,
    rehearsed,
)
from vit_jax.progress import duration
from vit_jax.shipped import EXPERIMENTS, demand_checkout


def main(arguments: list[str]) -> None:
    """Runs the command with its arguments, as in the module's docstring."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    name, *rest = [argument for argument in arguments if argument not in flags] or [""]
    if not name and {"-h", "--help"} & {*arguments}:
        print(__doc__)
    elif "--list" in arguments:
        print_list()
    elif name == "record":
        keep_record(rest, flags)
    elif name == "ledger":
        demand_checkout("ledger writes LEDGER.md and docs/")
        write_ledger()
    elif not name:
        raise UserError("give the name of an experiment and --out=DIR, or --list")
    else:
        run_experiment(name, arguments)


def keep_record(names_and_folders: list[str], flags: list[str]) -> None:
    """Writes the record of an experiment's results, given the folders of its runs and a verdict.

    Raises:
      UserError: the name or the folders are missing.
    """
    if len(names_and_folders) < 2:
        raise UserError(
            "give the name of an experiment and the folders of its runs: record NAME DIR ..."
        )
    demand_checkout("record writes into experiments/records")
    name, *folders = names_and_folders
    folders = [Path(folder).absolute() for folder in folders]
    prefix = "--verdict="
    verdicts = [flag.removeprefix(prefix) for flag in flags if flag.startswith(prefix)]
    record = with_verdict(make_record(Path(name).stem, load(name), folders), *verdicts[-1:])
    files = [str(write_record(record)), *map(str, keep_pictures(record, folders[0]))]
    print(f"{', '.join(files)}: {how_far(record)}")


def run_experiment(name: str, arguments: list[str]) -> None:
    """Runs an experiment, given by its name or its file, or prints its plan."""
    experiment = load(name)
    parsed = parse(name, experiment, [argument for argument in arguments if argument != name])
    out, plan, scale, shortened = (parsed.pop(key) for key in ("out", "plan", "scale", "steps"))
    data = parsed.pop("data")
    options = parsed | ({"data": sorted(data)} if data else {})
    study = Study(out, options, lambda line: print(line, flush=True), scale, steps=shortened)
    if data:
        check_names(study.data, data_sets_of(rehearsed(experiment.at(scale), out, parsed, scale)))
    if plan:
        show_plan(known_trials(experiment.at(scale), study))
    else:
        command.use_compilation_cache()
        conduct(Path(name).stem, experiment, study)


def names() -> list[str]:
    """Returns the sorted names of all experiments."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.py"))


def load(name: str) -> Experiment:
    """Loads an experiment by its name or its file; raises UserError if it does not exist."""
    file = Path(name) if name.endswith(".py") else EXPERIMENTS / f"{name}.py"
    if not file.is_file():
        raise UserError(f"there is no experiment {name!r}; {nearest(name, names())}")
    experiment = runpy.run_path(str(file)).get("EXPERIMENT")
    if not isinstance(experiment, Experiment):
        raise UserError(f"{file} defines no EXPERIMENT of type vit_jax.ledger.study.Experiment")
    if experiment.runs_of:
        runs = load(experiment.runs_of)
        return replace(experiment, stages=runs.stages, options=runs.options, minutes=runs.minutes)
    return experiment


def print_list() -> None:
    """Prints a paragraph for each experiment, in the order of LEDGER.md, and the total hours."""
    known, recorded = {name: load(name) for name in names()}, records()
    minutes = {"of the paper": 0.0, "our own": 0.0}
    for name in sorted(known, key=lambda name: ledger_page.order(known[name].place, name)):
        experiment = known[name]
        print_experiment(name, experiment, recorded)
        if experiment.read is not None and not experiment.runs_of:
            minutes["of the paper" if experiment.place else "our own"] += experiment.minutes
    hours = ", ".join(f"{duration(60 * time)} those {whose}" for whose, time in minutes.items())
    print(f"{len(known)} experiments; here, on two idle cores: {hours}")


def print_experiment(name: str, experiment: Experiment, recorded: dict) -> None:
    """Prints an experiment's claim, durations, requirements and records."""
    print(f"{name} ({experiment.place or 'our own'}): {experiment.claim}")
    if experiment.read is not None:
        shared = f", by the runs of {experiment.runs_of}" if experiment.runs_of else ""
        print(f"    here: {duration(60 * experiment.minutes)} on two cores{shared}")
    if experiment.paper is not None:
        read = data_sets_of(rehearsed(experiment.paper, Path(), experiment.defaults, "paper"))
        needed = f"; needs {in_words(read)}" if read else ""
        print("    the paper's scale: --scale=paper" + price(recorded, name) + needed)
    if experiment.needs:
        print(f"    needs {experiment.needs}")
    for key, scale in ((name, "here"), (f"{name}-paper", "paper")):
        if key in recorded:
            print(f"    {scale}: {how_far(recorded[key])}")
            print(f"      {': '.join(verdict_of(recorded[key]))}")


def price(recorded: dict, name: str) -> str:
    """Returns the device-days at the paper's scale from the record `prices`; empty: unknown."""
    days = recorded.get("prices", {}).get("figures", {}).get("days", {}).get(name)
    if days is None:
        return ""
    return ", " + ", ".join(f"{days[chip]:,.0f} {chip} device-days" for chip in days)


def write_ledger() -> None:
    """Writes LEDGER.md, and writes recorded tables into README.md and the pages of docs/."""
    known, recorded = {name: load(name) for name in names()}, records()
    ledger_page.PAGE.write_text(ledger_page.page(known, recorded))
    for path in [ledger_page.ROOT / "README.md", *sorted((ledger_page.ROOT / "docs").glob("*.md"))]:
        text = path.read_text()
        if (written := ledger_page.with_records(text, known, recorded)) != text:
            path.write_text(written)
            print(path)
    print(ledger_page.PAGE)


def parse(name: str, experiment: Experiment, arguments: list[str]) -> dict:
    """Parses the flags of an experiment. `--help` or an unknown flag ends the process."""
    parser = argparse.ArgumentParser(
        f"python -m vit_jax.experiment {name}", description=experiment.claim
    )
    parser.add_argument(
        "--out",
        type=lambda path: Path(path).absolute(),
        required=True,
        help="folder for all of it; finished runs are kept",
    )
    parser.add_argument("--plan", action="store_true", help="list the runs without starting them")
    parser.add_argument(
        "--scale",
        choices=("laptop", "paper"),
        default="laptop",
        help="the paper's needs its data and pods",
    )
    parser.add_argument(
        "--steps", type=steps, help="steps of each run, for a trial; such runs are not recorded"
    )
    parser.add_argument(
        "--data",
        nargs="+",
        action="extend",
        metavar=FORM,
        help="data in the place of those that the runs name, such as "
        "jft=folder:/data/mine@train,val; once for each",
    )
    for option, values in experiment.options.items():
        parser.add_argument(f"--{option}", **values)
    return vars(parser.parse_args(arguments))


def steps(text: str) -> int:
    """Parses `--steps`: an integer above 0."""
    if (number := int(text)) < 1:
        raise ValueError(text)  # argparse adds the flag's name to the message.
    return number


def show_plan(trials: list[Trial]) -> None:
    """Prints the command of each run, with its exaFLOPs.

    Args:
      trials: the runs that are known in advance, from `known_trials`. Runs of later stages may
        depend on results of these runs, and are not included.
    """
    from vit_jax.planning.estimate import make_workload

    total = 0.0
    for trial in trials:
        try:
            cost = make_workload(config_of(trial.job), None).exaflops
            total += cost
            shown = f"{cost:.3g} exaFLOPs"
        except (UserError, OSError) as error:
            shown = f"not known: {str(error).partition(';')[0]}"
        words = ("python", "-m", "vit_jax.main", *trial.job.flags, f"--workdir={trial.job.workdir}")
        print(f"{shlex.join(words)}  # {shown}")
    print(f"{len(trials)} runs are known, of {total:.3g} exaFLOPs; later ones may depend on these")


if __name__ == "__main__":
    with command.mistakes():
        main(sys.argv[1:])
