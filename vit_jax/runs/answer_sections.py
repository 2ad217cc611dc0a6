"""Sections of a report about predictions: mistakes, confusion matrix, classes and calibration."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.inspection import page_charts
from vit_jax.inspection.html_page import card_width
from vit_jax.inspection.page_images import SMALL, image_address
from vit_jax.runs.predictions import (
    BINS,
    MOST_MISTAKES,
    MOST_SAMPLES,
    ClassCounts,
    Predictions,
    by_class,
    calibration,
    class_counts,
    class_figures,
    confused,
)

MOST_PAIRS = 10
MOST_IN_MATRIX = 100  # Maximum number of classes in the confusion matrix.
MOST_LISTED = 40  # Number of classes that are shown at first; a click shows all classes.
MOST_NAME = 22  # Maximum length of a class name in the matrix, in characters.
CELL = 26  # Side of a matrix cell, in units of the SVG.


class Card(NamedTuple):
    """An image of the report with its label and its prediction."""

    label: str
    prediction: str
    probability: str
    right: bool
    small: bool  # True: small image, drawn with sharp pixels. False: scaled smoothly.
    source: str  # Data URL.
    file: str  # Path of the image file; empty: unknown.


class Bar(NamedTuple):
    """A line of a bar chart: name, metrics, and a bar of length `share` in [0, 1]; None: no bar."""

    name: str
    figures: str
    share: float | None = None


class Cell(NamedTuple):
    """A cell of the confusion matrix."""

    row: int
    column: int
    count: int
    share: float  # Share of the row's images.
    about: str


def answer_figures(predictions: Predictions, names: Sequence[str]) -> dict[str, Any]:
    """Returns the variables of the HTML template `answers.html`."""
    images, mistakes = len(predictions.numbers), predictions.mistakes.tolist()
    among = f"{len(mistakes):,} in {images:,} {predictions.split} images"
    spread = np.linspace(0, images - 1, min(MOST_SAMPLES, images)).astype(int)
    spread = np.unique(spread).tolist()
    if not mistakes:
        heading = "Mistakes"
    elif len(mistakes) <= MOST_MISTAKES:
        heading = f"Mistakes: {among}"
    else:
        heading = f"Worst mistakes: the surest of {among}"
    summary = f"{len(spread)} {predictions.split} images spread over the split, right and wrong"
    return {
        "card_width": card_width(names),
        "mistakes": heading,
        "no_mistakes": "" if mistakes else f"None in {images:,} {predictions.split} images.",
        "worst": _cards(predictions, names, mistakes[:MOST_MISTAKES]),
        "sample_summary": summary,
        "sample": _cards(predictions, names, spread),
        "confusion": _confusion(predictions, names),
        "classes": _accuracies(predictions, names),
        "calibration": _calibration(predictions),
    }


def _cards(predictions: Predictions, names: Sequence[str], rows: Sequence[int]) -> list[Card]:
    """Returns a `Card` for each image in `rows` (indices in `predictions`) with stored pixels."""
    shown, numbers = predictions.shown.tolist(), predictions.numbers.tolist()
    kept = dict(zip(shown, predictions.images, strict=True))
    files = dict(zip(shown, predictions.files.tolist(), strict=False))
    cards = []
    for row in rows:
        if (pixels := kept.get(numbers[row])) is None:
            continue
        labels = [names[int(label)] for label in predictions.labels[row] if label >= 0]
        cards.append(
            Card(
                label=", ".join(labels) or "without a label",
                prediction=names[int(predictions.answer[row])],
                probability=f"{predictions.probability[row]:.0%}",
                right=bool(predictions.right[row]),
                small=max(pixels.shape) <= SMALL,
                source=image_address(pixels, max(pixels.shape)),
                file=files.get(numbers[row], ""),
            )
        )
    return cards


def _confusion(predictions: Predictions, names: Sequence[str]) -> dict[str, Any]:
    """Returns the most frequent confusions, and the confusion matrix if it is small enough."""
    drawn = {"undefined": "", "pairs": [], "matrix": None, "most_in_matrix": MOST_IN_MATRIX}
    if not predictions.one_class_each:
        return drawn | {"undefined": "Not defined: some images are of several classes."}
    pairs, counts = confused(predictions)
    images, right = by_class(predictions, len(names))
    for (truth, answer), count in zip(pairs[:MOST_PAIRS].tolist(), counts.tolist(), strict=False):
        share = f"{count:,} of {images[truth]:,} ({count / images[truth]:.0%})"
        drawn["pairs"].append(Bar(f"{names[truth]} taken for {names[answer]}", share))
    if len(images) <= MOST_IN_MATRIX:
        matrix = np.diag(right)
        matrix[tuple(pairs.T)] = counts
        drawn["matrix"] = _matrix(matrix, images, names)
    return drawn


def _matrix(matrix: np.ndarray, images: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Returns the variables of the HTML template for the confusion matrix."""
    short = [_shortened(name) for name in names]
    margin = 12 + 6.4 * max(map(len, short))
    cells = []
    for row, column in np.argwhere(matrix).tolist():
        count, of = int(matrix[row, column]), int(images[row])
        about = f"{names[row]} taken for {names[column]}: {count:,} of {of:,}"
        cells.append(Cell(row, column, count, count / of, about))
    size = round(margin + CELL * len(matrix))
    least = min(size, round(margin) + 15 * len(matrix))  # A smaller matrix is illegible.
    return {
        **{"size": size, "least": least, "margin": margin, "cell": CELL},
        **{"names": short, "cells": cells},
    }


