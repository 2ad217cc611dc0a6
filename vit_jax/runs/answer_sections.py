"""Report sections on predictions: mistakes, confusion, classes, calibration and samples."""

import html
import io
from collections.abc import Sequence

import numpy as np

from vit_jax.inspection import page_charts
from vit_jax.inspection.html_page import Section, bar, breakable, card_width, folded, inline, note
from vit_jax.runs.predictions import (
    BINS,
    MOST_MISTAKES,
    MOST_SAMPLES,
    Predictions,
    by_class,
    calibration,
    class_counts,
    class_figures,
    confused,
)

MOST_PAIRS = 10
MOST_IN_MATRIX = 100  # Classes.
MOST_LISTED = 40  # Classes, before the rest is folded.
MOST_NAME = 22  # Characters of a class in the matrix.
CELL = 26  # Side of a matrix cell, in units of the SVG.


def answer_sections(found: Predictions, names: Sequence[str]) -> list[Section]:
    """Returns all sections of a report that show predictions.

    Args:
      names: names of all classes.
    """
    figures = Figures(found, names)
    return [
        figures.worst(),
        Section("Confusion", figures.confusion(), ""),
        Section("Accuracy by class", figures.accuracies(), ""),
        Section("Calibration", figures.calibration(), ""),
        figures.sample(),
    ]


