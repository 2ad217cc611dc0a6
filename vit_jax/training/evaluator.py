"""Accuracy and loss over a whole split."""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data.pipeline import SkipLog, evaluation_batches
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.base import Source, Subset
from vit_jax.parallel.mesh import local_rows, to_devices, whole_batch
from vit_jax.training.program import Program
from vit_jax.training.report import Sample
from vit_jax.training.step import make_eval_step, make_forward, make_pictures
from vit_jax.training.weights import objective_weights


class Evaluator:
    """Evaluates parameters on every image of a source once; compiled at the first call."""

    def __init__(self, program: Program, source: Source, config: ConfigDict, say):
        self._mesh, self._source = program.mesh, source
        # As large as the training batch, but no larger than the split needs.
        self._batch_size = min(config.batch_size, whole_batch(self._mesh, len(source)))
        self._arguments = dict(
            crop=test_crop(config), workers=config.data.workers, threads=config.data.threads
        )
        weights = program.state["params"], objective_weights(program.state)
        shardings = jax.tree.map(lambda x: x.sharding, weights)
        both = program.graphdef, program.objective, config, program.mesh, shardings
        self._step, self._pictures = make_eval_step(*both), make_pictures(*both)
        self._forward = make_forward(program.graphdef, program.mesh, shardings[0])
        self._skipped = SkipLog(source, config.data.max_unreadable, say)

    def __call__(self, params: dict, own: dict, go_on: Callable[[], bool]) -> dict[str, float] | None:
        """Mean `loss` and the objective's metrics over the readable images, and how many `images` these were.

        Args:
          own: the objective's parameters.
          go_on: asked before each batch; None is returned when it says no.
        """
        total = None
        rows = local_rows(self._mesh, self._batch_size)
        arguments = self._arguments | dict(batch_size=self._batch_size, rows=rows)
        with contextlib.closing(evaluation_batches(self._source, **arguments)) as batches:
            for number, batch in enumerate(batches):
                if not go_on():
                    return None
                placed = to_devices(self._skipped.check(batch), self._mesh)
                sums = self._step(params, own, placed, np.int32(number * self._batch_size))
                total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        total = {name: float(value) for name, value in jax.device_get(total).items()}
        images = total.pop("images")
        return {name: value / max(images, 1.0) for name, value in total.items()} | {"images": images}

    def samples(self, params: dict, most: int = 48) -> list[Sample]:
        """Test images spread evenly over the split, with what the model says of them."""
        batch = self._spread(most)
        names = self._source.class_names
        probabilities = np.asarray(jax.nn.softmax(self._forward(params, self._placed(batch))))
        return [
            Sample(
                image,
                tuple(names[label] for label in labels if label >= 0),
                names[row.argmax()] if row.argmax() < len(names) else str(row.argmax()),
                float(row.max()),
            )
            for image, labels, row, keep in zip(
                batch["image"], batch["labels"], probabilities, batch["mask"], strict=True
            )
            if keep
        ]

    def images(self, most: int = 6) -> np.ndarray:
        """Test images spread evenly over the split, uint8 `[images, height, width, 3]`."""
        batch = self._spread(most)
        return batch["image"][batch["mask"]]

    def pictures(self, params: dict, own: dict, most: int = 6) -> np.ndarray:
        """`images`, what is visible of them, and what the objective predicts: uint8
        `[3, images, height, width, 3]`."""
        batch = self._spread(most)
        drawn = jax.device_get(self._pictures(params, own, self._placed(batch)))
        return np.stack([batch["image"], *drawn])[:, batch["mask"]]

    def _spread(self, most: int) -> dict[str, np.ndarray]:
        """A whole batch of so many images spread evenly over the split, with their `numbers` in it."""
        chosen = np.unique(np.linspace(0, len(self._source) - 1, most).astype(int))
        batch_size = whole_batch(self._mesh, len(chosen))
        arguments = self._arguments | dict(batch_size=batch_size, rows=np.arange(batch_size), workers=0)
        (batch,) = evaluation_batches(Subset(self._source, chosen), **arguments)
        return batch | {"numbers": np.resize(chosen, batch_size).astype(np.int32)}

    def _placed(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Images and numbers of a batch that every process has whole, on the devices."""
        rows = local_rows(self._mesh, len(batch["image"]))
        return to_devices({name: batch[name][rows] for name in ("image", "numbers")}, self._mesh)


def test_crop(config: ConfigDict) -> TestCrop:
    """What an evaluation sees of an image."""
    data = config.data
    return TestCrop(
        data.image_size,
        data.test_crop,
        data.test_resize,
        data.decode,
        data.interpolation or "bilinear",
        data.background,
    )
