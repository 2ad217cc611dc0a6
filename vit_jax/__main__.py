"""Starts a command: vit-jax train --config=quickstart --workdir=DIR.

`vit-jax COMMAND --help` describes a command, and `vit-jax --version` prints the version. Flags,
messages and exit codes are the same as with `python -m`.
"""

import re
import runpy
import sys

from vit_jax import __version__
from vit_jax.commands import COMMANDS, Command
from vit_jax.errors import UserError, nearest, readers_may_leave


@readers_may_leave()
def main() -> None:
    """Runs the command named by the first argument, and passes all other arguments to it."""
    name, *arguments = sys.argv[1:] or [""]
    if name in COMMANDS:
        start(COMMANDS[name], arguments)
    elif name in ("-h", "-help", "--help", "help"):
        listed = (f"  {name:<12}{command.about}" for name, command in COMMANDS.items())
        print(f"{str(__doc__).strip()}\n", *listed, sep="\n")
    elif name == "--version":
        print(version())
    else:
        from vit_jax.command import mistakes

        with mistakes():
            message = f"there is no command {name!r}; {nearest(name, COMMANDS)}"
            raise UserError(
                message if name else "give a command, such as vit-jax train; --help lists them"
            )


def start(command: Command, arguments: list[str]) -> None:
    """Runs the module of a command, as `python -m` does."""
    if command.config and not any(re.match(r"--?config(=|$)", argument) for argument in arguments):
        arguments = [f"--config={command.config}", *arguments]
    sys.argv[1:] = arguments
    runpy.run_module(f"vit_jax.{command.module}", run_name="__main__", alter_sys=True)


def version() -> str:
    """Returns the versions of the package and of Python, and the JPEG decoder in use."""
    try:
        from vit_jax.data import _jpeg  # noqa: F401

        decoder = "with the fast JPEG decoder"
    except ImportError:
        decoder = "without the fast JPEG decoder: Pillow decodes, at under half the speed"
    return f"vit_jax {__version__}, Python {sys.version.split()[0]}, {decoder}"


if __name__ == "__main__":
    main()
