"""Predictions of a loaded model for images: preprocessing, probabilities and class names."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.data.image_files import find_images
from vit_jax.data.pipeline import SkipLog, why_skipped
from vit_jax.data.sources import handed_in
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.evaluation.features import Extractor, likeliest, reaching, top_of
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.models.image_model import ImageModel
from vit_jax.models.pixels import from_lists
from vit_jax.models.prediction import Prediction
from vit_jax.parallel.mesh import make_mesh, place
from vit_jax.parallel.sharding import parameter_shardings

BATCH_SIZE = 32  # Maximum batch size of `Predictor`.
TOP = 3  # Default number of classes for each image.
# Probabilities, float32, and indices of the most likely classes; both are `[batch, top]`.
Likeliest = tuple[np.ndarray, np.ndarray]


class Predictor:
    """Callable that predicts classes with a checkpoint's preprocessing and its `probabilities`."""

    def __init__(self, checkpoint: Checkpoint, probabilities: str):
        self._checkpoint, self._probabilities = checkpoint, probabilities
        self._extractors: dict[Any, tuple[dict, Extractor]] = {}
        self._compiled: dict[int, Callable] = {}  # For `MultichannelImages`, by `top`.

    def __call__(
        self,
        model: ImageModel,
        images: Any,
        class_names: Sequence[str],
        top: int | None,
        threshold: float | None,
    ) -> list[Prediction]:
        """Predicts the most likely classes of images.

        Args:
          images: paths, PIL images or arrays, as for `ImageModel.predict`.
          class_names: names of all classes; empty: their indices are used as names.
          top: maximum number of classes for each image. None: 3 classes without `threshold`, all
            classes with `threshold`.
          threshold: minimum probability of the returned classes.

        Raises:
          UserError: the model has no head, an image cannot be read, or `top` or `threshold` is out
            of range.
        """
        if not model.num_classes:
            raise UserError(
                f"the model of {self._checkpoint.place} has no head: it computes features, but "
                "predicts no classes"
            )
        top = top_of(top, threshold, model.num_classes, TOP)
        names: Sequence[str] = class_names or [*map(str, range(model.num_classes))]
        if model.channels in (1, 3):
            source = image_source(images)
            batches = self._read_batches(model, source, top)
        else:
            source = MultichannelImages(images, model.channels)
            batches = self._array_batches(model, source, top)
        predictions = []
        for batch in batches:
            for values, labels in zip(*batch, strict=True):
                count = reaching(threshold, values)
                image = source.describe(len(predictions))
                found = tuple(names[int(label)] for label in labels[:count])
                predictions.append(Prediction(image, found, tuple(values[:count].tolist())))
        return predictions

    def _array_batches(
        self, model: ImageModel, images: "MultichannelImages", top: int
    ) -> Iterator[Likeliest]:
        """Yields the predictions of each batch of images that are arrays in memory."""
        if top not in self._compiled:
            self._compiled[top] = nnx.jit(likeliest(top, self._probabilities))
        crop = checkpoint_crop(self._checkpoint, model.image_size)
        for start in range(0, len(images), BATCH_SIZE):
            batch = images.cropped(crop, slice(start, start + BATCH_SIZE))
            yield jax.device_get(self._compiled[top](model, jnp.asarray(batch)))

    def _read_batches(self, model: ImageModel, source: Source, top: int) -> Iterator[Likeliest]:
        """Yields the predictions of each batch of images of a data source that must be readable."""
        # The batch size is a power of two, to compile only few batch sizes.
        batch_size = min(BATCH_SIZE, 1 << (len(source) - 1).bit_length())
        graphdef, params = nnx.split(model)
        params = nnx.to_pure_dict(params)
        key = graphdef, batch_size, top
        if key not in self._extractors:
            mesh = make_mesh()
            shardings = parameter_shardings(mesh, params)
            extractor = Extractor(
                graphdef,
                shardings,
                mesh,
                checkpoint_crop(self._checkpoint, model.image_size),
                compute=likeliest(top, self._probabilities),
                batch_size=batch_size,
                workers=0,
            )
            self._extractors[key] = shardings, extractor
        shardings, extractor = self._extractors[key]
        skipped = SkipLog(source, limit=len(source), log=lambda line: None)
        done = 0
        for batch in extractor.stream(jax.tree.map(place, params, shardings), source, skipped):
            mask = batch["mask"][: len(source) - done]  # Without the padding of the last batch.
            if not mask.all():
                index = done + int(mask.argmin())
                raise UserError(
                    f"cannot read {source.describe(index)}: {why_skipped(source, index)}"
                )
            done += len(mask)
            probabilities, labels = (x[: len(mask)] for x in batch["values"])
            yield probabilities, labels