def _accuracies(predictions: Predictions, names: Sequence[str]) -> dict[str, Any]:
    """Returns the template's variables: a `Bar` for each class, the worst first, and notes."""
    images, right = by_class(predictions, len(names))
    tested = np.flatnonzero(images)
    shares = right / np.maximum(images, 1)
    counts = class_counts(predictions.labels, predictions.answer, len(names))
    bars = [
        Bar(
            names[label],
            f"{shares[label]:.1%}, {right[label]:,} of {images[label]:,}"
            + _predicted(counts, label),
            float(shares[label]),
        )
        for label in map(int, tested[np.argsort(shares[tested], kind="stable")])
    ]
    notes = []
    if not predictions.one_class_each:
        notes.append(
            "An image of several classes counts for each; right is an answer that is one of them."
        )
    if counts is not None:
        means = class_figures(counts)
        notes.append(
            "Bars show recall: the share of a class's images that are predicted as the class. "
            f"Balanced accuracy {means['balanced_accuracy']:.2%}, macro F1 {means['macro_f1']:.2%}."
        )
    count = len(images) - len(tested)
    untested = f"{count:,} class{'es' * (count > 1)} without {predictions.split} images."
    return {
        "notes": notes,
        "worst": bars[:MOST_LISTED],
        "others": bars[MOST_LISTED:],
        "untested": untested if count else "",
    }


def _predicted(counts: ClassCounts | None, label: int) -> str:
    if counts is None:
        return ""
    if not counts.answers[label]:
        return "; never predicted"
    return f"; precision {counts.precision[label]:.1%}, F1 {counts.f1[label]:.1%}"


def _calibration(predictions: Predictions) -> dict[str, Any]:
    """Returns the reliability diagram and the histogram of the predicted probabilities."""
    bins, error = calibration(predictions)
    sure, right = bins[:, 2] @ bins[:, :2] / bins[:, 2].sum()
    confidence, is_right = predictions.probability, predictions.right
    by_result = {"right": confidence[is_right].tolist(), "wrong": confidence[~is_right].tolist()}
    return {
        "text": (
            f"Expected calibration error {error:.1%} in {BINS} bins: on average the model is "
            f"{sure:.1%} sure and {right:.1%} right, {'surer' if sure > right else 'less sure'} "
            "than it should be. Larger dots are of more images."
        ),
        "charts": [
            page_charts.reliability(bins.tolist()),
            page_charts.certainty(by_result, 2 * BINS),
        ],
    }


def _shortened(name: str) -> str:
    """Shortens a long class name in the middle, because names often only differ at the end."""
    return (
        name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 9].rstrip()}…{name[-8:].lstrip()}"
    )
