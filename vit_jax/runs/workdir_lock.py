"""Lock that allows one run at a time in a workdir, even on a disk that is shared by several hosts.

The lock files are `.lock-1`, `.lock-2`, ... in the workdir. The file with the highest number names
the owner of the workdir. If this file is empty, the workdir has no owner. To take the lock, a run
creates the file with the next number by an atomic hard link. If several processes try this, only
one of them succeeds. Numbers are never reused.

The owner holds a `flock` on its file, which the kernel releases when the process ends. The owner
also updates the file's modification time every few seconds as a heartbeat. Some network file
systems do not share `flock` between hosts. Other hosts then only detect the heartbeat.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from vit_jax.errors import UserError

PREFIX = ".lock"  # Prefix of the names of a lock's files.
BEAT_SECONDS = 5.0  # Interval of heartbeats.
STALE_SECONDS = 90.0  # Without a heartbeat for this time, another host's process counts as gone.


class Holder(NamedTuple):
    """The process that a lock file names as the owner of the workdir."""

    host: str
    pid: int
    since: float  # `time.time()` when the lock was taken.
    boot: str  # Identifier of the current boot of the host's kernel.
    namespace: str  # PID namespace of the process.
    born: str  # Start time of the process in the kernel's units, because PIDs are reused.
    inode: int  # Inode of the lock file. A lock file with another inode is a copy.

    def __str__(self):
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class Lock:
    """Context manager that holds the lock on the workdir in the folder `workdir`.

    Args:
      beat_seconds: interval of heartbeats.
      stale_seconds: time without a heartbeat after which the lock is free. The values of
        `beat_seconds` and `stale_seconds` must be equal in all processes that use the workdir.
    """

    def __init__(
        self,
        workdir: Path,
        log: Callable[[str], None] = print,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ):
        self._workdir, self._log = workdir, log
        self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def __enter__(self):
        """Takes the lock.

        If a process of another host holds the lock, this method first waits for a heartbeat. If
        there is no heartbeat, the lock is taken over.

        Raises:
          UserError: another run holds the lock.
        """
        while True:
            newest = self._newest()
            left_by = self._wait(newest) if newest else None
            if self._make(newest + 1):
                break
        if left_by:
            self._log(f"note: taking over {self._workdir} from {left_by}: that process is gone")
        for number in range(newest, 0, -1):
            try:
                self._file(number).unlink()
            except FileNotFoundError:
                break
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._closed.set()
        self._thread.join()
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def check(self) -> None:
        """Raises UserError if the workdir no longer exists, or no longer belongs to this run."""
        try:
            if self._mine.read_bytes() == self._content and self._newest() == self._number:
                return
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return  # The run's next write raises the error.
        newest = self._newest() if self._workdir.is_dir() else 0
        if newest <= self._number:
            raise UserError(
                f"the workdir {self._workdir} was deleted, moved or recreated in the middle of "
                f"the run ({self._mine.name} is gone)"
            )
        with self._file(newest).open("rb") as file:
            holder = _read(file)
        raise UserError(
            f"{self._workdir} was taken over by {holder or 'another run'}, while this one stood "
            "still"
        )

    def _file(self, number: int) -> Path:
        return self._workdir / f"{PREFIX}-{number}"

    def _newest(self) -> int:
        """Returns the highest number of a lock file; 0: there is no lock file."""
        names = (re.fullmatch(rf"{PREFIX}-(\d+)", name) for name in os.listdir(self._workdir))
        return max((int(match[1]) for match in names if match), default=0)

    def _wait(self, number: int) -> Holder | None:
        """Waits until the lock is free, or until it is known that the lock's holder still runs.

        Returns:
          The previous holder, if it ended without releasing the lock; None if it released the lock.

        Raises:
          UserError: the holder still runs.
        """
        seen, until = None, 0.0
        while True:
            try:
                with self._file(number).open("rb") as file:
                    status, locked = os.fstat(file.fileno()), _locked(file.fileno())
                    holder = _read(file)
            except FileNotFoundError:
                return None  # Another process created the next file and removed this one.
            if holder is None:
                return None
            held = still_held(holder, status.st_ino, locked)
            if held is None:
                if seen is None:
                    seen, silent = status.st_mtime_ns, self._silent_seconds(status.st_mtime_ns)
                    # Even a file that looks old is watched for a while, because the clocks of two
                    # hosts may differ.
                    seconds = max(self._stale_seconds - max(silent, 0), 2 * self._beat_seconds)
                    until = time.monotonic() + seconds
                    self._log(
                        f"{self._workdir} is in use by {holder}; "
                        f"waiting up to {seconds:.0f} s for a sign that it still runs"
                    )
                held = status.st_mtime_ns != seen
                if not held and time.monotonic() < until:
                    time.sleep(min(1.0, self._beat_seconds / 2))
                    continue
            if held:
                raise UserError(
                    f"{self._workdir} is in use by another run: {holder}; "
                    "stop that one, or give another --workdir"
                )
            return holder

    def _silent_seconds(self, last: int) -> float:
        """Returns the seconds since the last modification of a lock file.

        The current time is taken from a new file, as its modification time. On a network file
        system, both times are thus from the server's clock.
        """
        file = self._workdir / f"{PREFIX}.{secrets.token_hex(8)}"
        try:
            file.touch()
            return (file.stat().st_mtime_ns - last) / 1e9
        finally:
            file.unlink(missing_ok=True)

    def _make(self, number: int) -> bool:
        """Creates a lock file atomically; returns False if another process was faster."""
        self._number, self._mine = number, self._file(number)
        temporary = self._workdir / f"{PREFIX}.{secrets.token_hex(8)}"
        self._descriptor = _create(temporary)
        try:
            self._sign()
            try:
                os.link(temporary, self._mine)
            except FileExistsError:
                # If the temporary file has two links, the hard link was created, but NFS lost the
                # reply.
                if os.stat(temporary).st_nlink == 1:
                    os.close(self._descriptor)
                    return False
            # The file system does not support hard links. An empty file is created instead. It
            # names no owner until its content is written.
            except OSError:
                os.close(self._descriptor)
                try:
                    self._descriptor = _create(self._mine)
                except FileExistsError:
                    return False
                self._sign()
        finally:
            temporary.unlink(missing_ok=True)
        if self._newest() == number:
            return True
        # Another process has created a lock file with a higher number, which the earlier list of
        # lock files did not contain.
        self._mine.unlink(missing_ok=True)
        os.close(self._descriptor)
        return False

    def _sign(self) -> None:
        """Locks the new lock file with `flock`, and writes the owner into it: this process."""
        with contextlib.suppress(OSError):  # Some file systems do not support `flock`.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder = this_process(os.fstat(self._descriptor).st_ino)
        self._content = json.dumps(holder._asdict()).encode()
        os.write(self._descriptor, self._content)
        os.fsync(self._descriptor)

    def _beat(self) -> None:
        while not self._closed.wait(self._beat_seconds):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)


def in_use(workdir: Path) -> bool:
    """Returns True if another run uses the workdir, as far as this host can detect."""
    if not workdir.is_dir():
        return False
    lock = Lock(workdir)
    try:
        with lock._file(lock._newest()).open("rb") as file:
            status, locked, holder = os.fstat(file.fileno()), _locked(file.fileno()), _read(file)
    except FileNotFoundError:
        return False
    held = holder and still_held(holder, status.st_ino, locked)
    return bool(
        lock._silent_seconds(status.st_mtime_ns) < STALE_SECONDS
        if holder and held is None
        else held
    )


def _create(file: Path) -> int:
    """Creates a file and returns its descriptor; raises FileExistsError if the file exists."""
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _read(file: BinaryIO) -> Holder | None:
    """Reads the owner from a lock file; None for an empty file: the lock was released."""
    content = file.read()
    try:
        return Holder(**json.loads(content)) if content else None
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{file.name} is not a lock file; remove it if no run uses the workdir"
        ) from error


def _locked(descriptor: int) -> bool | None:
    """Returns whether a process holds the file's `flock`; None: `flock` is not supported."""
    try:
        # The lock is tested with a shared lock, because several processes may test it at the same
        # time.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def this_process(inode: int = 0) -> Holder:
    """Returns the `Holder` that describes this process."""
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=time.time(),
        boot=_boot(),
        namespace=_namespace(),
        born=_born(os.getpid()) or "",
        inode=inode,
    )


def still_held(holder: Holder, inode: int, locked: bool | None) -> bool | None:
    """Returns whether the process in a lock file still holds the lock; None: unknown here.

    Args:
      inode: inode of the lock file.
      locked: whether a process holds the file's `flock`; None: `flock` is not supported.
    """
    if holder.boot != _boot():
        return None
    if holder.inode != inode:  # The lock file was copied together with the workdir.
        return False
    if locked:
        return True
    if holder.namespace == _namespace():
        return _born(holder.pid) == holder.born
    return locked  # For a process in another container, only `flock` is conclusive.


def _boot() -> str:
    """Returns an identifier that is different after each boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _born(pid: int) -> str | None:
    """Returns a process's start time; empty: unknown without `/proc`; None: ended or zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except OSError:
        if os.path.exists("/proc/self/stat"):
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""
