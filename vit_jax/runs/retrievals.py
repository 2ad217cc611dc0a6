"""Captions of an evaluation with their most similar images, for a report."""

import secrets
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.inspection.page_images import SMALL, image_address
from vit_jax.models.retrieval import Paired

RETRIEVALS = "retrievals.npz"
MOST_MISTAKES, MOST_SAMPLES = 12, 6  # Maximum numbers of captions.
MOST_FOUND = 5  # Maximum number of images shown for a caption.


class Retrievals(NamedTuple):
    """Some captions of a split: mistakes in order of decreasing rank, then a sample.

    Attributes:
      total, total_images: number of distinct captions, and of images.
      wrong: number of captions with a wrong most similar image.
      mistakes: number of mistakes at the start of `captions`.
      captions: texts `[captions]`.
      ranks: rank of each caption's best correct image, from 1, `[captions]`.
      right: index of that image in the split, `[captions]`.
      found: the most similar images, the most similar first, `[captions, most]`.
      found_right: True where a found image is correct, `[captions, most]`.
      similarities: cosine similarity to the correct image and to the found ones, `[captions, 1 +
        most]`.
      shown, images: indices of the images, and their pixels, uint8 `[shown, height, width, 3]`.
    """

    split: str
    step: int
    total: int
    total_images: int
    wrong: int
    mistakes: int
    captions: np.ndarray
    ranks: np.ndarray
    right: np.ndarray
    found: np.ndarray
    found_right: np.ndarray
    similarities: np.ndarray
    shown: np.ndarray
    images: np.ndarray


def retrievals_of(
    paired: Paired,
    numbers: np.ndarray,
    caption: Callable[[int], str],
    read: Callable[[np.ndarray], np.ndarray],
    split: str,
    step: int,
) -> Retrievals:
    """Selects the captions to show, with their images.

    Args:
      paired: embeddings of the images and of the distinct captions of a split.
      numbers: index of each image in the split, `[images]`.
      caption: returns a caption by its index in `paired.texts`.
      read: returns the pixels of images by their indices, uint8 `[images, height, width, 3]`.
    """
    ranks = paired.ranks_of_texts()
    wrong = np.flatnonzero(ranks)
    worst = wrong[np.argsort(-ranks[wrong], kind="stable")][:MOST_MISTAKES]
    spread = np.linspace(0, len(ranks) - 1, min(MOST_SAMPLES, len(ranks))).astype(int)
    chosen = np.concatenate([worst, np.unique(spread)])
    scores = paired.texts[chosen] @ paired.images.T
    own = np.zeros(scores.shape, bool)
    for row, text in enumerate(chosen):
        own[row, paired.pairs[paired.pairs[:, 1] == text, 0]] = True
    best = np.where(own, scores, -np.inf).argmax(axis=1)
    found = np.argsort(-scores, axis=1, kind="stable")[:, :MOST_FOUND]
    columns = np.concatenate([best[:, None], found], axis=1)
    shown = np.unique(columns)
    return Retrievals(
        split,
        step,
        len(ranks),
        len(numbers),
        len(wrong),
        len(worst),
        np.array([caption(int(text)) for text in chosen]),
        ranks[chosen] + 1,
        numbers[best],
        numbers[found],
        np.take_along_axis(own, found, axis=1),
        np.take_along_axis(scores, columns, axis=1),
        numbers[shown],
        read(numbers[shown]),
    )


def keep_retrievals(workdir: Path, retrievals: Retrievals) -> None:
    """Writes the captions and images into the workdir atomically, replacing earlier ones."""
    temporary = workdir / f"{RETRIEVALS}.{secrets.token_hex(4)}.tmp"
    with temporary.open("wb") as file:
        np.savez_compressed(file, **retrievals._asdict())
    temporary.replace(workdir / RETRIEVALS)


def kept_retrievals(workdir: Path) -> Retrievals | None:
    """Returns the captions and images in a workdir; None if there are none, or they are damaged."""
    try:
        with np.load(workdir / RETRIEVALS, allow_pickle=False) as file:
            values = {name: file[name] for name in Retrievals._fields}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
        return None
    return Retrievals(**{name: x if x.ndim else x.item() for name, x in values.items()})


class Thumbnail(NamedTuple):
    """An image next to a caption."""

    label: str
    similarity: str
    right: bool
    small: bool  # Small images keep their pixels; a photograph is scaled down smoothly.
    source: str  # Data URL.


class Caption(NamedTuple):
    """A caption with its correct image and the most similar ones."""

    text: str
    about: str
    images: Sequence[Thumbnail]


def retrieval_figures(found: Retrievals) -> dict[str, Any]:
    """Returns the variables of the template `retrievals.html`."""
    among = f"{found.wrong:,} of {found.total:,} captions of the {found.split} images"
    captions = [_caption(found, row) for row in range(len(found.captions))]
    return {
        "heading": "Captions and their most similar images",
        "about": (
            f"The most similar one of {found.total_images:,} images is a wrong one for {among}."
            + (" The right image is first, the highest rank on top." if found.wrong else "")
        ),
        "mistakes": captions[: found.mistakes],
        "sample": captions[found.mistakes :],
        "summary": f"{len(captions) - found.mistakes} captions spread over the split",
    }


def _caption(found: Retrievals, row: int) -> Caption:
    pixels = dict(zip(found.shown.tolist(), found.images, strict=True))
    rank, similarities = int(found.ranks[row]), found.similarities[row].tolist()

    def thumbnail(label: str, number: int, similarity: float, right: bool) -> Thumbnail:
        image = pixels[number]
        small = max(image.shape) <= SMALL
        return Thumbnail(label, f"{similarity:.3f}", right, small, image_address(image))

    images = []
    if rank > 1:
        images.append(thumbnail(f"rank {rank:,}", int(found.right[row]), similarities[0], True))
    each = zip(found.found[row].tolist(), found.found_right[row].tolist(), strict=True)
    for place, (number, right) in enumerate(each, 1):
        images.append(thumbnail(str(place), number, similarities[place], right))
    about = "the right image is the most similar one"
    if rank > 1:
        about = f"the right image has rank {rank:,} of {found.total_images:,}"
    return Caption(str(found.captions[row]), about, images)
