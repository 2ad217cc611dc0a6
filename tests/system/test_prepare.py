"""The command `vit_jax.prepare`: killed, with several processes, on a full disk, with Beam."""

import contextlib
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import HANG
from tests.system.conftest import ROOT
from vit_jax.data.sources import open_source

pytestmark = pytest.mark.slow  # Each test starts processes, or compiles for seconds.

IMAGES = 300


@pytest.fixture(scope="session")
def prepare(run):
    return lambda *arguments, **environment: run(
        *arguments, module="vit_jax.prepare", **environment
    )


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """Returns a folder of JPEG files with random pixels; two of them are truncated."""
    root = tmp_path_factory.mktemp("prepare") / "pets"
    pixels = np.random.default_rng(0).integers(256, size=(20, 28, 3), dtype=np.uint8)
    contents = []
    for shift in range(20):
        file = io.BytesIO()
        Image.fromarray(np.roll(pixels, shift, 0)).resize((280, 200)).save(file, "JPEG")
        contents.append(file.getvalue())
    for i in range(IMAGES):
        path = root / "train" / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[i % 20][:99] if i in (5, 6) else contents[i % 20])
    return root


def shards(out: Path) -> dict[str, bytes]:
    files = (path for path in out.rglob("*") if path.is_file() and path.name != "prepared.json")
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


ARGUMENTS = ("--shards=12", "--shots=1,3")


@pytest.fixture(scope="session")
def undisturbed(prepare, source) -> tuple[Path, subprocess.CompletedProcess]:
    out = source.parent / "undisturbed"
    result = prepare(source, f"--out={out}", *ARGUMENTS, "--workers=1")
    assert result.returncode == 0, result.stderr
    return out, result


def test_the_last_lines_are_the_number_of_examples_and_the_flags_for_training(undisturbed):
    out, result = undisturbed
    *_, made, flags = result.stdout.splitlines()
    assert made.endswith(
        "train 298, train_1shot 2, train_3shot 6 examples; 2 could not be read, see skipped.txt"
    )
    assert flags.endswith(f"--config.data.source=tfds --config.data.path=pets:1.0.0:{out}")
    path = flags.split("data.path=")[1]
    assert len(open_source("tfds", "train", path=path)) == 298
    assert (out / "pets" / "1.0.0" / "skipped.txt").read_text().count(".jpg\t") == 2


@pytest.mark.slow
def test_two_workers_write_the_same_bytes(prepare, source, undisturbed, tmp_path):
    result = prepare(source, f"--out={tmp_path}", *ARGUMENTS, "--workers=2")
    assert result.returncode == 0, result.stderr
    assert shards(tmp_path) == shards(undisturbed[0])


def alive(group: int) -> bool:
    """Returns True if a process of the group is running; zombies do not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def interrupt(run, out: Path, source: Path, blow: int) -> tuple[int, str, str]:
    """Stops the command after its first shard; returns its exit code and output.

    Args:
      blow: the signal that stops the command.
    """
    for _ in range(10):
        code, *said = blow_at_first_shard(run, out, source, blow)
        if code != 0:
            return code, *said
        # On a busy machine the command may finish before the signal arrives.
        shutil.rmtree(out / "pets")
    raise AssertionError("it was never interrupted")


def blow_at_first_shard(run, out: Path, source: Path, blow: int) -> tuple[int, str, str]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "vit_jax.prepare",
            source,
            f"--out={out}",
            *ARGUMENTS,
            "--workers=2",
        ],
        cwd=ROOT,
        env=run.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Background jobs of a shell ignore SIGINT, and so do their child processes.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not list(out.glob("pets/1.0.0/.prepare/shards/train-*.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    os.kill(process.pid, blow)
    said = process.communicate(timeout=HANG)
    deadline = time.monotonic() + HANG
    while alive(process.pid):  # The workers end after their parent.
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process.returncode, *said


def test_killed_and_started_again_it_writes_the_same_bytes(
    run, prepare, source, undisturbed, tmp_path
):
    interrupt(run, tmp_path, source, signal.SIGKILL)
    folder = tmp_path / "pets" / "1.0.0"
    finished = list(folder.glob("*-of-00012"))
    # Workers end after the command. On a busy machine they may have written all shards by then.
    assert finished and not (folder / "features.json").exists()
    result = prepare(source, f"--out={tmp_path}", *ARGUMENTS, "--workers=2")
    assert result.returncode == 0, result.stderr
    assert "of them earlier" in result.stdout
    assert shards(tmp_path) == shards(undisturbed[0])


def test_ctrl_c_prints_how_to_resume(run, source, tmp_path):
    code, out, err = interrupt(run, tmp_path, source, signal.SIGINT)
    assert code == 130 and "the same command resumes" in out and err == ""


def fails(result: subprocess.CompletedProcess) -> str:
    """Returns the error line of a command that failed because of a user's mistake."""
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: "), result.stderr
    return result.stderr


