"""The package as it is installed from a wheel, outside of a checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.system.conftest import FAST_COMPILE, ROOT

pytestmark = pytest.mark.slow
NOT_COPIED = shutil.ignore_patterns(
    ".*", "build", "dist", "venv", "shared", "*.egg-info", "__pycache__", "*.so"
)


def build(folder, **environment):
    """Builds an sdist, and of that a wheel, whose path is returned with what was printed."""
    shutil.copytree(ROOT, folder / "source", ignore=NOT_COPIED)
    command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={folder}", folder / "source"]
    built = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    return wheel, built.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of commands of an environment with the wheel, and with this environment's libraries."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel, _ = build(folder)
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    Path(packages, "needed.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel]
    subprocess.run(install, check=True, capture_output=True)
    return python.parent


@pytest.fixture
def start(installed, tmp_path):
    def run(*arguments):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            [installed / arguments[0], *map(str, arguments[1:])],
            cwd=tmp_path,
            env=environment | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_COMPILE},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def test_installed_package_trains_from_the_name_of_a_config(start, tmp_path):
    result = start("vit-jax", "train", "--config=quickstart:smoke", "--workdir=run")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "report.html").exists()


def test_installed_package_lists_the_experiments_with_their_records(start):
    listed = start("python", "-m", "vit_jax.experiment", "--list")
    command = [sys.executable, "-m", "vit_jax.experiment", "--list"]
    assert listed.stdout == subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert "    here: recorded: 3 of 3 runs" in listed.stdout


@pytest.mark.parametrize("what", [("record", "quickstart", "."), ("ledger",)])
def test_installed_package_writes_no_records(start, what):
    result = start("vit-jax", "experiment", *what)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "which an installed package has not: run it in a checkout" in result.stderr


def test_wheel_without_a_compiler_says_so_and_is_named_for_no_platform(tmp_path):
    wheel, said = build(tmp_path, CC="no-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    (line,) = [line for line in said.splitlines() if "the fast JPEG decoder is not built" in line]
    assert "no-compiler" in line and "Pillow will decode" in line and "apt install libjpeg-dev" in line
