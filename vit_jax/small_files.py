"""Functions that read whole files. The files must be regular files of limited size."""

import errno
import os
import stat
from pathlib import Path

from vit_jax.errors import UserError

MOST = 64 * 2**20  # Maximum size in bytes.


def check_small(path: str | Path, most: int | None = MOST) -> None:
    """Raises OSError if a path is not a regular file, or is larger than `most` bytes.

    Pipes and devices are not allowed: opening a pipe would wait for a writer, and reading a device
    may never end.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if most is not None and status.st_size > most:
        words = f"{status.st_size:,} bytes, where {most:,} are allowed"
        raise OSError(errno.EFBIG, words, str(path))


def read_small(path: str | Path, most: int = MOST) -> str:
    """Returns the text of a small file.

    Raises:
      OSError: the file cannot be read, is not a regular file, or is larger than `most` bytes.
      UnicodeDecodeError: the file is not UTF-8.
    """
    check_small(path, most)
    return Path(path).read_text(encoding="utf-8")


def read_lines(path: str | Path, flag: str) -> list[str]:
    """Returns the lines of a flag's text file; raises UserError if it is not UTF-8 or missing."""
    try:
        return read_small(path).removeprefix("\ufeff").splitlines()
    except OSError as error:
        raise UserError(f"cannot read --{flag}={path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--{flag}={path} is not UTF-8 text: {error}") from error
