"""A run that chooses its best checkpoint by a dev split, and reports metrics of a test split."""

import json
import re
from pathlib import Path

import pytest

import vit_jax
from tests.system.conftest import SMALL
from vit_jax.runs.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def chosen(run, tmp_path_factory):
    """Returns workdir, output and flags of a run that chooses by a dev split."""
    workdir = tmp_path_factory.mktemp("chosen") / "run"
    flags = (
        *SMALL,
        "--config.data.train_split=train[:90%]",
        "--config.data.dev_split=train[90%:]",
        "--config.checkpoint.keep_best=1",
        "--config.checkpoint.keep_last=1",
        "--config.evaluate_every=10",
        f"--workdir={workdir}",
    )
    result = run(*flags)
    assert result.returncode == 0, result.stderr
    return workdir, result.stdout, flags


def rows_of(workdir: Path, split: str) -> dict[int, dict]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if f"{split}/accuracy" in row}


def test_dev_images_are_evaluated_during_training_and_test_images_only_at_its_end(chosen):
    workdir, out, _ = chosen
    dev, test = rows_of(workdir, "dev"), rows_of(workdir, "test")
    assert (sorted(dev), sorted(test)) == ([10, 20, 30, 40], [40])
    assert {row["dev/images"] for row in dev.values()} == {144} and test[40]["test/images"] == 360
    assert "1,293 images to train, 144 to choose by, 360 to test" in out
    assert len(re.findall(r"step \d+ \| dev accuracy .*\(144 images\)", out)) == 4
    assert len(re.findall(r"step \d+ \| test accuracy .*\(360 images\)", out)) == 1
    assert re.search(r"done after .* \| test accuracy .*\(360 images\)", out)
    assert "keep_best chooses" not in out


def test_best_checkpoint_is_that_of_the_dev_images(chosen):
    workdir, _, _ = chosen
    dev = rows_of(workdir, "dev")
    best = max(dev, key=lambda step: (dev[step]["dev/accuracy"], step))
    kept = sorted(
        int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()
    )
    assert kept == sorted({best, 40})
    with Checkpoints(workdir / "checkpoints", None) as checkpoints:
        assert checkpoints.best == best
    assert vit_jax.load_model(f"{workdir}@best", log=str)


def test_report_has_the_figures_and_curves_of_both_splits(chosen):
    report = (chosen[0] / "report.html").read_text()
    for name in ("dev accuracy", "test accuracy", "dev loss", "test loss"):
        assert f"<td>{name}<td>" in report
    assert ">dev<" in report
    assert json.loads((chosen[0] / "manifest.json").read_text())["images"] == dict(
        train=1293, dev=144, test=360
    )


@pytest.mark.slow
def test_finished_run_that_is_started_again_reports_the_same_figures(run, chosen):
    workdir, out, flags = chosen
    report = (workdir / "report.html").read_text()
    again = run(*flags)
    assert again.returncode == 0, again.stderr
    done = r"done after .* \| (test accuracy .*)"
    assert re.search(done, again.stdout)[1] == re.search(done, out)[1]
    table = r"(?s)<table class=.figures.>.*?</table>"
    assert re.search(table, (workdir / "report.html").read_text())[0] == re.search(table, report)[0]
