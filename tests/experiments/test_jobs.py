"""Jobs in a folder that several processes share."""

import json

import pytest

from vit_jax.runs import jobs
from vit_jax.runs.jobs import Job, run_jobs
from vit_jax.runs.workdir_lock import Lock, in_use


def finish(job: Job) -> None:
    """Writes the files of a finished run that `outcome` reads."""
    job.workdir.mkdir(exist_ok=True)
    (job.workdir / "manifest.json").write_text(json.dumps({"steps": 3}))
    row = {"step": 3, "test/accuracy": 0.5, "test/loss": 1.0}
    (job.workdir / "metrics.jsonl").write_text(json.dumps(row) + "\n")


@pytest.fixture
def three(tmp_path):
    return [Job(tmp_path / name, ()) for name in ("a", "b", "c")]


@pytest.fixture
def ran(monkeypatch):
    """Replaces runs by ones that finish immediately; returns the names of the started ones."""
    made = []

    def run(job):
        made.append(job.name)
        finish(job)
        return ""

    monkeypatch.setattr(jobs, "_run", run)
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.0)
    return made


def test_runs_of_other_processes_are_waited_for(three, ran, monkeypatch):
    said = []
    monkeypatch.setattr(
        jobs, "in_use", lambda workdir: workdir == three[0].workdir and len(ran) < 2
    )

    def log(line):
        said.append(line)

    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)
    run_jobs(three, log)
    assert ran == ["b", "c", "a"]


def test_run_that_another_process_finished_meanwhile_is_not_made_again(three, ran, monkeypatch):
    waited = []

    def other_finishes(seconds):
        waited.append(seconds)
        finish(three[0])

    monkeypatch.setattr(jobs, "in_use", lambda workdir: workdir == three[0].workdir and not waited)
    monkeypatch.setattr(jobs.time, "sleep", other_finishes)
    said = []
    run_jobs(three, said.append)
    assert ran == ["b", "c"] and waited
    assert any("waiting for 1 runs that other processes have: a" in line for line in said)


def test_run_that_fails_is_tried_once_and_stops_no_other(three, ran, monkeypatch):
    def run(job):
        ran.append(job.name)
        if job.name == "b":
            return "no memory"
        finish(job)
        return ""

    monkeypatch.setattr(jobs, "_run", run)
    after = []
    run_jobs(three, lambda line: None, lambda: after.append(len(ran)))
    assert ran == ["a", "b", "c"] and after == [1, 2, 3]
    assert three[1].failed.read_text() == "no memory\n"


def test_workdir_is_in_use_while_it_is_locked(tmp_path):
    assert not in_use(tmp_path / "nothing") and not in_use(tmp_path)
    with Lock(tmp_path):
        assert in_use(tmp_path)
    assert not in_use(tmp_path)
