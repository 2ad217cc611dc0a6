"""What an evaluation found so far: kept after each figure, shown as a table and as bars."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vit_jax.data.vtab import GROUPS, TASKS
from vit_jax.errors import UserError

SUITES = {
    "imagenet": "ImageNet and its other test sets, top-1",
    "vtab": "VTAB-1k, top-1 after fine-tuning on 1,000 images",
    "fewshot": "Few-shot linear evaluation of the frozen network",
    "probe": "k-NN and linear probe on all training images",
}
# The paper's figures for a suite, of experiments/expected.
PUBLISHED = {"imagenet": "table2.json", "vtab": "table9.json"}


class Row(NamedTuple):
    """A figure, or why there is none."""

    suite: str
    name: str
    accuracy: float | None = None  # From 0 to 1.
    deviation: float | None = None  # Standard deviation over seeds (n - 1).
    images: int | None = None  # That were scored.
    note: str = ""


class Results:
    """The rows in a folder, of one checkpoint; `put` writes all of them.

    Raises:
      UserError: the folder holds another checkpoint's, or other files.
    """

    def __init__(self, folder: Path, checkpoint: str, description: str):
        self.folder, self._file = folder, folder / "results.json"
        self._about = {"checkpoint": checkpoint, "model": description}
        self.rows: dict[tuple[str, str], Row] = {}
        if self._file.exists():
            saved = json.loads(self._file.read_text())
            if saved["checkpoint"] != checkpoint:
                raise UserError(f"{folder} has results of {saved['checkpoint']}; give another --out")
            self.rows = {(row["suite"], row["name"]): Row(**row) for row in saved["rows"]}
        elif folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} holds files but no results; give a new or empty --out")
        folder.mkdir(parents=True, exist_ok=True)

    def has(self, suite: str, *names: str) -> bool:
        """Whether the figures are all there."""
        rows = [self.rows.get((suite, name)) for name in names]
        return all(row is not None and row.accuracy is not None for row in rows)

    def put(self, *rows: Row) -> None:
        """Adds rows in the place of older ones."""
        self.rows |= {(row.suite, row.name): row for row in rows}
        text = json.dumps(self._about | {"rows": [row._asdict() for row in self.rows.values()]}, indent=2)
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(self._file)

    def markdown(self, expected: Path) -> str:
        """A table for each suite, the paper's figures beside ours.

        Args:
          expected: the folder `experiments/expected`; without it there are none.
        """
        parts = [f"# {self._about['model']}\n"]
        for suite, title in SUITES.items():
            rows = [row for row in self.rows.values() if row.suite == suite]
            if not rows:
                continue
            published = read_published(expected / PUBLISHED[suite]) if suite in PUBLISHED else {}
            if suite == "vtab":
                rows += [Row(suite, f"**{name}**", *mean) for name, mean in vtab_means(self.rows).items()]
            columns = list(published)
            parts.append(f"## {title}\n")
            parts.append("| | ours | images | " + "".join(f"{column} (paper) | " for column in columns))
            parts.append("|---|---|---|" + "---|" * len(columns))
            for row in rows:
                ours = cell(row.accuracy, row.deviation) or row.note
                key = row.name.strip("*").split(",")[0]
                cells = [published[column].get(key) for column in columns]
                theirs = "".join(f"{'' if figure is None else f'{figure:.2f}'} | " for figure in cells)
                images = "" if row.images is None else f"{row.images:,}"
                parts.append(f"| {row.name} | {ours} | {images} | {theirs}")
            parts.append("")
        return "\n".join(parts)


def cell(accuracy: float | None, deviation: float | None = None) -> str:
    """An accuracy in per cent."""
    if accuracy is None:
        return ""
    return f"{100 * accuracy:.2f}" + (f" ± {100 * deviation:.2f}" if deviation else "")


def vtab_means(rows: Mapping[tuple[str, str], Row]) -> dict[str, tuple[float, None]]:
    """Mean accuracy (and no deviation) of each group of tasks and of all; the name says what is missing."""
    means = {}
    for group in (*GROUPS, "all"):
        names = [task.name for task in TASKS.values() if group in (task.group, "all")]
        found = [rows[key].accuracy for name in names if (key := ("vtab", name)) in rows]
        found = [accuracy for accuracy in found if accuracy is not None]
        missing = f", {len(found)} of {len(names)} tasks" if len(found) < len(names) else ""
        if found:
            means[f"VTAB-19{missing}" if group == "all" else f"{group}{missing}"] = (
                math.fsum(found) / len(found),
                None,
            )
    return means


def read_published(path: Path) -> dict[str, dict[str, float]]:
    """Per cent by model and row, of the paper's ViTs; with VTAB's means."""
    if not path.is_file():
        return {}
    table = json.loads(path.read_text())
    columns = {
        f"{column['model']}, {column['pretraining']}": {
            name: figures[index] for name, figures in table["rows"].items() if figures[index] is not None
        }
        for index, column in enumerate(table["columns"])
        if column["model"].startswith("ViT")
    }
    if path.name == PUBLISHED["vtab"]:
        for figures in columns.values():
            rows = {("vtab", name): Row("vtab", name, value / 100) for name, value in figures.items()}
            figures |= {name: 100 * mean for name, (mean, _) in vtab_means(rows).items()}
    return columns


def draw(path: Path, rows: Mapping[tuple[str, str], Row], expected: Path) -> None:
    """VTAB by groups as in the paper's figure 2, and few-shot accuracy over shots, as far as known."""
    from matplotlib.figure import Figure

    vtab = {name: 100 * mean for name, (mean, _) in vtab_means(rows).items()}
    few = {}
    for row in rows.values():
        if row.suite == "fewshot" and row.accuracy is not None:
            name, shots = row.name.rsplit(", ", 1)
            few.setdefault(name, []).append(
                (int(shots.split()[0]), 100 * row.accuracy, 100 * (row.deviation or 0))
            )
    panels = [panel for panel, there in (("vtab", vtab), ("few", few)) if there]
    if not panels:
        return
    figure = Figure(figsize=(6 * len(panels), 3.8), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if panel == "vtab":
            draw_groups(axes, {"ours": vtab} | read_published(expected / PUBLISHED["vtab"]))
        else:
            for name, points in sorted(few.items()):
                shots, accuracies, deviations = zip(*sorted(points), strict=True)
                axes.errorbar(shots, accuracies, deviations, fmt="o-", capsize=3, label=name)
            axes.set(xscale="log", xlabel="training images of each class", ylabel="accuracy, %")
            axes.set_xticks(shots, [str(count) for count in shots])
            axes.minorticks_off()
            axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def draw_groups(axes, figures: Mapping[str, Mapping[str, float]]) -> None:
    """Bars of each group, side by side for each model."""
    groups = ["VTAB-19", *GROUPS]

    def of_group(values: Mapping[str, float], group: str) -> float:
        return next((value for name, value in values.items() if name.split(",")[0] == group), math.nan)

    width = 0.8 / len(figures)
    for place, (model, values) in enumerate(figures.items()):
        heights = [of_group(values, group) for group in groups]
        lefts = [x + place * width for x in range(len(groups))]
        axes.bar(lefts, heights, width, label=model, align="edge")
    axes.set_xticks([x + 0.4 for x in range(len(groups))], groups)
    axes.set(ylabel="top-1, %", ylim=(0, 100))
    axes.legend(frameon=False, fontsize="small")


def names_of_shots(name: str, shots: Sequence[int]) -> list[str]:
    """Of the rows of a data set in the suite `fewshot`."""
    return [f"{name}, {count} shot{'s' if count > 1 else ''}" for count in shots]
