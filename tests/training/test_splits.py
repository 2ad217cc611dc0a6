"""The splits of a run: one to train on, one to choose by, one to report."""

import json
import re
from pathlib import Path

import pytest

import vit_jax
from tests.data.test_slices import make_folder
from tests.system.conftest import SMALL
from vit_jax.config import base_config
from vit_jax.errors import UserError
from vit_jax.training.splits import notes, open_splits


def config_of(**values):
    config = base_config()
    config.update_from_flattened_dict({f"data.{key}": value for key, value in values.items()})
    return config


def test_splits_are_those_of_the_config_and_share_the_numbers_of_classes(tmp_path):
    make_folder(tmp_path / "train", {"ant": 10, "cat": 30})
    make_folder(tmp_path / "test", {"cat": 5})
    names = dict(train_split="train[:90%]", dev_split="train[90%:]")
    splits = open_splits(config_of(source="folder", path=str(tmp_path), **names))
    assert {name: len(source) for name, source in splits.named.items()} == dict(train=36, dev=4, test=5)
    assert splits.chosen_by == "dev"
    assert {source.class_names for source in splits.named.values()} == {("ant", "cat")}
    assert notes(base_config(), splits) == ["note: no test images of ant"]


def test_without_a_dev_split_the_test_images_choose():
    splits = open_splits(config_of())
    assert (list(splits.named), splits.chosen_by) == (["train", "test"], "test")


@pytest.mark.parametrize(
    ("train", "dev", "test", "named"),
    [
        ("train", "train[99%:]", "test", "data.train_split has images of it: 'train'"),
        ("train[:95%]", "train[90%:]", "test", "data.train_split"),
        ("train[:1000]", "train[69%:]", "test", "data.train_split"),  # 1437 images.
        ("train[:90%][:90%]", "train[80%:][:50%]", "test", "data.train_split"),
        ("train", "test[:50%]", "test", "data.test_split has images of it: 'test'"),
    ],
)
def test_choosing_by_images_that_are_trained_on_or_reported_is_refused(train, dev, test, named):
    with pytest.raises(UserError, match=re.escape(named)):
        open_splits(config_of(train_split=train, dev_split=dev, test_split=test))


@pytest.mark.parametrize(
    ("train", "dev"),
    [
        ("train[:90%]", "train[90%:]"),
        ("train[:1000]", "train[70%:]"),
        ("train[:80%][:90%]", "train[:80%][90%:]"),
    ],
)
def test_splits_that_share_nothing_are_not_refused(train, dev):
    assert open_splits(config_of(train_split=train, dev_split=dev)).dev is not None


def test_choosing_by_the_test_images_and_training_on_them_are_said():
    config = config_of(test_split="train[50%:]")
    config.checkpoint.keep_best = 1
    said = notes(config, open_splits(config))
    assert [line for line in said if "the test images are trained on" in line]
    assert [line for line in said if "keep_best chooses by the test images" in line]
    config.data.update(dict(train_split="train[:90%]", dev_split="train[90%:]", test_split="test"))
    assert notes(config, open_splits(config)) == []


@pytest.fixture(scope="module")
def chosen(run, tmp_path_factory):
    """The workdir of a run that chooses by a split of its own, and what it printed."""
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


def test_dev_images_are_looked_at_during_training_and_test_images_at_its_end_alone(chosen):
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
    kept = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())
    assert kept == sorted({best, 40})
    from vit_jax.training.checkpoint import Checkpoints

    with Checkpoints(workdir / "checkpoints", None) as checkpoints:
        assert checkpoints.best == best
    assert vit_jax.load_model(f"{workdir}@best", say=str)


def test_report_has_the_figures_and_curves_of_both_splits(chosen):
    report = (chosen[0] / "report.html").read_text()
    for name in ("dev accuracy", "test accuracy", "dev loss", "test loss"):
        assert f"<td>{name}<td>" in report
    assert ">dev<" in report
    assert json.loads((chosen[0] / "manifest.json").read_text())["images"] == dict(
        train=1293, dev=144, test=360
    )


def test_finished_run_that_is_started_again_says_the_same_figures(run, chosen):
    workdir, out, flags = chosen
    report = (workdir / "report.html").read_text()
    again = run(*flags)
    assert again.returncode == 0, again.stderr
    done = r"done after .* \| (test accuracy .*)"
    assert re.search(done, again.stdout)[1] == re.search(done, out)[1]
    table = r"<table>.*?</table>"
    assert re.search(table, (workdir / "report.html").read_text())[0] == re.search(table, report)[0]


def test_class_that_a_slice_loses_is_said_by_a_run(run, tmp_path):
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name, images in (("common", 30), ("rare", 1)):
            for index in range(images):
                file = tmp_path / "data" / split / name / f"{index}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(256, size=(12, 10, 3), dtype=np.uint8)).save(file)
    flags = ("--config.data.source=folder", f"--config.data.path={tmp_path / 'data'}", "--config.steps=2")
    both = "--config.data.train_split=train[:50%]", "--config.data.dev_split=train[50%:]"
    result = run(*SMALL, *flags, *both, "--config.batch_size=8", f"--workdir={tmp_path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert len(re.findall("note: no (training|dev) images of rare", result.stdout)) == 1
