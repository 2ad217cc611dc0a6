"""Predictions as lines of text, JSON lines and CSV, on standard output or in a file."""

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from vit_jax.spreadsheet import ENCODING, CsvWriter, file_cell

SUFFIXES = {".csv": "csv", ".jsonl": "json", ".json": "json", ".txt": "text"}


def most_named(top: int, threshold: float | None, probabilities: str) -> int:
    """Returns the maximum number of classes that an image can have in the output.

    Softmax probabilities have the sum 1, so at most 1 / threshold classes can reach the threshold.

    Args:
      top: maximum number of classes without a threshold.
      threshold: minimum probability of a class; None: no threshold.
      probabilities: function from logits to probabilities: `softmax` or `sigmoid`.
    """
    exclusive = threshold and probabilities == "softmax"
    # Without the tolerance of 0.1 %, rounding errors could exclude a class whose probability is
    # equal to the threshold.
    return min(top, math.floor(1.001 / threshold)) if exclusive else top


@contextlib.contextmanager
def written_to(file: Path | None, form: str, columns: int) -> Iterator[Callable[[Any], None]]:
    """Yields a function that writes predictions to a file, atomically, or to standard output."""
    if file is None:
        yield writer_of(sys.stdout, form, columns)
        return
    temporary = file.with_name(f".{file.name}.tmp")
    try:
        encoding = ENCODING if form == "csv" else "utf-8"
        errors = "backslashreplace" if form == "csv" else "surrogateescape"
        with temporary.open("w", encoding=encoding, errors=errors, newline="") as opened:
            yield writer_of(opened, form, columns)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def writer_of(stream: TextIO, form: str, columns: int) -> Callable[[Any], None]:
    """Returns a function that writes a prediction as a line to a stream."""
    if form == "csv":
        rows = CsvWriter(stream)
        numbers = ["", *(f"_{number}" for number in range(2, columns + 1))]
        rows.write(
            [
                "file",
                *(f"{name}{number}" for number in numbers for name in ("class", "probability")),
            ]
        )

        def write_row(prediction: Any) -> None:
            named = zip(prediction.classes, prediction.probabilities, strict=True)
            cells = [cell for pair in named for cell in pair]
            rows.write([file_cell(prediction.image), *cells, *[None] * (2 * columns - len(cells))])
            stream.flush()

        return write_row

    def write_line(prediction: Any) -> None:
        # Names of files may contain line breaks. They are escaped, so that each prediction has one
        # line.
        line = str(prediction).replace("\n", "\\n").replace("\r", "\\r")
        if form == "json":
            named = zip(prediction.classes, prediction.probabilities, strict=True)
            found = [{"class": name, "probability": chance} for name, chance in named]
            line = json.dumps({"path": prediction.image, "predictions": found})
        print(line, file=stream, flush=True)

    return write_line
