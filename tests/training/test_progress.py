"""What a run writes down."""

import json
import threading

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vit_jax.progress import Progress, duration, waiting
from vit_jax.runs.console import Console, MetricWriter
from vit_jax.runs.trackers.delivery import Delivery
from vit_jax.runs.trackers.tensorboard import Tracker
from vit_jax.runs.trackers.tracker import RunFacts


def steps(workdir) -> list[int]:
    return [json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def write(workdir, first_step, *rows):
    writer = MetricWriter(workdir, first_step)
    for step, value in rows:
        writer.write(step, {"train/loss": value})
    writer.close()


def test_rows_of_a_killed_run_come_once(tmp_path):
    write(tmp_path, 0, (10, 1.0), (20, 2.0), (30, 3.0))
    write(tmp_path, 20, (30, 3.0), (40, 4.0))
    assert steps(tmp_path) == [10, 20, 30, 40]


def test_half_written_last_line_is_dropped(tmp_path):
    write(tmp_path, 0, (10, 1.0), (20, 2.0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "train/lo')
    write(tmp_path, 20, (30, 3.0))
    assert steps(tmp_path) == [10, 20, 30]


def test_infinity_is_null(tmp_path):
    write(tmp_path, 0, (10, float("inf")), (20, float("nan")))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in rows] == [None, None]


def tensorboard(workdir, *rows):
    """Writes rows as a start of the run does."""
    delivery = Delivery("tensorboard", Tracker, RunFacts(workdir, str(workdir), "", {}, {}), (), print)
    for step, value in rows:
        delivery.row(step, {"train/loss": value})
    delivery.close()


def test_tensorboard_reads_the_events(tmp_path):
    tensorboard(tmp_path, (10, 1.5), (20, 0.25))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(10, 1.5), (20, 0.25)]


def test_tensorboard_sees_the_rows_of_a_killed_run_once(tmp_path):
    tensorboard(tmp_path, (10, 1.0), (20, 2.0), (30, 3.0))
    tensorboard(tmp_path, (20, 2.0), (30, 3.0), (40, 4.0))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [10, 20, 30, 40]


def test_log_file_has_every_line_with_its_time(tmp_path, capsys):
    console = Console(tmp_path / "log.txt")
    console.say("one\ntwo")
    console.status("three")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[20:] for line in lines] == ["one", "two", "three"]
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (180_000, "2 d 2 h")],
)
def test_duration_has_two_units_at_most(seconds, words):
    assert duration(seconds) == words


def test_progress_says_now_and_then_how_long_it_still_takes(monkeypatch):
    clock, said = iter((0.0, 1.0, 20.0, 21.0, 60.0)), []
    monkeypatch.setattr("vit_jax.progress.time.monotonic", lambda: next(clock))
    progress = Progress("features", 3000, "images", said.append)
    for done in (100, 1000, 1100, 2400):
        progress(done)
    assert said == [
        "features: 1,000 of 3,000 images | 50 images/s | 40 s left",
        "features: 2,400 of 3,000 images | 40 images/s | 15 s left",
    ]


def test_what_cannot_say_how_far_it_is_says_how_long_it_takes():
    lines, third = [], threading.Event()

    def say(line):
        lines.append(line)
        if len(lines) == 3:
            third.set()

    with pytest.raises(ZeroDivisionError), waiting("compiling the step", say, every=0.01):
        assert third.wait(60)
        raise ZeroDivisionError
    said = len(lines)
    assert lines[:3] == ["compiling the step ...", *2 * ["compiling the step: 0 s so far"]]
    assert "compiling the step" not in {thread.name for thread in threading.enumerate()}
    assert len(lines) == said
