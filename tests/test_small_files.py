"""Files that are read as a whole are rejected if they are too large or not regular files."""

import errno
import json
import os

import pytest

from vit_jax.command import read_config
from vit_jax.errors import UserError, mistake
from vit_jax.interop.reading import open_files
from vit_jax.interop.tensor_files import open_tensors
from vit_jax.runs.goodput import read_rows
from vit_jax.runs.workdir import FORMAT, saved_run
from vit_jax.small_files import read_small

GIGABYTE = 2**30


@pytest.fixture
def pipe(tmp_path):
    """Returns a named pipe without a writer: opening it for reading would block forever."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def sparse(path):
    """Creates a sparse file of 1 GiB."""
    with path.open("wb") as file:
        file.truncate(GIGABYTE)
    return path


@pytest.mark.parametrize("read", [open_tensors, open_files, read_config])
def test_a_pipe_for_a_file_is_refused_at_once(read, pipe):
    with pytest.raises(UserError, match="pipe: not a regular file"):
        read(pipe if read != read_config else str(pipe))


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_a_file_of_a_run_that_is_too_large_is_not_read(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT, "model": {}}))
    sparse(tmp_path / name)
    with pytest.raises(
        UserError, match=f"cannot read .*{name}: 1,073,741,824 bytes, where 67,108,864 are"
    ):
        saved_run(tmp_path)


def test_other_descriptions_that_are_too_large_are_not_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    sparse(tmp_path / "config.json")
    with pytest.raises(UserError, match="cannot read .*config.json: 1,073,741,824 bytes"):
        open_files(tmp_path)
    with pytest.raises(
        UserError, match="cannot read the config file .*big.py: 1,073,741,824 bytes"
    ):
        read_config(str(sparse(tmp_path / "big.py")))


def test_a_small_file_is_read(tmp_path):
    (tmp_path / "small").write_text("é")
    assert read_small(tmp_path / "small") == "é"
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        read_small(tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENOSPC])
def test_failures_of_a_disk_are_one_line_with_the_file(number):
    line = mistake(OSError(number, os.strerror(number), "/runs/a"))
    assert line.startswith(f"{os.strerror(number)}: /runs/a")


def test_unreadable_lines_of_metrics_are_skipped(tmp_path):
    rows = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0}]
    first, second = (json.dumps(row).encode() + b"\n" for row in rows)
    damaged = (
        b'{"step": 1, "\xe9": 0}\n',
        b"[" * 100_000 + b"\n",
        b"{}\n",
        b"5\n",
        b'{"step": "1"}\n',
    )
    (tmp_path / "metrics.jsonl").write_bytes(first + b"".join(damaged) + second + b'{"step": 3')
    assert read_rows(tmp_path / "metrics.jsonl") == rows
