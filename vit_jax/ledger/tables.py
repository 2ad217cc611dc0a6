"""Figures as Markdown tables."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vit_jax import published

Points = Sequence[
    Mapping[str, Any]
]  # Factors and figures of runs that differ in their seeds alone.
Pairs = Mapping[
    str, Mapping[str, tuple[float, float]]
]  # A published figure and ours, by row and column.


def markdown_table(header: Sequence[Any], lines: Iterable[Sequence[Any]]) -> str:
    """Rows of cells as Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def spread(values: Iterable[float]) -> str:
    """Mean and standard deviation (n - 1; none of one value) of shares, in per cent."""
    values = [100 * value for value in values]
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}" if values else ""


def written(figure: float | None) -> str:
    """A figure in four digits or more, a whole number as one; nothing, if there is none."""
    if figure is None:
        return ""
    if figure == int(figure):
        return f"{figure:,.0f}"
    return f"{figure:,.1f}" if abs(figure) >= 1000 else f"{figure:.4g}"


def short(value: Any) -> str:
    """A factor's value in a heading or a folder's name: 10000 as `10,000`, a rate without
    noughts.
    """
    return (
        f"{value:,}"
        if isinstance(value, int)
        else f"{value:g}"
        if isinstance(value, float)
        else f"{value}"
    )


def in_words(factor: str) -> str:
    """A factor's name as a heading: `optimizer__learning_rate` as `learning rate`."""
    return factor.rpartition("__")[2].replace("_", " ")


def means(points: Points, *factors: str, figure: str = "accuracy") -> dict[str, float]:
    """The mean of a figure, in per cent, by the values of the factors as words: `BiT-R14x1/8,
    adam`.
    """
    return {
        ", ".join(short(point[factor]) for factor in factors): 100 * statistics.mean(point[figure])
        for point in points
    }


def ranking(means: Mapping[str, float]) -> str:
    """The figures in words, the highest first."""
    return "; ".join(
        f"{name}: {means[name]:.1f} %" for name in sorted(means, key=means.get, reverse=True)
    )


def pivot(points: Points, rows: str, columns: str, figure: str = "accuracy") -> str:
    """A figure's mean and deviation, in per cent, by two factors; empty where there is no run.

    Args:
      points: the figures of runs; each has the factors and, by its name, a list of the figure's
        values.
      rows, columns: names of factors.
    """
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
    """A factor's value, or the mean of a figure's."""
    return written(statistics.mean(value)) if isinstance(value, list) else short(value)


def listing(points: Points, factors: Sequence[str], figures: Sequence[str] = ("accuracy",)) -> str:
    """A line for each point: factors, or means of figures; then mean and deviation of shares, in
    per cent.
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


def crossings(points: Points, x: str, models: Sequence[str], figure: str = "accuracy") -> str:
    """A sentence for each value of the factor x: which model has the highest mean, and by how much.

    Args:
      models: those that are compared.
    """
    sentences = []
    for value in sorted({point[x] for point in points}):
        means = {
            point["model"]: 100 * statistics.mean(point[figure])
            for point in points
            if point[x] == value and point["model"] in models
        }
        first, *others = sorted(means, key=means.get, reverse=True)
        if others:
            lead = means[first] - means[others[0]]
            sentences.append(f"{x} {short(value)}: {first} leads {others[0]} by {lead:.1f} points")
    return "; ".join(sentences) + "." if sentences else ""


def beside(table: published.Table, figures: Mapping[str, Mapping[str, float]]) -> str:
    """Returns a table of the paper's figures and ours, a line for each column that we have.

    Args:
      table: the published table.
      figures: ours, by the table's rows and its columns as `Table.by_model` names them; other
        columns, which are not printed, have ours alone.
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
    """The published figures that we have figures of, with ours.

    Args:
      figures: as of `beside`.
    """
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
    """The published points and ours that each name of both has over a base; nothing without the
    base.
    """
    return {
        f"points over {base}": {
            name: (published[name] - published[base], ours[name] - ours[base])
            for name in ours
            if name != base and {name, base} <= published.keys() and base in ours
        }
    }


def pairs_in_words(published: Mapping, difference: Mapping) -> str:
    """A clause for each row: our figures, and in brackets the published."""
    rows = []
    for row, cells in difference.items():
        figures = [
            f"{name} {published[row][name] + apart:+.1f} ({published[row][name]:+.1f})"
            for name, apart in cells.items()
        ]
        rows.append(f"{row}: {', '.join(figures)}")
    return "; ".join(rows) + "."


def agreement(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A line for each recipe: the paper's values, and ours in bold where none of these is ours.

    Args:
      figures: by recipe `paper`, a list of values by name, of which one must be ours, and `ours`.
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
    """The numbers of `agreement`: of the paper's values that which is ours, else the first."""
    return {
        recipe: {
            name: (ours if ours in values else values[0], ours)
            for name, values in entry["paper"].items()
            if isinstance(ours := entry["ours"][name], (int, float))
        }
        for recipe, entry in figures.items()
    }


def differences(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A sentence on the values of `agreement` that are not the paper's."""
    other = [
        f"{name} of {recipe} is {entry['ours'][name]}, not {' or '.join(map(str, values))}"
        for recipe, entry in figures.items()
        for name, values in entry["paper"].items()
        if entry["ours"][name] not in values
    ]
    count = sum(len(entry["paper"]) for entry in figures.values())
    return "; ".join(other) + "." if other else f"All {count} values are the paper's."


def by_name(figures: Mapping[str, Mapping[str, float]]) -> str:
    """A line for each name: its figures in four digits."""
    names = list(next(iter(figures.values()), {}))
    lines = [[name, *(written(found[each]) for each in names)] for name, found in figures.items()]
    return markdown_table(["", *names], lines)


def against(points: Points, factor: str, one: str, figures: Sequence[str]) -> str:
    """A sentence on each figure: its mean where the factor has the value `one`, and the others'
    range.
    """
    sentences = []
    for figure in figures:
        means = [(point[factor], 100 * statistics.mean(point[figure])) for point in points]
        own = [mean for value, mean in means if value == one]
        others = [mean for value, mean in means if value != one]
        if own and others:
            span = f"{min(others):.1f} to {max(others):.1f} %"
            sentences.append(f"{figure}: {one} has {own[0]:.1f} %, the others {span}")
    return "; ".join(sentences) + "." if sentences else ""


def slopes(points: Points, x: str, y: str, by: str) -> str:
    """A sentence: the points of y that a doubling of x brings, by least squares, for each value of
    a factor.

    Args:
      x: a figure of each point, one number.
      y: a figure with a list of shares of 1.
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
