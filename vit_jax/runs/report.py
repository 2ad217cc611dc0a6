"""The report of a finished run: one HTML file with its figures, curves and predictions."""

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

STYLE = """
:root { color-scheme: light dark; --line: #8884; --wrong: #c62828; --muted: #666; }
@media (prefers-color-scheme: dark) { :root { --wrong: #ff8a80; --muted: #aaa; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
table { border-collapse: collapse; }
td { padding: .2rem 1.5rem .2rem 0; border-bottom: 1px solid var(--line); }
td:last-child { font-variant-numeric: tabular-nums; text-align: right; padding-right: 0; }
.curves { display: grid; gap: .8rem; }
.curves { grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }
.curves figure { background: #fff; border: 1px solid var(--line); border-radius: 6px; margin: 0; }
.curves figure { padding: .4rem; }
.curves svg, .curves img { width: 100%; height: auto; display: block; }
.curves figcaption { color: #222; font-size: .85rem; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.2rem, 1fr)); gap: .7rem; }
.samples figure { margin: 0; font-size: .8rem; line-height: 1.35; overflow-wrap: anywhere; }
.samples img { width: 100%; border-radius: 4px; display: block; }
.samples .small { image-rendering: pixelated; } figcaption { margin-top: .35rem; }
.samples .wrong img { outline: 3px solid var(--wrong); } .samples .wrong b { color: var(--wrong); }
.samples span { color: var(--muted); } pre { overflow-x: auto; font-size: .85rem; }
"""


def _of_each_split(name: str) -> dict[str, str]:
    return {f"train/{name}": "training", f"dev/{name}": "dev", f"test/{name}": "test"}


# Title, rows' keys with their names in the legend, and the factor to the unit shown.
CURVES = (
    ("Loss", _of_each_split("loss"), 1),
    ("Accuracy, %", _of_each_split("accuracy"), 100),
    ("Accuracy in hidden patches, %", _of_each_split("patch_accuracy"), 100),
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
    figures: dict[str, str],
    samples: Sequence[Sample] = (),
    pictures: Mapping[str, Mapping[str, bytes]] | None = None,
) -> Path:
    """Writes `report.html` from the workdir's config.json and metrics.jsonl; returns its path.

    Args:
      pictures: headings of more sections, and for each PNGs by caption.
    """
    config = json.loads((workdir / "config.json").read_text())
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    model, data = config["model"], config["data"]
    title = html.escape(f"{model['name']} on {data.get('path') or data['source']}")
    table = "".join(f"<tr><td>{html.escape(k)}<td>{html.escape(v)}</tr>" for k, v in figures.items())
    curves = "".join(
        f"<figure>{drawn}</figure>" for panel in CURVES if (drawn := _curve(rows, *panel)) is not None
    )
    wrong = sum(not _right(sample) for sample in samples)
    predictions = f"Predictions on {len(samples)} test images, {wrong} of them wrong"
    sections = [("Curves", "curves", curves), (predictions, "samples", "".join(map(_figure, samples)))]
    for heading, captioned in (pictures or {}).items():
        drawn = "".join(_picture(*item) for item in captioned.items())
        sections.append((html.escape(heading), "curves", drawn))
    body = "\n".join(
        f'<h2>{heading}</h2>\n<div class="{name}">{content}</div>'
        for heading, name, content in sections
        if content
    )
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{STYLE}</style></head><body>
<h1>{title}</h1>
<table>{table}</table>
{body}
<h2>Config</h2>
<pre>{html.escape(json.dumps(config, indent=2))}</pre>
</body></html>
"""
    path = workdir / "report.html"
    temporary = path.with_suffix(".html.tmp")
    temporary.write_text(text, encoding="utf-8")
    return temporary.replace(path)


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
        if len(lines) > 1:
            axes.legend(frameon=False)
        drawing = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(drawing, format="svg", metadata=no_metadata)
    svg = drawing.getvalue()
    label = html.escape(f"{title} over the steps", quote=True)
    return svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _picture(caption: str, png: bytes) -> str:
    source, caption = base64.b64encode(png).decode(), html.escape(caption, quote=True)
    image = f'<img alt="{caption}" src="data:image/png;base64,{source}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _right(sample: Sample) -> bool:
    return sample.prediction in sample.labels


def _figure(sample: Sample) -> str:
    """One image with its prediction; a wrong one has a sign and a frame."""
    from PIL import Image

    encoded = io.BytesIO()
    Image.fromarray(sample.image).save(encoded, "PNG")
    source = base64.b64encode(encoded.getvalue()).decode()
    right = _right(sample)
    # Single pixels are shown as such; a photograph is scaled down smoothly.
    size = ' class="small"' if max(sample.image.shape) <= 64 else ""
    label, prediction = (
        html.escape(", ".join(sample.labels), quote=True),
        html.escape(sample.prediction, quote=True),
    )
    return (
        f'<figure class="{"right" if right else "wrong"}">'
        f'<img{size} alt="{label}, predicted {prediction}" src="data:image/png;base64,{source}">'
        f"<figcaption><b>{'✓' if right else '✗'} {prediction}</b> {sample.probability:.0%}"
        + ("" if right else f"<br><span>is {label}</span>")
        + "</figcaption></figure>"
    )
