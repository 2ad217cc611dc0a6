"""Formats results of experiments as Markdown tables and sentences."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vit_jax import published

# Results of runs from `Study.points`. A point stands for runs that differ only in their seeds. It
# contains the values of their factors, and for each metric a list of values, one for each seed.
Points = Sequence[Mapping[str, Any]]
# Pairs (published value, our value), by row and column.
Pairs = Mapping[str, Mapping[str, tuple[float, float]]]


def markdown_table(header: Sequence[Any], lines: Iterable[Sequence[Any]]) -> str:
    """Formats rows of cells as a Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def spread(values: Iterable[float]) -> str:
    """Formats values from 0 to 1 as mean and std (n - 1) in per cent, as `81.20 ± 0.35`."""
    values = [100 * value for value in values]
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}" if values else ""


def written(figure: float | None) -> str:
    """Formats a number with four significant digits, such as `0.1235`; None: an empty string.

    Integers and numbers above 1,000 keep all digits before the decimal point.
    """
    if figure is None:
        return ""
    if figure == int(figure):
        return f"{figure:,.0f}"
    return f"{figure:,.1f}" if abs(figure) >= 1000 else f"{figure:.4g}"


def short(value: Any) -> str:
    """Formats a factor's value: 10000 as `10,000`, and floats without zeros at the end."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_words(factor: str) -> str:
    """Converts a factor's name to a heading: `optimizer__learning_rate` to `learning rate`."""
    return factor.rpartition("__")[2].replace("_", " ")


def means(points: Points, *factors: str, figure: str = "accuracy") -> dict[str, float]:
    """Returns means of a metric over seeds, in per cent, by the values of `factors`."""
    return {
        ", ".join(short(point[factor]) for factor in factors): 100 * statistics.mean(point[figure])
        for point in points
    }


def ranking(means: Mapping[str, float]) -> str:
    """Formats means in descending order: `ViT: 64.0 %; BiT: 41.2 %`."""
    return "; ".join(
        f"{name}: {means[name]:.1f} %" for name in sorted(means, key=means.get, reverse=True)
    )


def pivot(points: Points, rows: str, columns: str, figure: str = "accuracy") -> str:
    """Returns a table of mean and std of a metric, in per cent, by two factors."""
    heads = list(dict.fromkeys(point[columns] for point in points))
    cells = {(point[rows], point[columns]): spread(point[figure]) for point in points}
    lines = [
        [short(row), *(cells.get((row, head), "") for head in heads)]
        for row in dict.fromkeys(point[rows] for point in points)
    ]
    return markdown_table(
        [f"{figure}, %", *(f"{in_words(columns)} {short(head)}" for head in heads)], lines
    )


def written_factor(value: Any) -> str:
    """Formats a factor's value, such as `10,000`, or the mean of a metric's list over seeds."""
    return written(statistics.mean(value)) if isinstance(value, list) else short(value)


def listing(points: Points, factors: Sequence[str], figures: Sequence[str] = ("accuracy",)) -> str:
    """Returns a table of results, with a line for each point.

    Args:
      factors: names of factors or metrics for the first columns. For a metric, its mean is shown.
      figures: names of metrics for the other columns. Their mean and std are shown in per cent.
    """
    lines = [
        [
            *(written_factor(point[factor]) for factor in factors),
            *(spread(point.get(figure, ())) for figure in figures),
        ]
        for point in points
    ]
    return markdown_table(
        [*map(in_words, factors), *(f"{in_words(figure)}, %" for figure in figures)], lines
    )


def crossings(points: Points, x: str, models: Sequence[str]) -> str:
    """Returns a text about the best model for each value of a factor, and its lead.

    Example: `images 1,000: BiT-R14x1/8 leads ViT-32x4/4 by 21.3 points.`
    """
    sentences = []
    for value in sorted({point[x] for point in points}):
        means = {
            point["model"]: 100 * statistics.mean(point["accuracy"])
            for point in points
            if point[x] == value and point["model"] in models
        }
        first, *others = sorted(means, key=means.get, reverse=True)
        if others:
            lead = means[first] - means[others[0]]
            sentences.append(f"{x} {short(value)}: {first} leads {others[0]} by {lead:.1f} points")
    return "; ".join(sentences) + "." if sentences else ""


