"""If one of two hosts fails, both end with one error line and leave no processes."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import HANG
from tests.system.conftest import ROOT, SMALL, free_port


def finish(pair) -> list[tuple[int, str]]:
    """Returns exit code and errors of each process, after all their subprocesses have ended.

    Zombies count as subprocesses.
    """
    try:
        errors = [process.communicate(timeout=HANG)[1] for process in pair]
        until = time.monotonic() + HANG
        for process in pair:
            while in_session(process.pid):
                assert time.monotonic() < until, f"processes of {process.args} are still running"
                time.sleep(0.05)
    finally:
        for process in pair:
            if in_session(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
    return [
        (process.returncode, "\n".join(re.findall("^(?:error: |Traceback).*", text, re.MULTILINE)))
        for process, text in zip(pair, errors, strict=True)
    ]


def in_session(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_hosts_with_different_configs_are_named(run, tmp_path):
    arguments = (*SMALL, f"--workdir={tmp_path / 'run'}")
    pair = run.start_pair(*arguments, of_each=((), ("--config.optimizer.learning_rate=1.0",)))
    leader, other = finish(pair)
    assert leader[0] == other[0] == 2
    assert re.fullmatch(
        r"error: process 1 \(.*\): the config differs from process 0 \(.*\): "
        r"optimizer\.learning_rate is 1\.0, there 0\.\d+",
        leader[1],
    )
    assert other[1] == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_workdir_that_is_not_shared_is_named(run, tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    own = [(f"--workdir={tmp_path / name}",) for name in "01"]
    leader, other = finish(run.start_pair(*SMALL, of_each=own))
    assert leader[0] == other[0] == 2
    assert re.fullmatch(
        rf"error: process 1 \(.*\): the workdir {tmp_path}/1 is not that of process 0 \(.*\): "
        "give a folder that all hosts share",
        leader[1],
    )
    assert other[1] == ""


@pytest.mark.slow
def test_data_that_only_the_leader_has_are_named(run, tmp_path):
    pixels = np.zeros((8, 8, 3), np.uint8)
    for split in ("train", "test"):
        folder = tmp_path / "0" / "data" / split / "cat"
        folder.mkdir(parents=True)
        for index in range(32):
            Image.fromarray(pixels).save(folder / f"{index}.png")
    (tmp_path / "1").mkdir()
    address, (config, *rest) = f"--coordinator=localhost:{free_port()}", SMALL
    pair = [
        run.start(
            config.replace("configs", f"{ROOT}/configs"),
            *rest,
            "--config.data.source=folder",
            # The same relative path in another working directory, as on another host.
            "--config.data.path=data",
            f"--workdir={tmp_path / 'run'}",
            address,
            "--processes=2",
            f"--process={index}",
            cwd=tmp_path / str(index),
        )
        for index in range(2)
    ]
    leader, other = finish(pair)
    assert leader[0] == other[0] == 2
    assert re.fullmatch(r"error: process 1 \(.*\): no folder data/train .*", leader[1])
    assert other[1] == ""


def kill(pair, victim: int, when: Path) -> str:
    """Kills one process when a file exists, and returns the errors of the other."""
    while not when.exists():
        assert all(process.poll() is None for process in pair)
        time.sleep(0.01)
    pair[victim].kill()
    outcome = finish(pair)
    assert outcome[victim][0] == -signal.SIGKILL
    assert outcome[1 - victim][0] == 1
    return outcome[1 - victim][1]


@pytest.mark.slow
def test_killed_host_is_named_and_one_host_can_continue(run, tmp_path):
    arguments = (*SMALL, "--config.evaluate_every=40", f"--workdir={tmp_path / 'run'}")
    pair = run.start_pair(*arguments, "--config.data.workers=1")
    line = kill(pair, 1, when=tmp_path / "run" / "checkpoints" / "10")
    assert re.fullmatch(r"error: process 1 \(.*\) died; the same command resumes .*", line)
    alone = run(*arguments)
    assert alone.returncode == 0, alone.stderr
    assert "continuing from" in alone.stdout


@pytest.mark.slow
def test_killed_leader_is_named(run, tmp_path):
    pair = run.start_pair(*SMALL, f"--workdir={tmp_path / 'run'}")
    line = kill(pair, 0, when=tmp_path / "run" / "config.json")
    assert re.fullmatch(r"error: process 0 \(.*\) died; the same command resumes .*", line)
