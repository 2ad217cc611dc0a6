"""Figures of benchmarks: tables, which are printed row by row, and a JSON file per benchmark."""

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from vit_jax.errors import UserError
from vit_jax.runs.workdir import commit_of_package, versions_here

PEERS = ("libtpu", "torch", "timm", "onnxruntime", "tensorflow", "safetensors", "scikit-image")
COMPILED = ("tpu", "crops")  # Their figures are the TPU compiler's, on any machine.


class Table:
    """A Markdown table. Each row is printed as soon as it is measured.

    Args:
      title: heading of the rows' names.
      columns: format of each column's numbers by heading, such as `{"images/s": ",.1f"}`.
      figures: figures of an earlier table, to which rows are added.

    Attributes:
      figures: the values by row and column.
    """

    def __init__(
        self,
        title: str,
        columns: Mapping[str, str],
        figures: dict[str, dict[str, Any]] | None = None,
    ):
        self.columns, self.figures = columns, {} if figures is None else figures
        self._printed: Counter[str] = Counter()  # Number of rows by name.
        print("| " + " | ".join([title, *columns]) + " |\n|" + "---|" * (1 + len(columns)))

    def row(self, name: str, *values: float | str | None) -> None:
        """Prints a row.

        Args:
          *values: a value for each column; None: the cell is empty. A text is printed as it is.
        """
        cells = dict(zip(self.columns, values, strict=True))
        known = {column: value for column, value in cells.items() if value is not None}
        self.figures.setdefault(self._key(name), {}).update(known)
        forms = {x: "" if isinstance(value, str) else self.columns[x] for x, value in cells.items()}
        texts = [format(known[x], form) if x in known else "" for x, form in forms.items()]
        print("| " + " | ".join([name, *texts]) + " |", flush=True)

    @contextlib.contextmanager
    def skipping(self, name: str) -> Iterator[None]:
        """Context in which a UserError skips a program; prints a row with the reason."""
        try:
            yield
        except UserError as error:
            self.skip(name, error)

    def skip(self, name: str, reason: Exception | str) -> None:
        """Prints a row with the reason why a program is not measured."""
        self.figures[self._key(f"{name}: skipped")] = {"reason": str(reason)}
        print(f"| {name}: skipped | {reason} |" + "|" * (len(self.columns) - 1), flush=True)

    def _key(self, name: str) -> str:
        """Returns the key of a new row: its name, with a number if an earlier row has the name."""
        self._printed[name] += 1
        return name if self._printed[name] == 1 else f"{name} ({self._printed[name]})"


def numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yields all numbers in nested figures, each with the names of its row and columns."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers(f"{name}, {key}" if name else key, inner)
    elif isinstance(value, int | float):
        yield name, value


def facts() -> dict[str, Any]:
    """Returns the conditions of a measurement: commit, versions, JAX's platform and the machine."""
    versions = versions_here()
    for package in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    backend, machine = jax.default_backend(), f"{os.cpu_count()} cores of {_cpu_model()}"
    if backend != "cpu":
        machine = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    commit = commit_of_package()
    return dict(commit=commit, versions=versions, platform=backend, machine=machine)


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.processor() or platform.machine()


def write_record(
    folder: str | Path,
    name: str,
    figures: Mapping[str, Any],
    conditions: Mapping[str, Any],
    complete: bool = True,
) -> None:
    """Writes a benchmark's figures and their conditions (`facts`) to NAME.json, which is replaced.

    `complete` is False if the benchmark has not finished yet.
    """
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--out=")]
    record = {
        "name": name,
        "arguments": arguments,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        **conditions,
        "complete": complete,
        "figures": figures,
    }
    file = Path(folder) / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1, default=float) + "\n")
    temporary.replace(file)


def read_record(folder: str | Path, name: str) -> dict[str, Any] | None:
    """Returns the content of NAME.json in a folder; None: the file is missing or damaged."""
    try:
        record = json.loads((Path(folder) / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "figures" in record else None


def changes(record: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Returns the conditions in which a record differs from `facts` now; [] if it is current."""
    keys = ["commit", "versions", *([] if record["name"] in COMPILED else ["machine"])]
    return [key for key in keys if record[key] != here[key]]


if __name__ == "__main__":
    print(json.dumps(facts()))
