"""Experiments and studies.

An experiment is a file in experiments/ that defines an `Experiment`: training runs in several
stages, metrics that are computed from the runs, a table and pictures. A study is the execution of
an experiment in a folder: `python -m vit_jax.experiment NAME --out=DIR` starts or resumes it.
Several machines that can access the same DIR share the training runs.
"""

import ast
import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vit_jax import published
from vit_jax.command import read_config
from vit_jax.config import run_options
from vit_jax.errors import UserError
from vit_jax.ledger.other_data import names_of, open_all, read_data, replaced
from vit_jax.ledger.progress_page import write_progress
from vit_jax.ledger.tables import Pairs, comparison_table, matched
from vit_jax.options.objective import OBJECTIVE_NAMES
from vit_jax.options.run import RunOptions
from vit_jax.runs.jobs import Job, Outcome, job_of, outcome, run_jobs
from vit_jax.runs.workdir import saved_run

Figures = Mapping[str, Any]  # Results of an experiment, as values for JSON.
# File in a study's folder with the experiment's name, scale and flags. It shows if a folder belongs
# to another study.
STUDY = "study.json"


class Trial(NamedTuple):
    """A training run of a study."""

    stage: str  # Name of the run's stage, such as `pretrained`.
    # Properties that vary between the runs, by name, such as `{"model": "ViT-32x4/4", "seed": 0}`.
    factors: Mapping[str, Any]
    job: Job  # The command for the training run, with the run's workdir.

    def has(self, factors: Mapping[str, Any]) -> bool:
        """Returns True if the run has all these factors, with the same values."""
        return factors.items() <= self.factors.items()


