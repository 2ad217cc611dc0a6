"""Accuracy and loss over a whole split."""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data.pipeline import SkipLog, evaluation_batches
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources import Source, Subset
from vit_jax.parallel.mesh import local_rows, to_devices, whole_batch
from vit_jax.training.program import Program
from vit_jax.training.report import Sample
from vit_jax.training.step import make_eval_step, make_forward


class Evaluator:
    """Evaluates parameters on every image of a source once; compiled at the first call."""

    def __init__(self, program: Program, source: Source, config: ConfigDict, say):
        self._mesh, self._source = program.mesh, source
        # As large as the training batch, but no larger than the split needs.
        self._batch_size = min(config.batch_size, whole_batch(self._mesh, len(source)))
        self._arguments = dict(
            crop=test_crop(config), workers=config.data.workers, threads=config.data.threads
        )
        shardings = jax.tree.map(lambda x: x.sharding, program.state["params"])
        self._step = make_eval_step(program.graphdef, config, program.mesh, shardings)
        self._forward = make_forward(program.graphdef, program.mesh, shardings)
        self._skipped = SkipLog(source, config.data.max_unreadable, say)

    def __call__(self, params: dict, go_on: Callable[[], bool]) -> dict[str, float] | None:
        """Mean `loss` and `accuracy` over the readable images, and how many `images` these were.

        Args:
          go_on: asked before each batch; None is returned when it says no.
        """
        total = None
        rows = local_rows(self._mesh, self._batch_size)
        arguments = self._arguments | dict(batch_size=self._batch_size, rows=rows)
        with contextlib.closing(evaluation_batches(self._source, **arguments)) as batches:
            for batch in batches:
                if not go_on():
                    return None
                sums = self._step(params, to_devices(self._skipped.check(batch), self._mesh))
                total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        total = {name: float(value) for name, value in jax.device_get(total).items()}
        images = max(total["images"], 1.0)
        return {
            "loss": total["loss"] / images,
            "accuracy": total["accuracy"] / images,
            "images": total["images"],
        }

    def samples(self, params: dict, most: int = 48) -> list[Sample]:
        """Test images spread evenly over the split, with what the model says of them."""
        chosen = np.unique(np.linspace(0, len(self._source) - 1, most).astype(int))
        batch_size = whole_batch(self._mesh, len(chosen))
        arguments = self._arguments | dict(batch_size=batch_size, rows=np.arange(batch_size), workers=0)
        (batch,) = evaluation_batches(Subset(self._source, chosen), **arguments)
        names = self._source.class_names
        local = {"image": batch["image"][local_rows(self._mesh, batch_size)]}
        probabilities = np.asarray(jax.nn.softmax(self._forward(params, to_devices(local, self._mesh))))
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


def test_crop(config: ConfigDict) -> TestCrop:
    """What an evaluation sees of an image."""
    data = config.data
    return TestCrop(data.image_size, data.test_crop, data.test_resize, data.decode)
