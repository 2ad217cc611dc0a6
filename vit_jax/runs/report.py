"""The report of a finished run: one HTML file with its figures, curves and predictions."""

import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.evaluation.suites import SUITES
from vit_jax.inspection.html_page import Section, inline, picture, write_page


def _of_each_split(name: str) -> dict[str, str]:
    return {f"train/{name}": "training", f"dev/{name}": "dev", f"test/{name}": "test"}


ENTROPIES = {"train/teacher_entropy": "teacher", "train/student_entropy": "student"}
ENTROPIES |= {"train/kl": "student's divergence"}

# Title, rows' keys with their names in the legend, and the factor to the unit shown.
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


class Sample(NamedTuple):
    """A test image, uint8 `[height, width, 3]`, its classes, and what the model says of it."""

    image: np.ndarray
    labels: tuple[str, ...]
    prediction: str
    probability: float


def write_report(
    workdir: Path,
    model: str,
    figures: dict[str, str],
    samples: Sequence[Sample] = (),
    pictures: Mapping[str, Mapping[str, bytes]] | None = None,
) -> Path:
    """Writes `report.html` from the workdir's config.json and metrics.jsonl; returns its path.

    Args:
      model: its name.
      pictures: headings of more sections, and for each PNGs by caption.
    """
    config = json.loads((workdir / "config.json").read_text())
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    data = config["data"]
    table = "".join(f"<tr><td>{html.escape(k)}<td>{html.escape(v)}</tr>" for k, v in figures.items())
    curves = "".join(
        f"<figure>{drawn}</figure>"
        for panel in (*CURVES, *_curves_of_suites(rows))
        if (drawn := _curve(rows, *panel)) is not None
    )
    wrong = sum(not _right(sample) for sample in samples)
    predictions = f"Predictions on {len(samples)} test images, {wrong} of them wrong"
    sections = [
        Section("", f"<table>{table}</table>", ""),
        Section("Curves", curves),
        Section(predictions, "".join(map(_figure, samples)), "samples"),
    ]
    for heading, captioned in (pictures or {}).items():
        drawn = "".join(picture(caption, inline(png)) for caption, png in captioned.items())
        sections.append(Section(heading, drawn))
    sections.append(Section("Config", f"<pre>{html.escape(json.dumps(config, indent=2))}</pre>", ""))
    title = f"{model} on {data.get('path') or data['source']}"
    return write_page(workdir / "report.html", title, sections)


def _curves_of_suites(rows: list[dict]) -> list[tuple[str, dict[str, str], int]]:
    """A panel for each evaluation suite that the run has figures of: `knn/pets/20` is its line `pets/20`."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [
        (
            f"{suite.title}, %",
            {key: key.removeprefix(f"{name}/") for key in keys if key.startswith(f"{name}/")},
            100,
        )
        for name, suite in SUITES.items()
    ]


def _curve(rows: list[dict], title: str, lines: dict[str, str], scale: float) -> str | None:
    """An SVG of some scalars over the steps, or None where the run has none of them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    points = {
        name: [(row["step"], scale * row[key]) for row in rows if row.get(key) is not None]
        for key, name in lines.items()
    }
    if not any(points.values()):
        return None
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}):
        figure = Figure(figsize=(4.6, 2.8), layout="constrained")
        axes = figure.add_subplot()
        for name, line in points.items():
            if line:
                style = "-" if name in ("", "training") else "o-"
                style = "o" if len(line) == 1 else style  # A line through one point is not seen.
                axes.plot(*zip(*line, strict=True), style, label=name, markersize=4, linewidth=1.5)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xlabel("step")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if any(lines.values()):
            axes.legend(frameon=False)
        drawing = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(drawing, format="svg", metadata=no_metadata)
    svg = drawing.getvalue()
    label = html.escape(f"{title} over the steps", quote=True)
    return svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _right(sample: Sample) -> bool:
    return sample.prediction in sample.labels


def _figure(sample: Sample) -> str:
    """One image with its prediction; a wrong one has a sign and a frame."""
    from PIL import Image

    encoded = io.BytesIO()
    Image.fromarray(sample.image).save(encoded, "PNG")
    right = _right(sample)
    # Single pixels are shown as such; a photograph is scaled down smoothly.
    size = ' class="small"' if max(sample.image.shape) <= 64 else ""
    label, prediction = (
        html.escape(", ".join(sample.labels), quote=True),
        html.escape(sample.prediction, quote=True),
    )
    return (
        f'<figure class="{"right" if right else "wrong"}">'
        f'<img{size} alt="{label}, predicted {prediction}" src="{inline(encoded.getvalue())}">'
        f"<figcaption><b>{'✓' if right else '✗'} {prediction}</b> {sample.probability:.0%}"
        + ("" if right else f"<br><span>is {label}</span>")
        + "</figcaption></figure>"
    )
