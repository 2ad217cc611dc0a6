"""Report of a run: an HTML file that is created from the files in the run's workdir."""

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import base_config, leaves, to_json
from vit_jax.data.sources import SOURCES
from vit_jax.errors import UserError
from vit_jax.evaluation.suites import SUITES
from vit_jax.inspection import page_charts
from vit_jax.inspection.html_page import inline, render, write_text
from vit_jax.interop.checkpoint import all_names, model_name, sketch
from vit_jax.models import count_multiply_adds, count_parameters, read_options
from vit_jax.models.model_card import parameter_shapes
from vit_jax.options.model import ImageOptions
from vit_jax.paths import CONFIG
from vit_jax.progress import duration
from vit_jax.runs.answer_sections import answer_figures
from vit_jax.runs.bucket import shown
from vit_jax.runs.goodput import KINDS, read_rows
from vit_jax.runs.predictions import CLASS_FIGURES, Predictions, kept, metric_in_words
from vit_jax.runs.report_pictures import SEEN, kept_pictures
from vit_jax.runs.retrievals import Retrievals, kept_retrievals, retrieval_figures
from vit_jax.runs.suite_pages import suite_pages
from vit_jax.runs.workdir import (
    METRICS,
    RECONSTRUCTIONS,
    REPORT,
    SEEN_FOLDER,
    SavedRun,
    ends_run,
    saved_run,
)
from vit_jax.runs.worst_images import kept_worst
from vit_jax.training.objectives import OBJECTIVES
from vit_jax.training.objectives.objective import Objective, in_format

REFRESH_SECONDS = 10  # Reload interval of a page that is served while its run trains.


def _of_each_split(name: str) -> dict[str, str]:
    return {f"train/{name}": "training", f"dev/{name}": "dev", f"test/{name}": "test"}


ENTROPIES = {"train/teacher_entropy": "teacher", "train/student_entropy": "student"}
ENTROPIES |= {"train/kl": "student's divergence"}

# Panels of curves: title, curves and scale of each panel. The curves map a metric's key in
# `metrics.jsonl` to its label in the legend. Values are multiplied by the scale for display.
CURVES = (
    ("Loss", _of_each_split("loss"), 1),
    ("Accuracy, %", _of_each_split("accuracy"), 100),
    ("Accuracy in hidden patches, %", _of_each_split("patch_accuracy"), 100),
    ("Views nearest to their image's other view, %", _of_each_split("views_matched"), 100),
    ("Entropy over prototypes, nats", ENTROPIES, 1),
    ("Prototypes in use, effective number", {"train/prototypes_used": ""}, 1),
    ("Spread of the features about their mean", _of_each_split("spread"), 1),
    ("Learning rate", {"train/learning_rate": ""}, 1),
    ("Throughput, images/s", {"train/images_per_second": ""}, 1),
)


class RunFiles(NamedTuple):
    """The files of a run's workdir."""

    workdir: Path
    saved: SavedRun
    rows: list[dict]  # Rows of `metrics.jsonl`.
    # Predictions of the last evaluation; None: no labels, or no evaluation yet.
    predictions: Predictions | None
    # Captions of the last evaluation with their most similar images; None: no captions, or no
    # evaluation yet.
    retrievals: Retrievals | None = None
    # The worst images of the last evaluation, as variables of the template `segments.html`; None:
    # the objective has no metric of single images, or no evaluation yet.
    worst: dict[str, Any] | None = None

    @property
    def step(self) -> int:
        """Number of the last logged step."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def finished(self) -> bool:
        """True if the run has ended, that is, its final evaluation was written."""
        steps = self.saved.manifest["steps"]
        return any(ends_run(row, steps) for row in self.rows)

    @property
    def kept_step(self) -> int | None:
        """Step of the best parameters, if the run kept these; None: it kept the last parameters."""
        return next((row["kept/step"] for row in reversed(self.rows) if "kept/step" in row), None)

    @property
    def probe(self) -> dict[str, float]:
        """Metrics of the linear probe at the start of the run; empty: no linear probe."""
        return next((row for row in self.rows if row["step"] == 0 and "test/loss" in row), {})

    @property
    def evaluated(self) -> list[dict]:
        """Rows of `metrics.jsonl` that contain an evaluation."""
        return [row for row in self.rows if "test/loss" in row or "dev/loss" in row]

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of the last evaluation, such as `test/accuracy`; empty before an evaluation."""
        evaluated = self.evaluated
        if not evaluated:
            return {}
        row = evaluated[-1]
        if (kept := self.kept_step) is not None:
            of_dev = next(row for row in evaluated if row["step"] == kept and "dev/loss" in row)
            row = {key: x for key, x in of_dev.items() if key.startswith("dev/")} | row
        return {key: x for key, x in row.items() if "/" in key}

    @property
    def formats(self) -> dict[str, str]:
        """Formats of the metrics (`share` or `number`), by name."""
        return CLASS_FIGURES | self.saved.manifest.get("metrics", {"accuracy": "share"})

    @property
    def labelled(self) -> bool:
        """True if the objective uses labels."""
        kind = OBJECTIVES.get(self.saved.config.objective.name)
        return bool(self.saved.manifest["num_classes"]) and (kind is None or kind.labels)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; a class without a name has its index as the name."""
        names, classes = self.saved.manifest["class_names"], self.saved.manifest["num_classes"]
        return all_names(names, classes) or tuple(map(str, range(classes)))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the run so far, by kind of work, such as `train` or `evaluate`."""
        timed = [row for row in self.rows if "time/train" in row]
        return {kind: timed[-1][f"time/{kind}"] for kind in KINDS} if timed else {}


