"""Configs of an installed package and configs of the user are found from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READ = """
import sys
from vit_jax.command import read_config
from vit_jax.errors import UserError
try:
    config = read_config(sys.argv[1])
    print(config.model.name, config.steps)
except UserError as error:
    print(error)
"""
OWN = """
from vit_jax.config import base_config

def get_config(argument=None):
    config = base_config()
    config.model.name, config.steps = "ViT-S/32", 7
    return config
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Returns a folder with the package as in a wheel, without other files of the repository."""
    folder = tmp_path_factory.mktemp("installed")
    command = "setup.py", "-q", "build_py", f"--build-lib={folder}"
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("configs/vit_l16_i21k.py", "ViT-L/16 None"),
        ("quickstart.py:smoke", "ViT-Ti/4 2"),
        ("vit_s16_i1k:epochs=90", "ViT-S/16 111477"),
        ("quickstrat", "there is no config file quickstrat; did you mean 'quickstart'?"),
        (
            "configs/vit_l16_i21.py:smoke",
            "there is no config file configs/vit_l16_i21.py; did you mean 'vit_l16_i21k'?",
        ),
        ("own/mine.py", "ViT-S/32 7"),
        ("quickstart", "ViT-S/32 7"),  # A file of the user has precedence.
    ],
)
def test_installed_package_finds_a_config_from_any_folder(installed, tmp_path, name, said):
    for path in ("own/mine.py", *(["quickstart"] if name == "quickstart" else [])):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(OWN)
    process = subprocess.run(
        [sys.executable, "-c", READ, name],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert process.stdout.strip() == said, process.stderr
