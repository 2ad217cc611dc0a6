"""How every command starts and how it fails: a user's mistake is one line and exit code 2."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from absl import flags

from vit_jax.errors import UserError


def run(main: Callable[[], None]) -> None:
    """Parses the flags, calls `main`, and leaves the process with the right exit code.

    0: done, or stopped by a signal and saved. 2: the user's mistake. A fault of ours is a
    traceback and 1.
    """
    try:
        flags.FLAGS(sys.argv, known_only=False)
        if len(extra := flags.FLAGS(sys.argv)) > 1:
            raise UserError(f"unexpected argument {extra[1]!r}")
        main()
    except UserError as error:
        sys.exit(fail(str(error)))
    except flags.Error as error:
        sys.exit(fail(str(error)))


def fail(message: str) -> int:
    """Prints an error as one line; returns exit code 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return 2


def use_compilation_cache() -> None:
    """Keeps compiled programs under the user's cache folder, unless JAX_COMPILATION_CACHE_DIR says where."""
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "vit_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
