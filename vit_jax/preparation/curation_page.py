"""HTML page and tables of a curation: retrieved images and removed near-duplicates."""

import contextlib
import html
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vit_jax.data.decode import Unreadable
from vit_jax.data.sources.base import Source
from vit_jax.errors import as_text
from vit_jax.inspection.html_page import Section, note, table, write_page
from vit_jax.preparation.curation import Curated
from vit_jax.preparation.duplicates import thumbnail
from vit_jax.spreadsheet import write_csv

SHOWN = 24  # Curated images with their neighbours.
FEWER = 12  # Curated images with the least similar neighbours, and pairs of each kind.
SIDE = 200  # Pixels of an image's longer side.
STYLE = """<style>
.row, .pair { display: grid; gap: .5rem; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); }
.row { margin: 0 0 1rem; } .row figure:first-child img { outline: 3px solid #4c8dd6; }
.pairs { display: grid; gap: 1rem 1.4rem; }
.pairs { grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr)); }
.compare figure { margin: 0; font-size: .75rem; line-height: 1.35; min-width: 0; }
.compare img, .compare figure div { width: 100%; height: 8rem; object-fit: contain; display: block; }
.compare img, .compare figure div { background: #8882; border-radius: 4px; }
.compare .small { image-rendering: pixelated; } .compare figcaption { overflow-wrap: anywhere; }
.compare span { color: var(--muted); }
@media (max-width: 40rem) { .row { grid-template-columns: repeat(auto-fill, minmax(7rem, 1fr)); } }
</style>"""


def report_curation(
    curated: Curated, train: Source, folder: Path, similarity: float, excluded: int
) -> None:
    """Writes `retrieved.csv`, `duplicates.csv` and `curated.html` into `folder`.

    Args:
      train: the uncurated images.
      similarity: the least cosine of near-duplicates.
      excluded: number of images removed as near-duplicates of test images.
    """
    compared, neighbours = curated.compared, curated.neighbours
    write_csv(
        folder / "retrieved.csv",
        ("curated", "example", "similarity"),
        (
            (curated.source.describe(i), train.describe(j), round(c, 4))
            for i, j, c in neighbours.tolist()
        ),
    )
    left_out = compared[~compared["kept"]]
    write_csv(
        folder / "duplicates.csv",
        ("example", "kept", "similarity"),
        ((train.describe(i), train.describe(j), round(c, 4)) for i, j, c, _ in left_out.tolist()),
    )
    images = curated.images
    facts = {
        "images of the uncurated set": f"{len(train):,}",
        "of these removed as near-duplicates of test images": f"{excluded:,}",
        "embedded": f"{len(compared):,}",
        f"removed as near-duplicates of others (similarity {similarity:g} or above)": f"{len(left_out):,}",
        "curated images": f"{len(np.unique(neighbours['curated'])):,} of {len(curated.source):,}",
        "retrieved": f"{len(neighbours):,} times an image, {len(images):,} different ones",
        "their similarity, at 5, 25, 50, 75 and 95 %": _quantiles(neighbours["similarity"]),
    }
    if not excluded:
        del facts["of these removed as near-duplicates of test images"]
    write_page(
        folder / "curated.html",
        f"{len(images):,} of {len(train):,} images retrieved",
        [
            Section("", STYLE + table(facts, "figures"), ""),
            *_retrieved(curated, train),
            *_pairs(curated, train, similarity),
        ],
    )


def _quantiles(values: np.ndarray) -> str:
    return ", ".join(f"{value:.2f}" for value in np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95)))


def _retrieved(curated: Curated, train: Source) -> list[Section]:
    """Returns sections of curated images with their neighbours: a sample, and the least similar."""
    neighbours = curated.neighbours
    starts = np.flatnonzero(np.diff(neighbours["curated"], prepend=-1))
    rows = np.split(neighbours, starts[1:])
    nearest = neighbours["similarity"][starts]
    sample = _spread(len(rows), SHOWN)
    far = np.argsort(nearest, kind="stable")[:FEWER]

    def draw(chosen: Iterable[int]) -> str:
        return "".join(_row(curated.source, train, rows[place]) for place in chosen)

    sections = [
        Section("Curated images (framed), and what was retrieved for each", draw(sample), "compare")
    ]
    if len(rows) > SHOWN:
        sections.append(
            Section("Those for which the nearest is the least similar", draw(far), "compare")
        )
    return sections


def _row(source: Source, train: Source, found: np.ndarray) -> str:
    first = int(found["curated"][0])
    figures = figure(source, first, "curated") + "".join(
        figure(train, image, f"{cosine:.3f}") for _, image, cosine in found.tolist()
    )
    return f'<div class="row" style="--columns: {len(found) + 1}">{figures}</div>'


def _pairs(curated: Curated, train: Source, similarity: float) -> list[Section]:
    """Returns sections of image pairs below and above the threshold, each with its kept image."""
    compared = curated.compared[np.argsort(curated.compared["similarity"], kind="stable")]
    left_out = compared[~compared["kept"]]
    below = compared[compared["kept"] & (compared["similarity"] > -1)][-FEWER:][::-1]
    shown = left_out[_spread(len(left_out), 2 * FEWER)]
    sections = []
    for heading, pairs, before in (
        (f"Removed near-duplicates, from similarity {similarity:g} up", shown, "removed"),
        (f"Kept, though nearly so similar: below {similarity:g}", below, "kept"),
    ):
        content = "".join(
            f'<div class="pair" style="--columns: 2">{figure(train, image, f"{before}, {cosine:.3f}")}'
            f"{figure(train, nearest, 'kept')}</div>"
            for image, nearest, cosine, _ in pairs.tolist()
        )
        if content:
            sections.append(Section(heading, content, "pairs compare"))
    return [*sections] or [Section("", note("No image is similar to another."), "")]


def figure(source: Source, index: int, words: str) -> str:
    """Returns the HTML of an image with words and the end of its name below it."""
    picture = "<div></div>"
    with contextlib.suppress(OSError, Unreadable):
        picture = thumbnail(source[index].image, SIDE)
    name = html.escape(as_text(source.describe(index)))
    caption = f"<figcaption><b>{words}</b> <span>{_end(name)}</span></figcaption>"
    return f'<figure title="{name}">{picture}{caption}</figure>'


def _end(name: str) -> str:
    """Returns the last two parts of a path, to save room."""
    return "/".join(name.split("/")[-2:])


def _spread(size: int, most: int) -> np.ndarray:
    """Returns at most `most` evenly spread positions of `range(size)`."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int))
