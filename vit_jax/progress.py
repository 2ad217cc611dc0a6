"""Progress in words: how much is done, how fast it goes, how long it still takes."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 10  # Between two lines.


class Progress:
    """Says now and then how much is done, how fast it goes and how long it still takes.

    Args:
      what: is being done, to how many `total`.
      unit: what is counted, such as images.
      say: is told each line.
    """

    def __init__(self, what: str, total: int, unit: str, say: Callable[[str], None] = print):
        self._what, self._total, self._unit, self._say = what, total, unit, say
        self._start = self._said = time.monotonic()

    def __call__(self, done: int) -> None:
        """Says how much is done in all, if the last line was long ago."""
        now = time.monotonic()
        if now - self._said < SECONDS or done >= self._total:
            return
        self._said = now
        rate = done / (now - self._start)
        self._say(
            f"{self._what}: {done:,} of {self._total:,} {self._unit} | {rate:,.0f} {self._unit}/s | "
            f"{duration((self._total - done) / rate)} left"
        )


@contextlib.contextmanager
def waiting(what: str, say: Callable[[str], None], every: float = 30) -> Iterator[None]:
    """Says what begins and, every so many seconds until it ends, how long it has taken.

    For what cannot say itself how much of it is done. `say` is then called by another thread.
    """
    begun, over = time.monotonic(), threading.Event()

    def watch() -> None:
        while not over.wait(every):
            say(f"{what}: {duration(time.monotonic() - begun)} so far")

    say(f"{what} ...")
    thread = threading.Thread(target=watch, name=what, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def duration(seconds: float) -> str:
    """A time in its two leading units: `2 h 5 min`, `3 min 20 s`, `8 s`."""
    seconds = round(seconds)
    parts = [
        (seconds // 86400, "d"),
        (seconds // 3600 % 24, "h"),
        (seconds // 60 % 60, "min"),
        (seconds % 60, "s"),
    ]
    while len(parts) > 1 and not parts[0][0]:
        parts = parts[1:]
    return " ".join(f"{n} {unit}" for n, unit in parts[:2])
