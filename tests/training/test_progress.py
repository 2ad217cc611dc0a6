"""Tests of a run's output: metrics, TensorBoard events, the log, and lines in a terminal."""

import io
import json
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vit_jax.progress import LINE, Progress, duration, phase, ticking
from vit_jax.runs.console import Console, MetricWriter
from vit_jax.runs.trackers.delivery import Delivery
from vit_jax.runs.trackers.tensorboard import Tracker
from vit_jax.runs.trackers.tracker import RunFacts
from vit_jax.runs.watchdog import Watchdog


def steps(workdir) -> list[int]:
    return [
        json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()
    ]


def write(workdir, first_step, *rows):
    writer = MetricWriter(workdir, first_step)
    for step, value in rows:
        writer.write(step, {"train/loss": value})
    writer.close()


def test_rows_of_a_killed_run_are_not_repeated(tmp_path):
    write(tmp_path, 0, (10, 1.0), (20, 2.0), (30, 3.0))
    write(tmp_path, 20, (30, 3.0), (40, 4.0))
    assert steps(tmp_path) == [10, 20, 30, 40]


def test_half_written_last_line_is_dropped(tmp_path):
    write(tmp_path, 0, (10, 1.0), (20, 2.0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "train/lo')
    write(tmp_path, 20, (30, 3.0))
    assert steps(tmp_path) == [10, 20, 30]


def test_infinity_is_written_as_null(tmp_path):
    write(tmp_path, 0, (10, float("inf")), (20, float("nan")))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in rows] == [None, None]


def tensorboard(workdir, *rows):
    """Writes rows to TensorBoard, as one start of a run does."""
    delivery = Delivery(
        "tensorboard", Tracker, RunFacts(workdir, str(workdir), "", {}, {}), (), print
    )
    for step, value in rows:
        delivery.row(step, {"train/loss": value})
    delivery.close()


def test_tensorboard_reads_the_events(tmp_path):
    tensorboard(tmp_path, (10, 1.5), (20, 0.25))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 1.5), (20, 0.25)]


def test_tensorboard_has_the_rows_of_a_killed_run_once(tmp_path):
    tensorboard(tmp_path, (10, 1.0), (20, 2.0), (30, 3.0))
    tensorboard(tmp_path, (20, 2.0), (30, 3.0), (40, 4.0))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [10, 20, 30, 40]


def test_log_file_has_every_line_with_its_time(tmp_path, capsys):
    console = Console(tmp_path / "log.txt")
    console.log("one\ntwo")
    console.status("three")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[20:] for line in lines] == ["one", "two", "three"]
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (180_000, "2 d 2 h"),
    ],
)
def test_duration_has_two_units_at_most(seconds, words):
    assert duration(seconds) == words


def test_progress_logs_the_remaining_time_at_intervals(monkeypatch):
    clock, said = iter((0.0, 1.0, 20.0, 21.0, 60.0)), []
    monkeypatch.setattr("vit_jax.progress.time.monotonic", lambda: next(clock))
    progress = Progress("features", 3000, "images", said.append)
    for done in (100, 1000, 1100, 2400):
        progress(done)
    assert said == [
        "features: 1,000 of 3,000 images | 50 images/s | 40 s left",
        "features: 2,400 of 3,000 images | 40 images/s | 15 s left",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def screen_lines(written: str) -> list[str]:
    """Returns the lines on a terminal's screen. Text after a carriage return overwrites a line."""
    lines = []
    for line in written.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


@pytest.fixture
def clock(monkeypatch):
    """Returns a function that sets the number of seconds that have passed."""
    now = [0.0]
    monkeypatch.setattr("vit_jax.progress.time.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_status_lines_in_a_file_are_limited_by_time_except_the_last_one(tmp_path, capsys, clock):
    console = Console(tmp_path / "log.txt")
    for tenths in range(0, 1001):
        clock(tenths / 10)
        if console.due:
            console.status(f"at {tenths / 10:g}")
    console.status("the end", last=True)
    expected = [*range(0, 60), *range(69, 100, 10)]
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*(f"at {second}" for second in expected), "the end"]
    assert [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()] == printed


def test_terminal_overwrites_the_status_line_and_keeps_the_others(tmp_path, monkeypatch, clock):
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    console = Console(tmp_path / "log.txt")
    console.status("step 1/9 | loss 2.5000")
    clock(0.5)
    console.status("step 2/9")  # Too early to be shown.
    clock(1)
    console.status("step 3/9")
    assert screen_lines(terminal.getvalue()) == ["step 3/9"]
    console.log("saved")
    clock(70)
    console.status("step 4/9")
    clock(71)
    console.status("step 5/9")
    assert screen_lines(terminal.getvalue()) == ["saved", "step 5/9"]
    logged = [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert logged == ["step 1/9 | loss 2.5000", "step 3/9", "saved", "step 4/9"]


def test_status_is_repeated_while_a_step_takes_long(tmp_path, capsys, clock):
    console = Console(tmp_path / "log.txt")
    console.status("step 3/9")
    for second in range(1, 12):
        clock(second)
        console.still(f"step 3 done {second} s ago")
    assert capsys.readouterr().out.splitlines() == [
        "step 3/9",
        "step 3/9 | step 3 done 5 s ago",
        "step 3/9 | step 3 done 10 s ago",
    ]


def test_watchdog_describes_long_operations(monkeypatch, clock):
    watchdog = Watchdog(60)
    watchdog.set_phase("compiling the step")
    clock(4)
    assert watchdog.in_words() == ""
    clock(90)
    assert watchdog.in_words() == "compiling the step: 1 min 30 s so far"
    watchdog.done("step 1")
    clock(102)
    assert watchdog.in_words() == "step 1 done 12 s ago"


def test_progress_is_a_bar_that_moves_in_a_terminal_and_is_cleared(monkeypatch, clock):
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    progress = Progress("features", 400, "images", pytest.fail)
    clock(2)
    progress(100)
    assert screen_lines(terminal.getvalue()) == [
        f"features {5 * '━'}{15 * '╌'} 100 of 400 images | 50 images/s | 6 s left"
    ]
    progress(400)
    print("done")
    assert screen_lines(terminal.getvalue()) == ["done", ""]


def test_ticking_ends_with_its_context():
    ticks, third = [], threading.Event()

    def tick():
        ticks.append(None)
        if len(ticks) == 3:
            third.set()

    with pytest.raises(ZeroDivisionError), ticking(tick, every=0.01):
        assert third.wait(60)
        raise ZeroDivisionError
    count = len(ticks)
    assert (
        "ticking" not in {thread.name for thread in threading.enumerate()} and len(ticks) == count
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_a_phase_moves_in_a_terminal_and_is_removed_at_its_end(terminal, monkeypatch, capsys):
    shown = threading.Event()
    monkeypatch.setattr(type(LINE), "possible", terminal)
    monkeypatch.setattr("vit_jax.progress.SECONDS", 0)
    show = LINE.show
    monkeypatch.setattr(LINE, "show", lambda text: (show(text), shown.set()))
    with phase("writing model.onnx", every=0.001):
        if terminal:
            assert shown.wait(60)
        else:
            text = ""
            while not text:
                text = capsys.readouterr().err
            assert text.startswith("writing model.onnx: 0 s so far\n")
    printed = capsys.readouterr().out
    assert printed.startswith("\rwriting model.onnx: 0 s so far") if terminal else not printed
    assert printed.endswith(" \r") if terminal else not printed
