"""Report of a curation: HTML page and tables of retrieved images and removed near-duplicates."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vit_jax.data.decode import Unreadable
from vit_jax.data.sources.base import Source
from vit_jax.errors import as_text
from vit_jax.inspection.html_page import render, write_text
from vit_jax.preparation.curation import Curated
from vit_jax.preparation.duplicates import Thumbnail, thumbnail
from vit_jax.spreadsheet import write_csv

SHOWN = 24  # Number of curated images on the page that are shown with their neighbours.
# The page shows at most this number of curated images with the least similar neighbours, of pairs
# of which one image is removed, and of pairs of which both images are kept.
FEWER = 12
SIDE = 200  # Longer side of an image, in pixels.


class Figure(NamedTuple):
    """An image on the page, with a text and the last part of the image's name below it.

    The attribute `image` is None if the image is unreadable.
    """

    image: Thumbnail | None
    words: str
    name: str


def report_curation(
    curated: Curated, train: Source, folder: Path, similarity: float, excluded: int
) -> None:
    """Writes `retrieved.csv`, `duplicates.csv` and `curated.html` into `folder`.

    Args:
      excluded: number of images that were removed as near-duplicates of test images.
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
    quantiles = np.quantile(neighbours["similarity"], (0.05, 0.25, 0.5, 0.75, 0.95))
    facts = {
        "images of the uncurated set": f"{len(train):,}",
        "of these removed as near-duplicates of test images": f"{excluded:,}",
        "embedded": f"{len(compared):,}",
        f"removed as near-duplicates of others (similarity {similarity:g} or above)": (
            f"{len(left_out):,}"
        ),
        "curated images": f"{len(np.unique(neighbours['curated'])):,} of {len(curated.source):,}",
        "retrieved": f"{len(neighbours):,} times an image, {len(images):,} different ones",
        "their similarity, at 5, 25, 50, 75 and 95 %": ", ".join(f"{x:.2f}" for x in quantiles),
    }
    if not excluded:
        del facts["of these removed as near-duplicates of test images"]
    sample, least_similar = _retrieved(curated, train)
    removed, kept = _pairs(curated, train)
    page = render(
        "curated.html",
        title=f"{len(images):,} of {len(train):,} images retrieved",
        facts=facts,
        retrieved=sample,
        least_similar=least_similar,
        removed=removed,
        kept=kept,
        threshold=f"{similarity:g}",
    )
    write_text(folder / "curated.html", page)


def _retrieved(curated: Curated, train: Source) -> tuple[list[list[Figure]], list[list[Figure]]]:
    """Returns a sample of rows, and the rows with the least similar neighbours.

    A row shows a curated image and its neighbours. The second list is empty if the sample contains
    all rows.
    """
    neighbours = curated.neighbours
    starts = np.flatnonzero(np.diff(neighbours["curated"], prepend=-1))
    rows = np.split(neighbours, starts[1:])
    far = np.argsort(neighbours["similarity"][starts], kind="stable")[:FEWER]
    sample, least_similar = (
        [_row(curated.source, train, rows[place]) for place in chosen]
        for chosen in (_spread(len(rows), SHOWN), far if len(rows) > SHOWN else [])
    )
    return sample, least_similar


def _row(source: Source, train: Source, rows: np.ndarray) -> list[Figure]:
    first = figure(source, int(rows["curated"][0]), "curated")
    return [first, *(figure(train, image, f"{cosine:.3f}") for _, image, cosine in rows.tolist())]


def _pairs(curated: Curated, train: Source) -> list[list[tuple[Figure, Figure]]]:
    """Returns two lists of image pairs.

    In the first list the similarities are above the threshold, so one image of each pair is
    removed. In the second list they are below the threshold, so both images of a pair are kept.
    """
    compared = curated.compared[np.argsort(curated.compared["similarity"], kind="stable")]
    left_out = compared[~compared["kept"]]
    below = compared[compared["kept"] & (compared["similarity"] > -1)][-FEWER:][::-1]
    shown = left_out[_spread(len(left_out), 2 * FEWER)]
    return [
        [
            (figure(train, image, f"{words}, {cosine:.3f}"), figure(train, nearest, "kept"))
            for image, nearest, cosine, _ in pairs.tolist()
        ]
        for words, pairs in (("removed", shown), ("kept", below))
    ]


def figure(source: Source, index: int, words: str) -> Figure:
    """Returns a figure of an image of `source`, with the text `words`."""
    image = None
    with contextlib.suppress(OSError, Unreadable):
        image = thumbnail(source[index].image, SIDE)
    return Figure(image, words, as_text(source.describe(index)))


def _spread(size: int, most: int) -> np.ndarray:
    """Returns at most `most` integers that are spread evenly over `range(size)`."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int))
