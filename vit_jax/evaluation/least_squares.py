"""Ridge regression in closed form: the linear classifier of the few-shot evaluation.

The features of the training images are standardized and the constant 100 is appended:
`A [n, D + 1]`. The targets `Y [n, K]` are +1 for an image's class and -1 for the others. The
coefficients are

    (A^T A + penalty I)^-1 A^T Y

or, if there are fewer images than D + 1,

    A^T (A A^T + penalty I)^-1 Y

The standardized features X sum to zero over the training images. The row of A^T A that belongs to
the constant is therefore zero except on the diagonal. The coefficient of the constant is thus `100
sum(Y) / (100^2 n + penalty)`, and the coefficients of the features depend only on X.

All computations are in float64. The devices compute the products of features.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.parallel.mesh import everywhere, over_devices, replicated, split_batch, whole_batch

CONSTANT = 100.0  # Feature for the bias. A large value reduces the penalty's effect on the bias.
GUARD = 1e-5  # Added to the std of a feature, to avoid a division by zero.
BLOCK = 2048  # Number of rows in a product. It is fixed to compile only few shapes.


class Classifier(NamedTuple):
    """Linear classifier, with the mean and std by which features are standardized."""

    mean: np.ndarray  # float64 [features]
    deviation: np.ndarray  # float64 [features]: std plus `GUARD`.
    coefficients: np.ndarray  # float64 [features + 1, classes]; the last row is the constant's.


def fit(
    features: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    penalties: Sequence[float],
    mesh: Mesh,
    log: Callable[[str], None] = print,
) -> list[Classifier]:
    """Fits a classifier for each penalty.

    If a penalty is 0, there may be several solutions. The result is then the solution with the
    minimum norm, and a note is logged.

    Args:
      features: features of the training images, `[images, features]`.
      labels: class of each image, `[images]`.

    Raises:
      UserError: a penalty is below 0, or a feature is not finite.
    """
    if min(penalties) < 0:
        raise UserError(
            f"the penalty of least squares is {min(penalties):g} and must be 0 or above"
        )
    features = np.asarray(features, np.float64)
    if not np.isfinite(features).all():
        raise UserError(
            "the model's features are not finite: its parameters are damaged, or have diverged"
        )
    mean, deviation = features.mean(axis=0), features.std(axis=0) + GUARD
    standard = (features - mean) / deviation
    images, width = standard.shape
    dual = images < width + 1
    if dual:
        targets = 2.0 * (labels[:, None] == np.arange(num_classes)) - 1
        standardized, rank = _solve(gram(standard.T, mesh), targets, penalties)
        solutions = (standard.T @ solution for solution in standardized)
    else:
        solutions, rank = _solve(
            gram(standard, mesh), _class_sums(standard, labels, num_classes), penalties
        )
    # Standardized features sum to zero over the images. The rank of the Gram matrix is therefore at
    # most images - 1.
    if min(penalties) == 0 and rank < min(width, images - 1):
        vectors = "images" if dual else "features"
        log(
            f"note: penalty 0 with {vectors} that are linearly dependent (rank {rank}): the "
            "least-norm "
            "solution"
        )
    sums = CONSTANT * (2 * np.bincount(labels, minlength=num_classes) - images)
    constants = (sums / (CONSTANT**2 * images + penalty) for penalty in penalties)
    return [
        Classifier(mean, deviation, np.vstack([solution, constant]))
        for solution, constant in zip(solutions, constants, strict=True)
    ]


def gram(rows: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Computes `rows^T rows` of float64 rows on all devices, float64 `[columns, columns]`."""
    count, width = rows.shape
    padded = -(-width // 128) * 128  # Padding with zeros does not change the result.
    size = whole_batch(mesh, BLOCK)
    with jax.enable_x64(True):
        total = everywhere(np.zeros((padded, padded)), mesh)
        for start in range(0, count, size):
            block = np.pad(rows[start : start + size], ((0, 0), (0, padded - width)))
            total = _add_gram(mesh)(total, over_devices(block, mesh, size))
        return np.asarray(total)[:width, :width]


def accuracy(classifier: Classifier, features: jax.Array, labels: jax.Array, mesh: Mesh) -> float:
    """Returns the share of images whose predicted class is one of their labels.

    Args:
      features: float32 `[images, features]`, sharded over the devices.
      labels: labels of each image, int32 `[images, max_labels]`, sharded over the devices. They are
        padded with -1. All labels of a padding image are -1.
    """
    host = [*classifier[:2], classifier.coefficients[:-1], CONSTANT * classifier.coefficients[-1]]
    values = [everywhere(x.astype(np.float32), mesh) for x in host]
    right, images = jax.device_get(_count_right(mesh)(*values, features, labels))
    return float(right / images)


def _solve(
    matrix: np.ndarray, right: np.ndarray, penalties: Sequence[float]
) -> tuple[list[np.ndarray], int]:
    """Solves `(matrix + penalty I) solution = right` for each penalty.

    With several penalties, eigenvectors of the matrix whose eigenvalue is zero up to rounding
    errors are excluded. These eigenvectors do not contribute to the classifier, but the factor 1 /
    penalty would amplify the rounding errors of their coefficients.

    Args:
      matrix: symmetric Gram matrix, float64 `[size, size]`.
      right: right-hand side, float64 `[size, classes]`.

    Returns:
      A list of solutions, each `[size, classes]`, and the rank of the matrix. With a single penalty
      above 0, the rank is not computed, and `size` is returned in its place.
    """
    # SciPy is imported here, because the import is slow, and training runs start without SciPy.
    from scipy.linalg import cho_factor, cho_solve, eigh

    zero = 10 * np.finfo(np.float64).eps * np.trace(matrix)
    if len(penalties) == 1 and penalties[0] > zero:
        factor = cho_factor(matrix + penalties[0] * np.eye(len(matrix)), overwrite_a=True)
        return [cho_solve(factor, right)], len(matrix)
    values, vectors = eigh(matrix)
    vectors, values = vectors[:, values > zero], values[values > zero]
    projected = vectors.T @ right
    return [vectors @ (projected / (values + penalty)[:, None]) for penalty in penalties], len(
        values
    )


@functools.cache
def _add_gram(mesh: Mesh):
    def add(total, rows):
        return total + jnp.matmul(rows.T, rows, precision="highest")

    copied = replicated(mesh)
    return jax.jit(
        add, donate_argnums=0, in_shardings=(copied, split_batch(mesh)), out_shardings=copied
    )


@functools.cache
def _count_right(mesh: Mesh):
    def count(mean, deviation, coefficients, bias, features, labels):
        scores = jnp.matmul((features - mean) / deviation, coefficients, precision="highest") + bias
        right = (scores.argmax(axis=1)[:, None] == labels).any(axis=1)
        return right.sum(), (labels >= 0).any(axis=1).sum()

    rows, copied = split_batch(mesh), replicated(mesh)
    return jax.jit(count, in_shardings=(*[copied] * 4, rows, rows), out_shardings=copied)


def _class_sums(standard: np.ndarray, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Returns `X^T Y`, float64 `[features, classes]`.

    X are the standardized features, `[images, features]`. Y are the targets, `[images, classes]`:
    +1 for the class of an image, -1 for all other classes. The features in X sum to zero over the
    images. Column k of the result is therefore twice the sum of the features of class k's images.
    """
    order = np.argsort(labels, kind="stable")
    present, starts = np.unique(labels[order], return_index=True)
    sums = np.zeros((num_classes, standard.shape[1]))
    sums[present] = np.add.reduceat(standard[order], starts)
    return 2 * sums.T
