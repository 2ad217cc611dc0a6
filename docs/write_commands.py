"""Writes docs/commands.md: python docs/write_commands.py"""

import os
import subprocess
import sys
from pathlib import Path

from vit_jax.commands import COMMANDS

ROOT = Path(__file__).parents[1]


def page() -> str:
    """Returns the page with the `--help` output of each command.

    The config's options are omitted, because another page describes them.
    """
    running = {
        name: _help(command.module) for name, command in COMMANDS.items() if not command.config
    }
    parts = [
        "# Commands",
        "What each says with `--help`. Written by `python docs/write_commands.py`.",
    ]
    for name, process in running.items():
        said = process.communicate()[0]
        if process.returncode:
            raise RuntimeError(f"the help of {name} fails")
        said = said.partition("\n\nValues of the config that")[0].replace(f"{ROOT}/", "").strip()
        parts += [
            f"## {name}",
            f"`vit-jax {name}`, which is `python -m vit_jax.{COMMANDS[name].module}`.",
        ]
        parts.append(f"```text\n{said}\n```")
        if "--config:" in said:
            parts.append("What `--config.NAME=VALUE` changes: [all values of a config](config.md).")
    return "\n\n".join(parts) + "\n"


def _help(module: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", f"vit_jax.{module}", "--help"],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "100", "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    Path(__file__).with_name("commands.md").write_text(page())
