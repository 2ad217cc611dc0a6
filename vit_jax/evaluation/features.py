"""Features: what enters the head of a frozen model, for all images of a data set."""

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

LAYERS = 4  # Of which the class tokens are features together.
# What a linear probe may read of a model with a class token, the narrowest first.
CHOICES = (
    "class token",
    "class token and patches",
    f"{LAYERS} class tokens",
    f"{LAYERS} class tokens and patches",
)
POOLED = "pooled features"  # And of another.


class Features(NamedTuple):
    """A model's outputs for a source, on the host; unreadable images are left out."""

    values: np.ndarray  # float32 [images, features]
    labels: np.ndarray  # int32 [images, max_labels], padded with -1
    indices: np.ndarray  # int64 [images]: where each is in the source.


class Extractor:
    """Features by any parameters of one model, the same batch size for all sources: compiled once.

    Args:
      graphdef: of the model, with or without a head.
      shardings: of its parameters.
      crop: what the model sees of an image.
      batch_size: of all processes together; rounded up to what divides over the mesh.
      workers, threads: as of `evaluation_batches`.
      max_unreadable: images of a source that may be skipped.
      compute: what of a model and its images, `[batch, ...]`, instead of `representation`.
      say: is told of each that is, and how far it is where that takes long.
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
        say: Callable[[str], None] = print,
    ):
        self.mesh = mesh
        self._batch_size = whole_batch(mesh, batch_size)
        rows = local_rows(mesh, self._batch_size)
        self._arguments = dict(
            batch_size=self._batch_size, crop=crop, workers=workers, threads=threads, rows=rows
        )
        self._forward = make_features(graphdef, mesh, shardings, compute or representation)
        self._say, self._skip_log = say, partial(SkipLog, limit=max_unreadable, say=say)
        self._skipped = {}

    def __call__(
        self, params: dict, source: Source, go_on: Callable[[], bool] = lambda: True
    ) -> Features | None:
        """Features of every readable image, in the source's order.

        Args:
          go_on: asked after each batch; None is returned when it says no.

        Raises:
          UserError: no image is readable, or too many are not.
        """
        parts, progress = [], Progress("features", len(source), "images", self._say)
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

    def stream(self, params: dict, source: Source) -> Iterator[dict[str, Any]]:
        """Yields of each batch `values` (of `compute`), `labels` and `mask`, False where none was
        read.
        """
        skipped = self._skipped.setdefault(id(source), self._skip_log(source))
        running = None
        with contextlib.closing(evaluation_batches(source, **self._arguments)) as batches:
            for batch in batches:
                started = self._forward(params, to_devices(skipped.check(batch), self.mesh))
                if running:
                    yield jax.device_get(running)  # While the devices work on the next.
                running = started
        yield jax.device_get(running)


def representation(model: nnx.Module, images: jax.Array) -> jax.Array:
    """The representation that enters the head, float32 `[batch, features]`."""
    return model.features(images).astype(jnp.float32)


def class_tokens_and_patches(model: TokenModel, images: jax.Array) -> jax.Array:
    """The class token behind each of the last layers, the last one last, and the mean of the last's
    patches.

    All are normalised by the model's final norm, if it has one: float32 `[batch, (layers + 1) *
    dim]`, of
    `LAYERS` layers, or of one where the model has fewer than those.
    """
    with model.capturing(("tokens",)) as found:
        model.encode(model.assemble(model.patches(images)))
    norm = model.norm or (lambda x: x)
    *before, last = found["tokens"][-LAYERS if model.depth >= LAYERS else -1 :]
    last = norm(last)
    tokens = [norm(x[:, :1])[:, 0] for x in before]
    parts = [*tokens, last[:, 0], last[:, model.patch_tokens].astype(jnp.float32).mean(axis=1)]
    return jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=-1)


def choices_of(model: ImageModel) -> tuple[Callable[[Any, jax.Array], jax.Array], dict[str, slice]]:
    """The function that computes all features a linear probe may choose of, and each choice's
    columns.

    They are DINOv2's of a model with a class token: that of the last layer or those of the last
    four, each with the mean of the patches and without. Of other models they are the pooled
    features alone.
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
    """The five likeliest classes, the likeliest first, int32 `[batch, 5]`."""
    return jax.lax.top_k(model(images), 5)[1]


def likeliest(
    count: int, probabilities: str = "softmax"
) -> Callable[[nnx.Module, jax.Array], tuple[jax.Array, jax.Array]]:
    """Makes the function that computes the `count` likeliest: probabilities and classes, `[batch,
    count]`.

    Args:
      probabilities: of `PROBABILITIES`.
    """

    def compute(model, images):
        logits = model(images)
        _, classes = jax.lax.top_k(
            logits, count
        )  # Probabilities may be rounded to the same number.
        return jnp.take_along_axis(PROBABILITIES[probabilities](logits), classes, axis=-1), classes

    return compute


def top_of(top: int | None, threshold: float | None, num_classes: int, default: int) -> int:
    """The highest number of classes to name of an image: `top`, else `default`, or with a threshold
    all.

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
    """The number of probabilities, the highest first, that reach the threshold; without one all of
    them.
    """
    return len(probabilities) if threshold is None else int((probabilities >= threshold).sum())


def make_features(
    graphdef: nnx.GraphDef,
    mesh: Mesh,
    shardings: dict,
    compute: Callable[[nnx.Module, jax.Array], jax.Array],
) -> Callable[[dict, dict], dict[str, jax.Array]]:
    """Compiles `(params, batch) -> {values, labels, mask}`, the same on every device."""

    def features(params, batch):
        with placing(partial(place_activation, mesh), mesh.devices.flat[0].platform):
            model = nnx.merge(graphdef, params)
            values = compute(model, in_channels(batch["image"], model.channels))
        return {"values": values, "labels": batch["labels"], "mask": batch["mask"]}

    return jax.jit(
        features, in_shardings=(shardings, split_batch(mesh)), out_shardings=replicated(mesh)
    )


def extractor_of(
    model: nnx.Module, mesh: Mesh, crop: TestCrop | None = None, **options
) -> tuple[Extractor, dict]:
    """An extractor of a loaded model's features, and its parameters on the devices of `mesh`.

    Args:
      crop: what the model sees of an image, `transfer_crop` by default.
      **options: `batch_size` and others, as of `Extractor`.

    Raises:
      UserError: the model's images are not square.
    """
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    shardings = parameter_shardings(mesh, params)
    crop = crop or transfer_crop(model.image_size)
    return Extractor(graphdef, shardings, mesh, crop, **options), jax.tree.map(
        place, params, shardings
    )


def single_labels(labels: np.ndarray, name: str) -> np.ndarray:
    """int32 `[images]` of `[images, max_labels]`, for what only images with one label can do.

    Raises:
      UserError: an image has none or several.
    """
    counts = (labels >= 0).sum(axis=1)
    if (wrong := np.flatnonzero(counts != 1)).size:
        raise UserError(
            f"{name}: image {wrong[0]} has {counts[wrong[0]]} labels; this evaluation needs one "
            "an image"
        )
    return labels.max(axis=1)


def transfer_crop(image_size: int | tuple[int, int], **how: str) -> TestCrop:
    """The few-shot protocol's: both sides to 256, and the central 224; other sizes in the same
    ratio.

    Args:
      **how: `mode`, `interpolation` and `background` of the crop.

    Raises:
      UserError: the model's images are not square.
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if height != width:
        raise UserError(
            f"the model takes images of {height}x{width} pixels; evaluations need square ones"
        )
    return TestCrop(height, "square", round(height * 256 / 224), **how)
