"""What an evaluation found so far: kept after each figure, shown as a table and as bars."""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from vit_jax import published
from vit_jax.data.sources.vtab import GROUPS, TASKS
from vit_jax.errors import UserError

SUITES = {
    "imagenet": "ImageNet and its other test sets, top-1",
    "vtab": "VTAB-1k, top-1 after fine-tuning on 1,000 images",
    "fewshot": "Few-shot linear evaluation of the frozen network",
    "probe": "k-NN and linear probe on all training images",
}
# The paper's figures for a suite, of `vit_jax.published`.
PUBLISHED = {"imagenet": ("table2", "objectnet"), "vtab": ("table9",)}


class Row(NamedTuple):
    """A figure, or why there is none."""

    suite: str
    name: str
    accuracy: float | None = None  # From 0 to 1.
    deviation: float | None = None  # Standard deviation over seeds (n - 1).
    images: int | None = None  # That were scored.
    note: str = ""


Rows = Mapping[tuple[str, str], Row]  # By suite and name.


class Results:
    """The rows in a folder, of one checkpoint; `put` writes all of them.

    Raises:
      UserError: the folder holds another checkpoint's, or other files.
    """

    def __init__(self, folder: Path, checkpoint: str, description: str):
        self.folder, self._file = folder, folder / "results.json"
        self._temporary = self._file.with_suffix(".tmp")
        self._about = {"checkpoint": checkpoint, "model": description, "settings": {}}
        self.rows: dict[tuple[str, str], Row] = {}
        if self._file.exists():
            try:
                saved = json.loads(self._file.read_text())
                theirs, self._about["settings"] = saved["checkpoint"], saved["settings"]
                self.rows = {(row["suite"], row["name"]): Row(**row) for row in saved["rows"]}
            except (ValueError, LookupError, TypeError) as error:
                raise UserError(f"{self._file} is not of this command; give another --out") from error
            if theirs != checkpoint:
                raise UserError(f"{folder} has results of {theirs}; give another --out")
        elif folder.exists() and (not folder.is_dir() or {*folder.iterdir()} - {self._temporary}):
            raise UserError(f"{folder} holds files but no results; give a new or empty --out")
        folder.mkdir(parents=True, exist_ok=True)
        self.put()  # From here on the folder is ours, whatever a suite writes into it first.

    def begin(self, suite: str, settings: dict) -> None:
        """Takes down what a suite's figures depend on.

        Raises:
          UserError: there are figures that other settings gave.
        """
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
                f"{self.folder} has results of {suite} with other settings ({differing}); give another --out"
            )
        self._about["settings"][suite] = settings
        self.put()

    def has(self, suite: str, *names: str) -> bool:
        """Whether the figures are all there."""
        rows = [self.rows.get((suite, name)) for name in names]
        return all(row is not None and row.accuracy is not None for row in rows)

    def put(self, *rows: Row) -> None:
        """Adds rows in the place of older ones."""
        self.rows |= {(row.suite, row.name): row for row in rows}
        text = json.dumps(self._about | {"rows": [row._asdict() for row in self.rows.values()]}, indent=2)
        self._temporary.write_text(text + "\n")
        self._temporary.replace(self._file)

    def markdown(self) -> str:
        """A table for each suite, the paper's figures beside ours."""
        parts = [f"# {self._about['model']}"]
        for suite, title in SUITES.items():
            rows = [row for row in self.rows.values() if row.suite == suite]
            if not rows:
                continue
            printed = published_figures(suite)
            if suite == "vtab":
                ours = vtab_figures(self.rows)
                for name, tasks in vtab_groups(ours).items():
                    rows.append(Row(suite, f"**{name}**", mean(ours, tasks)))
                    for figures in printed.values():
                        figures[f"**{name}**"] = round(mean(figures, tasks) + 1e-9, 2)  # Halves go up.
            header = ["", "ours, %", "images", *(f"{column}, paper" for column in printed), "note"]
            cells = [
                [
                    row.name,
                    in_per_cent(row),
                    "" if row.images is None else f"{row.images:,}",
                    *(str(figures.get(row.name, "")) for figures in printed.values()),
                    row.note,
                ]
                for row in rows
            ]
            table = [header, ["---"] * len(header), *cells]
            lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table]
            parts += [f"## {title}", "\n".join(lines)]
        return "\n\n".join(parts) + "\n"


