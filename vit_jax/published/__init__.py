"""The figures that the paper prints, as data: one file of `tables` each, with where each figure
stands.

A file has the `table` of the paper, the `unit` of its figures, a `note` on what its reader should
know, the
`columns` (model, pre-training set, epochs, or what else each is of) and the `rows`, with a figure
or none (null) for each column. A column with `"baseline": true` is of another paper's model, which
this paper compares its own with.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vit_jax.errors import UserError, nearest

FOLDER = Path(__file__).parent / "tables"
TABLES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


class Table(NamedTuple):
    """A table of the paper."""

    source: str  # Paper and table.
    unit: str
    note: str
    columns: tuple[Mapping[str, Any], ...]  # `model`, perhaps `pretraining`, `epochs`, `baseline`.
    rows: Mapping[str, tuple[float | None, ...]]

    def figure(self, row: str, **column: Any) -> float | None:
        """The figure of a row in the column that has these values, such as `model="ViT-B/16",
        epochs=7`.

        Raises:
          UserError: the table has no such row, or not one such column.
        """
        if row not in self.rows:
            raise UserError(f"{self.source} has no row {row!r}; {nearest(row, self.rows)}")
        places = [
            place for place, head in enumerate(self.columns) if column.items() <= head.items()
        ]
        if len(places) != 1:
            raise UserError(f"{self.source} has {len(places)} columns with {column}")
        return self.rows[row][places[0]]

    def by_model(self, baselines: bool = False) -> dict[str, dict[str, float]]:
        """The figures of the paper's own models, by "model, pre-training set" and what else tells
        the columns apart, such as "7 epochs", and by row.

        Args:
          baselines: those of other papers' models too.
        """
        figures = {}
        for place, head in enumerate(self.columns):
            if baselines or not head.get("baseline"):
                name = ", ".join(
                    f"{value} epochs" if key == "epochs" else value
                    for key, value in head.items()
                    if key != "baseline"
                )
                printed = {row: cells[place] for row, cells in self.rows.items()}
                figures[name] = {
                    row: figure for row, figure in printed.items() if figure is not None
                }
        return figures


@functools.cache
def table(name: str) -> Table:
    """The table of a file, such as `table2`.

    Raises:
      UserError: there is no such file.
    """
    if name not in TABLES:
        raise UserError(f"no published table {name!r}; {nearest(name, TABLES)}")
    read = json.loads((FOLDER / f"{name}.json").read_text())
    rows = {row: tuple(figures) for row, figures in read["rows"].items()}
    source = f"{read['paper']}, {read['table'][0].lower()}{read['table'][1:]}"
    return Table(source, read["unit"], read["note"], tuple(read["columns"]), rows)