@pytest.mark.slow
def test_full_disk_is_named_and_finished_shards_are_kept(prepare, source, undisturbed, small_disk):
    arguments = (source, f"--out={small_disk.path}", *ARGUMENTS, "--workers=2")
    line = fails(prepare(*arguments))
    assert f"No space left on device: {small_disk.path}" in line
    kept = list(small_disk.path.rglob("*.array_record*"))
    assert kept and not list(small_disk.path.rglob("*.tmp"))
    small_disk.resize(64)
    result = prepare(*arguments)
    assert result.returncode == 0, result.stderr
    assert "of them earlier" in result.stdout
    assert shards(small_disk.path) == shards(undisturbed[0])


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage: python -m vit_jax.prepare SOURCE --out=DIR"),
        (("{source}",), "usage: python -m vit_jax.prepare SOURCE --out=DIR"),
        (("{tmp}/none", "--out={tmp}/out"), "there is no {tmp}/none"),
        (
            ("{tmp}", "--out={tmp}/out"),
            "{tmp} is empty or not a data set: it must contain images, a folder for each class",
        ),
        (
            ("{source}", "--out={tmp}/out", "--kind=cifar"),
            "unknown --kind=cifar; there are: csv, folder",
        ),
        (
            ("{source}", "--out={tmp}/out", "--kind=webdataset"),
            "contains nothing of the kind 'webdataset'",
        ),
        (("{source}", "--out={tmp}/out", "--shots=1,x"), "--shots=1,x: give numbers"),
        (("{source}", "--out={tmp}/out", "--name=7"), "'7' is not a name for a data set"),
        (("{source}", "--out={tmp}/out", "--limit=0"), "limit"),
        (
            ("{source}", "--out={tmp}/out", "--retrieve_for=x"),
            "--retrieve_for needs --embeddings=CHECKPOINT",
        ),
        (
            ("{source}", "--out={tmp}/out", "--deduplicate_against=x:y/test", "--similarity=0.9"),
            "--similarity has no effect without --embeddings",
        ),
        (("{source}", "--out={file}"), "--out: {file} is a file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, prepare, source, tmp_path):
    places = {"source": source, "tmp": tmp_path, "file": Path(__file__)}
    line = fails(prepare(*(argument.format(**places) for argument in arguments)))
    assert message.format(**places) in line
    assert list(tmp_path.iterdir()) == []


def test_folder_without_permission_is_named(source, run, tmp_path):
    code = (
        "import os, zipfile; from vit_jax import command, prepare\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "command.run(prepare.main)\n"
    )
    copy = tmp_path / "pets"
    shutil.copytree(source, copy)
    for folder in tmp_path.parents:
        folder.chmod(folder.stat().st_mode | 0o055)
    tmp_path.chmod(0o777)
    for folder in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    (copy / "train" / "b").chmod(0)
    arguments = [sys.executable, "-c", code, copy, f"--out={tmp_path / 'out'}", "--workers=1"]
    result = subprocess.run(
        arguments, cwd=ROOT, env=run.environment, capture_output=True, text=True
    )
    (copy / "train" / "b").chmod(0o755)
    assert f"no permission to read {copy / 'train' / 'b'}" in fails(result)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("apache_beam") is None, reason="Apache Beam is not installed"
)
def test_beam_writes_the_same_bytes(prepare, source, undisturbed, tmp_path):
    result = prepare(source, f"--out={tmp_path}", *ARGUMENTS, "--workers=1", "--beam=DirectRunner")
    assert result.returncode == 0, result.stderr
    assert shards(tmp_path) == shards(undisturbed[0])
    result = prepare(source, f"--out={tmp_path}", "--name=x", "--beam=NoRunner")
    assert result.returncode == 2
    assert (
        result.stderr.splitlines()[-1]
        == "error: --beam=NoRunner: Unexpected pipeline runner: NoRunner"
    )
