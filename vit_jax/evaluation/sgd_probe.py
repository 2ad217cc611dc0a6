"""DINOv2's linear probe: SGD on frozen features.

There is a classifier for each learning rate and each feature set. All classifiers are trained
simultaneously on the same batches (Caron et al., 2021; Oquab et al., 2023, appendix B.3).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.evaluation.features import Features, single_labels
from vit_jax.evaluation.probe import count_right, cross_entropy, hold_out
from vit_jax.parallel.mesh import everywhere, over_devices, replicated, split_batch, whole_batch
from vit_jax.progress import Progress

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
BATCH_SIZE, STEPS = 1024, 12_500
MOMENTUM = 0.9
SEED = 0  # Of the validation set, the initial weights and the batches.
AHEAD = 16  # The host waits after each 16 steps, to limit the number of batches on the devices.

# Weights by feature set: float32 [learning rates, features + 1, classes]. The last row contains the
# biases.
Weights = dict[str, jax.Array]


class Fitted(NamedTuple):
    """Result for one feature set: accuracy and learning rate of the best classifier."""

    accuracy: float  # Accuracy on the test images.
    rate: float  # Learning rate for a batch of 256 images.
    held_out: dict[float, float]  # Validation accuracy by learning rate.


class SgdProbe:
    """Linear classifiers trained by SGD with momentum and cosine decay to 0, without weight decay.

    Args:
      choices: a dict from the name of each feature set to the slice of its columns in the features.
      rates: learning rates for a batch of 256 images. They are scaled linearly with the batch size.
      batch_size: number of images in a batch, at most the number of training images.
      go_on: function that is called every few steps. If it returns False, the fit returns None.
    """

    def __init__(
        self,
        choices: Mapping[str, slice],
        mesh: Mesh,
        *,
        rates: Sequence[float] = RATES,
        batch_size: int = BATCH_SIZE,
        steps: int = STEPS,
        go_on: Callable[[], bool] = lambda: True,
        log: Callable[[str], None] = print,
    ):
        self.choices, self.mesh, self.rates = dict(choices), mesh, sorted(rates)
        self.batch_size, self.steps = batch_size, steps
        self._go_on, self._log = go_on, log
        columns = tuple((name, part.start, part.stop) for name, part in self.choices.items())
        self._step, self._count = _make_step(mesh, columns), _make_count(mesh, columns)

    def __call__(
        self, train: Features, test: Features, num_classes: int
    ) -> dict[str, Fitted] | None:
        """Returns test accuracies of all feature sets, each with its best learning rate.

        The best learning rate has the highest accuracy on a validation set, a tenth of the training
        images. In a tie, the lowest learning rate is selected. The final classifiers are then
        trained with the best learning rate on all training images. The test images are evaluated
        once.

        Raises:
          UserError: there are fewer than ten training images or fewer than two classes, a training
            image does not have exactly one label, or the validation set and the other training
            images have no class in common.
        """
        labels = single_labels(train.labels, "the training images")
        if num_classes < 2:
            raise UserError(f"a linear probe needs two classes; there are {num_classes}")
        held, kept = hold_out(len(labels), SEED)
        if not np.isin(labels[held], labels[kept]).any():
            raise UserError(
                f"the {len(held)} validation images and the {len(kept)} other training images "
                "have no class in common: a linear probe needs several training images a class"
            )
        grid = dict.fromkeys(self.choices, self.rates)
        tried = self.fit(train.values, labels, num_classes, grid, kept)
        if tried is None:
            return None
        held_out = {
            name: dict(zip(self.rates, shares, strict=True))
            for name, shares in self.accuracies(tried, train, held).items()
        }
        best = {name: max(by_rate, key=by_rate.__getitem__) for name, by_rate in held_out.items()}
        classifier = self.fit(
            train.values, labels, num_classes, {name: [rate] for name, rate in best.items()}
        )
        if classifier is None:
            return None
        tested = self.accuracies(classifier, test)
        return {name: Fitted(tested[name][0], best[name], held_out[name]) for name in self.choices}

    def fit(
        self,
        values: np.ndarray,
        labels: np.ndarray,
        num_classes: int,
        rates: Mapping[str, Sequence[float]],
        rows: np.ndarray | None = None,
    ) -> Weights | None:
        """Fits one linear classifier per feature set and learning rate.

        The classifiers of a feature set have the same initial weights.

        Args:
          values: features of the images, float32 `[images, features]`.
          labels: class of each image, int `[images]`.
          rates: learning rates for a batch of 256 images, by feature set.
          rows: indices of the images to train on; None: all images.
        """
        rows = np.arange(len(values)) if rows is None else rows
        size = min(self.batch_size, len(rows))
        scaled = {
            name: everywhere(np.float32(each) * np.float32(size / 256), self.mesh)
            for name, each in rates.items()
        }
        weights = {
            name: everywhere(np.repeat(start[None], len(rates[name]), axis=0), self.mesh)
            for name, start in self.starts(values.shape[1], num_classes).items()
        }
        momenta = jax.tree.map(jnp.zeros_like, weights)
        progress = Progress("linear probe", self.steps, "steps", self._log)
        for step, batch in enumerate(batches(rows, size, self.steps, SEED)):
            if step % AHEAD == 0:
                if not self._go_on():
                    return None
                jax.block_until_ready(weights)
                progress(step)
            share = np.float32((1 + np.cos(np.pi * step / self.steps)) / 2)
            placed = self._placed(values[batch], labels[batch], size)
            weights, momenta = self._step(weights, momenta, *placed, scaled, share)
        return weights

    def starts(self, features: int, num_classes: int) -> dict[str, np.ndarray]:
        """Returns the initial weights (std 0.01) and biases (0) of each feature set.

        The arrays are float32 `[features + 1, classes]`. The last row contains the biases.
        """
        rng, starts = np.random.default_rng((SEED, 1)), {}
        for name, columns in self.choices.items():
            width = len(range(features)[columns])
            drawn = rng.normal(scale=0.01, size=(width, num_classes))
            starts[name] = np.concatenate([drawn, np.zeros((1, num_classes))]).astype(np.float32)
        return starts

    def accuracies(
        self, weights: Weights, of: Features, rows: np.ndarray | None = None
    ) -> dict[str, list[float]]:
        """Returns a dict from each feature set to its accuracies, one for each learning rate.

        A prediction is correct if it is one of the image's labels.

        Args:
          rows: indices of the images to evaluate; None: all images.
        """
        rows = np.arange(len(of.values)) if rows is None else rows
        right = {name: 0 for name in weights}
        size = min(self.batch_size, len(rows))
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            counts = self._count(weights, *self._placed(of.values[part], of.labels[part], size))
            right = {name: right[name] + np.asarray(counts[name]) for name in right}
        return {name: (counts / len(rows)).tolist() for name, counts in right.items()}

    def _placed(
        self, values: np.ndarray, labels: np.ndarray, size: int
    ) -> tuple[jax.Array, jax.Array]:
        rows = whole_batch(self.mesh, size)
        return over_devices(values, self.mesh, rows), over_devices(labels, self.mesh, rows, fill=-1)


def batches(rows: np.ndarray, size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Yields the image indices of each step's batch, int `[size]`.

    Each epoch permutes `rows` at random. The incomplete last batch of an epoch is dropped.
    """
    rng, order = np.random.default_rng((seed, 2)), []
    for _ in range(steps):
        if len(order) < size:
            order = rng.permutation(rows)
        batch, order = np.split(order, [size])
        yield batch


