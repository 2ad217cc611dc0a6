"""Evaluation results: saved to a folder after each metric, and shown as tables and plots."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vit_jax import published
from vit_jax.errors import UserError
from vit_jax.evaluation.suite import Row, Suite, mean
from vit_jax.evaluation.suites import SUITES
from vit_jax.small_files import read_small

Rows = Mapping[tuple[str, str], Row]  # (name of the suite, name of the row) -> row.


class Results:
    """Evaluation results of one checkpoint, saved in a folder by the method `put`.

    Args:
      version: step of the checkpoint, and hash of its content. If the folder contains results of
        another version of the checkpoint, these results are removed.

    Attributes:
      outdated: message that lists the removed metrics.

    Raises:
      UserError: the folder has results of another checkpoint, or other files.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: str,
        description: str,
        version: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.folder, self._file = folder, folder / "results.json"
        self._temporary = self._file.with_suffix(".tmp")
        self._about = {"checkpoint": checkpoint, "version": dict(version), "model": description}
        self._about |= {"settings": {}, "data": {}}
        self.rows: dict[tuple[str, str], Row] = {}
        self.outdated = ""
        if self._file.exists():
            about, rows = _load(self._file)
            if about["checkpoint"] != checkpoint:
                raise UserError(
                    f"{folder} has results of {about['checkpoint']}; give another --out"
                )
            if about["version"] == self._about["version"]:
                self.rows = rows
                self._about |= {"settings": about["settings"], "data": about["data"]}
            else:
                steps = about["version"].get("step"), version.get("step")
                self.outdated = _outdated(folder, rows, *steps)
        elif folder.exists() and (not folder.is_dir() or {*folder.iterdir()} - {self._temporary}):
            raise UserError(f"{folder} contains files but no results; give a new or empty --out")
        folder.mkdir(parents=True, exist_ok=True)
        self.put()  # Marks the folder as results before a suite writes other files into it.

    def begin(self, suite: str, settings: dict) -> None:
        """Records a suite's settings; raises UserError if its metrics have other settings."""
        saved = self._about["settings"].get(suite, settings)
        if saved != settings and any(
            row.suite == suite and row.accuracy is not None for row in self.rows.values()
        ):
            differing = ", ".join(
                f"{key}: {saved.get(key)} -> {settings[key]}"
                for key in settings
                if saved.get(key) != settings[key]
            )
            raise UserError(
                f"{self.folder} has results of {suite} with other settings ({differing}); give "
                "another --out"
            )
        self._about["settings"][suite] = settings
        self.put()

    def has(self, suite: str, *names: str) -> bool:
        """Returns True if the suite's rows with these names are complete.

        A row is complete if it has a metric, or a note that the data do not allow the metric.
        Complete rows are not evaluated again.
        """
        rows = [self.rows.get((suite, name)) for name in names]
        return all(row and (row.accuracy is not None or row.images) for row in rows)

    def data_of(self, suite: str, name: str) -> str | None:
        """Returns the hash of the data from which the row `name` was computed; None if unknown."""
        return self._about["data"].get(suite, {}).get(name)

    def put(self, *rows: Row, data: Mapping[str, str | None] = MappingProxyType({})) -> None:
        """Adds or replaces rows, and saves all rows; `data` contains hashes by row name."""
        self.rows |= {(row.suite, row.name): row for row in rows}
        for row in rows:
            self._about["data"].setdefault(row.suite, {})[row.name] = data.get(row.name)
        text = json.dumps(
            self._about | {"rows": [row._asdict() for row in self.rows.values()]}, indent=2
        )
        self._temporary.write_text(text + "\n")
        self._temporary.replace(self._file)

    def markdown(self) -> str:
        """Returns a Markdown table for each suite, with published values for comparison."""
        parts = [f"# {self._about['model']}"]
        for suite in SUITES.values():
            rows = [row for row in self.rows.values() if row.suite == suite.name]
            if rows:
                parts += [f"## {suite.title}", _suite_table(suite, rows)]
        return "\n\n".join(parts) + "\n"