def read_run(workdir: Path) -> RunFiles:
    """Reads a run's files, which it may write meanwhile; raises UserError if they are damaged."""
    saved = saved_run(workdir)
    if saved is None:
        raise UserError(f"no run in {shown(workdir)}: it has no {CONFIG}")
    rows = read_rows(workdir / METRICS)
    found = kept(workdir), kept_retrievals(workdir), kept_worst(workdir)
    return RunFiles(workdir, saved, rows, *found)


def write_report(workdir: Path) -> Path:
    """Writes `report.html` into the workdir; returns its path."""
    return write_text(workdir / REPORT, run_page(read_run(workdir)))


def title_of(saved: SavedRun) -> str:
    """Returns the title of a run, such as `ViT-B/16 fine-tuned on pets`."""
    config = saved.config
    options = _options_of(saved.manifest)
    name = model_name(options) if options else config.model.name or "a model"
    objective = config.objective.name
    done = "fine-tuned" if config.finetune.checkpoint else "trained"
    by = "" if objective == "classification" else f" by {objective}"
    return f"{name} {done}{by} on {data_name(config)}"


def data_name(config) -> str:
    """Returns the name of a config's training data, without parent folders."""
    data = config.data
    if data.parts:
        return " + ".join(_named(*part.partition(":")[::2]) for part in data.parts)
    return _named(data.source, data.path)


def _named(source: str, path: str) -> str:
    kind = SOURCES.get(source)
    if source == "handed_in":
        return "data of a program"
    return (kind and path and kind.name_of(path.rstrip("/"))) or source


def run_page(run: RunFiles, live: bool = False) -> str:
    """Returns the report as HTML; `live`: it reloads itself until the run is finished."""
    manifest = run.saved.manifest
    drawn = kept_pictures(run.workdir / RECONSTRUCTIONS)
    return render(
        "run.html",
        title=title_of(run.saved),
        refresh=REFRESH_SECONDS if live and not run.finished else None,
        head=_head(run),
        numbers=numbers_of(run),
        answers=run.predictions and answer_figures(run.predictions, run.class_names),
        retrievals=run.retrievals and retrieval_figures(run.retrievals),
        segments=run.worst,
        pages=suite_pages(run.workdir),
        no_answers=_why_no_answers(run),
        curves=curves(run.rows),
        provenance=provenance(run.saved),
        command=manifest.get("command"),
        split="Dev" if "dev" in manifest["images"] else "Test",
        picture_rows=OBJECTIVES.get(run.saved.config.objective.name, Objective).picture_rows,
        reconstructions={caption: inline(png) for caption, png in drawn.items()},
        seen=_seen(run.workdir / SEEN_FOLDER),
        parameters=parameter_table(manifest),
        changed=[(key, *values) for key, values in changed_values(run.saved).items()],
        config=to_json(run.saved.config),
    )


