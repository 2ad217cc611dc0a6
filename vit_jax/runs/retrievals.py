"""Image retrieval in a report: captions of an evaluation, each with its most similar images."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.inspection.page_images import SMALL, image_address
from vit_jax.models.retrieval import Paired
from vit_jax.runs.predictions import read_arrays, write_arrays

RETRIEVALS = "retrievals.npz"
MOST_MISTAKES, MOST_SAMPLES = 12, 6  # Maximum numbers of mistakes, and of captions in the sample.
MOST_FOUND = 5  # Maximum number of images shown for a caption.


class Retrievals(NamedTuple):
    """Some captions of a split and the images that were retrieved for them.

    For each caption, the images of the split are ranked by similarity. A mistake is a caption whose
    most similar image is wrong. The mistakes come first, those with the worst ranks at the start. A
    sample of all captions of the split follows.
    """

    split: str
    step: int
    total: int  # Number of distinct captions of the split.
    total_images: int  # Number of images of the split.
    wrong: int  # Number of mistakes in the whole split.
    mistakes: int  # Number of mistakes at the start of `captions`.
    captions: np.ndarray  # Texts, `[captions]`.
    # Rank of each caption's correct image, counted from 1, `[captions]`. If several images are
    # correct, it is the rank of the most similar one.
    ranks: np.ndarray
    # Index in the split of the correct image whose rank is in `ranks`, `[captions]`.
    right: np.ndarray
    # Indices in the split of each caption's most similar images, `[captions, most]`, the most
    # similar first.
    found: np.ndarray
    found_right: np.ndarray  # True if the image in `found` is correct, `[captions, most]`.
    # Cosine similarity of each caption to the image in `right`, followed by its similarities to the
    # images in `found`, `[captions, 1 + most]`.
    similarities: np.ndarray
    shown: np.ndarray  # Indices of the stored images, `[shown]`.
    images: np.ndarray  # Pixels of the stored images, uint8 `[shown, height, width, 3]`.


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
      paired: embeddings of a split's images, and of its distinct captions.
      numbers: index of each image in the split, `[images]`.
      caption: function from an index in `paired.texts` to the caption's text.
      read: function from indices of images to their pixels, uint8 `[images, height, width, 3]`.
    """
    ranks = paired.ranks_of_texts()
    wrong = np.flatnonzero(ranks)
    worst = wrong[np.argsort(-ranks[wrong], kind="stable")][:MOST_MISTAKES]
    spread = np.linspace(0, len(ranks) - 1, min(MOST_SAMPLES, len(ranks))).astype(int)
    chosen = np.concatenate([worst, np.unique(spread)])
    scores = paired.texts[chosen] @ paired.images.T
    is_pair = np.zeros(scores.shape, bool)
    for row, text in enumerate(chosen):
        is_pair[row, paired.pairs[paired.pairs[:, 1] == text, 0]] = True
    best = np.where(is_pair, scores, -np.inf).argmax(axis=1)
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
        np.take_along_axis(is_pair, found, axis=1),
        np.take_along_axis(scores, columns, axis=1),
        numbers[shown],
        read(numbers[shown]),
    )


def keep_retrievals(workdir: Path, retrievals: Retrievals) -> None:
    """Writes `retrievals` into the workdir atomically. Earlier retrievals are replaced."""
    write_arrays(workdir / RETRIEVALS, retrievals._asdict())


def kept_retrievals(workdir: Path) -> Retrievals | None:
    """Reads the retrievals that an evaluation saved in a workdir; None if missing or damaged."""
    found = read_arrays(workdir / RETRIEVALS, Retrievals._fields)
    return Retrievals(**found) if found else None


class Thumbnail(NamedTuple):
    """A small picture of an image, shown next to a caption."""

    label: str
    similarity: str
    right: bool
    small: bool  # True: small image, drawn with sharp pixels. False: scaled smoothly.
    source: str  # Data URL.


class Caption(NamedTuple):
    """A caption with its correct image and its most similar images."""

    text: str
    about: str
    images: Sequence[Thumbnail]


def retrieval_figures(retrievals: Retrievals) -> dict[str, Any]:
    """Returns the variables of the HTML template `retrievals.html`."""
    among = (
        f"{retrievals.wrong:,} of {retrievals.total:,} captions of the {retrievals.split} images"
    )
    captions = [_caption(retrievals, row) for row in range(len(retrievals.captions))]
    return {
        "heading": "Captions and their most similar images",
        "about": (
            f"The most similar one of {retrievals.total_images:,} images is a wrong one for "
            f"{among}."
            + (" The right image is first, the highest rank on top." if retrievals.wrong else "")
        ),
        "mistakes": captions[: retrievals.mistakes],
        "sample": captions[retrievals.mistakes :],
        "summary": f"{len(captions) - retrievals.mistakes} captions spread over the split",
    }


def _caption(retrievals: Retrievals, row: int) -> Caption:
    pixels = dict(zip(retrievals.shown.tolist(), retrievals.images, strict=True))
    rank, similarities = int(retrievals.ranks[row]), retrievals.similarities[row].tolist()

    def thumbnail(label: str, number: int, similarity: float, right: bool) -> Thumbnail:
        image = pixels[number]
        small = max(image.shape) <= SMALL
        return Thumbnail(label, f"{similarity:.3f}", right, small, image_address(image))

    images = []
    if rank > 1:
        images.append(
            thumbnail(f"rank {rank:,}", int(retrievals.right[row]), similarities[0], True)
        )
    each = zip(retrievals.found[row].tolist(), retrievals.found_right[row].tolist(), strict=True)
    for place, (number, right) in enumerate(each, 1):
        images.append(thumbnail(str(place), number, similarities[place], right))
    about = "the right image is the most similar one"
    if rank > 1:
        about = f"the right image has rank {rank:,} of {retrievals.total_images:,}"
    return Caption(str(retrievals.captions[row]), about, images)
