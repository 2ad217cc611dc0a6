"""Writes what a run says: lines for a terminal and a log file, scalars for machines."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from vit_jax.runs.goodput import read_rows


class Console:
    """Prints lines, and a status line that a terminal overwrites; a log file gets all as plain lines.

    Args:
      log: the file; None is the console of a process that leaves the talking to another one.
    """

    def __init__(self, log: Path | None):
        self._log = log.open("a", encoding="utf-8") if log else None
        self._terminal = sys.stdout.isatty()
        self._status = False  # The cursor stands behind a status line.

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if self._log:
            print(("\r\x1b[K" if self._status else "") + text, flush=True)
            self._status = False
            self._to_log(text)

    def status(self, text: str) -> None:
        """Prints the progress line."""
        if self._log and self._terminal:
            width = os.get_terminal_size().columns
            print("\r\x1b[K" + text[: width - 1], end="", flush=True)
            self._status = True
            self._to_log(text)
        else:
            self.say(text)

    def _to_log(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._log.writelines(f"{stamp} {line}\n" for line in text.splitlines())
        self._log.flush()


class MetricWriter:
    """Writes scalars by step into `metrics.jsonl` and TensorBoard events.

    The events are written with TensorBoard's own record format: CLU's writers would import
    TensorFlow into the training process (see the architecture page).
    """

    def __init__(
        self,
        workdir: Path,
        first_step: int,
        on_log: Callable[[int, dict[str, float]], None] | None = None,
    ):
        """Drops rows after `first_step` that a killed run left: they will come again.

        Args:
          on_log: is called with each step and its scalars, behind the files.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._on_log = on_log
        self._event, self._summary = event_pb2, summary_pb2
        path = workdir / "metrics.jsonl"
        self._rows = _keep_rows(path, first_step)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._events = RecordWriter((workdir / name).open("wb"))
        self._write_event(file_version="brain.Event:2")
        # Tells TensorBoard to forget what an earlier file says of the steps from here on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write_event(step=first_step + 1, session_log=start)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Appends a row; NaN and infinity are written as null."""
        finite = {name: value if abs(value) < float("inf") else None for name, value in scalars.items()}
        self._rows.write(json.dumps({"step": step, **finite}) + "\n")
        self._rows.flush()
        values = [self._summary.Summary.Value(tag=k, simple_value=v) for k, v in scalars.items()]
        self._write_event(step=step, summary=self._summary.Summary(value=values))
        if self._on_log:
            self._on_log(step, dict(scalars))

    def close(self) -> None:
        """Closes both files."""
        self._rows.close()
        self._events.close()

    def _write_event(self, **fields) -> None:
        event = self._event.Event(wall_time=time.time(), **fields)
        self._events.write(event.SerializeToString())
        self._events.flush()


def _keep_rows(path: Path, last_step: int):
    """Opens a JSON-lines file for appending, cut back to the rows up to `last_step`."""
    kept = [json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= last_step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)
    return path.open("a", encoding="utf-8")
