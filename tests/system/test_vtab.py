"""A VTAB task through the training command."""

import json

import numpy as np

from tests.data.prepared import BOX, prepare
from tests.system.conftest import SMALL


def kitti(number: int) -> dict:
    """A vehicle 5, 15, or 25 m away, or none."""
    vehicle = dict(type=number % 3, bbox=BOX, location=np.float32([0, 0, 5 + 10 * (number % 4)]))
    rest = dict(truncated=0.0, occluded=0, alpha=0.0, dimensions=np.zeros(3, np.float32), rotation_y=0.0)
    return dict(objects=[vehicle | rest] if number % 4 < 3 else [])


def test_task_trains_on_its_thousand_images(run, tmp_path):
    prepare("kitti:3.*.*", tmp_path / "tfds", {"train": 810, "validation": 205, "test": 30}, kitti)
    workdir = tmp_path / "run"
    result = run(
        *SMALL,
        f"--workdir={workdir}",
        "--config.steps=2",
        "--config.optimizer.warmup_steps=1",
        "--config.data.source=vtab",
        f"--config.data.path=kitti-dist:{tmp_path / 'tfds'}",
        "--config.data.train_split=train800val200",
        "--config.data.test_split=test",
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((workdir / "manifest.json").read_text())["images"] == {"train": 1000, "test": 30}
    assert "4 classes" in (workdir / "log.txt").read_text()
    assert "(30 images)" in (workdir / "log.txt").read_text()
