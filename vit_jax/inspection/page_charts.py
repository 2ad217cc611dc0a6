"""SVG charts that use the text colour of their page, light or dark."""

import html
import io
from collections.abc import Callable, Mapping, Sequence

from vit_jax.errors import as_text

INK = "#010203"  # Placeholder for the page's text colour.
COLOURS = ("#4c8dd6", "#f08c2e", "#3fa66b", "#d65f5f", "#9a7fd1", "#a9805b", "#d982c0", "#8c9196")


def draw(title: str, paint: Callable, about: str, width: float = 4.6, height: float = 2.6) -> str:
    """Returns a chart as SVG.

    `paint` draws the content into matplotlib's axes; `about` is a description for screen readers.
    If `title` is empty, the chart has no title.
    """
    from matplotlib import cycler, rc_context
    from matplotlib.figure import Figure

    inked = ("text", "xtick", "ytick", "grid")
    settings = dict.fromkeys([f"{name}.color" for name in inked], INK)
    settings |= {"axes.edgecolor": INK, "axes.labelcolor": INK}
    settings |= {"axes.prop_cycle": cycler(color=COLOURS), "svg.fonttype": "none"}
    settings |= {"svg.hashsalt": about, "font.size": 9, "font.family": "sans-serif"}
    settings["text.parse_math"] = False  # Names of runs or classes may contain dollar signs.
    with rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
        if title:
            axes.set_title(title, loc="left", fontweight="bold")
        if axes.get_legend() is None and axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False)
        drawing = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(drawing, format="svg", metadata=no_metadata)
    svg = drawing.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    label = html.escape(about, quote=True)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def curve(
    title: str, lines: Mapping[str, Sequence[tuple[float, float]]], dotted: Sequence[str] = ()
) -> str:
    """Returns a chart of metrics over the steps, as SVG.

    Args:
      lines: points (step, value) of each curve, by the curve's name. A curve with an empty name, or
        without points, is not in the legend.
      dotted: names of curves to draw with markers. A curve with one or two points always has
        markers.
    """

    def paint(axes):
        for name, line in lines.items():
            if line:
                style = "o-" if name in dotted or len(line) <= 2 else "-"
                points, label = zip(*line, strict=True), as_text(name) or "_"
                axes.plot(*points, style, label=label, markersize=4, linewidth=1.5)
        axes.set_xlabel("step")
        last = max((step for line in lines.values() for step, _ in line), default=1)
        axes.set_xlim(0, 1.04 * last)
        axes.xaxis.get_major_locator().set_params(integer=True)
        bottom, top = axes.get_ylim()
        if not any(value < 0 for line in lines.values() for _, value in line):
            # The axis starts at 0 and has a margin at the top, so that no point is cut off.
            bottom, top = 0, top + 0.05 * abs(top)
        axes.set_ylim(min(0, bottom), top)

    return draw(title, paint, f"{title} over the steps")


def reliability(bins: Sequence[tuple[float, float, float]]) -> str:
    """Returns a reliability diagram as SVG: accuracy by predicted probability.

    A bin is (mean probability, accuracy, number of images). Empty bins are not drawn.
    """
    bins = [row for row in bins if row[2]]
    most = max((row[2] for row in bins), default=1)

    def paint(axes):
        axes.plot([0, 100], [0, 100], "--", color=INK, alpha=0.5, linewidth=1)
        if bins:
            confidences, right, counts = zip(*bins, strict=True)
            confidences, right = ([100 * x for x in values] for values in (confidences, right))
            axes.plot(confidences, right, "-", linewidth=1.5)
            sizes = [12 + 110 * count / most for count in counts]
            axes.scatter(confidences, right, s=sizes, alpha=0.9)
        axes.set(xlim=(0, 103), ylim=(0, 105), xlabel="probability, %", ylabel="right, %")

    title = "How often an answer of a probability is right"
    return draw(title, paint, "Share of right answers by probability")


def certainty(probabilities: Mapping[str, Sequence[float]], bins: int) -> str:
    """Returns a stacked histogram of predicted probabilities as SVG.

    `probabilities` are those of the images of each group, from 0 to 1, by the group's name.
    """

    def paint(axes):
        values = [[100 * x for x in each] for each in probabilities.values()]
        groups = dict(label=list(probabilities), color=(COLOURS[0], COLOURS[3])[: len(values)])
        axes.hist(values, bins, range=(0, 100), stacked=True, **groups)
        axes.set(xlabel="probability, %", ylabel="images")

    return draw("How sure it is", paint, "Images by the probability of their answer")