@functools.cache
def _make_step(mesh: Mesh, columns: tuple[tuple[str, int, int | None], ...]):
    """Compiles an SGD step of all classifiers. Each classifier has its own loss."""

    def loss(weights, values, labels):
        return sum(
            jax.vmap(cross_entropy, (0, None, None))(
                weights[name], values[:, start:stop], labels
            ).sum()
            for name, start, stop in columns
        )

    def step(weights, momenta, values, labels, rates, share):
        gradients = jax.grad(loss)(weights, values, labels)
        momenta = jax.tree.map(lambda momentum, new: MOMENTUM * momentum + new, momenta, gradients)
        return {
            name: weights[name] - share * rates[name][:, None, None] * momenta[name]
            for name in weights
        }, momenta

    rows, copied = split_batch(mesh), replicated(mesh)
    placed = (copied, copied, rows, rows, copied, copied)
    return jax.jit(step, in_shardings=placed, out_shardings=copied, donate_argnums=(0, 1))


@functools.cache
def _make_count(mesh: Mesh, columns: tuple[tuple[str, int, int | None], ...]):
    def count(weights, values, labels):
        return {
            name: jax.vmap(count_right, (0, None, None))(
                weights[name], values[:, start:stop], labels
            )
            for name, start, stop in columns
        }

    rows, copied = split_batch(mesh), replicated(mesh)
    return jax.jit(count, in_shardings=(copied, rows, rows), out_shardings=copied)
