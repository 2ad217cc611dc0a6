"""Ends a run that hangs: a lost network file system, a pipe for an image, a device that is
silent.
"""

import faulthandler
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vit_jax.progress import LATE, duration


class Watchdog:
    """A context that writes down the stacks of all threads when nothing was done for so long.

    After twice the time the process ends with exit code 1, for whatever started it to start it
    again.

    Args:
      seconds: longer than anything that the run may wait for, and than any phase of its start.
      ends: the process may be ended; otherwise its stacks are written, and no more.
    """

    def __init__(self, seconds: float, ends: bool = True):
        self._seconds, self._ends = seconds, ends
        self._stacks, self._say = None, print
        self._last = time.monotonic(), "the start", ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def report_to(self, stacks: Path, say: Callable[[str], None]) -> None:
        """Sends stacks into this file instead of standard error from here on, and the first line to
        `say`.
        """
        self._stacks, self._say = stacks, say

    def begins(self, phase: str) -> None:
        """Notes that something long begins, such as `compiling the step`; the time counts from
        here.
        """
        self._last = time.monotonic(), self._last[1], f": {phase}"

    def done(self, what: str) -> None:
        """Notes that something was finished; the time counts from here."""
        self._last = time.monotonic(), what, ""

    def in_words(self) -> str:
        """Work that takes long: `compiling the step: 12 s so far`, `step 3 done 12 s ago`; empty:
        none.
        """
        since, done, phase = self._last
        passed = time.monotonic() - since
        if passed < LATE:
            return ""
        return (
            f"{phase[2:]}: {duration(passed)} so far"
            if phase
            else f"{done} done {duration(passed)} ago"
        )

    def __enter__(self):
        self._last = time.monotonic(), *self._last[1:]
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._closed.set()
        self._thread.join()
        if self._ends:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self):
        told = None
        while not self._closed.wait(self._seconds / 20):
            # A thread that hangs with the interpreter's lock holds this one up as well. Python's
            # own watchdog needs no lock: unless it is set anew here, it shows the stacks and exits.
            if self._ends:
                faulthandler.dump_traceback_later(2 * self._seconds, exit=True, file=sys.__stderr__)
            since, done, phase = self._last
            silent = time.monotonic() - since
            what = f"nothing done for {silent:.0f} s, since {done}{phase}"
            where = self._stacks or "the lines above"
            if self._ends and silent > 2 * self._seconds:
                print(f"error: {what}; see {where}", file=sys.stderr, flush=True)
                for child in multiprocessing.active_children():
                    child.kill()
                os._exit(1)
            if silent > self._seconds and told != since:
                told = since
                self._show_stacks(what)
                after = "; the process ends after as long again" if self._ends else ""
                self._say(f"{what}; all threads' stacks are in {where}{after} (hang_seconds)")

    def _show_stacks(self, what: str) -> None:
        try:
            with self._stacks.open("a") if self._stacks else open(os.dup(2), "w") as file:
                print(f"{time.ctime()}: {what}", file=file, flush=True)
                faulthandler.dump_traceback(file)
        except (
            OSError
        ) as error:  # The disk may be what hangs, or is full: the end comes all the same.
            print(f"no stacks of {what}: {error}", file=sys.stderr, flush=True)
