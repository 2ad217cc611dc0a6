"""The linear probe: multinomial logistic regression on frozen features, by L-BFGS."""

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
FOLDS = 5
# Penalties in a row with a higher loss, after which the search stops: smaller ones take longest.
RISES = 2
ONE_FOLD = 10_000  # Training images from which on a single tenth is held out.


class Probe(NamedTuple):
    """The result of a linear probe."""

    accuracy: float  # On the test images.
    penalty: float
    held_out: dict[float, float]  # By penalty, the accuracy on the training images that chose it.


def linear_probe(
    train: Features,
    test: Features,
    num_classes: int,
    mesh: Mesh,
    *,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
    iterations: int = 300,
) -> Probe:
    """Test accuracy with the penalty that is best on a tenth of the training images, held out.

    The features are standardised by the training images'. The loss is the mean cross-entropy and
    half the penalty times the squared weights, without the biases; with the penalty chosen, all
    training images are fitted. The test images are looked at once.

    Args:
      penalties: tried from the largest on, each starting where the one before ended.
      seed: of the choice of the tenth.
      iterations: of L-BFGS, at most, for each fit.

    Raises:
      UserError: fewer than ten training images; one that has not one label.
    """
    labels = single_labels(train.labels, "the training images")
    held, kept = hold_out(len(labels), seed)
    part, part_labels = train.values[kept], labels[kept]
    rest = Features(train.values[held], train.labels[held], held)
    weights, held_out = np.zeros((train.values.shape[1] + 1, num_classes)), {}
    found = {}
    for penalty in sorted(penalties, reverse=True):
        weights = fit(part, part_labels, weights, penalty, mesh, iterations)
        found[penalty], held_out[penalty] = weights, accuracy(weights, part, rest, mesh)
    best = max(held_out, key=held_out.get)  # The largest of equals.
    weights = fit(train.values, labels, found[best], best, mesh, iterations)
    return Probe(accuracy(weights, train.values, test, mesh), best, held_out)


class LinearHead(NamedTuple):
    """A linear classifier of features as they are.

    Attributes:
      kernel: float32 `[features, classes]`.
      bias: float32 `[classes]`.
      penalty: chosen on training images that are held out.
      accuracy: on these, in cross-validation.
    """

    kernel: np.ndarray
    bias: np.ndarray
    penalty: float
    accuracy: float


def linear_head(
    train: Features,
    num_classes: int,
    mesh: Mesh,
    *,
    groups: np.ndarray | None = None,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
    iterations: int = 300,
) -> LinearHead:
    """Fits the linear probe on all training images, with the penalty of the lowest loss in
    cross-validation.

    Each feature is divided by its own std, or all by one; cross-validation selects this and the
    penalty. Penalties are tried from the largest on, until `RISES` in a row have a higher loss.
    The loss is that of `linear_probe`: of few images it chooses more steadily than the accuracy,
    and the probabilities are not overconfident. From 10,000 images on, one tenth is held out in
    place of five folds.

    Args:
      groups: the group of each image of the source; a fold has all images of a group or none.
      penalties, seed, iterations: as of `linear_probe`.

    Raises:
      UserError: an image that has not one label.
    """
    labels = single_labels(train.labels, "the training images")
    folds = _folds(np.arange(len(labels)) if groups is None else groups[train.indices], seed)
    penalties = sorted(penalties, reverse=True)
    losses, right = {}, {}
    first = np.zeros((train.values.shape[1] + 1, num_classes))
    for each in (True, False):
        found, lowest, rises = [first] * len(folds), math.inf, 0
        for penalty in penalties:
            loss = hits = 0.0
            for fold, held in enumerate(folds):
                kept = np.setdiff1d(np.arange(len(labels)), held)
                part, rest = (
                    train.values[kept],
                    Features(train.values[held], train.labels[held], held),
                )
                found[fold] = fit(part, labels[kept], found[fold], penalty, mesh, iterations, each)
                hits += accuracy(found[fold], part, rest, mesh, each) * len(held)
                loss += _loss(found[fold], part, rest, mesh, each) * len(held)
            losses[each, penalty], right[each, penalty] = loss, hits
            lowest, rises = min(lowest, loss), rises + 1 if loss > lowest else 0
            if rises == RISES:
                break
    each, best = min(losses, key=lambda choice: losses[choice])  # The largest penalty of equals.
    weights = first
    for penalty in penalties[: penalties.index(best) + 1]:
        weights = fit(train.values, labels, weights, penalty, mesh, iterations, each)
    mean, deviation = _statistics(train.values, each)
    kernel = weights[:-1] / deviation[:, None]
    bias = weights[-1] - mean @ kernel
    share = right[each, best] / max(1, sum(map(len, folds)))
    return LinearHead(kernel.astype(np.float32), bias.astype(np.float32), best, share)


