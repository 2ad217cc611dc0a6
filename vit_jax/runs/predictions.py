"""Predictions of a run's model for each evaluated image, their storage, and metrics of classes."""

import secrets
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PREDICTIONS = "predictions.npz"
MOST_MISTAKES, MOST_SAMPLES = 24, 24
BINS = 10

# Formats of the metrics of `class_figures`.
CLASS_FIGURES = {"balanced_accuracy": "share", "macro_f1": "share"}


def metric_in_words(name: str) -> str:
    """Returns a readable name of a metric: `balanced accuracy` for `balanced_accuracy`."""
    return name.replace("_", " ").replace(" f1", " F1")


class Predictions(NamedTuple):
    """Predictions for the readable images of a split, in the order of the split."""

    split: str
    step: int
    numbers: np.ndarray  # Indices of the images in the split, `[images]`.
    # True classes of each image, `[images, most]`. The width `most` is the largest number of
    # classes of an image. Images with fewer classes are padded with -1.
    labels: np.ndarray
    answer: np.ndarray  # The most probable class of each image, `[images]`.
    probability: np.ndarray  # Probability of the most probable class, `[images]`.
    # Indices of the images that the report shows, `[shown]`.
    shown: np.ndarray = np.zeros(0, np.int32)
    # Pixels of the images in `shown`, uint8 `[shown, height, width, channels]`.
    images: np.ndarray = np.zeros((0, 1, 1, 3), np.uint8)
    # Files of the images in `shown`, or other descriptions, str `[shown]`. Predictions of earlier
    # versions have none.
    files: np.ndarray = np.zeros(0, "U1")

    @property
    def right(self) -> np.ndarray:
        """True for images whose prediction is one of their classes, bool `[images]`."""
        return (self.answer[:, None] == self.labels).any(axis=1)

    @property
    def mistakes(self) -> np.ndarray:
        """Indices of wrongly predicted images with labels, the most confident first."""
        wrong = np.flatnonzero(~self.right & (self.labels >= 0).any(axis=1))
        return wrong[np.argsort(-self.probability[wrong], kind="stable")]

    @property
    def one_class_each(self) -> bool:
        """True if no image has several classes."""
        return bool(((self.labels >= 0).sum(axis=1) <= 1).all())


class ClassCounts(NamedTuple):
    """Numbers of images by class, each int `[classes]`."""

    images: np.ndarray  # Number of images with this class as the label.
    answers: np.ndarray  # Number of images with this class as the prediction.
    right: np.ndarray  # Number of images with this class as both label and prediction.

    @property
    def recall(self) -> np.ndarray:
        """Share of a class's images that are predicted correctly; 0 for a class without images."""
        return self.right / np.maximum(self.images, 1)

    @property
    def precision(self) -> np.ndarray:
        """Share of a class's predictions that are correct; 0 for a class without predictions."""
        return self.right / np.maximum(self.answers, 1)

    @property
    def f1(self) -> np.ndarray:
        """F1 score: the harmonic mean of precision and recall; 0 if both are 0."""
        return 2 * self.right / np.maximum(self.images + self.answers, 1)

    @property
    def never_predicted(self) -> np.ndarray:
        """Indices of classes that have images, but no predictions."""
        return np.flatnonzero((self.images > 0) & (self.answers == 0))


def to_show(predictions: Predictions) -> np.ndarray:
    """Returns the indices of the images to show: the worst mistakes, and a sample of all images."""
    rows = np.linspace(0, len(predictions.numbers) - 1, min(MOST_SAMPLES, len(predictions.numbers)))
    chosen = np.concatenate([predictions.mistakes[:MOST_MISTAKES], rows.astype(int)])
    return np.unique(predictions.numbers[chosen])


def keep(workdir: Path, predictions: Predictions) -> None:
    """Writes predictions into the workdir atomically, in place of earlier predictions."""
    write_arrays(workdir / PREDICTIONS, predictions._asdict())