def comparison_table(table: published.Table, figures: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a table of the paper's values and ours, with a line for each of our models.

    Args:
      figures: our values, by row and column of the published table. A column has the same key as in
        `Table.by_model`. Columns that are not in the published table are allowed.
    """
    printed = table.by_model(baselines=True)
    columns = dict.fromkeys([*printed, *(column for each in figures.values() for column in each)])
    header = [""] + [f"{row}, {whose}" for row in figures for whose in ("paper", "ours")]
    lines = []
    for column in columns:
        if all(ours.get(column) is None for ours in figures.values()):
            continue
        line = [column]
        for row, ours in figures.items():
            paper = printed.get(column, {}).get(row)
            line += ["" if paper is None else f"{paper:,}", written(ours.get(column))]
        lines.append(line)
    return markdown_table(header, lines)


def matched(table: published.Table, figures: Mapping[str, Mapping[str, float]]) -> Pairs:
    """Returns pairs (published value, our value) for the cells that are in both tables."""
    printed = table.by_model()
    return {
        row: {
            column: (printed[column][row], figure)
            for column, figure in cells.items()
            if row in printed.get(column, {})
        }
        for row, cells in figures.items()
    }


def gains(published: Mapping[str, float], ours: Mapping[str, float], base: str) -> Pairs:
    """Returns pairs (published gain, our gain) over a baseline; none without its value."""
    return {
        f"points over {base}": {
            name: (published[name] - published[base], ours[name] - ours[base])
            for name in ours
            if name != base and {name, base} <= published.keys() and base in ours
        }
    }


def pairs_in_words(published: Mapping, difference: Mapping) -> str:
    """Formats our values, by row and column, with the published values in brackets."""
    rows = []
    for row, cells in difference.items():
        figures = [
            f"{name} {published[row][name] + apart:+.1f} ({published[row][name]:+.1f})"
            for name, apart in cells.items()
        ]
        rows.append(f"{row}: {', '.join(figures)}")
    return "; ".join(rows) + "."


def agreement(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Returns a table of the paper's values by recipe; ours, if they differ, in bold.

    Args:
      figures: for each recipe, a dict with two keys. `paper` maps the name of a hyperparameter to
        the list of its values in the paper: the paper may contradict itself. `ours` maps the name
        to our value.
    """
    names = list(next(iter(figures.values()))["paper"])
    lines = []
    for recipe, entry in figures.items():
        cells = [" / ".join(map(str, entry["paper"][name])) for name in names]
        ours = (entry["ours"][name] for name in names)
        marks = [
            cell if value in entry["paper"][name] else f"{cell} (**{value}**)"
            for name, cell, value in zip(names, cells, ours, strict=True)
        ]
        lines.append([recipe, *marks])
    return markdown_table(["", *names], lines)


def agreeing(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Pairs:
    """Returns pairs (published value, our value) for each numeric hyperparameter of each recipe.

    If the paper contains several values of a hyperparameter, the pair contains the published value
    that equals ours. If no published value equals ours, the pair contains the first one.

    The argument is that of `agreement`.
    """
    return {
        recipe: {
            name: (ours if ours in values else values[0], ours)
            for name, values in entry["paper"].items()
            if isinstance(ours := entry["ours"][name], (int, float))
        }
        for recipe, entry in figures.items()
    }


def differences(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Returns a text on our hyperparameters that differ from the paper's, as in `agreement`."""
    other = [
        f"{name} of {recipe} is {entry['ours'][name]}, not {' or '.join(map(str, values))}"
        for recipe, entry in figures.items()
        for name, values in entry["paper"].items()
        if entry["ours"][name] not in values
    ]
    count = sum(len(entry["paper"]) for entry in figures.values())
    return "; ".join(other) + "." if other else f"All {count} values are the paper's."


def by_name(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Formats a dict of dicts as a table, with four significant digits.

    Args:
      figures: the lines of the table, by name. A line is a dict with the value of each column. All
        lines have the same keys, which are the headings.
    """
    names = list(next(iter(figures.values()), {}))
    lines = [[name, *(written(found[each]) for each in names)] for name, found in figures.items()]
    return markdown_table(["", *names], lines)


def against(points: Points, factor: str, one: str, figures: Sequence[str]) -> str:
    """Returns a text that compares metrics for one value of a factor with metrics for all others.

    Example: `accuracy: relative has 91.2 %, the others 88.0 to 90.5 %.`

    Args:
      figures: names of metrics, whose means are compared.
    """
    sentences = []
    for figure in figures:
        means = [(point[factor], 100 * statistics.mean(point[figure])) for point in points]
        own_means = [mean for value, mean in means if value == one]
        others = [mean for value, mean in means if value != one]
        if own_means and others:
            span = f"{min(others):.1f} to {max(others):.1f} %"
            sentences.append(f"{figure}: {one} has {own_means[0]:.1f} %, the others {span}")
    return "; ".join(sentences) + "." if sentences else ""


def slopes(points: Points, x: str, y: str, by: str) -> str:
    """Returns each group's gain in y for a doubling of x, in points, by least squares.

    Args:
      x: key of a number in each point, such as the compute.
      y: name of a metric, with a list of values from 0 to 1 in each point.
    """
    found = {}
    for value in dict.fromkeys(point[by] for point in points):
        ours = [point for point in points if point[by] == value]
        places = [math.log2(point[x]) for point in ours]
        if len(set(places)) > 1:
            means = [100 * statistics.mean(point[y]) for point in ours]
            found[value] = statistics.linear_regression(places, means).slope
    ordered = sorted(found, key=found.get, reverse=True)
    words = ", ".join(f"{short(value)} {found[value]:+.2f}" for value in ordered)
    return f"Points of {y} that a doubling of {x} brings: {words}." if words else ""
