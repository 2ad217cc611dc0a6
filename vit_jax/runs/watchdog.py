"""Watchdog: ends a process that hangs, for example in a network file system or on a device."""

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
    """Context manager that writes the stacks of all threads when a process makes no progress.

    The stacks are written after a timeout. After twice the timeout, the process ends with exit code
    1, and a supervisor can restart it.

    Args:
      seconds: timeout in seconds. It must be longer than any wait of the run and any phase of its
        start.
      ends: True: end the process. False: only write the stacks.
    """

    def __init__(self, seconds: float, ends: bool = True):
        self._seconds, self._ends = seconds, ends
        self._stacks, self._log = None, print
        self._last = time.monotonic(), "the start", ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def report_to(self, stacks: Path, log: Callable[[str], None]) -> None:
        """Sets the file for the threads' stacks (default: stderr) and the callback for messages."""
        self._stacks, self._log = stacks, log

    def set_phase(self, phase: str) -> None:
        """Restarts the timeout for a long phase, such as `compiling the step`."""
        self._last = time.monotonic(), self._last[1], f": {phase}"

    def done(self, what: str) -> None:
        """Restarts the timeout because some work is done, such as `step 3`."""
        self._last = time.monotonic(), what, ""

    def in_words(self) -> str:
        """Returns the state of the process, for a status line.

        Examples: `compiling the step: 12 s so far` in a phase, `step 3 done 12 s ago` between two
        phases. The result is empty in the first seconds.
        """
        since, done, phase = self._last
        passed = time.monotonic() - since
        if passed < LATE:
            return ""
        if phase:
            return f"{phase[2:]}: {duration(passed)} so far"
        return f"{done} done {duration(passed)} ago"

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
        reported = None
        while not self._closed.wait(self._seconds / 20):
            # A thread that hangs while it holds the GIL also blocks this thread. Python's own
            # watchdog (`faulthandler`) does not need the GIL. If its timer is not restarted here in
            # time, `faulthandler` writes the stacks and ends the process.
            if self._ends:
                faulthandler.dump_traceback_later(2 * self._seconds, exit=True, file=sys.__stderr__)
            since, done, phase = self._last
            silent = time.monotonic() - since
            what = f"no progress for {silent:.0f} s, since {done}{phase}"
            where = self._stacks or "the lines above"
            if self._ends and silent > 2 * self._seconds:
                print(f"error: {what}; see {where}", file=sys.stderr, flush=True)
                for child in multiprocessing.active_children():
                    child.kill()
                os._exit(1)
            if silent > self._seconds and reported != since:
                reported = since
                self._show_stacks(what)
                after = "; the process ends after as long again" if self._ends else ""
                self._log(f"{what}; all threads' stacks are in {where}{after} (hang_seconds)")

    def _show_stacks(self, what: str) -> None:
        try:
            with self._stacks.open("a") if self._stacks else open(os.dup(2), "w") as file:
                print(f"{time.ctime()}: {what}", file=file, flush=True)
                faulthandler.dump_traceback(file)
        # If the stacks cannot be written, for example to a full disk, the process still ends.
        except OSError as error:
            print(f"no stacks of {what}: {error}", file=sys.stderr, flush=True)
