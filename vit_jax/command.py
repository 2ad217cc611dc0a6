"""How every command starts and how it fails: a user's mistake is one line and exit code 2."""

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path

from absl import flags

from vit_jax.config import base_config, leaves
from vit_jax.errors import UserError, mistake, nearest


def run(main: Callable[[list[str]], None]) -> None:
    """Parses the flags, calls `main` with the other arguments, and sets the right exit code.

    0: done, or stopped by a signal and saved. 2: the user's mistake. A fault of ours is a
    traceback and 1. With `--help` it says what the command does, and no more.
    """
    if {"--help", "-h"} & {*sys.argv[1:]}:
        print(f"{sys.modules['__main__'].__doc__.strip()}\n{flags.FLAGS.main_module_help()}")
        return
    with _mistakes():
        main(parse_flags())


def run_experiment(report: Callable[..., None], **options: dict) -> None:
    """Calls `report` with the folder `out` and with what else a script's flags say; it fails as `run` does.

    Args:
      options: by the flag's name, what `add_argument` takes.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__.splitlines()[0])
    kept = "folder for all of it; finished runs are kept"
    parser.add_argument("--out", type=lambda path: Path(path).absolute(), required=True, help=kept)
    for name, values in options.items():
        parser.add_argument(f"--{name}", **values)
    given = vars(parser.parse_args())
    use_compilation_cache()
    with _mistakes():
        report(**given)


@contextlib.contextmanager
def _mistakes():
    try:
        yield
    except (UserError, OSError) as error:
        if (message := mistake(error)) is None:
            raise
        print(f"error: {message}", file=sys.stderr, flush=True)
        sys.exit(2)


def parse_flags() -> list[str]:
    """The arguments that are not flags.

    Raises:
      UserError: flags that are unknown or malformed, a config that does not load.
    """
    try:
        arguments = flags.FLAGS(sys.argv)[1:]
        if "config" in flags.FLAGS and flags.FLAGS.config is not None:
            dict(flags.FLAGS.config)  # A file that could not be loaded raises at the first use.
    except (flags.Error, KeyError, AttributeError, TypeError, OSError) as error:
        raise UserError(_explain(error)) from error
    return arguments


def _explain(error: BaseException) -> str:
    """What ml_collections and absl mean, in one line; they nest messages and whole tracebacks."""
    last = str(error.args[0] if error.args else error).strip().splitlines()[-1].strip()
    if isinstance(error, flags.Error):
        return last.removeprefix("vit_jax.errors.UserError: ") if "Traceback" in str(error) else str(error)
    if isinstance(error, OSError):
        return f"the config does not load: {last}"
    if key := re.search(r"'(\w+)", str(error)):
        known = {part for path, _ in leaves(base_config()) for part in path.split(".")}
        return f"unknown config key {key[1]!r}; {nearest(key[1], known)}"
    return last


def parse_image_size(text: str) -> int | tuple[int, int]:
    """`384`, or `256x384` for a height and a width.

    Raises:
      UserError: neither.
    """
    if not (match := re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)):
        raise UserError(f"--image_size={text} is neither a number of pixels nor HEIGHTxWIDTH")
    return (int(match[1]), int(match[2])) if match[2] else int(match[1])


def use_compilation_cache() -> None:
    """Keeps compiled programs under the user's cache folder, unless JAX_COMPILATION_CACHE_DIR says where."""
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "vit_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def code_version() -> dict[str, str]:
    """What computes: versions of Python and of the libraries, and a hash of each file of ours."""
    folder = Path(__file__).parent
    hashes = {
        str(path.relative_to(folder.parent)): hashlib.blake2b(path.read_bytes(), digest_size=4).hexdigest()
        for path in sorted(folder.rglob("*.py"))
    }
    libraries = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    versions = {name: importlib.metadata.version(name) for name in libraries}
    return {"Python": platform.python_version()} | versions | hashes