def _load(file: Path) -> tuple[dict[str, Any], dict[tuple[str, str], Row]]:
    """Loads the description of an evaluation, such as `checkpoint`, and rows by `(suite, name)`."""
    try:
        saved = json.loads(read_small(file))
        about = {key: saved[key] for key in ("checkpoint", "settings")}
        about |= {key: saved.get(key, {}) for key in ("version", "data")}
        return about, {(row["suite"], row["name"]): Row(**row) for row in saved["rows"]}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} cannot be read as results of an evaluation; give another --out"
        ) from error


def _suite_table(suite: Suite, rows: list[Row]) -> str:
    """Returns the Markdown table of a suite."""
    columns = published_figures(suite)
    measured = {row.name: row.accuracy for row in rows if row.accuracy is not None}
    for name, members in suite.means(measured).items():
        rows = [*rows, Row(suite.name, f"**{name}**", mean(measured, members))]
        for figures in columns.values():
            # The addition of 1e-9 makes `round` round halves up. Otherwise it could round 81.125 to
            # 81.12.
            figures[f"**{name}**"] = round(mean(figures, members) + 1e-9, 2)
    several_units = {row.unit for row in rows} != {"%"}
    ours = "ours" if several_units else "ours, %"
    header = ["", ours, "images", *(f"{column}, paper" for column in columns), "note"]
    cells = [_cells(row, columns.values(), several_units) for row in rows]
    table = [header, ["---"] * len(header), *cells]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table
    )


def _cells(row: Row, published: Iterable[Mapping[str, float]], sign: bool) -> list[str]:
    """Returns a table row's cells: name, our metric, number of images, published values and note.

    Args:
      published: for each published model, a dict from the name of a row to the model's value.
      sign: True: append the per cent sign to percentages.
    """
    theirs = [str(figures.get(row.name, "")) for figures in published]
    images = "" if row.images is None else f"{row.images:,}"
    return [row.name, formatted(row, sign), images, *theirs, row.note]


def _outdated(folder: Path, rows: Rows, step: int | None, step_now: int | None) -> str:
    """Returns a message that lists the metrics of another version of the checkpoint.

    Args:
      rows: result rows of the other version. If no row has a metric, the message is empty.
      step: training step of the other version; None: unknown.
      step_now: training step of the evaluated version; None: unknown.
    """
    figures = [f"{row.suite} {row.name}" for row in rows.values() if row.accuracy is not None]
    content = "another content of it"
    if step not in (None, step_now):
        content = f"step {step:,} of the checkpoint"
    if not figures:
        return ""
    return f"{folder} had figures of {content}, which are removed: {'; '.join(figures)}"


def in_words(rows: Iterable[Row]) -> list[str]:
    """Formats rows as log lines. Rows without a metric are grouped by their note."""
    lines, missing = [], dict[str, list[str]]()
    for row in rows:
        if row.accuracy is None:
            missing.setdefault(row.note, []).append(row.name)
        else:
            lines.append(f"{row.name}: {formatted(row, sign=True)}")
    return lines + [f"{', '.join(names)}: {note}" for note, names in missing.items()]


def formatted(row: Row, sign: bool = False) -> str:
    """Formats a result row's metric with std and unit; `sign`: with the per cent sign."""
    if row.accuracy is None:
        return ""
    if row.unit != "%":
        return f"{row.accuracy:.3f} {row.unit}".strip()
    std = "" if row.deviation is None else f" ± {100 * row.deviation:.2f}"
    return f"{100 * row.accuracy:.2f}{std}{' %' if sign else ''}"


def published_figures(suite: Suite) -> dict[str, dict[str, float]]:
    """Returns the published values of a suite, in per cent: `{model: {row: value}}`."""
    columns = {}
    for name in suite.published:
        for model, figures in published.table(name).by_model().items():
            columns.setdefault(model, {}).update(figures)
    return columns


def draw(path: Path, rows: Rows) -> bool:
    """Draws a panel for each suite with metrics and a plot; returns False if there is none."""
    from matplotlib.figure import Figure

    panels = []
    for suite in SUITES.values():
        ours = [
            row for row in rows.values() if row.suite == suite.name and row.accuracy is not None
        ]
        if suite.draw and ours:
            panels.append((suite, ours))
    if not panels:
        return False
    figure = Figure(figsize=(6.4 * len(panels), 4), layout="constrained")
    for axes, (suite, ours) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        suite.draw(axes, ours, published_figures(suite))
    figure.savefig(path, dpi=150)
    return True
