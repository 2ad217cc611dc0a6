"""Workdirs in buckets: `gs://BUCKET/RUN` and `s3://BUCKET/RUN`.

Orbax writes checkpoints into the bucket itself. The other files of a run are small, and some of
them are
appended to, which no bucket can: they are in a folder of this process, and whole copies of those
that changed follow to the bucket every few seconds, and before each checkpoint.
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

UPLOAD_SECONDS = 10.0  # Between two looks at what has changed.

# Of a workdir, what nobody reads beside its checkpoints: it is left in the bucket.
_LEFT = ("checkpoints/", "profile/", "events.out.tfevents.", ".lock", ".shared")

# What other hosts write is seen at once: by Orbax too, whose file systems are made by these names.
for protocol in ("gs", "gcs", "s3"):
    fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False


class Bucket:
    """The objects below a URL, by the rest of their names.

    Raises, in all it does:
      UserError: there is no such bucket, it may not be used, or it cannot be reached.
    """

    def __init__(self, url: str):
        self.url = url
        with self._named_errors():
            self._files, self._root = _file_system(url)

    def read(self, name: str) -> bytes | None:
        """An object's content; None where there is none."""
        with self._named_errors():
            try:
                return self._files.cat_file(f"{self._root}/{name}")
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Makes the object, or gives it another content."""
        with self._named_errors():
            self._files.pipe_file(f"{self._root}/{name}", content)

    def create(self, name: str, content: bytes) -> bool:
        """Makes the object; False where there is one already, of which the bucket is the judge."""
        with self._named_errors():
            try:
                self._files.pipe_file(f"{self._root}/{name}", content, mode="create")
            except FileExistsError:
                return False
        return True

    def remove(self, name: str) -> None:
        """Removes the object, if it is there."""
        with self._named_errors(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def names(self) -> list[str]:
        """The names of all objects."""
        with self._named_errors():
            return [name[len(self._root) + 1 :] for name in self._files.find(self._root)]

    def read_all(self, names: list[str]) -> dict[str, bytes]:
        """The contents of several objects, by name, without those that are gone."""
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
        """The names that stand directly below the URL."""
        with self._named_errors():
            try:
                found = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                self._files.find(
                    self._root, maxdepth=1
                )  # Raises where the bucket itself is not there.
                return []
        return [name.rstrip("/").rpartition("/")[2] for name in found]

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Makes what a file system's library raises one line."""
        try:
            yield
        except UserError:
            raise
        except FileNotFoundError as error:
            bucket = "/".join(self.url.split("/")[:3])
            raise UserError(
                f"there is no bucket {bucket}, or these credentials do not see it"
            ) from error
        except Exception as error:  # Of aiohttp, botocore, google.auth: each has its own.
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            command = _SIGN_IN[self.url[:5]]
            raise UserError(
                f"cannot use {self.url} ({reason}); credentials: {command}, or the machine's "
                "service account"
            ) from error


_SIGN_IN = {"gs://": "gcloud auth application-default login", "s3://": "aws configure"}


@functools.cache
def _file_system(url: str):
    """The file system of a URL and the path in it."""
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # It writes tracebacks of what it raises.
    try:
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UserError(f'cannot use {url}: {error} (pip install "vit_jax[cloud]")') from error
    return files, root.rstrip("/")


_folders: dict[str, tempfile.TemporaryDirectory] = {}  # By URL.
_urls: dict[Path, str] = {}


def fetched(url: str) -> Path:
    """The folder of this process with the files of a workdir in a bucket, as they are there now.

    Raises:
      UserError: the bucket cannot be used.
    """
    url = url.rstrip("/")
    if len(url.split("/")) < 4:
        raise UserError(f"{url} is a whole bucket: name a folder in it, {url.rstrip('/')}/RUN")
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
    """The URL of the workdir whose files were fetched into a folder; None for a folder of its
    own.
    """
    return _urls.get(workdir)


def shown(workdir: Path) -> str:
    """The workdir's place, as its user named it."""
    return url_of(workdir) or str(workdir)


def checkpoints_of(workdir: Path) -> Path | epath.Path:
    """The folder of a workdir's checkpoints, which stay in the bucket where it is in one."""
    url = url_of(workdir)
    return epath.Path(url) / "checkpoints" if url else workdir / "checkpoints"


def read_through(url: str) -> None:
    """Reads every object below a URL.

    Raises:
      UserError: one cannot be read.
    """
    bucket = Bucket(url)
    for name in bucket.names():
        bucket.read(name)


def move(source: str, target: str) -> None:
    """Moves all objects below a URL to another one of the same bucket.

    Raises:
      UserError: they cannot be moved.
    """
    names, bucket, other = Bucket(source).names(), Bucket(source), Bucket(target)
    for name in names:
        if (content := bucket.read(name)) is not None:
            other.write(name, content)
    for name in names:
        bucket.remove(name)


class Upload:
    """Copies of a folder's files in its bucket, kept up to date; a context, at whose end all are.

    Args:
      workdir: as `fetched` made it.
      check: raises where the workdir in the bucket is another run's by now; called before anything
        is copied.
    """

    def __init__(self, workdir: Path, check: Callable[[], None], seconds: float = UPLOAD_SECONDS):
        self._workdir, self._check, self._seconds = workdir, check, seconds
        self._bucket = Bucket(shown(workdir))
        self._copied: dict[
            str, tuple[int, int]
        ] = {}  # Size and time of each file, as it was copied.
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
            if kind is None:  # Else the first error is the one to show.
                raise

    def flush(self) -> None:
        """Copies what has changed; the report, which says that a run is over, last.

        Raises:
          UserError: it cannot be copied.
        """
        with self._one_at_a_time:
            changed = {}
            for path in self._workdir.rglob("*"):
                with contextlib.suppress(
                    FileNotFoundError
                ):  # A temporary file, which has its name by now.
                    status = path.stat()
                    name, state = (
                        str(path.relative_to(self._workdir)),
                        (status.st_size, status.st_mtime_ns),
                    )
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
            with contextlib.suppress(
                UserError, OSError
            ):  # What lasts is raised before the next checkpoint.
                self.flush()
