"""A run that is killed and started again ends like one that never was."""

import json
import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.system.conftest import SMALL


def parameters(workdir: Path) -> list[np.ndarray]:
    model = vit_jax.load_model(workdir)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))]


def figures(workdir: Path) -> list[dict]:
    """The rows of metrics.jsonl without what the clock says."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    timed = ("train/images_per_second", "time/", "goodput")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


def writing_checkpoint(workdir: Path, step: int) -> bool:
    """Orbax writes into a folder of another name until the checkpoint is whole."""
    folder = workdir / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    return any(name.startswith(str(step)) and name != str(step) for name in names)


MOMENTS = {
    "before the first step": lambda workdir: (workdir / "config.json").exists(),
    "in the write of the first checkpoint": lambda workdir: writing_checkpoint(workdir, 10),
    "in the write of a later checkpoint": lambda workdir: writing_checkpoint(workdir, 30),
    "between checkpoints": lambda workdir: (
        (workdir / "metrics.jsonl").exists()
        and len((workdir / "metrics.jsonl").read_text().splitlines()) >= 4
    ),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_run_ends_with_the_same_bits(run, finished, tmp_path, moment):
    process = run.start(*SMALL, f"--workdir={tmp_path / 'run'}")
    while process.poll() is None and not MOMENTS[moment](tmp_path / "run"):
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"

    result = run(*SMALL, f"--workdir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    for got, expected in zip(parameters(tmp_path / "run"), parameters(finished), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert figures(tmp_path / "run") == figures(finished)


def test_sigterm_saves_says_where_and_leaves_with_zero(run, finished, tmp_path):
    process = run.start(*SMALL, "--config.checkpoint.every=1000", f"--workdir={tmp_path / 'run'}")
    for line in process.stdout:
        if line.startswith("first step"):
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (stopped,) = [line for line in out.splitlines() if line.startswith("stopped")]
    assert Path(stopped.split("saved ")[1].split(";")[0]).is_dir()

    result = run(*SMALL, "--config.checkpoint.every=1000", f"--workdir={tmp_path / 'run'}")
    assert "continuing from" in result.stdout
    for got, expected in zip(parameters(tmp_path / "run"), parameters(finished), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_finished_run_started_again_only_reports(run, finished):
    before = figures(finished)
    result = run(*SMALL, f"--workdir={finished}")
    assert result.returncode == 0, result.stderr
    assert "first step" not in result.stdout
    assert figures(finished) == before
