"""Experiments as values, and what runs one: jobs in stages, figures read from them, a table and pictures.

An experiment is a file in experiments/ that makes one `Experiment`, and is run by
`python -m vit_jax.experiment NAME --out=DIR`; the same command again goes on where it was stopped.
"""

import json
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit_jax import published
from vit_jax.errors import UserError
from vit_jax.runs.jobs import Job, job_of, outcome, run_jobs

Figures = Mapping[str, Any]  # What an experiment found, as JSON can hold it.


class Study:
    """An experiment in a folder: its options, its runs so far and their figures.

    Args:
      out: the folder for all of it.
      options: values of the experiment's own flags.
    """

    def __init__(self, out: Path, options: Mapping[str, Any], say: Callable[[str], None] = print):
        self.out, self.options, self.say = out, dict(options), say
        self.jobs: dict[Hashable, Job] = {}
        self.figures: dict[
            Hashable, dict[str, float]
        ] = {}  # Of each run's last evaluation of the test images.

    def job(self, name: str, config: str = "quickstart", **values: Any) -> Job:
        """A run of `vit_jax.main` in the folder `name`.

        Args:
          config: as of `job_of`.
          **values: of the config, a dot written as two underscores: `data__path`.
        """
        return job_of(self.out / name, config, {key.replace("__", "."): v for key, v in values.items()})

    def run(self, jobs: Mapping[Hashable, Job]) -> None:
        """Runs those that are not finished and takes down their figures.

        Raises:
          UserError: one failed.
        """
        run_jobs(list(jobs.values()), self.say)
        self.take(jobs)
        for key, job in jobs.items():
            if key not in self.figures:
                raise UserError(f"{job.workdir}: {outcome(job).failure}")

    def take(self, jobs: Mapping[Hashable, Job]) -> None:
        """Takes down the figures of those jobs that are finished."""
        self.jobs |= jobs
        results = {key: outcome(job).figures for key, job in jobs.items()}
        self.figures |= {key: figures for key, figures in results.items() if figures is not None}

    def accuracies(self, *prefix: Any) -> dict[Any, float]:
        """Test accuracies of the runs whose keys begin so, by the last part of their keys."""
        return {
            key[-1]: figures["accuracy"]
            for key, figures in self.figures.items()
            if isinstance(key, tuple) and key[: len(prefix)] == prefix
        }


@dataclass(frozen=True)
class Experiment:
    """A value that says what to run, and how to read it.

    Args:
      claim: what it shows or whether it holds, in a sentence.
      read: makes the figures, when all jobs are finished.
      stages: each makes jobs by any keys; a later one sees the figures of those before it.
      table: the figures in Markdown; by default they stand beside those of `published`.
      draw: pictures by their files' names, without ending.
      published: a table of `vit_jax.published`.
      options: its own flags: what `add_argument` takes.
      needs: what must be here, and how long it takes, in words.
    """

    claim: str
    read: Callable[[Study], Figures]
    stages: Sequence[Callable[[Study], Mapping[Hashable, Job]]] = ()
    table: Callable[[Figures], str] | None = None
    draw: Callable[[Study, Figures], Mapping[str, Any]] | None = None
    published: str = ""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: str = ""

    def markdown(self, figures: Figures) -> str:
        """The figures as a table."""
        return self.table(figures) if self.table else beside(published.table(self.published), figures)


def conduct(experiment: Experiment, study: Study) -> Figures:
    """Runs the jobs of all stages, and writes results.md, results.json and the pictures.

    Raises:
      UserError: a run failed.
    """
    study.out.mkdir(parents=True, exist_ok=True)
    for stage in experiment.stages:
        study.run(stage(study))
    figures = experiment.read(study)
    write(experiment, study, figures)
    return figures


def write(experiment: Experiment, study: Study, figures: Figures) -> None:
    """The table, printed and as results.md, the figures as results.json, and the pictures."""
    text = experiment.markdown(figures)
    (study.out / "results.md").write_text(text + "\n")
    (study.out / "results.json").write_text(json.dumps(figures, indent=2) + "\n")
    files = ["results.json"]
    for name, figure in (experiment.draw(study, figures) if experiment.draw else {}).items():
        figure.savefig(study.out / f"{name}.png", dpi=150)
        files.append(f"{name}.png")
    study.say(f"\n{text}\n\n{study.out / 'results.md'}, {', '.join(files)}")


def known_jobs(experiment: Experiment, study: Study) -> dict[Hashable, Job]:
    """The jobs that can be named without running any: those of all stages up to the first unfinished one."""
    for stage in experiment.stages:
        jobs = stage(study)
        study.take(jobs)
        if not jobs.keys() <= study.figures.keys():
            break
    return study.jobs


def beside(table: published.Table, figures: Mapping[str, Mapping[str, float]]) -> str:
    """A line for each column of a published table that we have figures of: the paper's, and ours.

    Args:
      figures: ours, by the table's rows and its columns as `Table.by_model` names them.
    """
    printed = table.by_model()
    header = [""] + [f"{row}, {whose}" for row in figures for whose in ("paper", "ours")]
    lines = []
    for column in printed:
        ours = [each.get(column) for each in figures.values()]
        if any(figure is not None for figure in ours):
            cells = [
                ("" if figure is None else f"{figure:,}") if place == 0 else written(figure)
                for row, figure_of_ours in zip(figures, ours, strict=True)
                for place, figure in enumerate((printed[column].get(row), figure_of_ours))
            ]
            lines.append([column, *cells])
    return markdown_table(header, lines)


def written(figure: float | None) -> str:
    """A figure in four digits or more; nothing, if there is none."""
    return "" if figure is None else f"{figure:,.1f}" if abs(figure) >= 1000 else f"{figure:.4g}"


def markdown_table(header: Sequence[Any], lines: Sequence[Sequence[Any]]) -> str:
    """Rows of cells as Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation (n - 1; none of one value) of shares, in per cent."""
    values = [100 * value for value in values]
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def best(accuracies: Mapping[Any, float]) -> Any:
    """The key of the highest accuracy, of equals the first."""
    return max(accuracies, key=accuracies.get)