class Figures:
    """Predictions as HTML."""

    def __init__(self, found: Predictions, names: Sequence[str]):
        self._found, self._names = found, names
        rows = {number: row for row, number in enumerate(found.numbers.tolist())}
        shown = zip(found.shown.tolist(), found.images, strict=True)
        self._pixels = {rows[number]: image for number, image in shown if number in rows}

    def worst(self) -> Section:
        """Returns the section of the wrong predictions with the highest probability."""
        found = self._found
        images, mistakes = len(found.numbers), found.mistakes.tolist()
        if not mistakes:
            return Section("Mistakes", note(f"None in {images:,} {found.split} images."), "")
        heading = (
            f"Worst mistakes: the surest of {len(mistakes):,} in {images:,} {found.split} images"
        )
        if len(mistakes) <= MOST_MISTAKES:
            heading = f"Mistakes: {len(mistakes):,} in {images:,} {found.split} images"
        return Section(heading, self._cards(mistakes[:MOST_MISTAKES]), "")

    def sample(self) -> Section:
        """Returns the section of images spread over the split."""
        images = len(self._found.numbers)
        spread = np.unique(
            np.linspace(0, images - 1, min(MOST_SAMPLES, images)).astype(int)
        ).tolist()
        summary = f"{len(spread)} {self._found.split} images spread over the split, right and wrong"
        return Section("", folded(summary, self._cards(spread)), "")

    def _cards(self, rows: Sequence[int]) -> str:
        """Returns cards of the kept images in these rows, with their predictions."""
        cards = "".join(self._card(row) for row in rows if row in self._pixels)
        return (
            f'<div class="samples" style="{card_width(self._names)}">{cards}</div>' if cards else ""
        )

    def _card(self, row: int) -> str:
        """Returns one image with its prediction; a wrong one has a sign and a frame."""
        found, pixels = self._found, self._pixels[row]
        names = [self._names[int(label)] for label in found.labels[row].tolist() if label >= 0]
        label, prediction = (
            ", ".join(names) or "without a label",
            self._names[int(found.answer[row])],
        )
        about = html.escape(f"{label}, predicted {prediction}", quote=True)
        right = bool(found.right[row])
        # Small images keep their pixels; a photograph is scaled down smoothly.
        size = ' class="small"' if _is_small(pixels) else ""
        return (
            f'<figure class="{"right" if right else "wrong"}">'
            f'<img{size} alt="{about}" src="{_encoded(pixels)}"><figcaption title="{about}">'
            f"<b>{'✓' if right else '✗'} {breakable(prediction)}</b> {found.probability[row]:.0%}"
            + ("" if right else f"<br><span>is {breakable(label)}</span>")
            + "</figcaption></figure>"
        )

    def confusion(self) -> str:
        """Returns the most frequent confusions, next to the matrix if it is small enough."""
        if not self._found.one_class_each:
            return note("Not defined: some images are of several classes.")
        pairs, counts = confused(self._found)
        if not len(pairs):
            return ""
        images, right = by_class(self._found, len(self._names))
        most = "".join(
            bar(
                f"{self._names[truth]} taken for {self._names[answer]}",
                f"{count:,} of {images[truth]:,} ({count / images[truth]:.0%})",
            )
            for (truth, answer), count in zip(
                pairs[:MOST_PAIRS].tolist(), counts.tolist(), strict=False
            )
        )
        most = f'<div class="bars">{most}</div>'
        if len(images) > MOST_IN_MATRIX:
            return most + note(f"A matrix is drawn of up to {MOST_IN_MATRIX} classes.")
        matrix = np.diag(right)
        matrix[tuple(pairs.T)] = counts
        return f'<div class="beside">{self._matrix(matrix, images)}{most}</div>'

    def _matrix(self, matrix: np.ndarray, images: np.ndarray) -> str:
        """Returns an SVG of the confusion matrix: rows are classes, columns are predictions."""
        short = [_shortened(name) for name in self._names]
        margin = 12 + 6.4 * max(map(len, short))
        drawn = []
        for row, name in enumerate(map(html.escape, short)):
            y = margin + CELL * row
            middle = y + CELL / 2
            drawn.append(f'<text x="{margin - 6}" y="{middle + 4}" text-anchor="end">{name}</text>')
            turned = f'transform="rotate(-90 {middle + 4} {margin - 6})"'
            place = (
                f'x="{middle + 4}" {turned}'
                if margin > 30
                else f'x="{middle}" text-anchor="middle"'
            )
            drawn.append(f'<text {place} y="{margin - 6}">{name}</text>')
            for column in np.flatnonzero(matrix[row]).tolist():
                count, x = matrix[row, column], margin + CELL * column
                about = (
                    f"{self._names[row]} taken for {self._names[column]}: {count:,} of "
                    f"{images[row]:,}"
                )
                drawn.append(
                    f'<g><title>{html.escape(about)}</title><rect x="{x}" y="{y}" '
                    f'width="{CELL - 1}" height="{CELL - 1}" class="{"hit" if row == column else "miss"}" '
                    f'fill-opacity="{0.12 + 0.55 * (count / images[row]) ** 0.5:.2f}"/>'
                    f'<text x="{x + CELL / 2 - 0.5}" y="{y + 17}" text-anchor="middle">{count}</text></g>'
                )
        size = round(margin + CELL * len(matrix))
        least = min(size, round(margin) + 15 * len(matrix))  # Smaller ones are illegible.
        about = "Rows: what an image is. Columns: what it was taken for."
        return (
            f'<div style="flex:1 1 {least}px;max-width:{max(size, 320)}px"><div class="scroll">'
            f'<svg class="matrix" role="img" viewBox="0 0 {size} {size}" style="min-width:{least}px" '
            f'aria-label="Confusion matrix. {about}">{"".join(drawn)}</svg></div>{note(about)}</div>'
        )

    def accuracies(self) -> str:
        """Returns bars with the recall of each class, the worst first.

        Where each image is of one class, they have precision and F1 score too.
        """
        images, right = by_class(self._found, len(self._names))
        tested = np.flatnonzero(images)
        shares = right / np.maximum(images, 1)
        order = [int(label) for label in tested[np.argsort(shares[tested], kind="stable")]]
        counts = class_counts(self._found.labels, self._found.answer, len(self._names))

        def predicted(label: int) -> str:
            if counts is None:
                return ""
            if not counts.answers[label]:
                return "; never predicted"
            return f"; precision {counts.precision[label]:.1%}, F1 {counts.f1[label]:.1%}"

        bars = [
            bar(
                self._names[label],
                f"{shares[label]:.1%}, {right[label]:,} of {images[label]:,}{predicted(label)}",
                float(shares[label]),
            )
            for label in order
        ]
        text = f'<div class="bars">{"".join(bars[:MOST_LISTED])}</div>'
        if counts is not None:
            means = class_figures(counts)
            about = (
                "Bars show recall: the share of a class's images that are predicted as the "
                f"class. Balanced accuracy {means['balanced_accuracy']:.2%}, macro F1 "
                f"{means['macro_f1']:.2%}."
            )
            text = note(about) + text
        if not self._found.one_class_each:
            counted = (
                "An image of several classes counts for each; right is an answer that is one of "
                "them."
            )
            text = note(counted) + text
        if rest := bars[MOST_LISTED:]:
            text += folded(
                f"{len(rest):,} more classes", f'<div class="bars">{"".join(rest)}</div>'
            )
        if untested := len(images) - len(tested):
            text += note(
                f"{untested:,} class{'es' * (untested > 1)} without {self._found.split} images."
            )
        return text

    def calibration(self) -> str:
        """Returns charts of the accuracy by predicted probability, and of the probabilities."""
        bins, error = calibration(self._found)
        sure, right = bins[:, 2] @ bins[:, :2] / bins[:, 2].sum()
        said, hit = self._found.probability, self._found.right
        drawn = (
            page_charts.reliability(bins.tolist()),
            page_charts.certainty(
                {"right": said[hit].tolist(), "wrong": said[~hit].tolist()}, 2 * BINS
            ),
        )
        text = (
            f"Expected calibration error {error:.1%} in {BINS} bins: on average the model is "
            f"{sure:.1%} sure and {right:.1%} right, {'surer' if sure > right else 'less sure'} "
            "than it should be. Larger dots are of more images."
        )
        return (
            note(text)
            + f'<div class="curves">{"".join(f"<figure>{svg}</figure>" for svg in drawn)}</div>'
        )


def _shortened(name: str) -> str:
    """Returns a name without its middle if it is long: classes often differ at the end alone."""
    return (
        name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 9].rstrip()}…{name[-8:].lstrip()}"
    )


def _is_small(pixels: np.ndarray) -> bool:
    return max(pixels.shape) <= 64


def _encoded(pixels: np.ndarray) -> str:
    """Returns an image as a data URL: small ones losslessly as PNG, photographs as JPEG."""
    from PIL import Image

    kind, values = ("png", {}) if _is_small(pixels) else ("jpeg", {"quality": 88})
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, kind, **values)
    return inline(encoded.getvalue(), kind)
