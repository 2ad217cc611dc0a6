"""Plots metrics of training runs against a varied factor, with the std over seeds."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.ledger.tables import Points, short

MARKS = {"ViT": "o", "BiT": "s", "hybrid": "^"}  # Markers of points that have a factor `family`.


def lines(points: Points, x: str, y: str = "accuracy", by: Sequence[str] = (), **labels):
    """Plots a metric against a factor: the mean over seeds, with the std as error bars.

    The x-axis is logarithmic, unless the values of `x` are text.

    Args:
      points: results from `Study.points`. Values of `y` are from 0 to 1.
      x: quantity on the x-axis: the name of a factor, such as `model`, or of a metric, such as
        `exaflops`. For a metric, the mean over seeds is drawn.
      by: factors; there is a line for each combination of their values.
      **labels: `xlabel`, `ylabel`, `title`.

    Returns:
      A matplotlib Figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    series: dict[tuple, list[Mapping[str, Any]]] = {}
    for point in points:
        series.setdefault(tuple(point[factor] for factor in by), []).append(point)
    for name, members in series.items():
        _draw_line(axes, members, x, y, label=" ".join(map(short, name)) if name else None)
    if points and not isinstance(at(points[0], x), str):
        axes.set_xscale("log")
    axes.set(xlabel=labels.pop("xlabel", x), ylabel=labels.pop("ylabel", f"{y}, %"), **labels)
    axes.grid(alpha=0.3)
    if by and points:
        legend = dict(frameon=False, fontsize="small")
        if len(series) <= 4:
            axes.legend(**legend)
        else:  # Outside the axes, because a legend with many lines would cover the data.
            figure.legend(loc="outside right upper", **legend)
    return figure


def _draw_line(axes, points: Sequence[Mapping[str, Any]], x: str, y: str, label: str | None):
    """Draws a line through a metric's mean (0 to 1) at each point, with the std as error bars.

    `label` is the text in the legend; None: the line is not in the legend.
    """
    if not isinstance(at(points[0], x), str):
        points = sorted(points, key=lambda point: at(point, x))
    means = [100 * statistics.mean(point[y]) for point in points]
    stds = [100 * statistics.stdev(point[y]) if len(point[y]) > 1 else 0.0 for point in points]
    # Error bars are limited to the range from 0 to 100 %.
    below = [min(mean, std) for mean, std in zip(means, stds, strict=True)]
    above = [min(100 - mean, std) for mean, std in zip(means, stds, strict=True)]
    mark = MARKS.get(str(points[0].get("family")), "o")
    places = [at(point, x) for point in points]
    axes.errorbar(
        places, means, (below, above), fmt=f"{mark}-", capsize=3, markersize=5, label=label
    )


def with_laws(figure, laws: Mapping[str, Mapping[str, float]], points: Points, x: str, by: str):
    """Adds the power law of each group of points as a dashed line to a chart of `lines`.

    Args:
      laws: the fitted power law of each group, from `power_law.laws`.
    """
    import numpy as np

    (axes,) = figure.axes
    styles = itertools.cycle(((4, 2), (1, 1), (6, 2, 1, 2)))
    for (name, law), dashes in zip(laws.items(), styles, strict=False):
        places = [at(point, x) for point in points if point[by] == name]
        over = np.geomspace(min(places), max(places), 50)
        fitted = 100 * (1 - law["factor"] * over ** -law["exponent"])
        kept = fitted >= 0
        style = dict(color="black", linewidth=1, dashes=dashes, label=f"{name}, power law")
        axes.plot(over[kept], fitted[kept], **style)
    for legend in figure.legends:
        legend.remove()
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def at(point: Mapping[str, Any], name: str) -> Any:
    """Returns a factor, or the mean of a metric over seeds, of a point from `Study.points`."""
    value = point[name]
    return statistics.mean(value) if isinstance(value, (list, tuple)) else value


def panels(rows: Points, x: str, xlabel: str, figures: Mapping[str, str], by: str):
    """Draws a panel with logarithmic axes for each metric.

    Args:
      rows: the points to draw. Each is a mapping with the values of the factors `x` and `by`, and
        the value of each metric.
      figures: labels of the panels, by the name of the metric.
      by: the factor that distinguishes the lines of a panel.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(figures), 4.2), layout="constrained")
    places = sorted({row[x] for row in rows})
    drawn = figure.subplots(1, len(figures), squeeze=False)[0]
    for axes, (name, label) in zip(drawn, figures.items(), strict=True):
        for mark, value in zip(
            itertools.cycle("os^Dv"), dict.fromkeys(row[by] for row in rows), strict=False
        ):
            ours = sorted((row for row in rows if row[by] == value), key=lambda row: row[x])
            axes.plot(
                [row[x] for row in ours], [row[name] for row in ours], f"{mark}-", label=value
            )
        axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=label)
        axes.set_xticks(places, map(str, places))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return figure
