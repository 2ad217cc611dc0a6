"""Goodput: share of a run's total time that is spent on training steps.

The total time of a resumed run includes the time before it was resumed. Time that is not spent on
training steps is counted by kind of work, such as evaluation or waiting for images.
"""

import json
import time
from pathlib import Path

# Kinds of work and their descriptions. The goodput is the share of the time of the kind `train`.
KINDS = {
    "train": "training",
    "start": "starting and compiling",
    "data": "waiting for images",
    "evaluate": "evaluating",
    "save": "saving",
    "lost": "lost with runs that were killed",
}


class Ledger:
    """Timer that counts the seconds of each kind of work in `KINDS`.

    Args:
      started: `time.time()` when the command began.
      rows: rows of `metrics.jsonl` that a resumed run has written before. Counting continues from
        the seconds in these rows.
      first_step: the step from which the run continues. The time that a killed run has spent after
        this step is counted as `lost`.
    """

    def __init__(self, started: float, rows: list[dict], first_step: int):
        nothing = {f"time/{kind}": 0.0 for kind in KINDS}
        timed = [row for row in rows if nothing.keys() <= row.keys()]
        kept = [nothing] + [row for row in timed if row["step"] <= first_step]
        before, after = ([row[key] for key in nothing] for row in ([nothing, *timed][-1], kept[-1]))
        self.seconds = dict(zip(KINDS, after, strict=True))
        self.seconds["lost"] += sum(before) - sum(after)
        self._kind = "start"
        self._since = time.perf_counter() - (time.time() - started)

    def enter(self, kind: str) -> None:
        """Counts the time from now on as `kind`, such as `evaluate`."""
        now = time.perf_counter()
        self.seconds[self._kind] += now - self._since
        self._kind, self._since = kind, now

    def move(self, kind: str, seconds: float) -> None:
        """Moves `seconds` from the current kind of work to `kind`."""
        self.seconds[self._kind] -= seconds
        self.seconds[kind] += seconds

    def row(self) -> dict[str, float]:
        """Returns metrics: the seconds of each kind of work so far (`time/KIND`), and `goodput`."""
        self.enter(self._kind)
        return {f"time/{kind}": value for kind, value in self.seconds.items()} | {
            "goodput": self.seconds["train"] / sum(self.seconds.values())
        }

    def in_words(self) -> str:
        """Returns a line with the goodput, the total time, and other kinds' shares."""
        row = self.row()
        total = sum(self.seconds.values())
        rest = sorted(
            (kind for kind in KINDS if kind != "train"), key=lambda kind: -self.seconds[kind]
        )
        shares = ", ".join(
            f"{KINDS[kind]} {self.seconds[kind] / total:.1%}"
            for kind in rest
            if self.seconds[kind] >= total / 2000
        )
        return f"goodput {row['goodput']:.1%} of {total:,.0f} s" + (f"; {shares}" if shares else "")


def read_rows(path: Path) -> list[dict]:
    """Returns the rows of a `metrics.jsonl`. Lines that a crash has damaged are skipped."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # Invalid UTF-8 also raises a ValueError.
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
