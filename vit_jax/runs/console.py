"""Output of a run: messages and progress in a terminal and a log file, metrics as JSON lines."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vit_jax.progress import LATE, LINE, Pace
from vit_jax.runs.goodput import read_rows
from vit_jax.runs.trackers.delivery import Delivery


class Console:
    """Prints messages, and at intervals a status line. Both are also written to a log file.

    In a terminal or a notebook the status line overwrites the previous one. Elsewhere, and in the
    log file, a new status line is written every second in the first minute, and every ten seconds
    afterwards.

    Args:
      log: the log file. None: nothing is printed, because another process prints.
    """

    def __init__(self, log: Path | None):
        self._log = log.open("a", encoding="utf-8", errors="backslashreplace") if log else None
        self._moves = LINE.possible
        self._screen, self._file = Pace(1) if self._moves else Pace(), Pace()
        self._status = ""

    def log(self, text: str) -> None:
        """Prints a message and writes it to the log file."""
        if self._log:
            LINE.clear()
            print(text, flush=True)
            self._to_log(text)

    @property
    def due(self) -> bool:
        """True if a status line would be printed or logged now."""
        return self._log is not None and (self._screen.due() or self._file.due())

    @property
    def late(self) -> bool:
        """True if no status line was printed for longer than `LATE` seconds."""
        return self._log is not None and self._screen.due(LATE)

    def status(self, text: str, last: bool = False) -> None:
        """Prints and logs a status line if one is due, or if it is the `last` one."""
        self._status = text
        self._show(text, "", last)

    def still(self, text: str) -> None:
        """Prints the last status line with `text` appended, if the line is older than `LATE`."""
        if text and self.late:
            self._show(self._status, f" | {text}" if self._status else text)

    def _show(self, text: str, end: str, always: bool = False) -> None:
        if self._log and (always or self._screen.due()):
            self._screen.restart()
            if self._moves:
                LINE.show(text, end)
            else:
                print(text + end, flush=True)
        if self._log and (always or self._file.due()):
            self._file.restart()
            self._to_log(text + end)

    def _to_log(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.writelines(f"{stamp} {line}\n" for line in text.splitlines())
        self._log.flush()


class MetricWriter:
    """Writes metrics by step into `metrics.jsonl`, and sends metrics and pictures to trackers.

    Attributes:
      rows: rows that a resumed run has written into `metrics.jsonl` before, up to the step from
        which the run continues.
    """

    def __init__(
        self,
        workdir: Path,
        first_step: int,
        on_log: Callable[[int, dict[str, float]], None] | None = None,
    ):
        """Opens `metrics.jsonl` and removes the rows of steps after `first_step`.

        The run wrote these rows before it was killed. The resumed run trains these steps again, and
        writes the rows again.

        Args:
          first_step: the step from which the run continues.
          on_log: function that is called with a step and its metrics after they are written.
        """
        self._on_log = on_log
        self._deliveries: Sequence[Delivery] = ()
        path = workdir / "metrics.jsonl"
        self.rows = [row for row in read_rows(path) if row["step"] <= first_step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def deliver_to(self, deliveries: Sequence[Delivery]) -> None:
        """Sends all later metrics to trackers. Also makes `close` close the trackers."""
        self._deliveries = deliveries

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Appends a row of metrics to `metrics.jsonl`. NaN and infinity are written as null."""
        finite = {
            name: value if abs(value) < float("inf") else None for name, value in scalars.items()
        }
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        for delivery in self._deliveries:
            delivery.row(step, scalars)
        if self._on_log:
            self._on_log(step, dict(scalars))

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Sends a picture to the trackers. The calling code writes it into the workdir."""
        for delivery in self._deliveries:
            delivery.picture(step, name, png)

    def close(self) -> None:
        """Closes the file and the trackers."""
        self._file.close()
        for delivery in self._deliveries:
            delivery.close()
