"""Workdirs in buckets: `gs://BUCKET/RUN` and `s3://BUCKET/RUN`.

Orbax writes checkpoints directly to the bucket. All other files of a run are small. A run appends
lines to some of these files, but objects in a bucket cannot be appended to. The run therefore
writes all these files into a local folder. Changed files are copied to the bucket every few
seconds, and before each checkpoint.
"""

import contextlib
import functools
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec.config
from etils import epath

from vit_jax.errors import UserError

UPLOAD_SECONDS = 10.0  # Interval between two checks for changed files.

# Prefixes of the names of files that are not copied from the bucket: checkpoints, and files that a
# run never reads.
_LEFT = ("checkpoints/", "profile/", "events.out.tfevents.", ".lock", ".shared")

# Listings are not cached, because files that other hosts write must be visible immediately. The
# setting also applies to Orbax, because Orbax uses fsspec's protocols `gs` and `s3`, too.
for protocol in ("gs", "gcs", "s3"):
    fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False


class Bucket:
    """Access to the objects of a bucket below a URL, such as `gs://BUCKET/RUN`.

    The names in arguments and results of all methods are relative to this URL.

    Raises:
      UserError: (all methods) the bucket does not exist, access is denied, or the bucket cannot be
        reached.
    """

    def __init__(self, url: str):
        self.url = url
        with self._named_errors():
            self._files, self._root = _file_system(url)

    def read(self, name: str) -> bytes | None:
        """Returns an object's content; None if the object does not exist."""
        with self._named_errors():
            try:
                return self._files.cat_file(f"{self._root}/{name}")
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Creates or replaces the object."""
        with self._named_errors():
            self._files.pipe_file(f"{self._root}/{name}", content)

    def create(self, name: str, content: bytes) -> bool:
        """Creates an object atomically; returns False if the object exists already."""
        with self._named_errors():
            try:
                self._files.pipe_file(f"{self._root}/{name}", content, mode="create")
            except FileExistsError:
                return False
        return True

    def remove(self, name: str) -> None:
        """Removes the object if it exists."""
        with self._named_errors(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def names(self) -> list[str]:
        """Returns the names of all objects below the URL."""
        with self._named_errors():
            return [name[len(self._root) + 1 :] for name in self._files.find(self._root)]

    def read_all(self, names: list[str]) -> dict[str, bytes]:
        """Returns the contents of several objects by name; missing objects are omitted."""
        with self._named_errors():
            found = self._files.cat([f"{self._root}/{name}" for name in names], on_error="return")
            gone = {
                name for name, content in found.items() if isinstance(content, FileNotFoundError)
            }
            for content in found.values():
                if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                    raise content
        return {name[len(self._root) + 1 :]: found[name] for name in found.keys() - gone}

    def top(self) -> list[str]:
        """Returns the names of the files and folders that are directly in the folder at the URL."""
        with self._named_errors():
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                # The folder is missing. If the bucket is missing, too, `find` raises an error.
                self._files.find(self._root, maxdepth=1)
                return []
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Context that converts errors of gcsfs and s3fs to a UserError with a single line."""
        try:
            yield
        except UserError:
            raise
        except FileNotFoundError as error:
            bucket = "/".join(self.url.split("/")[:3])
            raise UserError(
                f"there is no bucket {bucket}, or these credentials have no access to it"
            ) from error
        # The libraries aiohttp, botocore and google.auth have no common exception class, so all
        # exceptions are caught.
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            command = _SIGN_IN[self.url[:5]]
            raise UserError(
                f"cannot use {self.url} ({reason}); credentials: {command}, or the machine's "
                "service account"
            ) from error


_SIGN_IN = {"gs://": "gcloud auth application-default login", "s3://": "aws configure"}


@functools.cache
def _file_system(url: str):
    """Returns fsspec's file system for a URL, and the URL's path in this file system."""
    # gcsfs logs the traceback of each error that it raises. These logs are suppressed.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    try:
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f'cannot use {url}: {error} (pip install "vit_jax[cloud]")') from error
    return files, root.rstrip("/")


