"""Workdirs of another format are rejected in one line, and damaged files of a workdir are named."""

import json
import shutil
from pathlib import Path

import pytest

import vit_jax
from tests.system.conftest import SMALL
from tests.system.test_bad_input import fails
from vit_jax.runs.workdir import FORMAT

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.


@pytest.fixture
def workdir(finished, tmp_path) -> Path:
    """Returns a copy of a finished run's workdir."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.parametrize(
    ("found", "remedy"),
    [(FORMAT + 1, "use a newer vit_jax"), (FORMAT - 1, "train again in a new workdir")],
)
def test_run_of_another_format_is_rejected_and_left_alone(run, workdir, found, remedy):
    manifest = workdir / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": found}))
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    line = fails(run, *SMALL, f"--workdir={workdir}")
    assert f"has format {found}, and this vit_jax reads format {FORMAT}: {remedy}" in line
    assert before == {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
@pytest.mark.parametrize(
    "damage",
    [b"", b'{"seed": 1', b"[1, 2]", b"\xff\xfe\x00", b'{"batch_size": "many", "model": 3}'],
)
def test_damaged_file_of_a_run_is_named_and_the_run_is_left_alone(workdir, name, damage):
    (workdir / name).write_bytes(damage)
    with pytest.raises(vit_jax.UserError, match=f"{name} is damaged.*restore a copy of it"):
        vit_jax.load_model(workdir)
    assert (workdir / name).read_bytes() == damage and (workdir / "checkpoints").is_dir()
