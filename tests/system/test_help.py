"""The help texts of commands."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.system.conftest import ROOT
from vit_jax.config import VALUES


@pytest.mark.parametrize(
    ("command", "flag"), [("main", "workdir"), ("visualize", "images"), ("plan", "chip")]
)
def test_help_describes_a_command_and_its_flags(run, command, flag):
    result = run("--help", "--nonsense", module=f"vit_jax.{command}")
    assert (result.returncode, result.stderr) == (0, "")
    with open(importlib.util.find_spec(f"vit_jax.{command}").origin) as file:
        first = file.readline().strip().strip('"')
    assert result.stdout.startswith(first)
    assert f"\n  --{flag}=" in result.stdout


def test_help_lists_every_value_and_one_section_of_them(run):
    everything = run("--helpfull").stdout
    assert all(f"\n  --config.{key}=" in everything for key in VALUES)
    short = run("--help", "--config=configs/quickstart.py").stdout
    assert (
        short.count("\n") < 60
        and "--config.batch_size=128" in short
        and "--helpfull lists all" in short
    )
    section = run("--help=optimizer").stdout
    assert "--config.optimizer.beta1=0.9\n      Decay rate of the first moment" in section
    assert "--config.data" not in section
    result = run("--help=optimiser")
    assert (result.returncode, result.stdout) == (
        2,
        "",
    ) and "did you mean 'optimizer'" in result.stderr


@pytest.mark.parametrize(
    "arguments", [("main", "--help"), ("completion", "bash"), ("__main__", "--help")]
)
def test_a_closed_output_pipe_ends_a_command_without_messages(arguments):
    """As with `| head`, which closes the pipe early."""
    read, write = os.pipe()
    os.close(read)
    module, *rest = arguments
    command = [sys.executable, "-m", f"vit_jax.{module}", *rest]
    try:
        result = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (141, "")
