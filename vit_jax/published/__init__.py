"""The results that the paper reports, as data: one file in `tables` for each table.

A file contains the `table` of the paper, the `unit` of its results, a `note` for the reader, the
`columns` and the `rows`. A column describes a model: its name, pre-training set, epochs, or other
properties. A row contains a result, or null, for each column. In a column with
`"baseline": true`, the results are of a model from another paper, for comparison.
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
    # Keys: `model`; optional: `pretraining`, `epochs`, `baseline`.
    columns: tuple[Mapping[str, Any], ...]
    rows: Mapping[str, tuple[float | None, ...]]

    def figure(self, row: str, **column: Any) -> float | None:
        """Returns the result in a row of the table, for the column with these properties.

        Args:
          row: name of the row.
          **column: properties of the column, such as `model="ViT-B/16", epochs=7`.

        Raises:
          UserError: the table has no such row, or not exactly one such column.
        """
        if row not in self.rows:
            raise UserError(f"{self.source} has no row {row!r}; {nearest(row, self.rows)}")
        heads = enumerate(self.columns)
        places = [place for place, head in heads if column.items() <= head.items()]
        if len(places) != 1:
            raise UserError(f"{self.source} has {len(places)} columns with {column}")
        return self.rows[row][places[0]]

    def by_model(self, baselines: bool = False) -> dict[str, dict[str, float]]:
        """Returns the results by column and row, such as `{"ViT-H/14, jft": {"ImageNet": 88.55}}`.

        The key of a column consists of its properties, such as model, pre-training set and epochs,
        separated by commas.

        Args:
          baselines: True: include columns of other papers' models.
        """
        figures = {}
        for place, head in enumerate(self.columns):
            if baselines or not head.get("baseline"):
                named = {key: value for key, value in head.items() if key != "baseline"}
                words = (f"{x} epochs" if key == "epochs" else x for key, x in named.items())
                printed = {row: cells[place] for row, cells in self.rows.items()}
                known = {row: figure for row, figure in printed.items() if figure is not None}
                figures[", ".join(words)] = known
        return figures


@functools.cache
def table(name: str) -> Table:
    """Reads a table by the name of its file, such as `table2`.

    Raises:
      UserError: there is no such file.
    """
    if name not in TABLES:
        raise UserError(f"no published table {name!r}; {nearest(name, TABLES)}")
    read = json.loads((FOLDER / f"{name}.json").read_text())
    rows = {row: tuple(figures) for row, figures in read["rows"].items()}
    source = f"{read['paper']}, {read['table'][0].lower()}{read['table'][1:]}"
    return Table(source, read["unit"], read["note"], tuple(read["columns"]), rows)
