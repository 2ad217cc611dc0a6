"""Runs training jobs one after another in separate processes, and records their failures.

Finished jobs are not repeated. Several machines can work on the jobs of a shared folder: a job that
another machine runs is skipped.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit_jax.paths import MANIFEST
from vit_jax.progress import duration
from vit_jax.runs.workdir import METRICS, ends_run
from vit_jax.runs.workdir_lock import in_use
from vit_jax.shipped import CONFIGS

POLL_SECONDS = 20.0  # Interval at which jobs of other processes are checked.


class Job(NamedTuple):
    """A training run to start with `vit_jax.main`, given by its workdir and its flags."""

    workdir: Path
    flags: tuple[str, ...]  # All flags except --workdir.

    @property
    def name(self) -> str:
        """Name of the run: the name of its workdir."""
        return self.workdir.name

    @property
    def failed(self) -> Path:
        """Path of the file next to the workdir that contains the reason if the job has failed."""
        return self.workdir.with_name(f"{self.name}.failed")


class Outcome(NamedTuple):
    """The metrics of a run's last evaluation, or the reason of its failure."""

    # Metrics of the last evaluation. Metrics on the test images have no prefix, such as `accuracy`.
    # Metrics of evaluation suites are named as `fewshot/pets/5`. `seconds` is the total time of the
    # run, including the time before it was resumed.
    figures: dict[str, float] | None = None
    failure: str = ""  # The reason of the failure; empty if the run did not fail.
    # Metrics of each evaluation so far, with the same names as in `figures`.
    history: Mapping[str, Sequence[float]] = {}

    @property
    def pending(self) -> bool:
        """True if the run has neither finished nor failed."""
        return self.figures is None and not self.failure


def job_of(workdir: Path, config: str, values: Mapping[str, Any]) -> Job:
    """Returns a job that trains a config with some values changed.

    Args:
      config: a config file, or the name of a file in configs/ with its argument, such as
        `finetune:cifar10`.
      values: values to change, by dotted key.
    """
    name, colon, argument = config.partition(":")
    file = name if name.endswith(".py") else str(CONFIGS / f"{name}.py")
    changed = (f"--config.{key}={value}" for key, value in values.items())
    return Job(workdir, (f"--config={file}{colon}{argument}", *changed))


def outcome(job: Job) -> Outcome:
    """Reads the outcome of a job (metrics or failure) from the files of its workdir."""
    try:
        steps = json.loads((job.workdir / MANIFEST).read_text())["steps"]
        lines = (job.workdir / METRICS).read_text().splitlines(keepends=True)
    except OSError:
        return Outcome(failure=_failure(job))
    # While another process writes the file, the last line may be incomplete. An incomplete line is
    # skipped.
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    history: dict[str, list[float]] = {}
    seconds, last = 0.0, None
    for row in rows:
        seconds = sum(x for key, x in row.items() if key.startswith("time/")) or seconds
        figures = _figures(row)
        for name, value in figures.items():
            history.setdefault(name, []).append(value)
        if ends_run(row, steps):
            last = figures
    if last is None:
        return Outcome(failure=_failure(job), history=history)
    return Outcome(last | {"seconds": seconds}, history=history)


def _figures(row: Mapping[str, float]) -> dict[str, float]:
    """Returns the evaluation metrics in a row of `metrics.jsonl`, without the prefix `test`."""
    return {
        key.removeprefix("test/"): value
        for key, value in row.items()
        if "/" in key and not key.startswith(("train/", "time/", "kept/"))
    }


def _failure(job: Job) -> str:
    """Returns the reason of a job's failure from the file `Job.failed`; empty without this file."""
    return job.failed.read_text().strip() if job.failed.exists() else ""


def run_jobs(
    jobs: Sequence[Job],
    log: Callable[[str], None] = print,
    after_each: Callable[[], None] = lambda: None,
) -> None:
    """Runs the jobs that are not finished, and continues jobs that were stopped.

    Raises:
      KeyboardInterrupt: the user stopped a job. The job saved a checkpoint before it ended.
    """
    waiting = _unfinished(jobs)
    begun, ran, retried = time.monotonic(), 0, set()
    while waiting:
        job = next((job for job in waiting if not in_use(job.workdir)), None)
        if job is None:
            log(
                f"== waiting for {len(waiting)} runs that other processes have: "
                f"{waiting[0].name}, ..."
            )
            time.sleep(POLL_SECONDS)
        elif outcome(job).figures is None:
            each = (time.monotonic() - begun) / max(ran, 1)
            left = f", about {duration(each * len(waiting))} left" if ran else ""
            log(f"== {job.name}: run {len(jobs) - len(waiting) + 1} of {len(jobs)}{left}")
            job.failed.unlink(missing_ok=True)
            failure, ran = _run(job), ran + 1
            if failure and in_use(job.workdir):
                continue  # Another process started this job at the same moment.
            if failure:
                job.failed.parent.mkdir(parents=True, exist_ok=True)
                job.failed.write_text(failure + "\n")
                log(f"== {job.name} failed: {failure}")
                retried.add(job)
            after_each()
        waiting = _unfinished(job for job in waiting if job not in retried)


def _unfinished(jobs: Iterable[Job]) -> list[Job]:
    return [job for job in jobs if outcome(job).figures is None]


def _run(job: Job) -> str:
    """Runs a job. Returns the reason of its failure, or an empty string if it succeeded."""
    command = [sys.executable, "-m", "vit_jax.main", *job.flags, f"--workdir={job.workdir}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    last = ""
    try:
        for line in process.stderr:
            sys.stderr.write(line)
            last = line.strip() or last
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # The job's process also received the signal, and ends itself.
        raise
    if code == 0 and outcome(job).figures is None:
        raise KeyboardInterrupt  # Only the job's process received the signal; it saved and ended.
    return (last.removeprefix("error: ") or f"exit code {code}") if code else ""
