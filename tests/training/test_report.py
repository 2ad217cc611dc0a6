"""The report of a run."""

import json
import re

import numpy as np
import pytest

from vit_jax.training.report import Sample, write_report

CONFIG = {"model": {"name": "ViT-Ti/4"}, "data": {"source": "folder", "path": "<pets>"}}
ROWS = [
    {"step": 50, "train/loss": 2.0, "train/accuracy": 0.3, "train/learning_rate": 1e-3},
    {"step": 100, "train/loss": 1.0, "train/accuracy": 0.6, "train/learning_rate": 2e-3},
    {"step": 100, "test/loss": 1.1, "test/accuracy": 0.5},
]
IMAGE = np.zeros((4, 4, 3), np.uint8)
SAMPLES = [
    Sample(IMAGE, ("cat",), "cat", 0.9),
    Sample(IMAGE, ("dog",), "cat", 0.6),
    Sample(IMAGE, ("dog", "fox"), "fox", 0.8),
]


@pytest.fixture
def report(tmp_path):
    def write(rows=ROWS, samples=SAMPLES):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return write_report(tmp_path, {"test accuracy": "0.5 & more"}, samples).read_text()

    return write


def test_report_needs_nothing_from_outside(report):
    references = re.findall(r'(?:src|href)="([^"]+)"', report())
    assert references
    assert all(reference.startswith(("data:image/png;base64,", "#")) for reference in references)


def test_curves_are_drawn_for_what_was_measured(report):
    text = report()
    assert re.findall(r'aria-label="(.*?) over', text) == ["Loss", "Accuracy, %", "Learning rate"]


def test_run_without_evaluation_has_a_report(report):
    assert 'aria-label="Loss' in report(rows=ROWS[:2])


def test_wrong_prediction_has_a_sign_and_the_truth(report):
    text = report()
    assert text.count("✓") == 2
    assert text.count("✗") == 1
    assert "is dog" in text
    assert "3 test images, 1 of them wrong" in text


def test_text_is_escaped(report):
    text = report()
    assert "&lt;pets&gt;" in text and "<pets>" not in text
    assert "0.5 &amp; more" in text
