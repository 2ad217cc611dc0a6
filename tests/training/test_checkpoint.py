"""Tests of checkpoints on a real disk."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.runs.checkpoints import DAMAGED, Checkpoints, DamagedCheckpoint, load_items

ROOT = Path(__file__).parents[2]


def items(value: float, width: int = 3) -> dict:
    return {
        "params": {"head": {"kernel": jnp.full((width, 2), value), "bias": jnp.arange(2.0)}},
        "run": {"step": jnp.int32(value)},
    }


def test_restored_items_equal_saved_items(tmp_path):
    with Checkpoints(tmp_path / "c", keep_last=3) as checkpoints:
        checkpoints.save(7, items(0.1))
    with Checkpoints(tmp_path / "c", keep_last=3) as checkpoints:
        assert checkpoints.latest == 7
        restored = checkpoints.restore(7, items(0.0))
    np.testing.assert_array_equal(
        restored["params"]["head"]["kernel"], items(0.1)["params"]["head"]["kernel"]
    )


def test_only_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path / "c", keep_last=2) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, items(step))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["3", "4"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("accuracy", {2: 0.5, 6: 0.8, 8: 0.8, 10: 0.7}),
        ("loss", {2: 3.0, 6: 1.0, 8: 1.0, 10: 2.0}),
        ("loss", {2: float("nan"), 6: 1.0, 8: 1.0, 10: float("nan")}),
    ],
)
def test_multiples_of_keep_every_and_the_best_are_also_kept(tmp_path, name, found):
    with Checkpoints(tmp_path / "c", keep_last=1, keep_every=4, keep_best=1) as checkpoints:
        for step in range(1, 12):
            checkpoints.save(step, items(step), {name: found[step]} if step in found else None)
            if step == 7:
                assert checkpoints.steps == [4, 6, 7]
    with Checkpoints(tmp_path / "c", keep_last=1, keep_every=4, keep_best=1) as checkpoints:
        assert checkpoints.steps == [4, 8, 11]
        assert checkpoints.best == 8
    params = load_items(tmp_path / "c", {"params": items(0)["params"]}, "best")["params"]
    np.testing.assert_array_equal(params["head"]["kernel"], np.full((3, 2), 8.0))


def largest(folder: Path) -> Path:
    return max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def flip_a_bit(folder: Path) -> None:
    data = bytearray(largest(folder).read_bytes())
    data[len(data) // 3] ^= 8
    largest(folder).write_bytes(data)


DAMAGES = {
    "an array's file cut short": lambda step: os.truncate(largest(step / "params"), 5000),
    "a bit of an array turned": lambda step: flip_a_bit(step / "params" / "ocdbt.process_0"),
    "a file gone": lambda step: (step / "optimizer" / "manifest.ocdbt").unlink(),
    "metadata empty": lambda step: (step / "_CHECKPOINT_METADATA").write_text(""),
    "list of arrays empty": lambda step: (step / "run" / "_METADATA").write_text(""),
    "figures empty": lambda step: (step / "metrics" / "metrics").write_text(""),
}


def large_items(value: float) -> dict:
    """Returns items that are so large that arrays get files of their own."""
    kernel = jax.random.normal(jax.random.key(int(value)), (64, 64))
    return {
        "params": {"kernel": kernel},
        "optimizer": {"mean": kernel / 2},
        "run": {"step": jnp.int32(value)},
    }


def save_two(folder: Path) -> None:
    with Checkpoints(folder, keep_last=3) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, large_items(step), {"accuracy": 0.1 * step, "loss": 1.0})


@pytest.mark.one_variant
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_moved_and_the_previous_one_is_restored(tmp_path, damage):
    save_two(tmp_path)
    DAMAGES[damage](tmp_path / "2")
    said = []
    with Checkpoints(tmp_path, keep_last=3, log=said.append) as checkpoints:
        step, restored = checkpoints.restore_newest(large_items(0))
        assert step == int(restored["run"]["step"]) == 1
        checkpoints.save(2, large_items(2))
    (line,) = said
    assert line.startswith(f"checkpoint {tmp_path / '2'} is damaged: ")
    assert line.endswith(f"; moved to {tmp_path / DAMAGED / '2'}")
    assert (tmp_path / DAMAGED / "2").is_dir()
    params = load_items(tmp_path, {"params": large_items(0)["params"]})["params"]
    np.testing.assert_array_equal(params["kernel"], large_items(2)["params"]["kernel"])


def test_run_with_only_damaged_checkpoints_does_not_start_and_none_is_moved(tmp_path):
    save_two(tmp_path)
    for step in ("1", "2"):
        (tmp_path / step / "run" / "_METADATA").unlink()
    for _ in range(2):  # The second start fails in the same way.
        with (
            Checkpoints(tmp_path, keep_last=3) as checkpoints,
            pytest.raises(
                UserError, match=r"every checkpoint .* is damaged: .*/2 is damaged.*/1 is damaged"
            ),
        ):
            checkpoints.restore_newest(large_items(0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_relative_folder_is_as_good_as_an_absolute_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_two(Path("run"))
    with Checkpoints(Path("run"), keep_last=3) as checkpoints:
        assert checkpoints.restore_newest(large_items(0))[0] == 2
    load_items(Path("run"), {"params": large_items(0)["params"]})
    assert not (tmp_path / "run" / DAMAGED).exists()


# Files and folders of an intact checkpoint that a process is not allowed to read, one at a time.
FORBIDDEN = (
    *("", "_CHECKPOINT_METADATA", "params", "params/_METADATA", "params/manifest.ocdbt"),
    *("params/ocdbt.process_0", "metrics/metrics"),
)
READ = """
import grp, os, pathlib, pwd, sys
import numpy as np
from tests.training.test_checkpoint import FORBIDDEN, large_items
from vit_jax.errors import mistake
from vit_jax.runs.checkpoints import Checkpoints, load_items
folder = pathlib.Path(sys.argv[1])
load_items(folder / "0", {"params": large_items(0)["params"]})  # Libraries import more when they read.
if os.geteuid() == 0:
    os.setuid(65534)
