"""Converts labels to lists of class indices, and recognizes one-hot and multi-hot labels."""

from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError


def one_hot_width(counts: np.ndarray, values: np.ndarray, classes: int | None = None) -> int | None:
    """Returns the length of one-hot or multi-hot labels; None if labels are lists of class indices.

    Labels count as one-hot or multi-hot if all of them have the same length and contain only zeros
    and ones. Lists of class indices are mistaken for multi-hot labels only if every image has the
    two classes 0 and 1, which is unlikely.

    Args:
      counts: length of each example's label, without unlabelled examples.
      values: all labels, concatenated.
      classes: number of classes, which must equal the length; None: unknown.
    """
    width = int(counts[0]) if len(counts) else 0
    if width < 2 or classes not in (None, width) or (counts != width).any():
        return None
    return width if np.isin(values, (0, 1)).all() else None


def from_one_hot(values: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Converts concatenated one-hot or multi-hot rows to lists of class indices.

    Returns:
      The length of each list, and all lists concatenated.
    """
    rows, indices = np.nonzero(values.reshape(-1, width))
    return np.bincount(rows, minlength=len(values) // width), indices


def check_lists(counts: np.ndarray, values: np.ndarray, classes: int | None = None) -> None:
    """Raises UserError for labels that seem to be rows of a table with one column per class.

    Labels must be lists of class indices. One-hot and multi-hot labels are converted before
    (`one_hot_width`). If all labels have the same length, a label that contains a value twice
    raises the error. If the labels have different lengths, no error is raised. A label may then
    contain a class twice, because an image may contain several objects of a class.

    Args:
      counts: length of each example's label, without unlabelled examples.
      values: all labels, concatenated.
    """
    if not len(counts) or counts[0] < 2 or (counts != counts[0]).any():
        return
    table = np.sort(values.reshape(len(counts), -1), axis=1)
    twice = np.flatnonzero((table[:, 1:] == table[:, :-1]).any(axis=1))
    if len(twice):
        raise not_indices(values.reshape(len(counts), -1)[twice[0]].tolist(), classes)


def not_indices(label: Sequence[int], classes: int | None = None) -> UserError:
    """Returns the error for a label in which a class occurs twice."""
    shown = ", ".join(map(str, label[:8])) + (", ..." if len(label) > 8 else "")
    width = f"{classes} zeros and ones" if classes else "zeros and ones"
    return UserError(
        f"the label [{shown}] is neither a list of class indices, as it has one twice, nor a row "
        f"of {width}, one for each class"
    )