class Study:
    """The execution of an experiment in a folder: flags, training runs and their results so far.

    Args:
      options: values of the experiment's own flags, and of the flag `--data` (see `read_data`).
      places: additional folders in which runs are searched: workdirs, or folders with workdirs.
      steps: number of steps of all training runs, to try out an experiment; None: the numbers that
        the experiment defines.

    Attributes:
      left: estimated seconds until the current stage is finished; None until its first run is
        finished.
    """

    def __init__(
        self,
        out: Path,
        options: Mapping[str, Any],
        log: Callable[[str], None] = print,
        scale: str = "laptop",
        places: Sequence[Path] = (),
        steps: int | None = None,
    ):
        self.out, self.options, self.log = out, dict(options), log
        self.scale, self.steps = scale, steps
        self.trials: list[Trial] = []
        self.data = read_data(options.get("data") or ())
        self.left: float | None = None
        self._places, self._outcomes = places, {}

    def job(self, name: str, config: str = "quickstart", **values: Any) -> Job:
        """Returns the command for a training run whose workdir is the folder `name`.

        Args:
          name: name of the workdir in the study's folder.
          config: name of a config in configs/, with an optional argument: `finetune:cifar10`.
          **values: overrides of the config, with two underscores for a dot: `data__path`.
        """
        found = [place / name for place in self._places if (place / name).is_dir()]
        found += [
            place
            for place in self._places
            if place.parts[-len(Path(name).parts) :] == Path(name).parts
        ]
        changed = {key.replace("__", "."): value for key, value in values.items()}
        if self.steps:
            changed |= {"steps": self.steps, "optimizer.warmup_steps": 1}
            for key in ("fewshot.every", "knn.every"):
                changed[key] = self.steps if changed.get(key) else 0
            changed |= {"evaluate_every": self.steps, "checkpoint.every": self.steps}
        job = job_of(found[0] if found else self.out / name, config, changed)
        others = replaced(config_of(job), self.data) if self.data else {}
        return job_of(job.workdir, config, changed | others)

    def outcome(self, trial: Trial) -> Outcome:
        """Returns the metrics of a run, or the reason why the run has no metrics."""
        known = self._outcomes.get(trial.job.workdir)
        if known is None or known.figures is None:
            known = self._outcomes[trial.job.workdir] = outcome(trial.job)
        return known

    def finished(self, stage: str = "", **factors: Any) -> list[Trial]:
        """Returns the finished runs of a stage (empty: all) with factors such as `seed=0`."""
        return [
            trial
            for trial in self.trials
            if stage in ("", trial.stage)
            and trial.has(factors)
            and self.outcome(trial).figures is not None
        ]

    def workdir(self, stage: str, **factors: Any) -> Path | None:
        """Returns the workdir of the finished run with these factors; None if there is none.

        Raises:
          ValueError: several runs have these factors.
        """
        trials = self.finished(stage, **factors)
        if len(trials) > 1:
            raise ValueError(f"{len(trials)} runs of {stage} have {factors}")
        return trials[0].job.workdir if trials else None

    def points(self, stage: str, *figures: str, **factors: Any) -> list[dict[str, Any]]:
        """Returns the results of a stage's finished runs.

        Runs that differ only by their seed are grouped.

        Args:
          *figures: metrics, such as `accuracy`, `fewshot/glyphs/5` or `seconds`. With the prefix
            `best `, the highest value of all evaluations is used, as with early stopping.
            `exaflops` is the compute of the run.
          **factors: factors that the runs must have.

        Returns:
          A mapping (a point) for each group, such as
          `{"model": "ViT-32x4/4", "seeds": [0, 1], "accuracy": [0.42, 0.44]}`.
        """
        points: dict[str, dict[str, Any]] = {}
        for trial in self.finished(stage, **factors):
            varied = {key: value for key, value in trial.factors.items() if key != "seed"}
            point = points.setdefault(json.dumps(varied), varied | {"seeds": []})
            point["seeds"].append(trial.factors.get("seed"))
            for name in figures:
                point.setdefault(name, []).append(self.figure(trial, name))
        return list(points.values())

    def figure(self, trial: Trial, name: str) -> float:
        """Returns a finished run's metric; with the prefix `best `, its highest value so far."""
        if name == "exaflops":
            return exaflops_of(trial.job.workdir)
        found = self.outcome(trial)
        best, of_set = name.startswith("best "), name.removeprefix("best ").split("/")
        if len(of_set) == 3 and of_set[1] in self.data:  # The name of a user's data set is used.
            of_set[1] = self.data[of_set[1]].name
        name = "/".join(of_set)
        return max(found.history[name]) if best else found.figures[name]

    def run(self, trials: Sequence[Trial], shown: Callable[[], None]) -> None:
        """Trains the runs that are not finished; if a run fails, the others continue."""
        self.trials += [trial for trial in trials if trial not in self.trials]
        begun, to_come = time.monotonic(), self.pending(trials)

        def after_each() -> None:
            pending = self.pending(trials)
            self.left = (time.monotonic() - begun) / max(1, to_come - pending) * pending
            shown()

        run_jobs([trial.job for trial in trials], self.log, after_each)

    def pending(self, trials: Sequence[Trial]) -> int:
        """Returns the number of runs that are neither finished nor failed, on any machine."""
        return sum(self.outcome(trial).pending for trial in trials)

    @property
    def failures(self) -> dict[str, str]:
        """Reason of each failed run, by the run's name."""
        reasons = {trial.job.name: self.outcome(trial).failure for trial in self.trials}
        return {name: reason for name, reason in reasons.items() if reason}


class Rehearsal(Study):
    """A study without training, which lists the runs of all stages.

    All runs count as finished with the same accuracy. In a search, such as for a learning rate, the
    first value that is tried therefore counts as the best.
    """

    def outcome(self, trial: Trial) -> Outcome:
        return Outcome({"accuracy": 0.0})

    def figure(self, trial: Trial, name: str) -> float:
        return 0.0


@functools.cache  # The function traces the model, and is called after each run of a study.
def exaflops_of(workdir: Path) -> float:
    """Returns the training compute of a run in exaFLOPs, counted as in the ViT paper's table 6."""
    from vit_jax.planning.estimate import make_workload

    saved = saved_run(workdir)
    return make_workload(saved.config, saved.manifest["images"]["train"]).exaflops