def image_source(images: Any) -> Source:
    """Converts images passed by a program to an unlabelled data source.

    Args:
      images: one of these:
        - The path of an image or a folder, or a pattern, such as `photos/*.jpg`.
        - A PIL image, an array or nested lists `[height, width, channels]`, or a PyTorch tensor
          `[channels, height, width]`.
        - A list of any of these.
        - An array of several images, `[images, height, width, channels]`.
        - A data set, as in `vit_jax.data.sources.handed_in`.

    Raises:
      UserError: a file does not exist, or is not an image.
    """
    items = _as_items(_as_arrays(images))
    if isinstance(items, list) and items and all(isinstance(item, str | Path) for item in items):
        return find_images([str(item) for item in items])
    return handed_in(items, "prediction", labels=False)


def _as_arrays(images: Any) -> Any:
    """Converts nested lists of numbers to an array, or to a list of arrays."""
    if not (isinstance(images, list) and images and isinstance(images[0], list)):
        return images
    if from_lists(images[0]).ndim < 3:
        return from_lists(images)
    return [from_lists(image) for image in images]


def _as_items(images: Any) -> Any:
    """Puts a single image into a list. An array or data set of several images stays unchanged."""
    if isinstance(images, str | Path | bytes):
        return [images]
    if isinstance(images, Sequence):
        return list(images)
    is_tensor = hasattr(images, "detach")  # A PyTorch tensor, with channels first.
    if not is_tensor and hasattr(images, "ndim") and hasattr(images, "__array__"):
        images = np.asarray(images)  # An array of NumPy, JAX or TensorFlow.
    if is_tensor or isinstance(images, np.ndarray):
        return [images] if _is_one_image(images, is_tensor) else images
    return images if hasattr(images, "__len__") and hasattr(images, "__getitem__") else [images]


def _is_one_image(array: Any, is_tensor: bool) -> bool:
    """Returns True for an array with one image, False for an array with several images."""
    if array.ndim != 3:
        return array.ndim == 2
    channels = {array.shape[-1], array.shape[0]} if is_tensor else {array.shape[-1]}
    return bool(channels & {1, 3, 4})


class MultichannelImages:
    """Images whose number of channels is not supported by image files, such as satellite images.

    Args:
      images: one uint8 array `[height, width, channels]`, a list of arrays, or an array `[images,
        height, width, channels]`.
      channels: the model's number of channels.

    Raises:
      UserError: an image is not a uint8 array with this number of channels.
    """

    def __init__(self, images: Any, channels: int):
        several = isinstance(images, list | tuple) or getattr(images, "ndim", 0) == 4
        self._images: list[Any] = list(images) if several else [images]
        if not self._images:
            raise UserError("give at least one image: the list of images is empty")
        for image in self._images:
            is_image = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3
            if not is_image or image.shape[-1] != channels or 0 in image.shape:
                found = f"uint8 {list(image.shape)}" if is_image else f"a {type(image).__name__}"
                raise UserError(
                    f"the model takes images of {channels} channels: give NumPy arrays of uint8, "
                    f"[height, width, {channels}], not {found}"
                )

    def __len__(self):
        return len(self._images)

    def describe(self, index: int) -> str:
        """Returns the name under which the prediction for image `index` is shown."""
        return f"prediction data's example {index}"

    def cropped(self, crop: Callable[[np.ndarray], np.ndarray], part: slice) -> np.ndarray:
        """Returns the crops of some images, uint8 `[images, height, width, channels]`.

        Args:
          crop: function that crops an RGB image. For images with more channels, it is called for
            each group of three channels.
          part: slice that selects the images.
        """
        crops = []
        for image in self._images[part]:
            channels = image.shape[-1]
            padded = np.pad(image, ((0, 0), (0, 0), (0, -channels % 3)))
            parts = [
                crop(np.ascontiguousarray(padded[..., first : first + 3]))
                for first in range(0, channels, 3)
            ]
            crops.append(np.concatenate(parts, axis=-1)[..., :channels])
        return np.stack(crops)
