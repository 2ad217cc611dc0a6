"""CSV files for spreadsheets. Texts that a spreadsheet would evaluate as formulas are escaped."""

import csv
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

ENCODING = "utf-8-sig"  # UTF-8 with a byte order mark. Without it, Excel assumes another encoding.
# First characters of texts that a spreadsheet evaluates as a formula.
_FORMULA = re.compile(r"[=+\-@\t\r\n＝＋－＠]")


class CsvWriter:
    """Writes rows to an open text file. Texts are quoted, and numbers are not.

    An apostrophe is written before a text that a spreadsheet would evaluate as a formula.
    """

    def __init__(self, file: TextIO):
        self._writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)

    def write(self, row: Sequence[Any]) -> None:
        """Writes a row of texts and numbers."""
        self._writer.writerow(
            [f"'{x}" if isinstance(x, str) and _FORMULA.match(x) else x for x in row]
        )


def file_cell(path: str) -> str:
    """Returns a relative path as a CSV cell. `./` is added to a path that starts like a formula."""
    return f"./{path}" if path != "-" and _FORMULA.match(path) else path


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV file atomically. Bytes in texts that are not UTF-8 are escaped."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("w", encoding=ENCODING, errors="backslashreplace", newline="") as file:
            writer = CsvWriter(file)
            writer.write(header)
            for row in rows:
                writer.write(row)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
