"""Linear probe: multinomial logistic regression on frozen features, by L-BFGS."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.evaluation.features import Features, single_labels
from vit_jax.evaluation.least_squares import GUARD
from vit_jax.parallel.mesh import everywhere, over_devices, replicated, split_batch

PENALTIES = tuple(10.0**power for power in range(2, -7, -1))
FOLDS, ITERATIONS = 5, 300  # Number of folds, and maximum number of iterations of L-BFGS.
# Penalties are tried in descending order. The search stops when the loss has been higher than the
# lowest one for this number of consecutive penalties, because fits with smaller penalties take
# longer.
RISES = 2
ONE_FOLD = 10_000  # With at least this number of training images, one tenth is the validation set.


class Probe(NamedTuple):
    """Result of a linear probe."""

    accuracy: float  # Accuracy on the test images.
    penalty: float
    held_out: dict[float, float]  # Validation accuracy by penalty.


def linear_probe(
    train: Features,
    test: Features,
    num_classes: int,
    mesh: Mesh,
    *,
    penalties: Sequence[float] = PENALTIES,
) -> Probe:
    """Fits a linear probe with the best penalty on a validation set, and evaluates the probe.

    The validation set is a random tenth of the training images. The features are standardized with
    the statistics of the training images. The loss is the mean cross-entropy plus `penalty / 2`
    times the sum of the squared weights, without the biases. The final classifier uses the best
    penalty and all training images. The test images are evaluated once.

    Args:
      penalties: L2 penalties. They are tried in descending order, and each fit starts from the
        previous solution.

    Raises:
      UserError: there are fewer than ten training images, or an image does not have exactly one
        label.
    """
    labels = single_labels(train.labels, "the training images")
    held_out_rows, kept = hold_out(len(labels), 0)
    part, part_labels = train.values[kept], labels[kept]
    rest = _rows(train, held_out_rows)
    weights, held_out = np.zeros((train.values.shape[1] + 1, num_classes)), {}
    solutions = {}
    for penalty in sorted(penalties, reverse=True):
        weights = fit(part, part_labels, weights, penalty, mesh)
        solutions[penalty], held_out[penalty] = weights, accuracy(weights, part, rest, mesh)
    best = max(held_out, key=held_out.get)  # In a tie, the largest penalty is chosen.
    weights = fit(train.values, labels, solutions[best], best, mesh)
    return Probe(accuracy(weights, train.values, test, mesh), best, held_out)


class LinearHead(NamedTuple):
    """Linear classifier for features without standardization."""

    kernel: np.ndarray  # float32 `[features, classes]`.
    bias: np.ndarray  # float32 `[classes]`.
    penalty: float  # L2 penalty, selected by cross-validation.
    accuracy: float  # Accuracy in cross-validation.


def linear_head(
    train: Features,
    num_classes: int,
    mesh: Mesh,
    *,
    groups: np.ndarray | None = None,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
    iterations: int = ITERATIONS,
) -> LinearHead:
    """Fits the linear probe on all training images, with a penalty from cross-validation.

    There are two ways to scale features: each feature is divided by its own std, or all features
    are divided by a common std. Five-fold cross-validation selects the scaling and the penalty with
    the lowest mean cross-entropy. With few images, cross-entropy is a more reliable criterion than
    accuracy. Cross-entropy also prevents overconfident probabilities. Penalties are tried in
    descending order. The search stops when `RISES` consecutive penalties have a higher loss. With
    10,000 images or more, a single validation set, a tenth of the images, replaces the five folds.

    Args:
      groups: group number of each image of the source, `[images]`. All images of a group are in the
        same fold. None: each image is its own group.

    Raises:
      UserError: an image does not have exactly one label.
    """
    labels = single_labels(train.labels, "the training images")
    folds = _folds(np.arange(len(labels)) if groups is None else groups[train.indices], seed)
    penalties = sorted(penalties, reverse=True)
    losses, right = {}, {}
    first = np.zeros((train.values.shape[1] + 1, num_classes))
    for each in (True, False):
        solutions, lowest, rises = [first] * len(folds), math.inf, 0
        for penalty in penalties:
            loss = hits = 0.0
            for fold, held_out_rows in enumerate(folds):
                kept = np.setdiff1d(np.arange(len(labels)), held_out_rows)
                part, rest = train.values[kept], _rows(train, held_out_rows)
                solutions[fold] = fit(
                    part, labels[kept], solutions[fold], penalty, mesh, iterations, each
                )
                hits += accuracy(solutions[fold], part, rest, mesh, each) * len(held_out_rows)
                loss += _loss(solutions[fold], part, rest, mesh, each) * len(held_out_rows)
            losses[each, penalty], right[each, penalty] = loss, hits
            lowest, rises = min(lowest, loss), rises + 1 if loss > lowest else 0
            if rises == RISES:
                break
    # If several penalties have the same loss, the largest penalty is chosen.
    each, best = min(losses, key=lambda choice: losses[choice])
    weights = first
    for penalty in penalties[: penalties.index(best) + 1]:
        weights = fit(train.values, labels, weights, penalty, mesh, iterations, each)
    mean, deviation = _statistics(train.values, each)
    kernel = weights[:-1] / deviation[:, None]
    bias = weights[-1] - mean @ kernel
    share = right[each, best] / max(1, sum(map(len, folds)))
    return LinearHead(kernel.astype(np.float32), bias.astype(np.float32), best, share)


def _rows(features: Features, rows: np.ndarray) -> Features:
    return Features(features.values[rows], features.labels[rows], rows)


def _folds(groups: np.ndarray, seed: int) -> list[np.ndarray]:
    """Returns the indices of each fold's validation images. No fold divides a group of images."""
    names, group = np.unique(groups, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    parts = [order[: len(order) // 10]] if len(groups) >= ONE_FOLD else np.array_split(order, FOLDS)
    folds = [np.flatnonzero(np.isin(group, part)) for part in parts]
    return [fold for fold in folds if 0 < len(fold) < len(groups)]


def hold_out(images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws a tenth of the images as the validation set.

    Returns:
      The indices of the validation images, and the indices of the other images.

    Raises:
      UserError: there are fewer than ten images.
    """
    if images < 10:
        raise UserError(
            f"a linear probe needs ten training images to hold one out; there are {images}"
        )
    held_out_rows, kept = np.split(np.random.default_rng(seed).permutation(images), [images // 10])
    return held_out_rows, kept


def fit(
    values: np.ndarray,
    labels: np.ndarray,
    start: np.ndarray,
    penalty: float,
    mesh: Mesh,
    iterations: int = ITERATIONS,
    each: bool = True,
) -> np.ndarray:
    """Fits logistic regression on standardized features by L-BFGS.

    Args:
      values: features, `[images, features]`.
      labels: class of each image, `[images]`.
      penalty: L2 penalty; the loss contains `penalty / 2` times the sum of the squared weights.
      each: True: divide each feature by its own std. False: divide all features by a common std.

    Returns:
      float64 `[features + 1, classes]`: the weights, and the biases in the last row.
    """
    from scipy.optimize import minimize
    from threadpoolctl import threadpool_limits

    mean, deviation = _statistics(values, each)
    rows = over_devices((values - mean) / deviation, mesh)
    targets = over_devices(labels, mesh, fill=-1)
    gradient_of = _gradient_of(mesh)

    def function(flat):
        weights = everywhere(flat.reshape(start.shape).astype(np.float32), mesh)
        loss, gradient = jax.device_get(gradient_of(weights, rows, targets, np.float32(penalty)))
        return float(loss), gradient.astype(np.float64).ravel()

    # The loss is computed in float32. Smaller tolerances of L-BFGS would be below the rounding
    # error of the loss.
    options = dict(maxiter=iterations, ftol=1e-8, gtol=1e-6)
    # BLAS uses a single thread. L-BFGS has small matrix products, and several threads took 14 times
    # as long.
    with threadpool_limits(1, "blas"):
        solution = minimize(function, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    return solution.x.reshape(start.shape)


def accuracy(
    weights: np.ndarray, fitted: np.ndarray, test: Features, mesh: Mesh, each: bool = True
) -> float:
    """Returns the share of images whose most likely class is one of their labels.

    Args:
      weights: result of `fit`.
      fitted: features of the training images. Their mean and std standardize the features of
        `test`.
      each: True: divide each feature by its own std. False: divide all features by a common std.
    """
    mean, deviation = _statistics(fitted, each)
    rows = over_devices((test.values - mean) / deviation, mesh)
    targets = over_devices(test.labels, mesh, fill=-1)
    right = _count_right(mesh)(everywhere(weights.astype(np.float32), mesh), rows, targets)
    return int(right) / len(test.values)


def _loss(weights: np.ndarray, fitted: np.ndarray, test: Features, mesh: Mesh, each: bool) -> float:
    """Returns the mean cross-entropy of images with one label each; arguments as in `accuracy`."""
    mean, deviation = _statistics(fitted, each)
    rows = over_devices((test.values - mean) / deviation, mesh)
    targets = over_devices(test.labels.max(axis=1), mesh, fill=-1)
    return float(_mean_loss(mesh)(everywhere(weights.astype(np.float32), mesh), rows, targets))


def _statistics(values: np.ndarray, each: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the std of each feature, float32 `[features]`.

    If `each` is False, all features have the same std, the root mean square of all stds.
    """
    mean, deviation = values.mean(axis=0, dtype=np.float64), values.std(axis=0, dtype=np.float64)
    if not each:
        deviation = np.full_like(deviation, np.sqrt(np.square(deviation).mean()))
    return mean.astype(np.float32), (deviation + GUARD).astype(np.float32)


def scores(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns logits, `[images, classes]`; the last row of `weights` contains the biases."""
    return jnp.matmul(rows, weights[:-1], precision="highest") + weights[-1]


def cross_entropy(weights: jax.Array, rows: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of a linear classifier.

    Args:
      weights: `[features + 1, classes]`. The last row contains the biases.
      rows: features, `[images, features]`.
      labels: class of each image, `[images]`. Images with the label -1 are ignored.
    """
    there = labels >= 0
    likely = jax.nn.log_softmax(scores(weights, rows))
    log_likelihood = jnp.take_along_axis(likely, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    return -jnp.where(there, log_likelihood, 0).sum() / there.sum()


def count_right(weights: jax.Array, rows: jax.Array, labels: jax.Array) -> jax.Array:
    """Counts the images whose most likely class is one of their labels.

    Args:
      weights: result of `fit`.
      rows: standardized features, `[images, features]`.
      labels: labels of each image, int32 `[images, max_labels]`, padded with -1.
    """
    return (scores(weights, rows).argmax(axis=1)[:, None] == labels).any(axis=1).sum()


@functools.cache
def _gradient_of(mesh: Mesh):
    def loss(weights, rows, labels, penalty):
        return cross_entropy(weights, rows, labels) + penalty / 2 * jnp.square(weights[:-1]).sum()

    rows, copied = split_batch(mesh), replicated(mesh)
    return jax.jit(
        jax.value_and_grad(loss), in_shardings=(copied, rows, rows, copied), out_shardings=copied
    )


@functools.cache
def _mean_loss(mesh: Mesh):
    rows, copied = split_batch(mesh), replicated(mesh)
    return jax.jit(cross_entropy, in_shardings=(copied, rows, rows), out_shardings=copied)


@functools.cache
def _count_right(mesh: Mesh):
    rows, copied = split_batch(mesh), replicated(mesh)
    return jax.jit(count_right, in_shardings=(copied, rows, rows), out_shardings=copied)
