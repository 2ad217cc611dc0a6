"""Features of a frozen model for all images of a data set.

The features of an image are the input of the model's head.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from vit_jax.data.pipeline import SkipLog, evaluation_batches
from vit_jax.data.preprocess import TestCrop
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.models.image_model import PROBABILITIES, ImageModel, TokenModel
from vit_jax.models.image_text import unit
from vit_jax.models.layers import placing
from vit_jax.models.pixels import in_channels
from vit_jax.parallel.mesh import (
    local_rows,
    place,
    replicated,
    split_batch,
    to_devices,
    whole_batch,
)
from vit_jax.parallel.sharding import parameter_shardings, place_activation
from vit_jax.progress import Progress

LAYERS = 4  # Number of last layers whose class tokens are concatenated.
# Feature sets for a linear probe on a model with a class token. The feature sets are in ascending
# order of the number of features.
CHOICES = (
    "class token",
    "class token and patches",
    f"{LAYERS} class tokens",
    f"{LAYERS} class tokens and patches",
)
POOLED = "pooled features"  # Name of the feature set of models without a class token.


class Features(NamedTuple):
    """Outputs of a model for the readable images of a source, in host memory."""

    values: np.ndarray  # float32 [images, features]
    labels: np.ndarray  # int32 [images, max_labels], padded with -1
    indices: np.ndarray  # int64 [images]: index of each image in the source.


class Extractor:
    """Feature extraction with a model, compiled once for a fixed batch size.

    The parameters are arguments of each call, so they may change.

    Args:
      batch_size: global batch size; rounded up to a multiple of the mesh's size.
      workers, threads: numbers of processes and threads that decode images; None: chosen
        automatically.
      max_unreadable: maximum number of unreadable images per source. Unreadable images are skipped.
      compute: function `(model, images) -> outputs [batch, ...]`; default: `representation`.
      log: callback for messages about skipped images, and about the progress of long extractions.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        shardings: dict,
        mesh: Mesh,
        crop: TestCrop,
        *,
        batch_size: int,
        workers: int | None = None,
        threads: int | None = None,
        max_unreadable: int = 100,
        compute: Callable[[nnx.Module, jax.Array], Any] | None = None,
        log: Callable[[str], None] = print,
    ):
        self.mesh = mesh
        self._batch_size = whole_batch(mesh, batch_size)
        rows = local_rows(mesh, self._batch_size)
        self._arguments = dict(
            batch_size=self._batch_size, crop=crop, workers=workers, threads=threads, rows=rows
        )
        self._forward = make_features(graphdef, mesh, shardings, compute or representation)
        self._log, self._skip_log = log, partial(SkipLog, limit=max_unreadable, log=log)
        self._skipped = {}

    def __call__(
        self, params: dict, source: Source, go_on: Callable[[], bool] = lambda: True
    ) -> Features | None:
        """Returns the features of all readable images, in the source's order.

        Args:
          go_on: function that is called after each batch. If it returns False, the result is None.

        Raises:
          UserError: no image is readable, or more than `max_unreadable` images are unreadable.
        """
        parts, progress = [], Progress("features", len(source), "images", self._log)
        for part in self.stream(params, source):
            if not go_on():
                return None
            parts.append(part)
            progress(min(len(parts) * self._batch_size, len(source)))
        mask = np.concatenate([part["mask"] for part in parts])
        if not mask.any():
            raise UserError(
                f"none of the {len(source)} images can be read, such as {source.describe(0)}"
            )
        values = np.concatenate([part["values"] for part in parts])[mask]
        labels = np.concatenate([part["labels"] for part in parts])[mask]
        return Features(values, labels, np.flatnonzero(mask))

    def stream(
        self, params: dict, source: Source, skipped: SkipLog | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yields a dict for each batch of images: `values`, `labels` and `mask`.

        `values` are the outputs of `compute`. `labels` are the labels of the images. `mask` is
        False for unreadable images and padding.

        Args:
          skipped: counter of the source's unreadable images. None: the counter that all such calls
            for this source share. The source then stays in memory as long as this object.
        """
        if skipped is None:
            # The dict maps a source's `id` to its counter. The source itself is stored, too,
            # because the `id` of a freed object may be reused.
            _, skipped = self._skipped.setdefault(id(source), (source, self._skip_log(source)))
        running = None
        with contextlib.closing(evaluation_batches(source, **self._arguments)) as batches:
            for batch in batches:
                started = self._forward(params, to_devices(skipped.check(batch), self.mesh))
                if running:
                    yield jax.device_get(running)  # Meanwhile the devices compute the next batch.
                running = started
        yield jax.device_get(running)


def representation(model: nnx.Module, images: jax.Array) -> jax.Array:
    """Returns the input of the model's head, float32 `[batch, features]`."""
    return model.features(images).astype(jnp.float32)


def image_embedding(model: nnx.Module, images: jax.Array) -> jax.Array:
    """Returns unit-norm embeddings of an image-text model's images, float32 `[batch, dim]`."""
    return unit(model(images).astype(jnp.float32))


def class_tokens_and_patches(model: TokenModel, images: jax.Array) -> jax.Array:
    """Concatenates class tokens of the last layers and the mean of the last layer's patch tokens.

    The class tokens are those of the last `LAYERS` = 4 layers, in the order of the layers. If the
    model has fewer layers, only the class token of the last layer is used. If the model has a final
    norm, it is applied to the tokens of all used layers.

    Returns:
      float32 `[batch, 5 * dim]`, or `[batch, 2 * dim]` for a model with fewer than 4 layers.
    """
    with model.capturing(("tokens",)) as captured:
        model.encode(model.assemble(model.patches(images)))
    norm = model.norm or (lambda x: x)
    *before, last = captured["tokens"][-LAYERS if model.depth >= LAYERS else -1 :]
    last = norm(last)
    tokens = [norm(x[:, :1])[:, 0] for x in before]
    parts = [*tokens, last[:, 0], last[:, model.patch_tokens].astype(jnp.float32).mean(axis=1)]
    return jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=-1)


