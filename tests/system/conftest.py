"""Fixtures that run the real commands, as users start them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.conftest import FAST_COMPILE, HANG, python_path

ROOT = Path(__file__).parents[2]

# A run of a few seconds that uses all parts of training: dropout, crops, several checkpoints.
SMALL = (
    "--config=configs/quickstart.py",
    "--config.model.dim=16",
    "--config.model.depth=1",
    "--config.model.mlp_dim=32",
    "--config.model.heads=2",
    "--config.model.dropout=0.1",
    "--config.batch_size=32",
    "--config.steps=40",
    "--config.optimizer.warmup_steps=5",
    "--config.log_every=7",
    "--config.checkpoint.every=10",
    "--config.evaluate_every=20",
)


def parameters(workdir: Path | str) -> list[np.ndarray]:
    """Returns the parameters of the newest checkpoint of a run."""
    model = vit_jax.load_model(workdir, log=str)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))]


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


class Runner:
    """Runs `python -m vit_jax.main`, and other modules.

    All tests of all workers share a cache of compiled programs.
    """

    def __init__(self, cache: Path):
        self.environment = os.environ | {
            "XDG_CACHE_HOME": str(cache),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": FAST_COMPILE,
        }
        self.preloaded: subprocess.Popen | None = None

    def start(
        self, *arguments, module="vit_jax.main", cwd=ROOT, stdin=None, **environment
    ) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=cwd,
            env=self.environment | {"PYTHONPATH": python_path(ROOT)} | environment,
            start_new_session=True,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def killed(
        self, *arguments, workdir: Path, when: Callable[[], bool], **options
    ) -> subprocess.Popen:
        """Starts a run on `workdir`, kills it as soon as `when()` is true, and returns its process.

        On a busy machine the run may end before this process tests `when()` again. Then it is
        started again in a new workdir.
        """
        for _ in range(20):
            process = self.start(*arguments, f"--workdir={workdir}", **options)
            while process.poll() is None and not when():
                time.sleep(0.001)
            process.kill()
            _, errors = process.communicate()
            if process.returncode == -signal.SIGKILL:
                return process
            assert process.returncode == 0, errors
            shutil.rmtree(workdir)
        raise AssertionError("each run ended before it could be killed")

    def close(self) -> None:
        if self.preloaded:
            self.preloaded.stdin.close()
            self.preloaded.wait()

    def start_pair(self, *arguments, of_each=((), ()), **options) -> list[subprocess.Popen]:
        """Starts one run of two processes over loopback.

        `of_each` contains the arguments that differ between the processes.
        """
        address = f"--coordinator=localhost:{free_port()}"
        return [
            self.start(*arguments, *own, address, "--processes=2", f"--process={index}", **options)
            for index, own in enumerate(of_each)
        ]

    def __call__(
        self, *arguments, module="vit_jax.main", cwd=ROOT, **environment
    ) -> subprocess.CompletedProcess:
        """Runs a command and returns its exit code and output.

        The command is forked from a process that has already imported its libraries.
        """
        # Libraries read some environment variables when they are imported.
        if environment or not module.startswith("vit_jax."):
            process = self.start(*arguments, module=module, cwd=cwd, **environment)
            try:
                out, err = process.communicate(timeout=HANG)
            finally:
                process.kill()
            return subprocess.CompletedProcess(arguments, process.returncode, out, err)
        if self.preloaded is None:
            self.preloaded = self.start(module="tests.system.preloaded", stdin=subprocess.PIPE)
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            request = dict(
                module=module,
                arguments=[*map(str, arguments)],
                cwd=str(cwd),
                out=str(out),
                err=str(err),
            )
            print(json.dumps(request), file=self.preloaded.stdin, flush=True)
            answer = json.loads(self.preloaded.stdout.readline())
            return subprocess.CompletedProcess(
                arguments, answer["returncode"], out.read_text(), err.read_text()
            )


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Iterator[Runner]:
    base = tmp_path_factory.getbasetemp()
    session = (
        base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    )  # The folder of each worker is inside this folder.
    runner = Runner(session / "cache")
    yield runner
    runner.close()


class Disk(NamedTuple):
    """A file system with a limited size."""

    path: Path

    def resize(self, megabytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={megabytes}m", self.path], check=True)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Disk]:
    """Yields a mounted file system of 2 MB."""
    disk = Disk(tmp_path / "disk")
    disk.path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk.path]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs more rights")
    yield disk
    subprocess.run(["umount", disk.path], check=True)


@pytest.fixture(scope="session")
def finished(run, tmp_path_factory) -> Path:
    """Returns the workdir of a small run that ended without disturbance."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    result = run(*SMALL, f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    return workdir


# The error is not an ImportError, because libraries with optional TensorFlow catch that.
TENSORFLOW = """
import pathlib, traceback
pathlib.Path({path!r}).write_text("".join(traceback.format_stack()))
raise RuntimeError("TensorFlow was imported")
"""


class NoTensorFlow(NamedTuple):
    """A fake `tensorflow` whose import fails.

    Attributes:
      python_path: a PYTHONPATH that contains the fake.
      imported: a file that contains the traceback of an import, if there was one.
    """

    python_path: str
    imported: Path

    def check(self) -> None:
        """Fails if a process has imported TensorFlow."""
        assert not self.imported.exists(), self.imported.read_text()


@pytest.fixture(scope="session")
def no_tensorflow(tmp_path_factory) -> NoTensorFlow:
    """Returns a fake `tensorflow`, for processes that must work without TensorFlow."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "tensorflow").mkdir()
    imported = folder / "imported"
    (folder / "tensorflow" / "__init__.py").write_text(TENSORFLOW.format(path=str(imported)))
    return NoTensorFlow(python_path(folder, ROOT), imported)
