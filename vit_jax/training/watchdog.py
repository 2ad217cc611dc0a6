"""An end for a run that hangs: a lost network file system, a device that does not answer."""

import faulthandler
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


class Watchdog:
    """While it is entered, writes down where all threads stand when nothing was done for so long.

    After twice the time the process ends with exit code 1, for whatever started it to start it again.

    Args:
      seconds: longer than anything that the run may wait for.
      stacks: file for the stacks of all threads.
      say: is told of the first; the second goes to standard error.
    """

    def __init__(self, seconds: float, stacks: Path, say: Callable[[str], None]):
        self._seconds, self._stacks, self._say = seconds, stacks, say
        self._last = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def done(self, what: str) -> None:
        """Something was finished; the time counts from here. Before the first call it does not count."""
        self._last = time.monotonic(), what

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self):
        told = None
        while not self._closed.wait(self._seconds / 20):
            # A thread that hangs with the interpreter's lock holds this one up as well. Python's own
            # watchdog needs no lock: unless it is set anew here, it shows the stacks and exits.
            faulthandler.dump_traceback_later(2 * self._seconds, exit=True, file=sys.__stderr__)
            if self._last is None:
                continue
            since, what = self._last
            silent = time.monotonic() - since
            if silent > 2 * self._seconds:
                line = f"error: nothing done for {silent:.0f} s, since {what}; see {self._stacks}"
                print(line, file=sys.stderr, flush=True)
                for child in multiprocessing.active_children():
                    child.kill()
                os._exit(1)
            if silent > self._seconds and told != since:
                told = since
                with self._stacks.open("a") as file:
                    print(f"{time.ctime()}: nothing done since {what}", file=file, flush=True)
                    faulthandler.dump_traceback(file)
                self._say(
                    f"nothing done for {silent:.0f} s, since {what}; all threads' stacks are in "
                    f"{self._stacks}; the process ends after as long again"
                )