def choices_of(model: ImageModel) -> tuple[Callable[[Any, jax.Array], jax.Array], dict[str, slice]]:
    """Returns a feature function for linear probes, and the feature sets that it computes.

    A feature set is a range of the features' columns. A model with a class token has DINOv2's four
    feature sets: the class token of the last layer or the class tokens of the last four layers,
    each with and without the mean of the patch tokens. With fewer than four layers, only the two
    sets of the last layer exist. A model without a class token has a single feature set, the pooled
    features.

    Returns:
      A function `(model, images) -> features [batch, columns]`, and a dict from the name of each
      feature set to the slice of its columns.
    """
    if not isinstance(model, TokenModel) or "cls" not in model.prefix_tokens:
        return representation, {POOLED: slice(0, None)}
    layers = LAYERS if model.depth >= LAYERS else 1
    first, last, end = (model.dim * count for count in (layers - 1, layers, layers + 1))
    chosen = {CHOICES[0]: slice(first, last), CHOICES[1]: slice(first, end)}
    if layers == LAYERS:
        chosen |= {CHOICES[2]: slice(0, last), CHOICES[3]: slice(0, end)}
    return class_tokens_and_patches, chosen


def first_five(model: nnx.Module, images: jax.Array) -> jax.Array:
    """Returns each image's five most likely classes, int32 `[batch, 5]`, in descending order."""
    return jax.lax.top_k(model(images), 5)[1]


