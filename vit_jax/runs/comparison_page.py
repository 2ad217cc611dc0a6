"""HTML page that compares runs. It is created from the files in the runs' workdirs."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vit_jax.config import leaves
from vit_jax.inspection import page_charts
from vit_jax.inspection.html_page import render
from vit_jax.progress import duration
from vit_jax.runs.data_identity import KEYS, differences
from vit_jax.runs.predictions import Predictions, by_class, metric_in_words
from vit_jax.runs.run_page import (
    REFRESH_SECONDS,
    RunFiles,
    figure,
    model_cost_of,
    panels_of,
    points_of,
    short_commit,
    title_of,
    with_unit,
)

MOST_CLASSES = 30  # Maximum number of classes in the table.


def comparison_page(runs: Sequence[RunFiles], live: bool = False) -> str:
    """Returns the page that compares runs; `live`: it reloads itself until they are finished."""
    names = short_names([run.workdir for run in runs])
    titles = dict.fromkeys(title_of(run.saved) for run in runs)
    title = f"Comparison of {len(runs)} runs"
    if len(titles) == 1:
        title = f"{len(runs)} runs: {next(iter(titles))}"
    finished = all(run.finished for run in runs)
    return render(
        "comparison.html",
        title=title,
        refresh=REFRESH_SECONDS if live and not finished else None,
        names=names,
        overview=_overview(runs, several=len(titles) > 1),
        other_data=_other_data(runs, names),
        differences=_differences(runs),
        curves=_curves(runs, names),
        paired=_paired(runs, names),
        classes=_classes(runs, names),
    )


def short_names(paths: Sequence[Path]) -> list[str]:
    """Returns short unique names of paths: the last components, as few as possible."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len({*names}) == len(paths):
            return names
    return [str(path) for path in paths]


def _overview(runs: Sequence[RunFiles], several: bool) -> list[list[str]]:
    """Returns rows of a table: a label, and each run's metrics, time, speed and cost."""
    keys = dict.fromkeys(
        key
        for run in runs
        for key in run.figures
        if key.startswith(("dev/", "test/")) and "/images" not in key
    )
    columns = [
        ({"what": title_of(run.saved)} if several else {})
        | {metric_in_words(key.replace("/", " ")): _figure(run, key) for key in keys}
        | _progress_and_cost(run)
        for run in runs
    ]
    return [[label, *(column[label] for column in columns)] for label in columns[0]]


def _figure(run: RunFiles, key: str) -> str:
    if key not in run.figures:
        split = key.partition("/")[0] + "/"
        evaluated = any(name.startswith(split) for name in run.figures)
        return "no such metric" if evaluated else "not evaluated yet"
    return figure(key, run.figures[key], run.formats, run.figures)


def _progress_and_cost(run: RunFiles) -> dict[str, str]:
    """Returns a run's steps, time, speed, number of parameters and FLOPs, as texts by label."""
    manifest = run.saved.manifest
    steps, flops, cost = manifest["steps"], manifest.get("flops"), model_cost_of(manifest)
    speeds = [speed for _, speed in points_of(run.rows, "train/images_per_second")]
    images = run.step * run.saved.config.batch_size
    return {
        "steps": f"{steps:,}" if run.finished else f"{run.step:,} of {steps:,}",
        "time": duration(sum(run.seconds.values())) if run.seconds else "",
        "images/s": f"{np.median(speeds):,.0f}" if speeds else "",
        "parameters": with_unit(cost.parameters) if cost else "",
        "training FLOPs": f"{flops * images:.2g}" if flops else "",
    }


def _other_data(runs: Sequence[RunFiles], names: Sequence[str]) -> list[str]:
    """Returns a warning for each run whose data differ from the first run's data."""
    first = {key: value for key, value in runs[0].saved.manifest.items() if key in KEYS}
    lines = []
    for run, name in zip(runs[1:], names[1:], strict=True):
        if other := differences(first, run.saved.manifest, now=f"in {name}"):
            lines.append(f"The data of {name} differ from those of {names[0]}: {'; '.join(other)}.")
    if lines:
        lines.append("Accuracies and losses on different images or classes do not compare.")
    return lines


def _differences(runs: Sequence[RunFiles]) -> list[list[str]]:
    """Returns table rows with the config values, commits and devices that differ."""
    values = [
        dict(leaves(run.saved.config))
        | {"commit": short_commit(run.saved.manifest), "devices": run.saved.manifest["devices"]}
        for run in runs
    ]
    keys = [
        key for key in values[0] if any(str(one.get(key)) != str(values[0][key]) for one in values)
    ]
    return [[key, *(str(one.get(key)) for one in values)] for key in keys]


