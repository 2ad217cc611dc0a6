"""Delivery of a run's metrics and pictures to a tracker, without blocking training."""

import contextlib
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

from vit_jax.errors import UserError
from vit_jax.runs.trackers.tracker import BaseTracker, RunFacts

FOLDER = "trackers"  # Folder in the workdir. For each tracker, a file records the sent rows.
CLOSE_SECONDS = 60  # Maximum time that a run waits for trackers at its end.
RETRY_SECONDS = 30

Say = Callable[[str], None]


class _Row(NamedTuple):
    step: int
    scalars: Mapping[str, float]


class _Picture(NamedTuple):
    step: int
    name: str
    png: bytes


class Delivery:
    """Thread that sends a run's metrics and pictures to a tracker, in the order of the steps.

    The file `trackers/NAME.json` in the workdir contains the tracker's identifier of the run and a
    record of the rows that were sent. If sending fails, it is tried again until the run ends.

    When a run is resumed after a crash, the thread sends the rows of `metrics.jsonl` that were not
    sent before. It also sends rows again that the tracking library may have lost in the crash. A
    few rows may therefore arrive twice. Rows that the run computes again after the crash are not
    sent again.

    Args:
      rows: rows of `metrics.jsonl` that the run has written so far.

    Raises:
      UserError: the first connection of a new run fails. The thread tries later connections again.
    """

    def __init__(
        self, name: str, kind: type[BaseTracker], run: RunFacts, rows: Sequence[dict], log: Say
    ):
        self._name, self._kind, self._run, self._log = name, kind, run, log
        self._file = run.workdir / FOLDER / f"{name}.json"
        # Record of sent data: the tracker's identifier of the run, the last step of which metrics
        # were sent, the names of the sent metrics of this step, and for each kind of picture the
        # last step of which a picture was sent.
        self._sent = {"identity": "", "step": 0, "figures": [], "pictures": {}}
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._sent |= json.loads(self._file.read_text())
        self._settling: deque[tuple[float, dict]] = deque()
        self._waiting: queue.SimpleQueue[_Row | _Picture | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._warned = False
        self._tracker: BaseTracker | None = None if self._sent["identity"] else self._open()
        for row in rows:
            self.row(row["step"], {key: value for key, value in row.items() if key != "step"})
        # The tracking library is imported here and not in the thread, because CPython 3.11 may fail
        # to parse code in two threads at once (python/cpython#106905). If the library is missing,
        # `_open` raises the error.
        with contextlib.suppress(Exception):
            import_module(kind.library)
        self._thread = threading.Thread(target=self._deliver, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def row(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Queues the metrics of a step. Metrics that are None are skipped."""
        self._waiting.put(_Row(step, {name: x for name, x in scalars.items() if x is not None}))

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Queues a picture."""
        self._waiting.put(_Picture(step, name, png))

    def close(self) -> None:
        """Waits up to a minute until all queued items are sent. Warns if some are not sent."""
        self._waiting.put(None)
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive() or not self._waiting.empty():
            self._log(
                f"warning: {self._name} lacks the figures after step {self._sent['step']}; the "
                "same command sends them"
            )

    def _open(self) -> BaseTracker:
        tracker = self._kind(self._run, self._sent["identity"], self._sent["step"])
        self._sent["identity"] = tracker.identity
        self._keep(self._sent)
        return tracker

    def _deliver(self) -> None:
        while (item := self._waiting.get()) is not None:
            while not self._tried(partial(self._send, item)):
                if self._closing.is_set():
                    self._waiting.put(item)
                    return
                self._closing.wait(RETRY_SECONDS)
        if self._tracker and self._tried(self._tracker.close):
            self._keep(self._sent)

    def _tried(self, act: Callable[[], None]) -> bool:
        """Calls `act`; returns False if it fails. Logs only the first of consecutive errors."""
        try:
            act()
        except Exception as error:  # The library may raise any exception; training continues.
            if not self._warned:
                line = str(error) if isinstance(error, UserError) else f"{self._name}: {error}"
                self._log(f"warning: {' '.join(line.split())}; training continues, with retries")
            self._warned = True
            return False
        self._warned = False
        return True

    def _send(self, item: _Row | _Picture) -> None:
        """Sends a row or a picture to the tracker. Metrics that were sent before are skipped."""
        tracker = self._tracker = self._tracker or self._open()
        sent = self._sent
        if isinstance(item, _Picture):
            if item.step <= sent["pictures"].get(item.name, 0):
                return
            tracker.picture(*item)
            sent["pictures"] = sent["pictures"] | {item.name: item.step}
        else:
            if item.step < sent["step"]:
                return
            known = sent["figures"] if item.step == sent["step"] else []
            new = {name: value for name, value in item.scalars.items() if name not in known}
            if not new:
                return
            tracker.row(item.step, new)
            sent["step"], sent["figures"] = item.step, [*known, *new]
        # A shallow copy of the record is sufficient, because nested values are replaced and never
        # modified.
        self._settling.append((time.monotonic() + tracker.settles_after, dict(sent)))
        settled = None
        while self._settling and self._settling[0][0] <= time.monotonic():
            _, settled = self._settling.popleft()
        if settled:
            self._keep(settled)

    def _keep(self, sent: dict) -> None:
        """Writes the record of sent rows.

        If the workdir was deleted, nothing is written. The run's lock detects the deletion.
        """
        with contextlib.suppress(FileNotFoundError):
            self._file.parent.mkdir(exist_ok=True)
            temporary = self._file.with_suffix(".tmp")
            temporary.write_text(json.dumps(sent) + "\n")
            temporary.replace(self._file)