def likeliest(
    count: int, probabilities: str = "softmax"
) -> Callable[[nnx.Module, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns a function `(model, images) -> (probabilities, classes)`.

    The function returns the `count` most likely classes of each image and their probabilities, both
    `[batch, count]`.

    Args:
      probabilities: name of the function from logits to probabilities, a key of `PROBABILITIES`,
        such as `softmax`.
    """

    def compute(model, images):
        logits = model(images)
        # Classes are sorted by logits, because different logits may have equal probabilities after
        # rounding.
        _, classes = jax.lax.top_k(logits, count)
        return jnp.take_along_axis(PROBABILITIES[probabilities](logits), classes, axis=-1), classes

    return compute


def top_of(top: int | None, threshold: float | None, num_classes: int, default: int) -> int:
    """Returns the maximum number of classes to list for an image.

    Args:
      top: maximum number that the user has set. None: `num_classes` if there is a threshold, else
        `default`.
      default: maximum number if neither `top` nor `threshold` is set.

    Raises:
      UserError: `top` or the threshold is out of range.
    """
    if threshold is not None and not (isinstance(threshold, Real) and 0 < threshold <= 1):
        raise UserError(
            f"threshold is {threshold!r} and must be a probability, above 0 and up to 1"
        )
    if top is not None and not (isinstance(top, Integral) and top >= 1):
        raise UserError(f"top is {top!r}, and must be a whole number, 1 or above")
    return min(num_classes, top or (default if threshold is None else num_classes))


def reaching(threshold: float | None, probabilities: np.ndarray) -> int:
    """Counts the probabilities (in descending order) that are at least `threshold`; None: all."""
    return len(probabilities) if threshold is None else int((probabilities >= threshold).sum())


def make_features(
    graphdef: nnx.GraphDef,
    mesh: Mesh,
    shardings: dict,
    compute: Callable[[nnx.Module, jax.Array], jax.Array],
) -> Callable[[dict, dict], dict[str, jax.Array]]:
    """Compiles a function `(params, batch) -> {values, labels, mask}` that applies the model.

    `values` are the outputs of `compute`. `labels` are the batch's labels. `mask` is the batch's
    item `valid`, which is False for unreadable images and padding. The three results are replicated
    on all devices.
    """

    def features(params, batch):
        with placing(partial(place_activation, mesh), mesh.devices.flat[0].platform):
            model = nnx.merge(graphdef, params)
            values = compute(model, in_channels(batch["image"], model.channels))
        return {"values": values, "labels": batch["labels"], "mask": batch["valid"]}

    return jax.jit(
        features, in_shardings=(shardings, split_batch(mesh)), out_shardings=replicated(mesh)
    )


def extractor_of(
    model: nnx.Module, mesh: Mesh, crop: TestCrop | None = None, **options
) -> tuple[Extractor, dict]:
    """Returns an `Extractor(**options)` for a loaded model, and its parameters on the devices.

    Raises:
      UserError: the model's images are not square.
    """
    graphdef, params, shardings = split_and_placed(model, mesh)
    crop = crop or transfer_crop(model.image_size)
    return Extractor(graphdef, shardings, mesh, crop, **options), params


def split_and_placed(model: nnx.Module, mesh: Mesh) -> tuple[nnx.GraphDef, dict, dict]:
    """Places a model's parameters on a mesh; returns graphdef, parameters and their shardings."""
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    shardings = parameter_shardings(mesh, params)
    return graphdef, jax.tree.map(place, params, shardings), shardings


def single_labels(labels: np.ndarray, name: str) -> np.ndarray:
    """Converts labels `[images, max_labels]` with one label per image to int32 `[images]`.

    Raises:
      UserError: an image does not have exactly one label.
    """
    counts = (labels >= 0).sum(axis=1)
    if (wrong := np.flatnonzero(counts != 1)).size:
        raise UserError(
            f"{name}: image {wrong[0]} has {counts[wrong[0]]} labels; this evaluation needs one "
            "an image"
        )
    return labels.max(axis=1)


def transfer_crop(image_size: int | tuple[int, int], **how: str) -> TestCrop:
    """Returns the few-shot protocol's transform, with other arguments of the crop in `how`.

    For a model with an image size of 224, images are resized to 256 x 256 pixels and cropped to the
    central 224 x 224 pixels. For other image sizes, the ratio 256 / 224 is the same.

    Raises:
      UserError: the model's images are not square.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if height != width:
        raise UserError(
            f"the model takes images of {height}x{width} pixels; evaluations need square ones"
        )
    return TestCrop(height, "square", round(height * 256 / 224), **how)