def kept(workdir: Path) -> Predictions | None:
    """Reads the predictions that `keep` wrote to a workdir; None if they are missing or damaged."""
    path, fields = workdir / PREDICTIONS, Predictions._fields
    found = read_arrays(path, fields) or read_arrays(path, set(fields) - {"files"})
    return Predictions(**found) if found else None


def write_arrays(path: Path, values: Mapping[str, Any]) -> None:
    """Writes arrays, numbers and texts to an `.npz` file atomically."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, **values)
    temporary.replace(path)


def read_arrays(path: Path, names: Iterable[str]) -> dict[str, Any] | None:
    """Reads values of a file of `write_arrays`; None if the file is missing or damaged."""
    try:
        with np.load(path) as file:
            values = {name: file[name] for name in names}
    # A TypeError: the file contains a single array.
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError):
        return None
    return {name: x if x.ndim else x.item() for name, x in values.items()}


def confused(predictions: Predictions) -> tuple[np.ndarray, np.ndarray]:
    """Counts the confusions: pairs of a true class and a wrongly predicted class.

    The images must have one class each. Returns the pairs, `[pairs, 2]`, and the number of images
    of each pair, `[pairs]`, the most frequent first.
    """
    wrong = predictions.mistakes
    pairs = np.stack([predictions.labels[wrong].max(axis=1), predictions.answer[wrong]], axis=1)
    pairs, counts = np.unique(pairs, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return pairs[order], counts[order]


def by_class(predictions: Predictions, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns two counts, int `[classes]`: images and correctly predicted images of each class."""
    of_images = np.where(predictions.right, 1, 0)[:, None] * np.ones_like(predictions.labels)
    known = predictions.labels >= 0
    images = np.bincount(predictions.labels[known], minlength=classes)
    right = np.bincount(predictions.labels[known], weights=of_images[known], minlength=classes)
    return images, right.astype(int)


def class_counts(labels: np.ndarray, answer: np.ndarray, classes: int = 0) -> ClassCounts | None:
    """Counts images by class; None if an image does not have exactly one label.

    Args:
      labels: classes of each image, `[images, most]`, padded with -1.
      answer: the most probable class of each image, `[images]`.
      classes: number of classes; 0: the largest class index plus 1.
    """
    if not len(labels) or ((labels >= 0).sum(axis=1) != 1).any():
        return None
    truth = labels.max(axis=1)
    classes = max(classes, int(truth.max()) + 1, int(answer.max()) + 1)
    each = truth, answer, truth[truth == answer]
    return ClassCounts(*(np.bincount(x, minlength=classes) for x in each))


def class_figures(counts: ClassCounts) -> dict[str, float]:
    """Returns metrics that weight all classes equally, by the names of `CLASS_FIGURES`.

    `balanced_accuracy` is the mean recall over classes with images. `macro_f1` is the mean F1 score
    over classes with images or predictions. Both are defined as in scikit-learn.
    """
    return {
        "balanced_accuracy": float(counts.recall[counts.images > 0].mean()),
        "macro_f1": float(counts.f1[counts.images + counts.answers > 0].mean()),
    }


def calibration(predictions: Predictions) -> tuple[np.ndarray, float]:
    """Returns the reliability diagram of the predictions and their expected calibration error.

    Returns:
      The reliability diagram, `[BINS, 3]`, and the expected calibration error (Guo et al., 2017).
      The bins divide the probability of the predicted class into intervals of equal width. A row of
      the diagram contains a bin's mean probability, accuracy and number of images. The calibration
      error is the absolute difference of the first two, averaged over all images.
    """
    where = np.minimum((predictions.probability * BINS).astype(int), BINS - 1)
    counts = np.bincount(where, minlength=BINS)
    sums = [
        np.bincount(where, weights=x, minlength=BINS)
        for x in (predictions.probability, predictions.right)
    ]
    means = [x / np.maximum(counts, 1) for x in sums]
    error = float((np.abs(means[0] - means[1]) * counts).sum() / max(counts.sum(), 1))
    return np.stack([*means, counts], axis=1), error