@dataclass(frozen=True)
class Experiment:
    """Definition of an experiment: its runs, and how to compute and show its results.

    Args:
      claim: the claim or question, in a sentence.
      read: function that computes the results from the finished runs. It is called after each run,
        so slow parts should be cached. None: the experiment has no laptop scale.
      place: place in the paper, such as `Table 8`, `Figure 5`, `Section 4.6`; empty: our own
        experiment.
      stages: functions that return the training runs of a stage; a stage can use metrics of the
        stages before it.
      paper: the experiment at the paper's scale; None: it has no such scale.
      table: function that formats the results as a Markdown table; None: a table that shows our
        results next to the values of the table `published`.
      draw: function that returns pictures by name, without file extension.
      finding: function that returns a sentence about the results.
      published: name of the table in `vit_jax.published` to compare with. The results have the same
        rows and columns as this table.
      compared: function that returns pairs of a published value and our value, by row and column;
        None: the pairs of the table `published`.
      options: the experiment's own flags, by name, with the arguments of `add_argument`.
      needs: text about required packages or data; empty: none are required.
      minutes: duration at laptop scale with two processes, each on an idle core.
      runs_of: name of an experiment with the same stages and flags; both can use the same folder.
    """

    claim: str
    read: Callable[[Study], Figures] | None = None
    place: str = ""
    stages: Sequence[Callable[[Study], Sequence[Trial]]] = ()
    paper: "Experiment | None" = None
    table: Callable[[Figures], str] | None = None
    draw: Callable[[Study, Figures], Mapping[str, Any]] | None = None
    finding: Callable[[Figures], str] | None = None
    published: str = ""
    compared: Callable[[Figures], Pairs] | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: str = ""
    minutes: float = 1.0
    runs_of: str = ""

    @property
    def defaults(self) -> dict[str, Any]:
        """Default values of the experiment's own flags."""
        return {name: values.get("default") for name, values in self.options.items()}

    def markdown(self, figures: Figures) -> str:
        """Returns the results as a Markdown table."""
        if self.table:
            return self.table(figures)
        return comparison_table(published.table(self.published), figures)

    def pairs(self, figures: Figures) -> Pairs:
        """Returns pairs (published value, our value) by row and column; empty if there are none."""
        if self.compared:
            return self.compared(figures)
        return matched(published.table(self.published), figures) if self.published else {}

    def at(self, scale: str) -> "Experiment":
        """Returns the experiment at a scale, `laptop` or `paper`; raises UserError without it."""
        found = self if scale == "laptop" else self.paper
        if found is None or found.read is None:
            other = "paper" if scale == "laptop" else "laptop"
            raise UserError(f"this experiment has no {scale} scale; give --scale={other}")
        return found


def conduct(name: str, experiment: Experiment, study: Study) -> Figures:
    """Trains the runs of all stages, and writes NAME.md, NAME.json and the pictures.

    Raises:
      UserError: the folder belongs to another study; data are missing; or runs have failed. In the
        last case all other runs are finished first.
    """
    scaled = experiment.at(study.scale)
    first = scaled.stages[0](study) if study.scale == "paper" and scaled.stages else ()
    # Before pre-training starts, all data are checked, including those for fine-tuning.
    if any(study.outcome(trial).pending for trial in first):
        check_data(rehearsed(scaled, study.out, study.options, study.scale), study)
    claim(name, experiment, study)
    begun = time.monotonic()

    def shown() -> None:
        pictures = draw(name, scaled, study, scaled.read(study)) if study.finished() else []
        write_progress(study.out / "progress.html", experiment.claim, study, pictures)

    for stage in scaled.stages:
        trials = stage(study)
        check_data(trials, study)
        study.run(trials, shown)
    figures = scaled.read(study)
    if not scaled.stages:
        count_seconds(study, time.monotonic() - begun)
    write(name, scaled, study, figures)
    if failures := study.failures:
        first = next(iter(failures))
        raise UserError(
            f"{len(failures)} of {len(study.trials)} runs failed, and the figures are those of "
            f"the others; the same command tries them again. {first}: {failures[first]}"
        )
    return figures


def check_data(trials: Sequence[Trial], study: Study) -> None:
    """Opens each data set that unfinished runs need, so that missing data are reported at once.

    Raises:
      UserError: a data set cannot be opened.
    """
    pending = [trial for trial in trials if study.outcome(trial).figures is None]
    for trial in {_of_data(trial.job): trial for trial in pending}.values():
        open_all(config_of(trial.job), replaced=[other.name for other in study.data.values()])