def _folds(groups: np.ndarray, seed: int) -> list[np.ndarray]:
    """The numbers of the images that are held out, of each fit; those of a group are in one."""
    names, group = np.unique(groups, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    parts = [order[: len(order) // 10]] if len(groups) >= ONE_FOLD else np.array_split(order, FOLDS)
    folds = [np.flatnonzero(np.isin(group, part)) for part in parts]
    return [fold for fold in folds if 0 < len(fold) < len(groups)]


def hold_out(images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a tenth of so many images, drawn by the seed, and those of the others.

    Raises:
      UserError: there are fewer than ten.
    """
    if images < 10:
        raise UserError(
            f"a linear probe needs ten training images to hold one out; there are {images}"
        )
    held, kept = np.split(np.random.default_rng(seed).permutation(images), [images // 10])
    return held, kept


def fit(
    values: np.ndarray,
    labels: np.ndarray,
    start: np.ndarray,
    penalty: float,
    mesh: Mesh,
    iterations: int,
    each: bool = True,
) -> np.ndarray:
    """Weights of standardised features and, in the last row, biases: float64 `[features + 1,
    classes]`.

    Args:
      each: divide every feature by its own std; otherwise all by one, which keeps their
        proportions.
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

    # The loss is in float32: below its rounding there is nothing to gain.
    options = dict(maxiter=iterations, ftol=1e-8, gtol=1e-6)
    with threadpool_limits(
        1, "blas"
    ):  # Its products are small: several threads took 14 times as long.
        found = minimize(function, start.ravel(), jac=True, method="L-BFGS-B", options=options)
    return found.x.reshape(start.shape)


def accuracy(
    weights: np.ndarray, fitted: np.ndarray, test: Features, mesh: Mesh, each: bool = True
) -> float:
    """Share of images of which the likeliest class is a label's; standardised as `fitted` is."""
    mean, deviation = _statistics(fitted, each)
    rows = over_devices((test.values - mean) / deviation, mesh)
    targets = over_devices(test.labels, mesh, fill=-1)
    right = _count_right(mesh)(everywhere(weights.astype(np.float32), mesh), rows, targets)
    return int(right) / len(test.values)


def _loss(weights: np.ndarray, fitted: np.ndarray, test: Features, mesh: Mesh, each: bool) -> float:
    """Mean cross-entropy of images with one label each; standardised as `fitted` is."""
    mean, deviation = _statistics(fitted, each)
    rows = over_devices((test.values - mean) / deviation, mesh)
    targets = over_devices(test.labels.max(axis=1), mesh, fill=-1)
    return float(_mean_loss(mesh)(everywhere(weights.astype(np.float32), mesh), rows, targets))


def _statistics(values: np.ndarray, each: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean of each feature, and its std or the root mean square of all stds,
    float32.
    """
    mean, deviation = values.mean(axis=0, dtype=np.float64), values.std(axis=0, dtype=np.float64)
    if not each:
        deviation = np.full_like(deviation, np.sqrt(np.square(deviation).mean()))
    return mean.astype(np.float32), (deviation + GUARD).astype(np.float32)


def scores(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """Scores `[images, classes]` of features, by weights with the biases in their last row."""
    return jnp.matmul(rows, weights[:-1], precision="highest") + weights[-1]


def cross_entropy(weights: jax.Array, rows: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy of images, `[images]` of which those labelled -1 are not there."""
    there = labels >= 0
    likely = jax.nn.log_softmax(scores(weights, rows))
    own = jnp.take_along_axis(likely, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    return -jnp.where(there, own, 0).sum() / there.sum()


def count_right(weights: jax.Array, rows: jax.Array, labels: jax.Array) -> jax.Array:
    """The number of images whose likeliest class is one of their labels, int32 `[images,
    max_labels]`.
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
