"""Class balancing: sampling probabilities of the classes, and class weights in the loss.

With `none`, there is no balancing. With `sqrt`, a class contributes to training in proportion to
the square root of its number of images. With `full`, all classes contribute equally.
"""

import numpy as np

from vit_jax.data.order import BalancedOrder
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError

EXPONENTS = {"none": 0.0, "sqrt": 0.5, "full": 1.0}
# A run logs a note if the largest class has more than 10 times the images of the smallest nonempty
# class.
NOTED = 10


def single_labels(source: Source, key: str) -> np.ndarray:
    """Returns the class of each training image, `[images]`.

    Args:
      key: name of the option that requires single labels, for the error message.

    Raises:
      UserError: an image has no label, or several labels.
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

    Let N be the number of images, and n_c the number of images of class c. The weight of class c is
    `w_c = N n_c^-e / sum_k n_k^(1 - e)`. The exponent e is 1/2 for `sqrt` and 1 for `full`. With
    `full` and K classes, the weight is N / (K n_c), as with scikit-learn's
    `class_weight="balanced"`. The mean over all training images of the weight of their class is 1.
    A class without images has weight 0.
    """
    if kind == "none":
        return ()
    counts = np.bincount(labels).astype(float)
    present, exponent = counts > 0, EXPONENTS[kind]
    weights = np.zeros(len(counts))
    weights[present] = counts[present] ** -exponent
    return tuple((weights * counts.sum() / (weights @ counts)).tolist())


def balanced_order(labels: np.ndarray, kind: str, seed: int, repeats: int = 1) -> BalancedOrder:
    """Returns an endless training order in which classes are balanced.

    With `kind` `sqrt`, a class is sampled in proportion to the square root of its number of images.
    With `full`, all classes are sampled equally often. `labels` are the class of each image. An
    image is sampled `repeats` times in succession (repeated augmentation).
    """
    members, counts = np.argsort(labels, kind="stable"), np.bincount(labels)
    counts = counts[counts > 0]
    if kind == "full":
        return BalancedOrder(seed, members, counts, np.ones_like(counts), repeats)
    shares = counts ** (1 - EXPONENTS[kind])
    ends = np.round(np.cumsum(shares) / shares.sum() * len(labels)).astype(np.int64)
    return BalancedOrder(seed, members, counts, np.maximum(np.diff(ends, prepend=0), 1), repeats)


def known_counts(source: Source) -> np.ndarray | None:
    """Returns the number of images of each class, `[classes]`.

    The result is None if the labels are unknown, or if not every image has exactly one label.
    """
    table = source.known_labels()
    if table is None or not len(table) or ((table >= 0).sum(axis=1) != 1).any():
        return None
    return np.bincount(table.max(axis=1), minlength=len(source.class_names))


def inequality(counts: np.ndarray | None) -> float:
    """Returns the ratio of the largest to the smallest nonempty class; 1 if `counts` is None."""
    return 1.0 if counts is None else float(counts.max() / counts[counts > 0].min())


def note_of(source: Source) -> str | None:
    """Returns a note on unequal class sizes; None if their `inequality` is at most `NOTED`."""
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
