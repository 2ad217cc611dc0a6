"""Compiled programs of a model, for batches of a few fixed sizes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from vit_jax.classifier import Classifier
from vit_jax.data.image_files import ImageFiles
from vit_jax.errors import UserError
from vit_jax.evaluation.features import (
    Features,
    extractor_of,
    likeliest,
    make_features,
    reaching,
    representation,
    top_of,
)
from vit_jax.inspection.attention_maps import check_attends, of_patches, rollout
from vit_jax.inspection.page_images import image_address
from vit_jax.models.image_model import TokenModel
from vit_jax.models.image_text import ZeroShotClassifier
from vit_jax.parallel.mesh import make_mesh, place, to_devices, whole_batch
from vit_jax.parallel.sharding import parameter_shardings
from vit_jax.serving.names import MOST_NAMES, Names

DEFAULT_TOP = 5  # Number of returned classes per image, if no threshold is set.


class Asked(NamedTuple):
    """The content of a request."""

    images: list[bytes]  # Encoded images, such as the bytes of JPEG files.
    heat: bool = False  # True if the response must contain attention rollout.
    neighbours: int = 0  # Number of similar images in the response.
    # True if the response must contain the crop of the image that the model receives.
    seen: bool = False
    # True if the response must contain the image with its classes or objects drawn on it.
    overlay: bool = False
    names: tuple[str, ...] = ()  # Class names to predict; empty: the server's classes.

    @property
    def looks(self) -> bool:
        """True if the request requires features or attention, in addition to classes."""
        return self.heat or self.neighbours > 0


class Look(NamedTuple):
    """Features and attention rollout of an image."""

    features: np.ndarray  # Input of the head, float32 `[features]`.
    heat: np.ndarray | None  # Attention rollout of patches, `[rows, columns]`, with sum 1.


class Engine:
    """A model that is compiled for a few fixed batch sizes, such as 1, 2, 4, 8 and 16.

    Everything is compiled at construction, so that no request waits for a compilation. Subclasses
    define how images are decoded and computed, and the JSON response.

    Args:
      batch_size: maximum number of images in a batch.
      compute: the function to compile; called with the model and a batch of images, returns the
        outputs.

    Attributes:
      sizes: the compiled batch sizes; a batch is padded to the next larger size.
      parameters: request parameters that the engine supports, such as `overlay`.
      names: computes embeddings of class names in requests. None: requests cannot contain class
        names.
    """

    parameters: tuple[str, ...] = ()
    names: Names | None = None

    def __init__(self, model: Any, batch_size: int, compute: Callable):
        self._model, self._mesh = model, make_mesh()
        self._graphdef, params = nnx.split(model)
        params = nnx.to_pure_dict(params)
        self._shardings = parameter_shardings(self._mesh, params)
        self._params = jax.tree.map(place, params, self._shardings)
        powers = (1 << power for power in range(batch_size.bit_length()))
        self.sizes = sorted({whole_batch(self._mesh, size) for size in (*powers, batch_size)})
        self._programs = {size: self._compiled(compute, size) for size in self.sizes}

    def _compiled(self, compute: Callable, size: int) -> Callable[[dict, dict], dict[str, Any]]:
        program = make_features(self._graphdef, self._mesh, self._shardings, compute)
        return program.lower(self._params, self._batch([], size)).compile()

    def _batch(self, images: Sequence[np.ndarray], size: int) -> dict[str, jax.Array]:
        """Returns a batch of `size` images on the devices; missing images are black."""
        pixels = np.zeros((size, *self._model.image_size, 3), np.uint8)
        for row, image in zip(pixels, images, strict=False):
            row[:] = image
        labels, mask = np.full((size, 1), -1, np.int32), np.arange(size) < len(images)
        return to_devices({"image": pixels, "labels": labels, "valid": mask}, self._mesh)

    def _values(self, images: Sequence[np.ndarray]) -> Any:
        """Computes any number of images in batches; returns the outputs, `[images, ...]`."""
        parts, most = [], self.sizes[-1]
        for start in range(0, len(images), most):
            part = images[start : start + most]
            size = next(size for size in self.sizes if size >= len(part))
            found = self._programs[size](self._params, self._batch(part, size))
            parts.append(jax.device_get(found["values"]))
        return jax.tree.map(lambda *x: np.concatenate(x)[: len(images)], *parts)

    def decode(self, image: bytes) -> Any:
        """Decodes the bytes of an image to an input of `compute`.

        Raises:
          Unreadable: the image is damaged.
        """
        raise NotImplementedError

    def compute(self, images: Sequence[Any], classes: Sequence[np.ndarray | None]) -> list[Any]:
        """Computes a batch; returns the result for each image.

        Args:
          images: outputs of `decode`; their number is at most the largest of `sizes`.
          classes: for each image, embeddings of the class names in its request; None: the server's
            classes.
        """
        raise NotImplementedError

    def answer(self, image: Any, result: Any, asked: Asked) -> dict[str, Any]:
        """Returns the JSON response for an image after `decode` and `compute`, as a mapping."""
        raise NotImplementedError


class ClassifierEngine(Engine):
    """Compiled programs of a classifier, for its classes, features and attention.

    Args:
      batch_size: maximum number of images in a batch.
      top: maximum number of returned classes per image.
      threshold: minimum probability of the returned classes.
      names: computes embeddings of class names in requests to an image-text model. None: the
        model's head predicts fixed classes.

    Attributes:
      no_heat: reason why attention rollout is undefined; None if it is defined.
    """

    parameters = ("heat", "neighbours", "seen", "names")

    def __init__(
        self,
        classifier: Classifier,
        batch_size: int,
        top: int,
        threshold: float | None = None,
        names: Names | None = None,
    ):
        self.classifier, self._threshold, self.names, self._top = classifier, threshold, names, top
        compute = representation
        if names is None:
            compute = likeliest(min(top, classifier.model.num_classes), classifier.probabilities)
        super().__init__(classifier.model, batch_size, compute)
        self.no_heat, look = None, _features_and_attention
        try:
            check_attends(classifier.model)
        except UserError as error:
            self.no_heat, look = str(error), _features
        self._look = self._compiled(look, self.sizes[0])

    def decode(self, image: bytes) -> np.ndarray:
        return self.classifier.crop(image)

    def compute(
        self, images: Sequence[np.ndarray], classes: Sequence[np.ndarray | None]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each image the most likely classes: their probabilities and their indices.

        Both arrays are in descending order of probability. The arguments `top` and `threshold` of
        the engine limit the number of classes.
        """
        values = self._values(images)
        if self.names is None:
            each = [*zip(*values, strict=True)]
        else:
            each = [self._of_names(*one) for one in zip(values, classes, strict=True)]
        counts = (reaching(self._threshold, chances) for chances, _ in each)
        return [(x[:n], labels[:n]) for (x, labels), n in zip(each, counts, strict=True)]

    def answer(
        self, image: np.ndarray, result: tuple[np.ndarray, np.ndarray], asked: Asked
    ) -> dict[str, Any]:
        chances, found = result
        names = asked.names or self.classifier.class_names
        pairs = zip(found.tolist(), chances.tolist(), strict=True)
        predictions = [{"class": names[label], "probability": chance} for label, chance in pairs]
        seen = {"seen": image_address(image)} if asked.seen else {}
        return {"predictions": predictions, **seen}

    def _of_names(
        self, image: np.ndarray, classes: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the probabilities and the indices of the most likely classes of one image.

        `image` is the image's embedding, and `classes` are embeddings of class names; None: the
        server's classes.
        """
        assert self.names is not None
        chances = self.names.probabilities(image, classes)
        labels = np.argsort(-chances, kind="stable")[: self._top]
        return chances[labels], labels

    def look(self, image: np.ndarray) -> Look:
        """Returns the features and the attention rollout of an image."""
        found = self._look(self._params, self._batch([image], self.sizes[0]))
        features, attention = jax.device_get(found["values"])
        if self.no_heat is not None:
            return Look(features[0], None)
        last = rollout([layer[:1] for layer in attention])[-1]
        model = self.classifier.model
        assert isinstance(model, TokenModel)  # Other models have no rollout.
        return Look(features[0], of_patches(model, last)[0])

    def features(self, images: ImageFiles, threads: int, log: Callable[[str], None]) -> Features:
        """Returns the features of all readable images in a folder.

        Raises:
          UserError: no image is readable.
        """
        extractor, params = extractor_of(
            self.classifier.model,
            self._mesh,
            self.classifier.crop,
            batch_size=self.sizes[-1],
            threads=threads,
            max_unreadable=len(images),
            log=log,
        )
        found = extractor(params, images)
        assert found is not None  # None only if the extraction is interrupted, as in training.
        return found


def _features_and_attention(model, images):
    """Returns the features of a batch, and each layer's attention, averaged over heads."""
    _, found = model(images, capture=("attention",))
    attention = [layer.mean(axis=1, keepdims=True) for layer in found["attention"]]
    return representation(model, images), attention


def _features(model, images):
    """Returns the features of a batch, and an empty list in place of each layer's attention.

    This is the variant for models whose attention rollout is undefined.
    """
    return representation(model, images), []


def make_engine(
    classifier: Classifier,
    batch_size: int,
    top: int | None,
    threshold: float | None,
    templates: Sequence[str],
) -> ClassifierEngine:
    """Returns the engine of a classifier.

    If the classifier has a text tower, requests can contain class names.

    Args:
      batch_size: maximum number of images in a batch.
      top: maximum number of returned classes per image. None: `DEFAULT_TOP`, or no limit if a
        threshold is set.
      threshold: minimum probability of the returned classes; None: no minimum.
      templates: prompt templates for class names in requests, with `{}` for the name.
    """
    names, count = None, len(classifier.class_names)
    if classifier.image_text is not None:
        model = classifier.model
        assert isinstance(model, ZeroShotClassifier)
        names = Names(classifier.image_text, templates, np.asarray(model.classes[...]))
        count = max(count, MOST_NAMES)  # A request may contain more names than the server has.
    top = top_of(top, threshold, count, DEFAULT_TOP)
    return ClassifierEngine(classifier, batch_size, top, threshold, names)