def in_per_cent(row: Row) -> str:
    """Accuracy and deviation."""
    if row.accuracy is None:
        return ""
    return f"{100 * row.accuracy:.2f}" + ("" if row.deviation is None else f" ± {100 * row.deviation:.2f}")


def vtab_figures(rows: Rows) -> dict[str, float]:
    """Accuracies by task, of those that are there."""
    return {
        row.name: row.accuracy for row in rows.values() if row.suite == "vtab" and row.accuracy is not None
    }


def vtab_groups(there: Collection[str]) -> dict[str, list[str]]:
    """The tasks that are there, of all and of each group; the key says how many lack."""
    groups = {"VTAB-19": [task.name for task in TASKS.values()]}
    groups |= {group: [task.name for task in TASKS.values() if task.group == group] for group in GROUPS}
    found = {}
    for group, tasks in groups.items():
        if names := [name for name in tasks if name in there]:
            lack = f", {len(names)} of {len(tasks)} tasks" if len(names) < len(tasks) else ""
            found[group + lack] = names
    return found


def mean(figures: Mapping[str, float], names: Collection[str]) -> float:
    """Of some of the figures."""
    return math.fsum(figures[name] for name in names) / len(names)


def published_figures(suite: str) -> dict[str, dict[str, float]]:
    """The paper's figures for a suite, in per cent, by model and row."""
    columns = {}
    for name in PUBLISHED.get(suite, ()):
        for model, figures in published.table(name).by_model().items():
            columns.setdefault(model, {}).update(figures)
    return columns


def draw(path: Path, rows: Rows) -> bool:
    """VTAB by groups as in the paper's figure 2, and few-shot accuracy over shots; whether there are any."""
    from matplotlib.figure import Figure

    vtab, few = vtab_figures(rows), {}
    for row in rows.values():
        if row.suite == "fewshot" and row.accuracy is not None:
            name, shots = row.name.rsplit(", ", 1)
            point = int(shots.split()[0]), 100 * row.accuracy, 100 * (row.deviation or 0)
            few.setdefault(name, []).append(point)
    panels = [draw_groups] * bool(vtab) + [draw_shots] * bool(few)
    if not panels:
        return False
    figure = Figure(figsize=(6.4 * len(panels), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if panel is draw_groups:
            ours = {name: 100 * accuracy for name, accuracy in vtab.items()}
            draw_groups(axes, {"ours": ours} | published_figures("vtab"))
        else:
            draw_shots(axes, few)
    figure.savefig(path, dpi=150)
    return True


def draw_groups(axes, figures: Mapping[str, Mapping[str, float]]) -> None:
    """Bars of each group, side by side for each model: means over the tasks that we have."""
    groups = vtab_groups(figures["ours"])
    width = 0.84 / len(figures)
    for place, (model, values) in enumerate(figures.items()):
        lefts = [x + place * width for x in range(len(groups))]
        bars = axes.bar(
            lefts, [mean(values, tasks) for tasks in groups.values()], width, label=model, align="edge"
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=6)
    axes.set_xticks([x + 0.42 for x in range(len(groups))], [name.replace(", ", "\n") for name in groups])
    axes.set(ylabel="top-1, %", ylim=(0, 100))
    axes.legend(frameon=False, fontsize="small", ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))


def draw_shots(axes, few: Mapping[str, list[tuple[int, float, float]]]) -> None:
    """Accuracy and its deviation over shots, a line for each data set."""
    for name, points in sorted(few.items()):
        axes.errorbar(*zip(*sorted(points), strict=True), fmt="o-", capsize=3, label=name)
    ticks = sorted({shots for points in few.values() for shots, _, _ in points})
    axes.set(xscale="log", xlabel="training images of each class", ylabel="accuracy, %")
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize="small")


def name_of_shots(name: str, shots: int) -> str:
    """Of the row of a data set in the suite `fewshot`."""
    return f"{name}, {shots} shot{'s' if shots > 1 else ''}"