for number, _ in enumerate(FORBIDDEN, 1):
    for read in (
        lambda: load_items(folder / str(number), {"params": large_items(0)["params"]}),
        lambda: Checkpoints(folder / str(number), keep_last=3).restore_newest(large_items(0)),
    ):
        try:
            print(read())
        except Exception as error:
            print(mistake(error))
"""


@pytest.mark.slow
def test_unreadable_checkpoint_is_not_treated_as_damaged():
    # Pytest's own temporary folders are not accessible to other users.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_two(folder / "0")
        for number in range(1, len(FORBIDDEN) + 1):
            shutil.copytree(folder / "0", folder / str(number))
        for path in (folder, *folder.rglob("*")):
            path.chmod(path.stat().st_mode | 0o777)
        for number, name in enumerate(FORBIDDEN, 1):
            (folder / str(number) / "2" / name).chmod(0)
        command = [sys.executable, "-c", READ, str(folder)]
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert not list(folder.rglob(DAMAGED))
    lines = out.stdout.splitlines()
    assert len(lines) == 2 * len(FORBIDDEN), out.stderr
    for line, name in zip(lines, np.repeat(FORBIDDEN, 2), strict=True):
        assert "Permission denied" in line and str(Path("2") / name) in line
        assert "is damaged" not in line


def test_checkpoint_deleted_while_it_is_read_is_not_treated_as_damaged(tmp_path):
    save_two(tmp_path)
    with Checkpoints(tmp_path, keep_last=3) as checkpoints:
        shutil.rmtree(tmp_path / "2")
        with pytest.raises(UserError, match="/2 is gone") as raised:
            checkpoints.restore_newest(large_items(0))
    assert not isinstance(raised.value, DamagedCheckpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_checkpoint_of_other_software_is_refused_and_stays(tmp_path):
    save_two(tmp_path)
    metadata = tmp_path / "2" / "_CHECKPOINT_METADATA"
    content = json.loads(metadata.read_text())
    metadata.write_text(json.dumps(content | {"custom_metadata": {"by": "another"}}))
    with (
        Checkpoints(tmp_path, keep_last=3) as checkpoints,
        pytest.raises(UserError, match="/2 is not one that vit_jax wrote"),
    ):
        checkpoints.restore_newest(large_items(0))
    assert not (tmp_path / DAMAGED).exists()


def test_checkpoint_of_another_model_is_refused_and_stays(tmp_path):
    save_two(tmp_path)
    wanted = large_items(0) | {"params": {"kernel": jnp.zeros((64, 32))}}
    with (
        Checkpoints(tmp_path, keep_last=3) as checkpoints,
        pytest.raises(
            UserError,
            match=r"2 does not fit this model: params/kernel is float32\[64, 64\] and .*32",
        ),
    ):
        checkpoints.restore_newest(wanted)
    assert not (tmp_path / DAMAGED).exists()


def test_reading_a_damaged_checkpoint_raises_an_error(tmp_path):
    save_two(tmp_path)
    DAMAGES["a bit of an array turned"](tmp_path / "2")
    with pytest.raises(DamagedCheckpoint, match="2 is damaged"):
        load_items(tmp_path, {"params": large_items(0)["params"]})["params"]
    assert (tmp_path / "2").is_dir()


def test_remains_of_an_unfinished_write_are_deleted(tmp_path):
    with Checkpoints(tmp_path / "c", keep_last=2) as checkpoints:
        checkpoints.save(1, items(1))
        checkpoints.wait()
    rest = tmp_path / "c" / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "c" / "1", rest)
    with Checkpoints(tmp_path / "c", keep_last=2) as checkpoints:
        assert checkpoints.latest == 1
    assert not rest.exists()


def test_reading_does_not_delete_an_unfinished_write(tmp_path):
    with Checkpoints(tmp_path / "c", keep_last=2) as checkpoints:
        checkpoints.save(1, items(1))
    shutil.copytree(tmp_path / "c" / "1", tmp_path / "c" / "2.orbax-checkpoint-tmp")
    load_items(tmp_path / "c", {"params": items(0)["params"]})["params"]
    assert (tmp_path / "c" / "2.orbax-checkpoint-tmp").exists()


def test_array_of_another_shape_is_refused(tmp_path):
    with Checkpoints(tmp_path / "c", keep_last=2) as checkpoints:
        checkpoints.save(1, items(1))
        checkpoints.wait()
        with pytest.raises(UserError, match=r"checkpoint .*/1"):
            checkpoints.restore(1, items(1, width=4))


def test_missing_array_is_refused(tmp_path):
    with Checkpoints(tmp_path / "c", keep_last=2) as checkpoints:
        checkpoints.save(1, items(1))
        checkpoints.wait()
        wanted = items(1)
        wanted["params"]["head"]["scale"] = jnp.ones(2)
        with pytest.raises(UserError, match=r"checkpoint .*/1"):
            checkpoints.restore(1, wanted)


def test_parameters_can_be_read_alone(tmp_path):
    with Checkpoints(tmp_path / "c", keep_last=2) as checkpoints:
        checkpoints.save(1, items(5))
    params = load_items(tmp_path / "c", {"params": items(0)["params"]})["params"]
    np.testing.assert_array_equal(params["head"]["kernel"], np.full((3, 2), 5.0))


@pytest.mark.parametrize("name", ["missing", ""])
def test_missing_checkpoint_raises_an_error(tmp_path, name):
    with pytest.raises(UserError, match="no checkpoint in"):
        load_items(tmp_path / name, {"params": items(0)["params"]})["params"]
