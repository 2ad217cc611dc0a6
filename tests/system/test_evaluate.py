"""The command evaluates suites on the checkpoint of a small run, with rows for missing data sets.

A later start evaluates the data sets that were missing.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.data.prepared import BOX, prepare

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.


def kitti(number: int) -> dict:
    """Returns a KITTI annotation with a vehicle at a distance of 5, 15, or 25 m, or with none."""
    vehicle = dict(type=number % 3, bbox=BOX, location=np.float32([0, 0, 5 + 10 * (number % 4)]))
    rest = dict(
        truncated=0.0, occluded=0, alpha=0.0, dimensions=np.zeros(3, np.float32), rotation_y=0.0
    )
    return dict(objects=[vehicle | rest] if number % 4 < 3 else [])


def rows_of(folder) -> dict[tuple[str, str], dict]:
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return {(row["suite"], row["name"]): row for row in rows}


class Evaluated(NamedTuple):
    folder: Path
    killed: dict[tuple[str, str], dict]  # The rows after the first start, which was killed.
    rows: dict[tuple[str, str], dict]  # The rows after the second start of the same command.
    printed: str


@pytest.fixture(scope="module")
def evaluated(run, finished, tmp_path_factory) -> Evaluated:
    """Returns the results of all suites with one data set of VTAB.

    Another data set is added after the first start was killed.
    """
    folder = tmp_path_factory.mktemp("evaluated")
    prepare("kitti:3.*.*", folder / "tfds", {"train": 810, "validation": 205, "test": 30}, kitti)
    arguments = (
        f"--checkpoint={finished}",
        f"--out={folder / 'out'}",
        f"--data_dir={folder / 'tfds'}",
        "--suite=all",
        "--image_size=16",
        "--set=digits:",
        "--set=tfds:eurosat/rgb@train[:30],train[30:]",
        "--set=tfds:dtd",
        "--shots=1,5,500",
        "--seeds=0,1",
        "--neighbours=20,100",
        "--probe_steps=30",
        "--value=steps=2",
        "--value=batch_size=32",
        "--value=optimizer.warmup_steps=1",
        "--value=data.workers=0",
    )
    process = run.start(*arguments, module="vit_jax.evaluate")
    for line in process.stdout:
        if line.startswith("== fewshot"):
            process.kill()
    process.wait()
    killed = rows_of(folder / "out")
    (folder / "out" / "vtab").rename(folder / "trained")
    prepare("eurosat/rgb:2.*.*", folder / "tfds", {"train": 60})
    result = run(*arguments, module="vit_jax.evaluate")
    assert result.returncode == 0, result.stderr
    return Evaluated(folder, killed, rows_of(folder / "out"), result.stdout)


@pytest.mark.slow
def test_vtab_trains_on_a_tasks_thousand_images(evaluated):
    (workdir,) = (evaluated.folder / "trained").glob("kitti-dist-*")
    assert json.loads((workdir / "manifest.json").read_text())["images"] == {
        "train": 1000,
        "test": 30,
    }
    config = json.loads((workdir / "config.json").read_text())
    assert (config["data"]["crop"], config["data"]["flip"]) == ("none", True)
    assert "4 classes" in (workdir / "log.txt").read_text()
    row = evaluated.killed["vtab", "KITTI-Dist"]
    last = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["accuracy"], row["images"]) == (last["test/accuracy"], 30)


@pytest.mark.slow
def test_start_after_a_killed_one_keeps_its_figures_and_retries_missing_data_sets(evaluated):
    killed, rows = evaluated.killed, evaluated.rows
    assert {suite for suite, _ in killed} == {"imagenet", "vtab"}
    # The first start's fine-tuning is not repeated.
    assert not (evaluated.folder / "out" / "vtab").exists()
    assert {key for key in killed if rows[key] != killed[key]} == {("vtab", "EuroSAT")}
    assert "run: tfds build eurosat/rgb" in killed["vtab", "EuroSAT"]["note"]
    assert "VTAB takes 800 images" in rows["vtab", "EuroSAT"]["note"]


@pytest.mark.slow
def test_missing_data_sets_are_rows_with_the_reason(evaluated):
    notes = {key: row["note"] for key, row in evaluated.rows.items() if row["accuracy"] is None}
    command = f"run: tfds build dtd --file_format=array_record --data_dir={evaluated.folder}"
    for key in (
        ("vtab", "DTD"),
        ("fewshot", "dtd, 5 shots"),
        ("knn", "dtd, 20-NN"),
        ("probe", "dtd, linear probe"),
    ):
        assert command in notes[key]
    assert len([key for key in notes if key[0] == "vtab"]) == 18
    of_imagenet = {name: note for (suite, name), note in notes.items() if suite == "imagenet"}
    assert "predicts 10 classes, ImageNet has 1,000" in of_imagenet["ImageNet"]
    assert len(of_imagenet) == 7 and "--real=real.json" in of_imagenet["ReaL"]


def test_shots_that_a_class_lacks_are_rows_without_figures(evaluated):
    few = {name: row for (suite, name), row in evaluated.rows.items() if suite == "fewshot"}
    assert few["digits, 500 shots"]["note"] == "class '2' has 130 training images"
    one, five = few["digits, 1 shot"], few["digits, 5 shots"]
    assert one["images"] == five["images"] == 360 and one["deviation"] > 0
    assert 0.1 < one["accuracy"] < five["accuracy"]
    assert one["note"] == "seeds 0, 1; penalty 1024"
    assert few["eurosat, 1 shot"]["images"] == 30
    assert "has 2 training images" in few["eurosat, 5 shots"]["note"]


def test_neighbours_and_probe_have_figures_of_available_data_sets(evaluated):
    for suite, kind in (
        ("knn", "20-NN"),
        ("probe", "linear probe"),
        ("sgd_probe", "SGD on class token and patches"),
    ):
        assert evaluated.rows[suite, f"digits, {kind}"]["accuracy"] > 0.2
        assert evaluated.rows[suite, f"eurosat, {kind}"]["images"] == 30
    assert evaluated.rows["knn", "digits, 100-NN"]["accuracy"] > 0.2
    too_many = evaluated.rows["knn", "eurosat, 100-NN"]
    assert (
        too_many["note"] == "eurosat has 30 training images, the most neighbours that are possible"
    )


def test_table_and_picture_are_written_and_the_table_is_printed(evaluated):
    text = (evaluated.folder / "out" / "results.md").read_text()
    assert text in evaluated.printed and "| **structured, 1 of 8 tasks** |" in text
    assert (evaluated.folder / "out" / "results.png").stat().st_size > 10_000
