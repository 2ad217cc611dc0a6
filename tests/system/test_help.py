"""What a command says of itself."""

import importlib.util

import pytest


@pytest.mark.parametrize(
    ("command", "flag"), [("main", "workdir"), ("visualize", "images"), ("plan", "chip")]
)
def test_help_says_what_a_command_does_and_its_flags(run, command, flag):
    result = run("--help", "--nonsense", module=f"vit_jax.{command}")
    assert (result.returncode, result.stderr) == (0, "")
    with open(importlib.util.find_spec(f"vit_jax.{command}").origin) as file:
        first = file.readline().strip().strip('"')
    assert result.stdout.startswith(first)
    assert f"\n  --{flag}: " in result.stdout
