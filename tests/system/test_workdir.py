"""Workdirs that are in use by another run, or are deleted during the run."""

import os
import shutil
import signal

import pytest

from tests.conftest import HANG
from tests.system.conftest import SMALL
from vit_jax.runs.workdir_lock import Lock

LONG = (
    *SMALL,
    "--config.steps=100000",
    "--config.evaluate_every=100000",
    "--config.checkpoint.every=100000",
)


@pytest.fixture
def training(run, tmp_path):
    """Yields the process of a long run after its first step."""
    process = run.start(*LONG, f"--workdir={tmp_path / 'run'}")
    for line in process.stdout:
        if line.startswith("first step"):
            break
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_second_run_is_refused_and_the_first_goes_on(run, training, tmp_path):
    other = run(*LONG, f"--workdir={tmp_path / 'run'}")
    assert other.returncode == 2
    (line,) = [line for line in other.stderr.splitlines() if line.startswith("error: ")]
    holder = f"process {training.pid} on {os.uname().nodename}, since 20"
    assert f"{tmp_path / 'run'} is in use by another run: {holder}" in line
    assert "Traceback" not in other.stderr
    training.send_signal(signal.SIGTERM)
    out, err = training.communicate(timeout=HANG)
    assert training.returncode == 0, err
    assert "stopped; saved" in out
    with Lock(tmp_path / "run", log=pytest.fail):  # The run has released the lock.
        pass


def test_run_whose_workdir_is_deleted_ends_with_one_line_and_makes_nothing_anew(training, tmp_path):
    # The run writes files into the folder meanwhile, so the folder is moved first.
    (tmp_path / "run").rename(tmp_path / "removed")
    shutil.rmtree(tmp_path / "removed", ignore_errors=True)
    _, err = training.communicate(timeout=HANG)
    assert training.returncode == 2, err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (
        len(lines) == 1
        and f"the workdir {tmp_path / 'run'} was deleted, moved or recreated" in lines[0]
    )
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()