def _head(run: RunFiles) -> dict[str, str]:
    """Returns the last evaluation's metrics and the run's progress, as texts by label."""
    steps = run.saved.manifest["steps"]
    far = f"{run.step:,} steps" if run.finished else f"step {run.step:,} of {steps:,}"
    if not run.figures:
        first = min(run.saved.config.evaluate_every, steps)
        return {"evaluated": f"not yet: the first comes at step {first:,}", "now at": far}
    rows = _figures_in_words(run)
    if run.kept_step is not None:
        probe = " (the linear probe)" if run.kept_step == 0 and run.probe else ""
        rows["kept"] = f"step {run.kept_step:,}{probe}, the best on the dev images"
    evaluated = max(row["step"] for row in run.evaluated)
    rows["evaluated"] = f"step {evaluated:,}" + ("" if run.finished else f"; now at {far}")
    return rows


def _figures_in_words(run: RunFiles) -> dict[str, str]:
    """Returns the metrics of the last evaluation and of the linear probe, as texts by label."""
    rows = {}
    for key, value in run.figures.items():
        split, _, name = key.partition("/")
        if split in ("dev", "test"):
            rows[f"{split} {metric_in_words(name)}"] = figure(key, value, run.formats, run.figures)
    for split in ("dev", "test"):
        if (key := f"{split}/accuracy") in run.probe:
            text = figure(key, run.probe[key], run.formats, run.probe)
            rows[f"linear probe, {split} accuracy"] = text
    return rows


def figure(
    key: str, value: float | None, formats: Mapping[str, str], figures: Mapping[str, float]
) -> str:
    """Formats a metric. For an accuracy, the standard error over the images is added.

    Args:
      formats: formats of the metrics (`share` or `number`), by name.
      figures: all metrics, among them the number of images.
    """
    split, _, name = key.partition("/")
    if value is None:
        return "not finite"
    if name == "images":
        return f"{value:,.0f}"
    text = in_format(value, formats.get(name, "number"))
    if name == "accuracy" and (images := figures.get(f"{split}/images")):
        text += f" ± {100 * math.sqrt(max(value * (1 - value), 0) / images):.2f}"
    return text


def curves(rows: Sequence[dict]) -> list[str]:
    """Draws all metrics over the steps; returns an SVG for each panel."""
    drawn = []
    for title, lines, scale in panels_of(rows):
        points = {name: points_of(rows, key, scale) for key, name in lines.items()}
        if any(points.values()):
            marked = [name for name in points if name not in ("", "training")]
            drawn.append(page_charts.curve(title, points, marked))
    return drawn


def points_of(rows: Sequence[dict], key: str, scale: float = 1) -> list[tuple[float, float]]:
    """Returns the finite points (step, scale * value) of a metric."""
    return [(row["step"], scale * row[key]) for row in rows if row.get(key) is not None]


def panels_of(rows: Sequence[dict]) -> list[tuple[str, dict[str, str], int]]:
    """Returns the panels of curves: those of `CURVES`, and one for each evaluation suite."""
    keys, panels = dict.fromkeys(key for row in rows for key in row), [*CURVES]
    for name, suite in SUITES.items():
        lines = {key: key.removeprefix(f"{name}/") for key in keys if key.startswith(f"{name}/")}
        panels.append((f"{suite.title}, %", lines, 100))
    return panels


def _why_no_answers(run: RunFiles) -> str:
    """Returns the reason why the report of an evaluated run shows no predictions.

    Empty: no evaluation yet, or the report shows other results, such as retrieved images.
    """
    if not run.figures or run.retrievals or run.worst:
        return ""
    return (
        "the run kept none, as of earlier versions" if run.labelled else "it trains without labels"
    )


def _seen(folder: Path) -> dict[str, str]:
    """Returns data URLs of the run's attention maps of test images, by caption."""
    kinds = {".png": "png", ".svg": "svg+xml"}  # An SVG in an <img> element cannot run scripts.
    return {
        caption: inline(file.read_bytes(), kinds[file.suffix])
        for name, caption in SEEN.items()
        if (file := folder / name).is_file()
    }


