"""Class balancing: sampling frequency of each class, and its weight in the loss.

Values: `none` (no balancing), `sqrt` (classes count by the square root of their number of images),
`full` (all classes count the same).
"""

import numpy as np

from vit_jax.data.order import BalancedOrder
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError

EXPONENTS = {"none": 0.0, "sqrt": 0.5, "full": 1.0}
NOTED = 10  # A run logs a note above this ratio of the largest class to the smallest one.


def single_labels(source: Source, key: str) -> np.ndarray:
    """Returns the class of each training image, `[images]`.

    Args:
      key: the option that requires single labels, for the error message.

    Raises:
      UserError: an image has no label, or several.
    """
    table = source.label_table()
    counts = (table >= 0).sum(axis=1)
    if (wrong := np.flatnonzero(counts != 1)).size:
        raise UserError(
            f"config.{key} needs one label for each training image, and {len(wrong):,} of "
            f"{len(table):,} have none or several; the first is {source.describe(int(wrong[0]))}: "
            f"use config.{key}='none'"
        )
    return table.max(axis=1)


def class_weights(labels: np.ndarray, kind: str) -> tuple[float, ...]:
    """Returns the weight of each class in the loss; empty for `none`.

    With N images, of which n_c have class c, the weight is `w_c = N n_c^-e / sum_k n_k^(1 - e)`.
    The exponent e is 1/2 for `sqrt` and 1 for `full` (N / (classes n_c), scikit-learn's
    `balanced`). The mean weight of the images is 1. A class without images has weight 0.
    """
    if kind == "none":
        return ()
    counts = np.bincount(labels).astype(float)
    present, exponent = counts > 0, EXPONENTS[kind]
    weights = np.zeros(len(counts))
    weights[present] = counts[present] ** -exponent
    return tuple((weights * counts.sum() / (weights @ counts)).tolist())


def balanced_order(labels: np.ndarray, kind: str, seed: int, repeats: int = 1) -> BalancedOrder:
    """Returns the sampling order.

    The frequency of a class is proportional to the square root of its number of images (`sqrt`), or
    equal for all classes (`full`).
    """
    members, counts = np.argsort(labels, kind="stable"), np.bincount(labels)
    counts = counts[counts > 0]
    if kind == "full":
        return BalancedOrder(seed, members, counts, np.ones_like(counts), repeats)
    shares = counts ** (1 - EXPONENTS[kind])
    ends = np.round(np.cumsum(shares) / shares.sum() * len(labels)).astype(np.int64)
    return BalancedOrder(seed, members, counts, np.maximum(np.diff(ends, prepend=0), 1), repeats)


def known_counts(source: Source) -> np.ndarray | None:
    """Returns the number of images of each class; None if unknown, or if images are multi-label."""
    table = source.known_labels()
    if table is None or not len(table) or ((table >= 0).sum(axis=1) != 1).any():
        return None
    return np.bincount(table.max(axis=1), minlength=len(source.class_names))


def inequality(counts: np.ndarray | None) -> float:
    """Returns the ratio of the largest class to the smallest nonempty one; 1 if unknown."""
    return 1.0 if counts is None else float(counts.max() / counts[counts > 0].min())


def note_of(source: Source) -> str | None:
    """Returns a note if the classes of the training images are very unequal, else None."""
    counts = known_counts(source)
    if inequality(counts) <= NOTED:
        return None
    least, most = int(np.where(counts > 0, counts, counts.max()).argmin()), int(counts.argmax())
    return (
        f"note: the classes are unequal, {inequality(counts):.0f} to 1: {counts[most]:,} training "
        f"images of {source.class_names[most]} and {counts[least]:,} of "
        f"{source.class_names[least]}; look at balanced accuracy and macro F1, and try "
        "--config.data.balance=sqrt or --config.loss.class_weights=sqrt"
    )
