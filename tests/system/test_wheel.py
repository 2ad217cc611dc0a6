"""The package, installed from a wheel outside of a checkout."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import FAST_COMPILE, HANG
from tests.pages import blocks
from tests.system.conftest import ROOT, free_port
from vit_jax.data.sources.digits import digits

pytestmark = pytest.mark.slow
NOT_COPIED = shutil.ignore_patterns(
    ".*", "build", "dist", "venv", "shared", "*.egg-info", "__pycache__", "*.so"
)


def build(folder, **environment):
    """Builds an sdist and a wheel from it; returns the wheel's path and the output of the build."""
    shutil.copytree(ROOT, folder / "source", ignore=NOT_COPIED)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        f"--outdir={folder}",
        folder / "source",
    ]
    built = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=HANG
    )
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    return wheel, built.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Returns the folder of executables of an environment with the installed wheel.

    The environment also has the libraries of the current environment.
    """
    folder = tmp_path_factory.mktemp("wheel")
    wheel, _ = build(folder)
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    Path(packages, "needed.pth").write_text(sysconfig.get_path("purelib"))
    Path(packages, "sitecustomize.py").write_text(
        "import sys\nsys.modules['onnx'] = None\n"
    )  # onnx belongs to an optional extra.
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel]
    subprocess.run(install, check=True, capture_output=True)
    return python.parent


@pytest.fixture
def surroundings(tmp_path):
    """Returns arguments of `subprocess` for a process in an empty folder outside the checkout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return dict(
        cwd=tmp_path,
        env=environment | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_COMPILE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def start(installed, surroundings):
    def run(*arguments):
        command = [installed / arguments[0], *map(str, arguments[1:])]
        return subprocess.run(command, timeout=HANG, **surroundings)

    return run


def test_commands_of_the_install_page_train_and_serve_a_model(
    installed, start, surroundings, tmp_path
):
    for number, item in zip(range(24), digits("train"), strict=False):
        folder = (
            tmp_path
            / "photos"
            / ("test" if number < 4 else "train")
            / ("even", "odd")[item.labels[0] % 2]
        )
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(item.image).save(folder / f"{number}.png")
    (block,) = blocks(ROOT / "docs/install.md", "sh")
    smaller = block.text.replace("\\\n", "").replace(
        "--config=quickstart", "--config=quickstart:smoke"
    )
    *lines, serve, ask = smaller.splitlines()
    port = str(free_port())

    said = {}
    for line in lines:
        program, command, *arguments = line.split()
        less = ["--config.batch_size=8", "--config.steps=2", "--config.optimizer.warmup_steps=1"]
        result = start(program, command, *arguments, *(less if command == "finetune" else []))
        assert result.returncode == 0, f"{line}\n{result.stderr}"
        said[command] = result.stdout
    assert list(said) == ["train", "finetune", "predict", "export", "push"]
    assert (tmp_path / "runs/quickstart/report.html").exists()
    assert said["predict"].count("photos/test/") == 4
    assert (tmp_path / "photos.stablehlo").stat().st_size > 10_000
    assert (tmp_path / "for_the_hub/model.safetensors").exists()

    program, *arguments = serve.replace("8000", port).split()
    server = subprocess.Popen([installed / program, *arguments], **surroundings)
    try:
        assert any(line.startswith("serving on") for line in server.stdout), server.stderr.read()
        with urllib.request.urlopen(ask.replace("8000", port).split()[-1]) as answer:
            assert answer.status == 200 and json.load(answer)["classes"] == 2
    finally:
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=HANG)
    assert server.returncode == 0, errors


def test_installed_package_lists_the_experiments_with_their_records(start):
    listed = start("python", "-m", "vit_jax.experiment", "--list")
    command = [sys.executable, "-m", "vit_jax.experiment", "--list"]
    assert listed.stdout == subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert "    here: recorded: 3 of 3 runs" in listed.stdout


@pytest.mark.parametrize("what", [("record", "quickstart", "."), ("ledger",)])
def test_installed_package_writes_no_records(start, what):
    result = start("vit-jax", "experiment", *what)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "which an installed package lacks: run it in a checkout" in result.stderr


def test_wheel_without_a_compiler_is_platform_independent_and_prints_a_note(tmp_path):
    wheel, said = build(tmp_path, CC="no-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    (line,) = [line for line in said.splitlines() if "the fast JPEG decoder is not built" in line]
    assert (
        "no-compiler" in line and "Pillow will decode" in line and "apt install libjpeg-dev" in line
    )
