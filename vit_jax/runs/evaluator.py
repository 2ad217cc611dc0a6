"""Evaluation over whole splits: loss, metrics, predictions and pictures."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.data.fields import TEXT, draw_caption
from vit_jax.data.pipeline import SkipLog, evaluation_batches
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.base import Source, Subset
from vit_jax.inspection.page_images import image_address
from vit_jax.models.dense.detector import LEAST_SCORE
from vit_jax.object_files import overlay
from vit_jax.options.run import RunOptions
from vit_jax.parallel.mesh import local_rows, to_devices, whole_batch
from vit_jax.progress import Progress
from vit_jax.runs.predictions import ClassCounts, Predictions, class_counts, class_figures, to_show
from vit_jax.runs.retrievals import Retrievals, retrievals_of
from vit_jax.training.objectives import objective_of
from vit_jax.training.program import Program
from vit_jax.training.step import Evaluated, make_eval_step, make_pictures

MOST_WORST, WORST_SIDE = 12, 480  # Maximum number of worst images, and of pixels on a side.
PICTURES = 6  # Number of images per call of the objective's `pictures`.


class Evaluator:
    """Evaluates parameters on every image of a split. The first call compiles the evaluation step.

    Args:
      views: result of `evaluation_views`; empty: a single view, the test crop.

    Attributes:
      metrics: formats (`share` or `number`) of the objective's metrics, by name.
      draws: True if the objective has pictures.
      answers: predictions for each readable image of the last evaluation. The keys are attributes
        of `Predictions`. None: the objective has no labels.
    """

    def __init__(
        self, program: Program, splits: dict[str, Source], config: RunOptions, log, views=()
    ):
        objective = program.abstract_objective()
        self.metrics = objective.metrics | objective.split_metrics
        self._objective, self._labelled = objective, objective.labels
        self.draws, self._paired = objective.pictures is not None, objective.paired
        self._mesh, self._splits, self._log = program.mesh, splits, log
        # Number of images in a micro-batch of training.
        self._most = config.batch_size // config.micro_batches
        self._arguments = dict(
            crop=test_crop(config), workers=config.data.workers, threads=config.data.threads
        )
        fields = objective_of(config.objective.name).fields(config)
        self._views = dict(views=views, seed=config.seed) if views else {}
        if fields:
            self._arguments["fields"] = fields
        self._entries = {"image", "numbers", *(entry.name for entry in (*views, *fields))}
        places = program.evaluated_places()
        both = program.graphdef, program.objective, config, program.mesh, places
        self._step, self._pictures = make_eval_step(*both), make_pictures(*both)
        self.answers: dict[str, np.ndarray] | None = None
        self._outputs: dict[str, np.ndarray] | None = None  # Outputs of the last evaluation.
        self._skipped = {
            name: SkipLog(source, config.data.max_unreadable, log)
            for name, source in splits.items()
        }

    def __call__(
        self, split: str, evaluated: Evaluated, go_on: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Returns mean `loss`, mean metrics and the number of readable `images` of a split.

        If each image has one label, balanced accuracy and macro F1 score are added.

        Args:
          evaluated: parameters to evaluate.
          go_on: function that is called before each batch. If it returns False, the evaluation
            stops and returns None.
        """
        total, answers_of_batches, source = None, [], self._splits[split]
        # The size of a training micro-batch, or less if the split has fewer images.
        batch_size = min(self._most, whole_batch(self._mesh, len(source)))
        arguments = self._arguments | self._views
        arguments |= dict(batch_size=batch_size, rows=local_rows(self._mesh, batch_size))
        progress = Progress(f"evaluating the {split} images", len(source), "images", self._log)
        with contextlib.closing(evaluation_batches(source, **arguments)) as batches:
            for number, batch in enumerate(batches):
                if not go_on():
                    return None
                progress(number * batch_size)
                placed = to_devices(self._skipped[split].check(batch), self._mesh)
                sums, answers = self._step(evaluated, placed, np.int32(number * batch_size))
                total = sums if total is None else jax.tree.map(jnp.add, total, sums)
                answers_of_batches.append(answers)
        progress(len(source))
        outputs = _joined(jax.device_get(answers_of_batches))
        self.answers = outputs if self._labelled else None
        self._outputs = outputs
        total = {name: float(value) for name, value in jax.device_get(total).items()}
        images = total.pop("images")
        figures = {name: value / max(images, 1.0) for name, value in total.items()}
        if outputs and not self._labelled:
            figures |= self._objective.over_split(outputs)
        if counts := self.counts():
            figures |= class_figures(counts)
        return figures | {"images": images}

    def counts(self) -> ClassCounts | None:
        """Returns the numbers of images and predictions by class in the last evaluation.

        None: an image does not have exactly one label.
        """
        if not self.answers:
            return None
        return class_counts(self.answers["labels"], self.answers["answer"])

    def predictions(self, split: str, step: int) -> Predictions | None:
        """Returns the predictions of the split evaluated last, with the images for a report."""
        if self.answers is None or not len(self.answers["numbers"]):
            return None
        kept = Predictions(split, step, **self.answers)
        batch = self._read(split, to_show(kept), 1)
        files = np.array([self._splits[split].describe(n) for n in batch["numbers"].tolist()], str)
        return kept._replace(shown=batch["numbers"], images=batch["image"], files=files)

    def retrievals(self, split: str, step: int) -> Retrievals | None:
        """Returns captions of the last evaluated split and their most similar images."""
        if self._paired is None or not self._outputs or not len(self._outputs["numbers"]):
            return None
        paired, first = self._paired(self._outputs)
        numbers = self._outputs["numbers"]

        def caption(text: int) -> str:
            number = int(numbers[first[text]])
            return draw_caption(self._splits[split].fields_of(number)[TEXT], None)

        def read(chosen: np.ndarray) -> np.ndarray:
            return self._read(split, chosen, 1)["image"]

        return retrievals_of(paired, numbers, caption, read, split, step)

    def worst(self, split: str, step: int, evaluated: Evaluated) -> dict[str, Any] | None:
        """Returns the worst predicted images of the last evaluated split, for a report.

        These images are read and predicted again, because the evaluation does not store the
        predictions of all images. All processes of a run must call this method.

        Returns:
          The variables of the HTML template `segments.html`; None: the objective has no metric of
          single images.
        """
        scores_of, outputs = self._objective.image_scores, self._outputs
        if scores_of is None or not outputs:
            return None
        scores = scores_of(outputs)
        rows = scores.worst(MOST_WORST)
        if not len(rows):
            return None
        outputs, source = {name: x[rows] for name, x in outputs.items()}, self._splits[split]
        overlays = self._overlays(split, outputs, evaluated)
        values = scores.values[rows].tolist()
        each = zip(outputs["numbers"].tolist(), values, overlays, strict=True)
        end = "highest" if scores.highest else "lowest"
        return {
            "title": f"{split.capitalize()} images, the {end} {scores.name} first",
            "note": f"{self._objective.picture_rows}; step {step:,}",
            "legend": self._objective.legend(outputs, source.class_names),
            "figures": [
                {
                    "name": source.describe(number),
                    "pictures": [image_address(picture, WORST_SIDE) for picture in pictures],
                    "caption": f"{scores.name} {scores.form.format(value)}",
                }
                for number, value, pictures in each
            ],
            "card": "28rem",
        }

    def _overlays(
        self, split: str, outputs: dict[str, np.ndarray], evaluated: Evaluated
    ) -> np.ndarray:
        """Draws the labels and the predictions (`Loss.outputs`) of some images.

        If the objective predicts objects, an image has two pictures. They show its true and its
        predicted objects. Otherwise an image has three pictures: the image itself, and the two
        pictures of `Objective.pictures`.

        Returns:
          uint8 `[images, pictures, height, width, 3]`.
        """
        numbers, objects_of = outputs["numbers"], self._objective.objects
        if objects_of is not None:
            images, names = self._read(split, numbers, 1)["image"], self._splits[split].class_names
            both = zip(images, *objects_of(outputs), strict=True)
            pairs = [(image, (true, found.above(LEAST_SCORE))) for image, true, found in both]
            return np.stack(
                [[overlay(image, each, names) for each in pair] for image, pair in pairs]
            )
        # Each call draws as many images as `pictures` does by default. The program for this number
        # is already compiled.
        count, drawn = min(PICTURES, len(self._splits[split])), []
        for start in range(0, len(numbers), count):
            part = numbers[start : start + count]
            pictures, _ = self._drawn(split, np.resize(part, count), evaluated)
            drawn.append(pictures[:, : len(part)])
        return np.concatenate(drawn, axis=1).swapaxes(0, 1)

    def images(self, most: int = 6) -> np.ndarray:
        """Returns test images, spread evenly over the split: uint8 `[images, height, width, 3]`."""
        batch = self._read("test", self._spread("test", most), whole_batch(self._mesh, 1))
        return batch["image"][batch["valid"]]

    def pictures(self, split: str, evaluated: Evaluated, most: int = PICTURES) -> np.ndarray:
        """Draws the objective's pictures for some images, spread evenly over the split.

        Returns:
          uint8 `[3, images, height, width, 3]`. On the first axis are the image and the two
          pictures of `Objective.pictures`. For masked image modelling, these are the image without
          masked patches, and the prediction. For other objectives, they are target and prediction.
        """
        pictures, valid = self._drawn(split, self._spread(split, most), evaluated)
        return pictures[:, valid]

    def _drawn(
        self, split: str, chosen: np.ndarray, evaluated: Evaluated
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws some images' pictures; also returns which images are readable, bool `[images]`."""
        batch = self._read(split, chosen, whole_batch(self._mesh, 1), **self._views)
        drawn = jax.device_get(self._pictures(evaluated, self._placed(batch)))
        return np.stack([batch["image"], *drawn]), batch["valid"]

    def _spread(self, split: str, most: int) -> np.ndarray:
        """Returns the indices of at most `most` images, spread evenly over the split."""
        return np.unique(np.linspace(0, len(self._splits[split]) - 1, most).astype(int))

    def _read(self, split: str, chosen: np.ndarray, of: int, **views) -> dict[str, np.ndarray]:
        """Reads some images of a split as one batch, in which `numbers` contains their indices.

        Args:
          chosen: indices of the images in the split.
          of: the batch is padded to a multiple of this number.
          **views: arguments `views` and `seed` of `evaluation_batches`; none: the test crop.
        """
        size = -(-len(chosen) // of) * of
        arguments = self._arguments | views | dict(batch_size=size, rows=np.arange(size), workers=0)
        (batch,) = evaluation_batches(Subset(self._splits[split], chosen), **arguments)
        return batch | {"numbers": np.resize(chosen, size).astype(np.int32)}

    def _placed(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Copies a batch's views and indices to the devices.

        Every process passes the whole batch, and copies the rows of its own devices.
        """
        rows = local_rows(self._mesh, len(batch["image"]))
        return to_devices({name: batch[name][rows] for name in self._entries}, self._mesh)


def _joined(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray] | None:
    """Concatenates all batches without unreadable images; `numbers` are the images' indices."""
    if not batches or not batches[0]:
        return None
    answers = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    readable = answers.pop("valid")
    return {"numbers": np.flatnonzero(readable)} | {
        name: x[readable] for name, x in answers.items()
    }


def test_crop(config: RunOptions) -> TestCrop:
    """Returns the evaluation transform (test crop) of a config."""
    data = config.data
    return TestCrop(
        data.image_size,
        data.test_crop,
        data.test_resize,
        data.decode,
        data.test_interpolation or data.interpolation or "bilinear",
        data.background,
    )
