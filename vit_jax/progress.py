"""Progress messages: work done, speed and time left."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator

SECONDS = 10  # Interval of lines in a log in seconds.
MOVES = 0.2  # Interval of progress bar updates in seconds.
LATE = 5  # If nothing was printed for this number of seconds, a line is overdue.
MINUTE = 60
CELLS = 20  # Width of a progress bar.


class Pace:
    """Rate limit of progress lines: one per second in the first minute, then one per `later` s."""

    def __init__(self, later: float = SECONDS):
        self._later, self._begun, self._last = later, time.monotonic(), float("-inf")

    def due(self, least: float = 1) -> bool:
        """Returns True if another line may be written now.

        The rate limit must allow it, and the last line must be at least `least` seconds old.
        """
        now = time.monotonic()
        return now - self._last >= max(least, 1 if now - self._begun < MINUTE else self._later)

    def restart(self) -> None:
        """Records that a line has been written now."""
        self._last = time.monotonic()


class MovingLine:
    """A line of standard output that the next line overwrites, in a terminal or a notebook."""

    def __init__(self):
        self._shown = 0  # Number of characters before the cursor.

    @property
    def possible(self) -> bool:
        """True if the output is a terminal or a notebook."""
        return sys.stdout.isatty() or type(sys.stdout).__module__.startswith("ipykernel")

    def show(self, text: str, end: str = "") -> None:
        """Replaces the line by `text`, cut off at the terminal's width, and `end`."""
        width = shutil.get_terminal_size().columns - 1
        text = text[: max(0, width - len(end))] + end
        print("\r" + text.ljust(self._shown), end="", flush=True)
        self._shown = len(text)

    def clear(self) -> None:
        """Removes the line. Other lines can then be printed."""
        if self._shown:
            print("\r" + " " * self._shown, end="\r", flush=True)
            self._shown = 0


LINE = MovingLine()  # A process has only one such line, since a terminal has one cursor.


class Progress:
    """Shows the work done, the speed and the time left.

    In a terminal or a notebook it is a progress bar. Elsewhere a line is logged every ten seconds.
    """

    def __init__(self, title: str, total: int, unit: str, log: Callable[[str], None] = print):
        self._title, self._total, self._unit, self._log = title, total, unit, log
        self._moves = LINE.possible
        self._start = self._shown_at = time.monotonic()

    def __call__(self, done: int) -> None:
        """Updates the output for finished work, if the last update is old enough."""
        now = time.monotonic()
        if self._moves and done >= self._total:
            LINE.clear()
        if now - self._shown_at < (MOVES if self._moves else SECONDS) or done >= self._total:
            return
        self._shown_at = now
        rate = done / (now - self._start)
        numbers = (
            f"{done:,} of {self._total:,} {self._unit} | {rate:,.0f} {self._unit}/s | "
            f"{duration((self._total - done) / rate) if rate else '?'} left"
        )
        if self._moves:
            filled = CELLS * done // self._total
            LINE.show(f"{self._title} {'━' * filled}{'╌' * (CELLS - filled)} {numbers}")
        else:
            self._log(f"{self._title}: {numbers}")


@contextlib.contextmanager
def ticking(tick: Callable[[], None], every: float = 1) -> Iterator[None]:
    """Calls `tick` from another thread every `every` seconds, while the context is open."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every):
            tick()

    thread = threading.Thread(target=watch, name="ticking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def phase(name: str, every: float = 1) -> Iterator[None]:
    """Shows a phase's time every `every` seconds in a terminal, elsewhere every ten seconds."""
    start = shown = time.monotonic()

    def tick() -> None:
        nonlocal shown
        now = time.monotonic()
        line = f"{name}: {duration(now - start)} so far"
        if LINE.possible:
            LINE.show(line)
        elif now - shown >= SECONDS:
            shown = now
            print(line, file=sys.stderr, flush=True)

    try:
        with ticking(tick, every):
            yield
    finally:
        LINE.clear()


def print_line(text: str) -> None:
    """Removes the progress line, and prints a permanent line."""
    LINE.clear()
    print(text, flush=True)


def duration(seconds: float) -> str:
    """Formats a duration in its two largest units: `2 h 5 min`, `3 min 20 s`, `8 s`."""
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
