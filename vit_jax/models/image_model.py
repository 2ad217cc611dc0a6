"""Base classes of all models: `ImageModel`, and its subclasses `TokenModel` and `CodeModel`.

A `TokenModel` is a Transformer, and a `CodeModel` an image tokenizer. Code outside `models/` and
`interop/` does not depend on model classes such as `ViT`. It calls the methods of the base classes,
or tests whether the model is a `TokenModel` or a `CodeModel`.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.core import Tracer

from vit_jax.errors import UserError
from vit_jax.models.initializers import Scheme
from vit_jax.models.layers import capturing
from vit_jax.models.pixels import affine, from_lists, to_floats
from vit_jax.models.prediction import Prediction
from vit_jax.options.model import ImageOptions, Statistic

if TYPE_CHECKING:
    from PIL.Image import Image

# An array `[batch, height, width, channels]`, nested lists of numbers, a list of images, or a PIL
# image, which is a batch of one image.
ImagesLike: TypeAlias = "jax.Array | npt.NDArray[Any] | Image | Sequence[Any]"

# Pixels may be outside of the range [-1, 1] by this amount, because of rounding errors.
ROUNDING = 1e-3


def height_and_width(image_size: int | tuple[int, int]) -> tuple[int, int]:
    """Returns an image size as (height, width); 224 becomes (224, 224)."""
    if isinstance(image_size, int | np.integer):
        return int(image_size), int(image_size)
    height, width = image_size
    return height, width


# Functions from logits to class probabilities: softmax if an image has exactly one class, sigmoid
# if it can have several classes or none.
PROBABILITIES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


class About:
    """Metadata of a model: its name, and the information that its checkpoint stores.

    Attributes:
      name: name of the model, such as `ViT-B/16`.
      preprocessing: the checkpoint's preprocessing of images, if it stores one.
      objective: parameters of the training objective, such as a decoder, if the checkpoint stores
        them.
      class_names: names of all classes, if the checkpoint stores them.
      probabilities: a key of `PROBABILITIES`: `softmax` or `sigmoid`.
    """

    preprocessing: Any = None
    objective: Any = None
    class_names: tuple[str, ...] = ()
    probabilities: str = "softmax"

    def __init__(self, name: str):
        self.name = name

    def for_classes(self, names: tuple[str, ...], probabilities: str) -> "About":
        """Returns a copy of this metadata with other class names.

        `probabilities` is a key of `PROBABILITIES`: `softmax` or `sigmoid`.
        """
        other = copy.copy(self)
        other.class_names, other.probabilities = names, probabilities
        return other

    def lines(self, model: "ImageModel") -> dict[str, str]:
        """Returns lines to append to a model card: labels, mapped to texts.

        An example is `{"from": "fresh parameters, not trained"}`.
        """
        return {"from": "fresh parameters, not trained"}

    def predict(
        self, model: "ImageModel", images: Any, top: int | None, threshold: float | None
    ) -> list[Prediction]:
        """Returns the most likely classes of images (for arguments see `ImageModel.predict`)."""
        raise UserError(
            "this model is not of a checkpoint, and has not been trained: see vit_jax.load_model"
        )


def as_array(images: ImagesLike, channels: int) -> Any:
    """Returns arrays, lists or PIL images as one array `[batch, height, width, channels]`.

    Integers from 0 to 255 in lists become uint8.

    Raises:
      UserError: the images differ in size, or a PIL image has an unsupported mode.
    """
    if isinstance(images, jax.Array | np.ndarray):
        return images
    if hasattr(images, "getbands"):
        images = [images]
    if not isinstance(images, list | tuple):
        return images
    if any(isinstance(image, jax.Array) for image in images):  # The arrays may be traced.
        return jnp.stack([jnp.asarray(image) for image in images])
    return _stacked([_pixels(image, channels) for image in images])


def _stacked(images: list[np.ndarray]) -> np.ndarray:
    """Stacks images of one size; raises UserError for several sizes."""
    if len(shapes := {image.shape for image in images}) > 1:
        sizes = ", ".join(str(list(shape)) for shape in sorted(shapes))
        raise UserError(
            f"the model takes images of one size, not of {sizes}; model.predict resizes them"
        )
    return np.stack(images) if images else np.empty(0)


def _pixels(image: Any, channels: int) -> np.ndarray:
    """Returns the pixels of a PIL image (uint8 `[height, width, channels]`), or of nested lists."""
    if not hasattr(image, "getbands"):
        return from_lists(image)
    mode = {1: "L", 3: "RGB"}.get(channels)
    if image.mode != mode:
        remedy = f"give image.convert({mode!r}), or use model.predict" if mode else "give arrays"
        raise UserError(
            f"the model takes images of {channels} channels, not PIL's {image.mode}: {remedy}"
        )
    return np.asarray(image).reshape(image.height, image.width, channels)


def check_range(images: jax.Array) -> None:
    """Checks that floats are in [-1, 1], and warns if they seem to be in [0, 1].

    Raises:
      UserError: values are outside of [-1, 1], or NaN.
    """
    with jax.ensure_compile_time_eval():  # For constant images within traced functions.
        if jnp.isnan(images).any():  # XLA's minimum may ignore NaN.
            raise UserError(
                "the model takes images of floats in [-1, 1], not NaN: check the preprocessing"
            )
        least, most = float(images.min()), float(images.max())
    if not (least >= -1 - ROUNDING and most <= 1 + ROUNDING):
        raise UserError(
            f"the model takes images of floats in [-1, 1], not from {least:.4g} to {most:.4g}: "
            "give uint8, or pixels / 127.5 - 1; the model itself normalizes by its mean and "
            "std"
        )
    if 0 <= least < most:
        warnings.warn(
            f"images of floats from {least:.4g} to {most:.4g} are taken to be in [-1, 1]; if they "
            "are in [0, 1], give 2 * images - 1, or uint8",
            stacklevel=2,
        )


class ImageModel(nnx.Module):
    """An image model that normalizes its inputs by the mean and std of its training data.

    A subclass defines `features(images, rngs=None, dense=False)`, which returns the input of the
    linear `head`. Without classes the head is None.

    Attributes:
      options: the model's arguments, an instance of `options_type`. That class documents them.
      any_size: the model accepts images of any size, not only of `image_size`.
    """

    about: About | None = None
    options: Any
    options_type: ClassVar[type[ImageOptions]] = ImageOptions
    # Names of the intermediate results that a call can return.
    captures: ClassVar[tuple[str, ...]] = ("features",)
    head: nnx.Linear | None

    def __init__(self, options: ImageOptions, any_size: bool = False):
        self.options, self.any_size = options, any_size

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        return self.options.image_size

    @property
    def channels(self) -> int:
        """Number of channels of the images."""
        return self.options.channels

    @property
    def num_classes(self) -> int:
        """Number of classes; 0: the model has no head."""
        return self.options.num_classes

    @property
    def mean(self) -> Statistic:
        """Mean for normalization, for pixel values in [0, 1]; one value or one per channel."""
        return self.options.mean

    @property
    def std(self) -> Statistic:
        """Std for normalization, for pixel values in [0, 1]; one value or one per channel."""
        return self.options.std

    @property
    def pixel_kernel(self) -> jax.Array:
        """Kernel of the first layer, which reads pixels, `[height, width, channels, filters]`."""
        raise NotImplementedError

    @overload
    def __call__(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, capture: tuple[()] = ()
    ) -> jax.Array: ...

    @overload
    def __call__(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, capture: Sequence[str]
    ) -> tuple[jax.Array, dict[str, list[jax.Array]]]: ...

    def __call__(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, capture: Sequence[str] = ()
    ) -> jax.Array | tuple[jax.Array, dict[str, list[jax.Array]]]:
        """Maps images `[batch, height, width, channels]` to logits `[batch, classes]`.

        A model without a head returns its features.

        Args:
          images: uint8 or floats in [-1, 1], as an array or as nested lists; or PIL images of the
            model's size.
          rngs: random keys with a `dropout` stream for a training call; None: evaluation.
          capture: names of intermediate results, from the class's `captures`. If there are names,
            the call returns a pair: the logits, and a dictionary from each name to a list of
            arrays. The list `features` contains an array `[batch, rows, columns, channels]` from
            before the first block, from after each block, and from after each change of resolution.

        Raises:
          UserError: the images have another shape or type, or a name cannot be captured.
        """
        with self.capturing(capture) as captured:
            (logits,) = self.each_head(images, rngs)
        return (logits, captured) if capture else logits

    @overload
    def features(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: Literal[False] = False
    ) -> jax.Array: ...

    @overload
    def features(self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool) -> Any: ...

    def features(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool = False
    ) -> Any:
        """Returns the features of each image, `[batch, features]`: the input of the head, if any.

        Args:
          dense: return the features of each position instead, for dense prediction. A `TokenModel`
            returns the last layer's patches, `[batch, rows, columns, dim]`. Other models return a
            list of each stage's features, `[batch, rows, columns, channels]`, the finest stage
            first. The features of stages are not normalized.
        """
        raise NotImplementedError

    @property
    def mask_patch_size(self) -> int | None:
        """Side, in pixels, of the patches that `features_of` can mask; None: unsupported.

        A patch of this size corresponds to one position of the last stage.
        """
        return None

    def features_of(
        self, images: jax.Array, keep: jax.Array, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """Returns the last stage's features of unmasked patches only, `[batch, kept, channels]`.

        The features do not depend on the masked patches: layers read zeros in place of these
        patches, and statistics of an image are computed over its unmasked patches. The features are
        not normalized. The height and width of the images must be multiples of `mask_patch_size`.

        Args:
          keep: distinct raster indices of the unmasked patches of each image, int32 `[batch,
            kept]`.
        """
        raise NotImplementedError

    def each_head(self, images: ImagesLike, rngs: nnx.Rngs | None = None) -> tuple[jax.Array, ...]:
        """Returns a tuple of each head's logits, `[batch, classes]`.

        Only a ViT with a distillation token has two heads. `__call__` returns the mean of their
        logits.
        """
        x = self.features(images, rngs)
        return (x if self.head is None else self.head(x),)

    def capturing(self, names: Sequence[str]) -> AbstractContextManager[dict[str, list[jax.Array]]]:
        """Returns a context manager that collects intermediate results of calls within the context.

        Entering the context returns a dictionary, which maps each of `names` to a list of arrays.

        Raises:
          UserError: a name cannot be captured.
        """
        for name in names:
            if name not in self.captures:
                raise UserError(
                    f"{name!r} cannot be captured; there are: {', '.join(self.captures)}"
                )
        return capturing(names)

    def resized(self, image_size: int | tuple[int, int]) -> "ImageModel":
        """Returns the same model for images of another size, in pixels or as (height, width).

        Both models share their parameters and gradients, so an objective may use crops of several
        sizes in one step. The original model does not change: it still accepts its own size only.

        Raises:
          UserError: the model does not support the size.
        """
        size = height_and_width(image_size)
        if size == self.image_size or self.any_size:
            return self
        raise UserError(
            f"a {type(self).__name__} for {'x'.join(map(str, self.image_size))} pixels has "
            f"parameters of that size, and is not resized to {'x'.join(map(str, size))}"
        )

    def predict(
        self, images: Any, top: int | None = None, threshold: float | None = None
    ) -> list[Prediction]:
        """Returns the most likely classes of images, with the checkpoint's preprocessing.

        Args:
          images: the path of an image or of a folder, a PIL image, an array uint8 `[height, width,
            3]`, a list of paths, PIL images or arrays, or an array uint8 `[images, height, width,
            3]`. Images may have any size. A model with one channel converts the images to grey. A
            model with four or more channels requires uint8 arrays with its number of channels.
          top: maximum number of classes for each image. None: 3 classes without `threshold`, all
            classes with `threshold`.
          threshold: minimum probability of the returned classes.

        Returns:
          A `Prediction` for each image, with `classes` and `probabilities`, the most likely class
          first. Probabilities are a softmax over the classes or a sigmoid of each class, depending
          on the model's training.

        Raises:
          UserError: an image cannot be read, the model has no head, or it was not loaded from a
            checkpoint.
        """
        return (self.about or About(type(self).__name__)).predict(self, images, top, threshold)

    def tree(self) -> str:
        """Returns a text with all modules and parameters, as Flax prints them."""
        return super().__repr__()

    def __repr__(self):
        return card_of(self)

    def __str__(self):
        return card_of(self)

    def normalize(self, images: ImagesLike) -> jax.Array:
        """Normalizes images for the first layer, float32 `[batch, height, width, channels]`.

        Args:
          images: uint8, or floats in [-1, 1].

        Raises:
          UserError: the images have another shape or type.
        """
        x = to_floats(self._image_array(images))
        shift, factor = affine(self.mean, self.std)
        return x if np.all(shift == 0) and np.all(factor == 1) else (x - shift) / factor

    def denormalize(self, x: jax.Array) -> jax.Array:
        """Inverts `normalize`: returns pixels in [0, 255], not rounded, `[..., channels]`."""
        shift, factor = affine(self.mean, self.std)
        return (x * factor + shift + 1) * 127.5

    def _image_array(self, images: ImagesLike) -> jax.Array:
        array = as_array(images, self.channels)
        try:
            images = jnp.asarray(array)
        except (TypeError, ValueError) as error:
            dtype = getattr(array, "dtype", type(array).__name__)
            raise UserError(
                f"the model takes images as arrays of uint8, or of floats in [-1, 1], not {dtype}; "
                "model.predict reads files"
            ) from error
        shape = images.shape
        sized = (
            len(shape) == 4 and (self.any_size or shape[1:3] == self.image_size) and 0 not in shape
        )
        if not sized or shape[3] != self.channels:
            height, width = ("height", "width") if self.any_size else self.image_size
            raise UserError(
                f"the model takes images [batch, {height}, {width}, {self.channels}], "
                f"not {str(list(shape)).replace(chr(39), '')}"
            )
        if images.dtype != jnp.uint8 and not jnp.issubdtype(images.dtype, jnp.floating):
            raise UserError(
                f"the model takes images of uint8, or of floats in [-1, 1], not {images.dtype}"
            )
        if images.dtype != jnp.uint8 and not isinstance(images, Tracer):
            check_range(images)
        return images


class TokenModel(ImageModel):
    """A Transformer over patch and prefix tokens: ViT and similar models.

    The forward pass has five steps: `patches`, `assemble`, `encode`, the layer norm `norm` (which
    may be None) and a head. A training objective may change the tokens between these steps.
    By default the last layer computes only the tokens that the head reads. With `whole=True`,
    `__call__` computes all tokens of the last layer.

    Attributes:
      prefix_tokens: names of the tokens before the patches, such as `cls`. The tokens' parameters
        have these names, too.
      grid: rows and columns of patches.
      tokens: number of all tokens, including the registers after the patches.
      embeds_pixels: a patch's embedding depends only on its own pixels. False for hybrids, which
        have a larger receptive field.
      attends_fully: every patch attends to all patches. Attention rollout and attention distance
        are defined only for such models.
      keeps_any: `assemble` accepts any subset of the patches, as masked autoencoders require.
      takes_queries: `encode_with` supports additional tokens in the last layers.
      pools_plainly: the head's input is one normalized token or the mean of the normalized patches;
        no other layer comes between the encoder and the head.
    """

    prefix_tokens: tuple[str, ...]
    grid: tuple[int, int]
    tokens: int
    embeds_pixels: bool
    attends_fully: bool
    keeps_any: bool
    takes_queries: bool
    pools_plainly: bool

    @property
    def patch_size(self) -> int:
        """Side of a patch, in pixels; in hybrids, in positions of the ResNet's feature map."""
        return self.options.patch_size

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.options.dim

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.options.depth

    @property
    def heads(self) -> int:
        """Number of attention heads of each layer."""
        return self.options.heads

    @property
    def prefix(self) -> int:
        """Number of prefix tokens: the tokens before the patches."""
        return len(self.prefix_tokens)

    @property
    def patch_tokens(self) -> slice:
        """Slice of the token axis that contains the patches."""
        return slice(self.prefix, self.prefix + math.prod(self.grid))

    def patches(self, images: ImagesLike) -> jax.Array:
        """Returns patch embeddings in raster order, `[batch, patches, dim]`.

        Raises:
          UserError: the images have another shape or type.
        """
        raise NotImplementedError

    def assemble(
        self, patches: jax.Array, rngs: nnx.Rngs | None = None, keep: jax.Array | None = None
    ) -> jax.Array:
        """Adds position embeddings, if any, and prefix tokens; returns `[batch, tokens, dim]`.

        Args:
          patches: patch embeddings, `[batch, patches, dim]`.
          keep: raster indices of the patches to return, int32 `[batch, kept]`. The patches are
            returned in the order of these indices. Only models with `keeps_any` support this
            argument. None: all patches.
        """
        raise NotImplementedError

    def encode(
        self,
        x: jax.Array,
        rngs: nnx.Rngs | None = None,
        read: int | None = None,
        after: int | None = None,
    ) -> Any:
        """Applies all layers to tokens `[batch, tokens, dim]`; the final norm is not applied.

        The result has the same shape.

        Args:
          read: number of leading tokens to return; the last layer computes only these tokens. None:
            all tokens.
          after: number of layers, from 0 to depth - 1. The method then returns a pair: the tokens
            after all layers, and all tokens after the first `after` layers. None: only the tokens
            after all layers.
        """
        raise NotImplementedError

    def encode_with(
        self,
        x: jax.Array,
        queries: jax.Array,
        layers: int,
        mask: Callable[[int, jax.Array], jax.Array | None],
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Applies all layers, with additional tokens in the last layers.

        Only models with `takes_queries` support this.

        Args:
          queries: additional tokens, which have no position embeddings, `[batch, queries, dim]`.
          layers: number of layers, at the end of the encoder, that also process the queries.
          mask: called as `mask(number, x)` before each layer with queries. `number` counts these
            layers from 0, and `x` is the layer's input. Returns bool `[batch, queries, tokens +
            queries]`, True for each token that a query attends to; or None: all tokens.

        Returns:
          `[batch, tokens + queries, dim]`, before the final norm.
        """
        raise NotImplementedError

    def layer_positions(self, rngs: nnx.Rngs | None = None) -> dict[str, Any]:
        """Returns the layers' keyword arguments for positions, such as angles of rotary embeddings.

        Args:
          rngs: random keys, in training, for the random rescaling of the patches' coordinates.
        """
        raise NotImplementedError

    def more_layers(
        self, count: int, first: int, scheme: Scheme | None = None, *, rngs: nnx.Rngs
    ) -> nnx.Dict:
        """Creates new layers with the settings of the model's layers, for use outside the model.

        Args:
          count: number of layers.
          first: index of the first new layer, from 0. As in the model, initialization and
            stochastic depth rate of a layer depend on its index.
          scheme: initialization scheme; None: the model's own.

        Raises:
          UserError: the layers of the model are not plain encoder layers.
        """
        raise NotImplementedError


class CodeModel(ImageModel):
    """An image tokenizer: predicts one code of a vocabulary for each position of an image.

    The linear `head` computes the logits of the codes.

    Attributes:
      code_stride: side in pixels of the square that a code represents.
    """

    code_stride: int

    @property
    def code_grid(self) -> tuple[int, int]:
        """Number of rows and number of columns of codes, for an image of the model's size."""
        height, width = self.image_size
        return height // self.code_stride, width // self.code_stride

    def code_scores(self, images: jax.Array) -> jax.Array:
        """Returns the code logits of each code position, float32 `[batch, rows, columns, codes]`.

        Raises:
          UserError: the images have another shape or type.
        """
        raise NotImplementedError

    def codes(self, images: jax.Array) -> jax.Array:
        """Returns the most likely code of each position of the code grid, row by row.

        The result is int32 `[batch, rows * columns]`.
        """
        scores = self.code_scores(images)
        return scores.argmax(-1).astype(jnp.int32).reshape(len(scores), -1)


def card_of(model: ImageModel) -> str:
    """Returns a model card of about ten lines: name, sizes, number of parameters, and source."""
    about = model.about or About(type(model).__name__)
    height, width = model.image_size
    sizes: dict[str, int] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        sizes[str(path[0])] = sizes.get(str(path[0]), 0) + math.prod(leaf.shape)
    size = "any size" if model.any_size else f"{height}x{width} pixels"
    lines = {"images": f"{size}, {model.channels} channels, mean {model.mean}, std {model.std}"}
    if isinstance(model, TokenModel):
        lines["tokens"] = (
            f"{model.tokens:,} of width {model.dim}, {model.depth} layers, {model.heads} heads"
        )
    names = ", ".join(about.class_names[:3]) + (", ..." if len(about.class_names) > 3 else "")
    classes = (
        f"{model.num_classes:,}{names and f': {names}'}" if model.num_classes else "none, features"
    )
    lines["classes"] = classes
    if model.num_classes:
        lines["probabilities"] = about.probabilities
    lines["parameters"] = f"{sum(sizes.values()):,}"
    for part in sorted(sizes, key=lambda part: -sizes[part])[:4]:
        lines[f"  {part}"] = f"{sizes[part]:,}"
    lines |= about.lines(model)
    return "\n".join([about.name, *(f"  {word:20} {text}" for word, text in lines.items())])
