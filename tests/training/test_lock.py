"""Tests with real processes: one run at a time uses a workdir, also after a process was killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from vit_jax.errors import UserError
from vit_jax.runs.workdir_lock import Lock

ROOT = Path(__file__).parents[2]

# Prints `held` or an error. For each line of input, it prints whether it still holds the lock.
HOLD = """
import sys
from pathlib import Path
from vit_jax.errors import UserError
from vit_jax.runs.workdir_lock import Lock
try:
    with Lock(Path(sys.argv[1]), lambda line: print(line, flush=True), *map(float, sys.argv[2:])) as lock:
        print("held", flush=True)
        for _ in sys.stdin:
            lock.check()
            print("still held", flush=True)
except UserError as error:
    print(error, flush=True)
"""


class Process:
    """A process that holds the lock of a folder, or failed to acquire it."""

    def __init__(self, folder: Path, *seconds: float):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), *map(str, seconds)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def ask(self) -> str:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line()

    def end(self, number: int | None = None) -> None:
        """Ends the process by a signal, or by closing its input."""
        if number:
            self.process.send_signal(number)
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a process which acquires the lock of a folder.

    The folder is `tmp_path` by default.
    """
    started = []

    def start(*arguments) -> Process:
        folder, *seconds = arguments or (tmp_path,)
        started.append(Process(folder, *seconds))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        one.process.stdout.close()


def from_another_host(folder: Path, **values) -> Path:
    """Rewrites the newest lock file as a process on an unreachable host would write it."""
    (file,) = folder.glob(".lock-*")
    content = json.loads(file.read_text()) | {"host": "elsewhere", "boot": "another"} | values
    file.write_text(json.dumps(content))
    return file


def test_second_run_is_refused_with_the_holder_of_the_lock(start, tmp_path):
    first, begun = start(), time.strftime("%Y-%m-%d %H:")
    assert first.line() == "held"
    line = start().line()
    host = re.escape(os.uname().nodename)
    assert re.match(
        rf"{tmp_path} is in use by another run: process {first.process.pid} on {host}, "
        rf"since {begun}",
        line,
    )
    assert first.ask() == "still held"


def test_released_lock_is_acquired_at_once(start):
    for _ in range(3):
        one = start()
        assert one.line() == "held"
        one.end()


@pytest.mark.parametrize("reaped", [True, False])
def test_lock_of_a_killed_process_is_taken_over_at_once(start, tmp_path, reaped):
    first = start()
    assert first.line() == "held"
    first.process.kill()
    if reaped:
        first.process.wait()
    # Until its parent calls wait(), the killed process is a zombie and its process ID stays in use.
    else:
        while Path(f"/proc/{first.process.pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
    second = start()
    assert second.line().startswith(
        f"note: taking over {tmp_path} from process {first.process.pid} on "
    )
    assert second.line() == "held"


def test_stopped_process_is_alive(start):
    first = start()
    assert first.line() == "held"
    first.process.send_signal(signal.SIGSTOP)
    assert "is in use by another run" in start().line()
    first.process.send_signal(signal.SIGCONT)
    assert first.ask() == "still held"


def test_another_process_with_a_reused_process_id_is_not_the_holder(tmp_path, start):
    first = start()
    assert first.line() == "held"
    first.end(signal.SIGKILL)
    (file,) = tmp_path.glob(".lock-*")
    # The process ID now belongs to this process, which has another start time.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": os.getpid()}))
    second = start()
    assert "note: taking over" in second.line() and second.line() == "held"


def test_process_of_another_host_without_heartbeats_is_dead_after_a_wait(start, tmp_path):
    first = start()
    assert first.line() == "held"
    first.end(signal.SIGKILL)
    from_another_host(tmp_path)
    second = start(tmp_path, 0.2, 1.5)
    assert re.search("in use by process .* on elsewhere, .*; waiting up to \\d+ s", second.line())
    assert second.line().startswith(
        f"note: taking over {tmp_path} from process {first.process.pid}"
    )
    assert second.line() == "held"


def test_process_of_another_host_with_heartbeats_is_alive(start, tmp_path):
    first = start(tmp_path, 0.2, 60.0)
    assert first.line() == "held"
    # The first process continues to update the modification time of this file.
    from_another_host(tmp_path)
    second = start(tmp_path, 0.2, 60.0)
    assert "waiting up to 60 s" in second.line()
    assert "is in use by another run: process" in second.line()


def test_old_heartbeat_of_another_host_is_watched_for_two_intervals_only(start, tmp_path):
    first = start()
    assert first.line() == "held"
    first.end(signal.SIGKILL)
    os.utime(from_another_host(tmp_path), (0, 0))
    second = start(tmp_path, 0.5, 10000.0)
    assert "waiting up to 1 s" in second.line()
    assert "note: taking over" in second.line() and second.line() == "held"


def test_process_whose_lock_was_taken_over_stops(start, tmp_path):
    # Heartbeats are so rare that the process seems to be dead.
    first = start(tmp_path, 1000.0, 0.0)
    assert first.line() == "held"
    file = from_another_host(tmp_path)
    second = start(tmp_path, 0.1, 0.2)
    assert [second.line() for _ in range(3)][-1] == "held"
    assert not file.exists()
    assert re.match(f"{tmp_path} was taken over by process {second.process.pid} on ", first.ask())
    first.process.wait()  # The exit of the first process does not affect the second.
    assert second.ask() == "still held"


def test_one_of_many_simultaneous_takeovers_wins(start, tmp_path):
    first = start()
    assert first.line() == "held"
    first.end(signal.SIGKILL)
    several = [start() for _ in range(6)]
    said = Counter()
    for one in several:
        line = one.line()
        if "taking over" in line:
            line = one.line()
        said[
            "held" if line == "held" else "in use" if "is in use by another run" in line else line
        ] += 1
    assert said == {"held": 1, "in use": 5}
    assert len(list(tmp_path.glob(".lock*"))) == 1


def test_copy_of_a_workdir_in_use_is_free(start, tmp_path):
    (tmp_path / "one").mkdir()
    first = start(tmp_path / "one")
    assert first.line() == "held"
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    second = start(tmp_path / "two")
    assert "note: taking over" in second.line() and second.line() == "held"
    assert first.ask() == "still held"


@pytest.mark.parametrize("missing", ["link", "flock", "link and flock"])
def test_file_system_without_links_or_locks_is_as_safe(start, tmp_path, monkeypatch, missing):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    if "link" in missing:
        monkeypatch.setattr("os.link", refuse)
    if "flock" in missing:
        monkeypatch.setattr("fcntl.flock", refuse)
    with Lock(tmp_path, log=pytest.fail) as lock:
        with pytest.raises(UserError, match="is in use by another run"), Lock(tmp_path):
            pass
        lock.check()
    with Lock(tmp_path, log=pytest.fail) as lock:
        lock.check()


@pytest.mark.parametrize(
    "change",
    [
        shutil.rmtree,
        lambda folder: folder.rename(folder.with_name("moved")),
        lambda folder: [shutil.rmtree(folder), folder.mkdir()],
    ],
    ids=["deleted", "moved", "recreated"],
)
def test_missing_workdir_is_detected(tmp_path, change):
    (tmp_path / "run").mkdir()
    with Lock(tmp_path / "run") as lock:
        lock.check()
        change(tmp_path / "run")
        with pytest.raises(
            UserError, match="the workdir .* was deleted, moved or recreated in the middle"
        ):
            lock.check()
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