def _curves(runs: Sequence[RunFiles], names: Sequence[str]) -> list[str]:
    """Returns an SVG for each metric, with one line for each run."""
    drawn = []
    for title, key, scale in _panels(runs):
        lines = {
            name: points_of(run.rows, key, scale) for run, name in zip(runs, names, strict=True)
        }
        if any(lines.values()):
            drawn.append(page_charts.curve(title, lines, () if key.startswith("train/") else names))
    return drawn


def _panels(runs: Sequence[RunFiles]) -> Sequence[tuple[str, str, float]]:
    """Returns the title, the key in `metrics.jsonl` and the scale of each panel of curves."""
    return [
        (f"{title}: {label}" if label else title, key, scale)
        for title, lines, scale in panels_of([row for run in runs for row in run.rows])
        for key, label in lines.items()
    ]


def _paired(runs: Sequence[RunFiles], names: Sequence[str]) -> list[list[str]]:
    """Returns a table row for each pair of runs that have predictions for the same images.

    A row counts the images that both runs, only the first, only the second and no run predict
    correctly, and contains the p-value of McNemar's test.
    """
    rows = []
    for (one, first), (other, second) in itertools.combinations(zip(runs, names, strict=True), 2):
        pair = one.predictions, other.predictions
        if not _same_images(*pair):
            continue
        right, other_right = pair[0].right, pair[1].right
        only, only_theirs = int((right & ~other_right).sum()), int((other_right & ~right).sum())
        counts = [
            int((right & other_right).sum()),
            only,
            only_theirs,
            int((~right & ~other_right).sum()),
        ]
        chance = sign_test(only, only_theirs)
        rows.append([first, second, *(f"{count:,}" for count in counts), f"{chance:.2g}"])
    return rows


def _same_images(one: Predictions | None, other: Predictions | None) -> bool:
    if one is None or other is None or one.labels.shape != other.labels.shape:
        return False
    same = np.array_equal(one.numbers, other.numbers) and np.array_equal(one.labels, other.labels)
    return same and one.split == other.split


def sign_test(one: int, other: int) -> float:
    """Returns the two-sided p-value of a sign test with `one` successes and `other` failures."""
    tosses = one + other
    tail = sum(math.comb(tosses, heads) for heads in range(min(one, other) + 1))
    return min(1.0, float(tail * 2 / 2**tosses)) if tosses < 1000 else _normal_tail(one, other)


def _normal_tail(one: int, other: int) -> float:
    distance = max(abs(one - other) - 1, 0) / math.sqrt(one + other)
    return math.erfc(distance / math.sqrt(2))


def _classes(runs: Sequence[RunFiles], names: Sequence[str]) -> dict | None:
    """Returns a table with each run's accuracy on the classes in which the runs differ most.

    None: fewer than two runs have predictions, or the runs have different sets of classes.
    """
    with_predictions = [
        (run, name) for run, name in zip(runs, names, strict=True) if run.predictions is not None
    ]
    if len(with_predictions) < 2 or len({run.class_names for run, _ in with_predictions}) > 1:
        return None
    classes = with_predictions[0][0].class_names
    images, right = map(
        np.stack,
        zip(*(by_class(run.predictions, len(classes)) for run, _ in with_predictions), strict=True),
    )
    accuracies = np.where(images > 0, right / np.maximum(images, 1), np.nan)
    order = _most_different(accuracies)
    rows = [
        [
            classes[label],
            " / ".join(dict.fromkeys(f"{count:,}" for count in images[:, label])),
            *(f"{accuracy:.1%}" for accuracy in accuracies[:, label]),
        ]
        for label in order
    ]
    fewer = f"The {len(order)} classes that differ most, of {len(classes):,}."
    return {
        "heads": ["class", "images", *(name for _, name in with_predictions)],
        "rows": rows,
        "fewer": fewer if len(order) < len(classes) else "",
    }


def _most_different(accuracies: np.ndarray) -> np.ndarray:
    """Returns the indices of the classes whose accuracies differ most between the runs.

    Args:
      accuracies: `[runs, classes]`, NaN for classes without images.
    """
    tested = np.flatnonzero(np.isfinite(accuracies).all(axis=0))
    spread = accuracies[:, tested].max(axis=0) - accuracies[:, tested].min(axis=0)
    return tested[np.argsort(-spread, kind="stable")][:MOST_CLASSES]
