"""Lock that allows one run at a time in a workdir in a bucket, where file locks do not exist.

The lock objects are `.lock-1`, `.lock-2`, ... in the workdir. The object with the highest number
names the owner of the workdir. If this object is empty, the workdir has no owner. To take the lock,
a run creates the object with the next number. The bucket creates an object only if it does not
exist yet (`ifGenerationMatch=0` of Google Cloud Storage, `If-None-Match: *` of S3), so only one of
several runs succeeds. Numbers are never reused. `workdir_lock.py` implements the same protocol for
folders.

The owner rewrites its object every few seconds as a heartbeat.

Some stores ignore the condition that the object must not exist. With such a store, two runs that
start within the same second may both get the lock. The first run detects this at its next
heartbeat.
"""

import contextlib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from vit_jax.errors import UserError
from vit_jax.runs.bucket import Bucket
from vit_jax.runs.workdir_lock import PREFIX, STALE_SECONDS, Holder, still_held, this_process

BEAT_SECONDS = 15.0  # Interval of heartbeats. It is long because each write costs money.


class Sign(NamedTuple):
    """The content of a lock object (`.lock-N`)."""

    holder: Holder
    token: str  # Random identifier of the process that holds the lock.
    beat: int  # Number of the heartbeat.


class BucketLock:
    """Context manager that holds the lock on the workdir in a bucket.

    Args:
      beat_seconds: interval of heartbeats.
      stale_seconds: time without a heartbeat after which the lock is free. The values of
        `beat_seconds` and `stale_seconds` must be equal in all processes that use the workdir.
    """

    def __init__(
        self,
        bucket: Bucket,
        log: Callable[[str], None] = print,
        beat_seconds: float = BEAT_SECONDS,
        stale_seconds: float = STALE_SECONDS,
    ):
        self._bucket, self._log = bucket, log
        self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
        self._token, self._closed = secrets.token_hex(8), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def __enter__(self):
        """Takes the lock.

        If a process of another host holds the lock, this method first waits for a heartbeat. If
        there is no heartbeat, the lock is taken over.

        Raises:
          UserError: another run holds the lock, or the bucket cannot be used.
        """
        self._holder = this_process()
        while True:
            newest = self._newest()
            left_by = self._wait(newest) if newest else None
            self._number = newest + 1
            if self._bucket.create(self._name(self._number), self._content(0)) and self._is_mine():
                break
        if left_by:
            self._log(f"note: taking over {self._bucket.url} from {left_by}: that process is gone")
        for name in self._names():
            if _number(name) < self._number:
                self._bucket.remove(name)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._closed.set()
        self._thread.join()
        with contextlib.suppress(UserError):  # If the release fails, the lock becomes stale.
            if self._is_mine():
                self._bucket.write(self._name(self._number), b"")

    def check(self) -> None:
        """Raises UserError if the workdir no longer exists, or no longer belongs to this run."""
        if self._is_mine():
            return
        newest = self._newest()
        sign = self._read(newest) if newest else None
        if newest < self._number or not sign:
            raise UserError(
                f"the workdir {self._bucket.url} was deleted or recreated in the middle of the run "
                f"({self._name(self._number)} is gone)"
            )
        raise UserError(
            f"{self._bucket.url} was taken over by {sign.holder}, while this one stood still"
        )

    def _name(self, number: int) -> str:
        return f"{PREFIX}-{number}"

    def _names(self) -> list[str]:
        return [name for name in self._bucket.top() if _number(name)]

    def _newest(self) -> int:
        """Returns the highest number of a lock object; 0: there is no lock object."""
        return max(map(_number, self._names()), default=0)

    def _content(self, beat: int) -> bytes:
        return json.dumps(self._holder._asdict() | {"token": self._token, "beat": beat}).encode()

    def _read(self, number: int) -> Sign | None:
        """Returns the content of a lock object; None if the object is empty (released) or gone."""
        if not (content := self._bucket.read(self._name(number))):
            return None
        try:
            values = json.loads(content)
            token, beat = values.pop("token"), values.pop("beat")
            return Sign(Holder(**values), token, beat)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{self._bucket.url}/{self._name(number)} is not a lock; remove it if no run uses "
                "the workdir"
            ) from error

    def _is_mine(self) -> bool:
        """Returns True if this process wrote the newest lock object."""
        sign = self._read(self._number)
        return sign is not None and sign.token == self._token and self._newest() == self._number

    def _wait(self, number: int) -> Holder | None:
        """Waits until the lock is free, or until it is known that the lock's holder still runs.

        Returns:
          The previous holder, if it ended without releasing the lock; None if it released the lock.

        Raises:
          UserError: the holder still runs.
        """
        first, until = None, 0.0
        while True:
            if (sign := self._read(number)) is None:
                return None
            alive = still_held(sign.holder, sign.holder.inode, None)
            if alive is None:
                if first is None:
                    first, until = sign, time.monotonic() + self._stale_seconds
                    self._log(
                        f"{self._bucket.url} is in use by {sign.holder}; "
                        f"waiting up to {self._stale_seconds:.0f} s for a sign that it still runs"
                    )
                alive = sign != first
                if not alive and time.monotonic() < until:
                    time.sleep(min(2.0, self._beat_seconds / 2))
                    continue
            if alive:
                raise UserError(
                    f"{self._bucket.url} is in use by another run: {sign.holder}; "
                    "stop that one, or give another --workdir"
                )
            return sign.holder

    def _beat(self) -> None:
        beat = 0
        while not self._closed.wait(self._beat_seconds):
            beat += 1
            with contextlib.suppress(UserError):  # The run's next write raises the error.
                if not self._is_mine():
                    return
                self._bucket.write(self._name(self._number), self._content(beat))


def _number(name: str) -> int:
    """Returns the number N in a name `.lock-N`; 0 for other names."""
    found = re.fullmatch(rf"{re.escape(PREFIX)}-(\d+)", name)
    return int(found[1]) if found else 0
