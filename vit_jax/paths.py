"""Paths that users pass: files, folders, workdirs with checkpoints, and URLs of buckets."""

import os
from pathlib import Path

from vit_jax.errors import UserError

SCHEMES = ("gs://", "s3://")
OBJECTIVE_FILES = "objective"  # Folder in a workdir that contains files of the objective.
CONFIG, MANIFEST = "config.json", "manifest.json"  # Every workdir contains both.


def check_path(value: object, name: str, instead: str = "") -> None:
    """Raises UserError if `value` is not a path.

    Args:
      name: name of the argument.
      instead: description of the expected path in the error message; empty: "a folder".
    """
    if not isinstance(value, str | os.PathLike):
        raise UserError(
            f"{name} is of type {type(value).__name__}, and must be the path of "
            f"{instead or 'a folder'}"
        )


def user_cache() -> Path:
    """Returns the package's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vit_jax"


def is_url(source: object) -> bool:
    """Returns True for the URL of a bucket, or of an object or folder in a bucket."""
    return str(source).startswith(SCHEMES)


def absolute(path: str | Path) -> Path:
    """Returns the absolute path. `~` is expanded, because shells do not expand it in --flag=~/x.

    Raises:
      UserError: the path is the URL of a bucket.
    """
    if is_url(path):
        raise UserError(
            f"Unsupported: a bucket as the place of {path}. Give a folder, and copy it there."
        )
    return Path(os.path.expanduser(path)).absolute()


def split_checkpoint(source: str | Path) -> tuple[str, str]:
    """Splits `WORKDIR@best` or `WORKDIR@3000` into workdir and checkpoint.

    A path that exists is not split.

    Returns:
      The URL or the absolute path of the workdir, and the part after `@`. An empty part means the
      newest checkpoint.
    """
    url = is_url(source)
    path = str(source) if url else str(absolute(source))
    whole = "@" not in path if url else "@" not in Path(path).name or Path(path).exists()
    if whole:
        return path, ""
    workdir, _, which = path.rpartition("@")
    return workdir, which


def is_workdir(folder: str | Path) -> bool:
    """Returns True for a folder with the files of a run's workdir."""
    return all(Path(folder, name).is_file() for name in (CONFIG, MANIFEST))
