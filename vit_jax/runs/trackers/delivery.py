"""Delivery of a run's rows and pictures to a tracker, each once, without ever holding up the
training.
"""

import contextlib
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from vit_jax.errors import UserError
from vit_jax.runs.trackers.tracker import BaseTracker, RunFacts

FOLDER = "trackers"  # In the workdir: what each has been sent.
CLOSE_SECONDS = 60  # A run waits for its trackers at its end.
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
    """A thread that sends a run's rows and pictures in their order.

    `trackers/NAME.json` in the workdir holds the run's identity and what was sent. A run that is
      killed makes
    rows again that it had made before: these are not sent twice, and those that were not sent are
    sent by the next start, from `metrics.jsonl`. So are those that a library may have lost with the
    process: it has them twice if it had not. What cannot be sent is tried again until the run
    closes.

    Args:
      rows: that the run has written so far.

    Raises:
      UserError: the tracker never had this run, and cannot be opened. One that had is opened by the
        thread.
    """

    def __init__(
        self,
        name: str,
        kind: Callable[[RunFacts, str, int], BaseTracker],
        run: RunFacts,
        rows: Sequence[dict],
        say: Say,
    ):
        self._name, self._kind, self._run, self._say = name, kind, run, say
        self._file = run.workdir / FOLDER / f"{name}.json"
        # The last step that was sent, the names of its figures, and the last step of each picture.
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
        self._thread = threading.Thread(target=self._deliver, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def row(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Takes the figures of a step; those without a value are left out."""
        self._waiting.put(_Row(step, {name: x for name, x in scalars.items() if x is not None}))

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Takes a picture."""
        self._waiting.put(_Picture(step, name, png))

    def close(self) -> None:
        """Waits a minute at most for what is on its way, and says what is not sent by then."""
        self._waiting.put(None)
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive() or not self._waiting.empty():
            self._say(
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
        """Calls a function; False where the tracker cannot take it now."""
        try:
            act()
        except Exception as error:  # Whatever the library raises: the training goes on.
            if not self._warned:
                line = str(error) if isinstance(error, UserError) else f"{self._name}: {error}"
                self._say(f"warning: {' '.join(line.split())}; training goes on, and tries again")
            self._warned = True
            return False
        self._warned = False
        return True

    def _send(self, item: _Row | _Picture) -> None:
        """Sends what of an item was not sent before."""
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
        self._settling.append((time.monotonic() + tracker.settles_after, dict(sent)))
        settled = None
        while self._settling and self._settling[0][0] <= time.monotonic():
            _, settled = self._settling.popleft()
        if settled:
            self._keep(settled)

    def _keep(self, sent: dict) -> None:
        """Writes what was sent, unless the workdir was deleted, which the run's lock says."""
        with contextlib.suppress(FileNotFoundError):
            self._file.parent.mkdir(exist_ok=True)
            temporary = self._file.with_suffix(".tmp")
            temporary.write_text(json.dumps(sent) + "\n")
            temporary.replace(self._file)