def rehearsed(
    experiment: Experiment, out: Path, options: Mapping[str, Any], scale: str
) -> list[Trial]:
    """Returns all runs of a study without starting them.

    The best choices, such as learning rates, are not known before training. The first choices are
    used instead.
    """
    study = Rehearsal(out, options, scale=scale)
    for stage in experiment.stages:
        study.trials += stage(study)
    return study.trials


def data_sets_of(trials: Sequence[Trial]) -> list[str]:
    """Returns the names of the data sets that runs read, in the order of their first use."""
    return list(dict.fromkeys(name for trial in trials for name in _read_by(_of_data(trial.job))))


def _of_data(job: Job) -> tuple[str, ...]:
    """Returns those flags of a run that determine which data it reads."""
    sections = ("data", "fewshot", "knn", "objective", *OBJECTIVE_NAMES)
    kept = tuple(f"--config.{section}." for section in sections)
    return tuple(flag for flag in job.flags if flag.startswith(("--config=", *kept)))


@functools.cache  # Thousands of runs share a few dozen configs.
def _read_by(flags: tuple[str, ...]) -> list[str]:
    return names_of(config_of(Job(Path(), flags)))


def config_of(job: Job) -> RunOptions:
    """Returns the config of a run as typed options."""
    config = read_config(job.flags[0].removeprefix("--config="))
    values = {}
    for flag in job.flags[1:]:
        key, _, text = flag.removeprefix("--config.").partition("=")
        values[key] = text
        with contextlib.suppress(ValueError, SyntaxError):  # A word such as float32 stays a text.
            values[key] = ast.literal_eval(text)
    config.update_from_flattened_dict(values)
    return run_options(config)


def claim(name: str, experiment: Experiment, study: Study) -> None:
    """Writes `STUDY` into a new folder; raises UserError if the folder is not this study's."""
    file = study.out / STUDY
    ours = {"experiment": experiment.runs_of or name, "scale": study.scale, "steps": study.steps}
    ours["options"] = {
        key: value if isinstance(value, (int, float, list)) else value and str(value)
        for key, value in study.options.items()
    }
    if file.exists():
        theirs = json.loads(file.read_text())
        if differing := [key for key in ours if theirs.get(key) != ours[key]]:
            words = "; ".join(f"{key} {theirs.get(key)}, not {ours[key]}" for key in differing)
            raise UserError(f"{study.out} belongs to another study ({words}); give another --out")
        return
    if study.out.exists() and any(study.out.iterdir()):
        raise UserError(f"{study.out} contains files but no study; give a new or empty --out")
    study.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(ours, indent=2) + "\n")


def count_seconds(study: Study, seconds: float) -> None:
    """Adds `seconds` to the duration in the file `STUDY`, for a study without training runs."""
    file = study.out / STUDY
    about = json.loads(file.read_text())
    file.write_text(
        json.dumps(about | {"seconds": about.get("seconds", 0.0) + seconds}, indent=2) + "\n"
    )


def write(name: str, experiment: Experiment, study: Study, figures: Figures) -> None:
    """Prints the table, and writes it (NAME.md), the results (NAME.json) and the pictures."""
    text = experiment.markdown(figures)
    if experiment.finding:
        text += f"\n\n{experiment.finding(figures)}"
    (study.out / f"{name}.md").write_text(text + "\n")
    (study.out / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    files = [f"{name}.json", *draw(name, experiment, study, figures)]
    study.log(f"\n{text}\n\n{study.out / f'{name}.md'}, {', '.join(files)}")


def draw(name: str, experiment: Experiment, study: Study, figures: Figures) -> list[str]:
    """Draws the pictures into the study's folder; returns file names: NAME.png or NAME-X.png."""
    files = []
    for picture, figure in (experiment.draw(study, figures) if experiment.draw else {}).items():
        files.append(f"{name}-{picture}.png" if picture != name else f"{name}.png")
        figure.savefig(study.out / files[-1], dpi=150)
    return files


def known_trials(experiment: Experiment, study: Study) -> list[Trial]:
    """Adds the runs of the finished and the first unfinished stages to a study; returns them."""
    for stage in experiment.stages:
        trials = stage(study)
        study.trials += trials
        if any(study.outcome(trial).pending for trial in trials):
            break
    return study.trials