_folders: dict[str, tempfile.TemporaryDirectory] = {}  # Local folders by URL.
_urls: dict[Path, str] = {}


def fetched(url: str) -> Path:
    """Copies a workdir in a bucket, without its checkpoints, to a local folder.

    Returns:
      The local folder.

    Raises:
      UserError: the bucket cannot be used.
    """
    url = url.rstrip("/")
    if len(url.split("/")) < 4:
        raise UserError(f"{url} is a whole bucket: give a folder in it, {url.rstrip('/')}/RUN")
    bucket = Bucket(url)
    names = [name for name in bucket.names() if not name.startswith(_LEFT)]
    if url not in _folders:
        _folders[url] = tempfile.TemporaryDirectory(prefix="vit_jax_")
        _urls[Path(_folders[url].name)] = url
    folder = Path(_folders[url].name)
    for name, content in bucket.read_all(names).items() if names else ():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def url_of(workdir: Path) -> str | None:
    """Returns the URL of the workdir whose local copy is `workdir`; None: not a local copy."""
    return _urls.get(workdir)


def shown(workdir: Path) -> str:
    """Returns the workdir's path or URL as the user wrote it."""
    return url_of(workdir) or str(workdir)


def checkpoints_of(workdir: Path) -> Path | epath.Path:
    """Returns the folder of a workdir's checkpoints: a local folder or a folder in the bucket."""
    url = url_of(workdir)
    return epath.Path(url) / "checkpoints" if url else workdir / "checkpoints"


def read_through(url: str) -> None:
    """Reads every object below a URL; raises UserError if one cannot be read."""
    bucket = Bucket(url)
    for name in bucket.names():
        bucket.read(name)


def move(source: str, target: str) -> None:
    """Moves all objects below a URL to another one of the bucket; raises UserError if it fails."""
    names, bucket, other = Bucket(source).names(), Bucket(source), Bucket(target)
    for name in names:
        if (content := bucket.read(name)) is not None:
            other.write(name, content)
    for name in names:
        bucket.remove(name)


class Upload:
    """Context manager that copies changed files to the bucket, at intervals and at its end.

    Args:
      workdir: local folder of the workdir, the result of `fetched`.
      check: function that is called before files are copied. It must raise an error if another run
        now owns the workdir in the bucket.
    """

    def __init__(self, workdir: Path, check: Callable[[], None], seconds: float = UPLOAD_SECONDS):
        self._workdir, self._check, self._seconds = workdir, check, seconds
        self._bucket = Bucket(shown(workdir))
        # Size and modification time of each file when it was last copied, by name.
        self._copied: dict[str, tuple[int, int]] = {}
        self._one_at_a_time, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="upload", daemon=True)

    def __enter__(self):
        self.flush()
        self._thread.start()
        return self

    def __exit__(self, kind, *_):
        self._closed.set()
        self._thread.join()
        try:
            self.flush()
        except Exception:
            if kind is None:  # If the context raised an error, that error is more important.
                raise

    def flush(self) -> None:
        """Copies the changed files. The report is copied last, because it marks a finished run.

        Raises:
          UserError: a file cannot be copied.
        """
        with self._one_at_a_time:
            changed = {}
            for path in self._workdir.rglob("*"):
                # Temporary files that were renamed after the listing no longer exist. They are
                # skipped.
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    name = str(path.relative_to(self._workdir))
                    state = status.st_size, status.st_mtime_ns
                    if path.is_file() and path.suffix != ".tmp" and self._copied.get(name) != state:
                        changed[name] = state
            if not changed:
                return
            self._check()
            for name in sorted(changed, key=lambda name: (name == "report.html", name)):
                with contextlib.suppress(FileNotFoundError):
                    self._bucket.write(name, (self._workdir / name).read_bytes())
                    self._copied[name] = changed[name]

    def _follow(self) -> None:
        while not self._closed.wait(self._seconds):
            # An error of this copy is ignored. If the error persists, the call of `flush` before
            # the next checkpoint raises it.
            with contextlib.suppress(UserError, OSError):
                self.flush()
