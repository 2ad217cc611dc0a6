"""The report of a run."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from vit_jax.runs.report import Sample, write_report

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
    def write(rows=ROWS, samples=SAMPLES, config=CONFIG):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return write_report(tmp_path, "ViT-Ti/4", {"test accuracy": "0.5 & more"}, samples).read_text()

    return write


def test_report_needs_nothing_from_outside(report):
    references = re.findall(r'(?:src|href)="([^"]+)"', report())
    assert references
    assert all(reference.startswith(("data:", "#")) for reference in references)


def test_title_is_the_model_and_its_data(report):
    assert "<h1>ViT-Ti/4 on &lt;pets&gt;</h1>" in report()


def test_title_without_a_path_names_the_source(report):
    config = {"model": {"name": "ViT-Ti/4"}, "data": {"source": "digits"}}
    assert "<h1>ViT-Ti/4 on digits</h1>" in report(config=config)


def test_sections_come_in_reading_order(report):
    assert re.findall("<(h1|table|h2|pre)>", report()) == ["h1", "table", "h2", "h2", "h2", "pre"]
    assert re.findall("<h2>([A-Z][a-z]+)", report()) == ["Curves", "Predictions", "Config"]


def test_final_figures_are_in_the_table(report):
    assert "<td>test accuracy<td>0.5 &amp; more</tr>" in report()


def test_curves_are_drawn_for_what_was_measured(report):
    text = report()
    assert re.findall(r'aria-label="(.*?) over', text) == ["Loss", "Accuracy, %", "Learning rate"]


def test_figures_of_each_suite_have_a_panel_with_a_line_for_each(report):
    figures = {"knn/pets/10": 0.25, "knn/pets/20": 0.5, "probe/pets/linear probe": 0.75}
    text = report(rows=[*ROWS, {"step": 100} | figures])
    of_suites = re.findall(r'aria-label="(.*?) over', text)[3:]
    assert of_suites == [
        "k-NN on frozen features of all training images, %",
        "Linear probe on all training images, %",
    ]
    assert all(line in text for line in (">pets/10<", ">pets/20<", ">pets/linear probe<"))


def test_run_without_evaluation_has_a_report(report):
    assert 'aria-label="Loss' in report(rows=ROWS[:2])


def test_run_without_samples_has_no_predictions(report):
    assert "Predictions" not in report(samples=[])


def test_run_without_rows_has_no_curves(report):
    text = report(rows=[])
    assert "Curves" not in text and "<h2>Config" in text


def test_values_that_were_not_finite_are_left_out(report):
    rows = [*ROWS[:2], {"step": 150, "train/loss": None, "train/accuracy": None}]
    assert report(rows=rows) == report(rows=ROWS[:2]) != report(rows=ROWS[:1])


def test_single_measurement_is_drawn_as_a_point(report):
    # Lines are stroked, and only markers are filled.
    assert "fill: #1f77b4" in report(rows=[{"step": 1, "train/learning_rate": 1e-3}])


def test_image_has_the_samples_pixels(report):
    image = np.random.default_rng(0).integers(256, size=(8, 6, 3), dtype=np.uint8)
    encoded = re.search(r'base64,([^"]+)"', report(samples=[Sample(image, ("cat",), "cat", 0.9)]))[1]
    np.testing.assert_array_equal(Image.open(io.BytesIO(base64.b64decode(encoded))), image)


@pytest.mark.parametrize(("size", "small"), [(8, 1), (64, 1), (224, 0)])
def test_only_small_images_show_their_pixels(report, size, small):
    image = np.zeros((size, size, 3), np.uint8)
    assert report(samples=[Sample(image, ("cat",), "cat", 0.9)]).count('<img class="small"') == small


def test_wrong_prediction_has_a_sign_and_the_truth(report):
    text = report()
    assert text.count("✓") == 2
    assert text.count("✗") == 1
    assert "is dog" in text
    assert "3 test images, 1 of them wrong" in text


def test_text_is_escaped(report):
    text = report(samples=[Sample(IMAGE, ('<i>"cat"',), '<i>"dog"', 0.6)])
    assert "&lt;pets&gt;" in text and "<pets>" not in text
    assert 'alt="&lt;i&gt;&quot;cat&quot;, predicted &lt;i&gt;&quot;dog&quot;"' in text and "<i>" not in text


def test_report_replaces_the_one_before_and_leaves_no_other_file(report, tmp_path):
    first, second = report(), report(samples=[])
    assert (tmp_path / "report.html").read_text() == second != first
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "metrics.jsonl", "report.html"}
