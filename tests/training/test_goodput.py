"""Tests of goodput: the time of each phase, over several starts of a run."""

import time

import pytest

from vit_jax.runs.goodput import Ledger, read_rows


def row(step: int, **seconds: float) -> dict:
    return {"step": step} | {
        f"time/{k}": float(seconds.get(k, 0)) for k in Ledger(time.time(), [], 0).seconds
    }


def shares(ledger: Ledger) -> dict[str, float]:
    return {kind: seconds for kind, seconds in ledger.seconds.items() if seconds}


def test_time_is_attributed_to_the_phase_that_was_entered():
    ledger = Ledger(time.time() - 100, [], 0)
    ledger.enter("train")
    ledger.move("data", 2.0)
    assert ledger.seconds["start"] == pytest.approx(100, abs=1)
    assert shares(ledger).keys() == {"start", "train", "data"}
    assert ledger.seconds["train"] == -2.0  # Negative until the time that includes it is added.


def test_training_after_the_last_checkpoint_is_lost():
    rows = [
        row(10, start=5, train=10),
        {"step": 10, "test/loss": 1.0},
        row(20, start=5, train=30, save=1),
    ]
    ledger = Ledger(time.time(), rows, first_step=10)
    assert shares(ledger) == {"start": 5, "train": 10, "lost": 21}


def test_lost_time_adds_up_over_kills():
    ledger = Ledger(
        time.time(), [row(10, train=10, lost=4), row(15, train=13, start=2, lost=4)], first_step=10
    )
    assert shares(ledger) == {"train": 10, "lost": 9}


def test_goodput_is_the_share_of_training():
    ledger = Ledger(time.time(), [row(10, train=900, start=50, evaluate=50)], first_step=10)
    assert ledger.row()["goodput"] == pytest.approx(0.9, abs=1e-3)
    assert (
        "evaluating 5.0%" in ledger.in_words()
        and "starting and compiling 5.0%" in ledger.in_words()
    )


def test_rows_end_where_a_killed_process_stopped_writing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert read_rows(tmp_path / "nothing.jsonl") == []