def numbers_of(run: RunFiles) -> dict[str, str]:
    """Returns the run's time, speed, model size, data size and FLOPs, as texts by label."""
    saved, manifest = run.saved, run.saved.manifest
    lines = {}
    if seconds := run.seconds:
        total = sum(seconds.values())
        shares = ", ".join(
            f"{KINDS[kind]} {x / total:.0%}"
            for kind, x in sorted(seconds.items(), key=lambda item: -item[1])
            if x >= total / 200
        )
        lines["time"] = f"{duration(total)}: {shares}"
    if speeds := [speed for _, speed in points_of(run.rows, "train/images_per_second")]:
        lines["speed"] = f"{float(np.median(speeds)):,.0f} images/s in training"
    if cost := model_cost_of(manifest):
        height, width = cost.image_size
        lines["model"] = (
            f"{with_unit(cost.parameters)} parameters, {with_unit(cost.multiply_adds)} "
            f"multiply-adds for an image of {width} × {height} pixels"
        )
    images = saved.config.batch_size * run.step
    lines["trained on"] = f"{images:,} images in {run.step:,} steps of {saved.config.batch_size:,}"
    sizes = manifest["images"]
    lines["trained on"] += f": {images / max(sizes['train'], 1):,.1f} epochs"
    if flops := manifest.get("flops"):
        lines["computed"] = f"{flops * images:.3g} FLOPs in training, {flops:.3g} for each image"
    words = {"train": "to train", "dev": "to choose by", "test": "to test"}
    lines["data"] = ", ".join(
        f"{sizes[split]:,} {words[split]}" for split in words if split in sizes
    )
    if run.labelled:
        lines["data"] += f"; {manifest['num_classes']:,} classes"
    return lines


def provenance(saved: SavedRun) -> dict[str, str]:
    """Returns the run's data, checkpoint, devices, code and versions, as texts by label."""
    config, manifest = saved.config, saved.manifest
    data = config.data
    lines = {"from": ", ".join(data.parts) if data.parts else f"{data.source} {data.path}".strip()}
    if config.finetune.checkpoint:
        lines["began with"] = config.finetune.checkpoint
    if started := manifest.get("started"):
        lines["started"] = started
    lines["devices"] = f"{manifest['devices']}, {manifest['processes']} process(es)"
    if commit := short_commit(manifest):
        lines["commit"] = commit
    lines["versions"] = ", ".join(
        f"{name} {version}" for name, version in manifest["versions"].items()
    )
    return lines


def short_commit(manifest: dict) -> str:
    """Returns the commit's first digits, with `, changed` for changed files; empty: unknown."""
    commit, comma, changed = manifest.get("commit", "").partition(",")
    return commit[:12] + comma + changed


class ModelCost(NamedTuple):
    """A model's number of parameters, and the multiply-adds of one image's forward pass."""

    parameters: int
    multiply_adds: int
    image_size: tuple[int, int]


def model_cost_of(manifest: dict) -> ModelCost | None:
    """Returns the cost of a run's model; None: this version of vit_jax lacks the model family."""
    return _cost(json.dumps({"model": manifest["model"]}, sort_keys=True))


@functools.lru_cache(maxsize=64)
def _cost(manifest: str) -> ModelCost | None:
    if (options := _options_of(json.loads(manifest))) is None:
        return None
    made = sketch(options)
    return ModelCost(count_parameters(made), count_multiply_adds(made), made.image_size)


def _options_of(manifest: dict) -> ImageOptions | None:
    """Returns the options of a run's model; None: this version of vit_jax lacks the model."""
    try:
        return read_options(manifest["model"])
    except UserError:
        return None


def parameter_table(manifest: dict) -> dict | None:
    """Returns the total number of parameters, and a table of parameters.

    A row contains the name and shape of a parameter, and the number of its values. The same
    parameter of several layers has one row.

    Returns:
      None if this version of vit_jax does not support the model.
    """
    if (options := _options_of(manifest)) is None:
        return None
    made, groups = sketch(options), {}
    for path, shape in parameter_shapes(made).items():
        groups.setdefault((re.sub(r"(?<=/)\d+(?=/)", "*", path), shape), []).append(path)
    rows = []
    for (pattern, shape), paths in groups.items():
        name, times = (pattern, f"{len(paths)} × ") if len(paths) > 1 else (paths[0], "")
        rows.append((name, " × ".join(map(str, shape)), f"{times}{math.prod(shape):,}"))
    return {"count": count_parameters(made), "rows": rows}


def with_unit(number: float) -> str:
    """Formats a number with an SI prefix, such as `85.8 M`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def changed_values(saved: SavedRun) -> dict[str, tuple[Any, Any]]:
    """Returns config values that differ from their defaults: (value, default) by key."""
    defaults = dict(leaves(base_config()))
    return {
        key: (value, defaults.get(key))
        for key, value in leaves(saved.config)
        if _plain(value) != _plain(defaults.get(key))
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
