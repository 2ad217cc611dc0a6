"""The methods and properties that every model has, and those that models of tokens or of codes have
besides.

Nothing outside `models/` and `interop/` asks which class a model is of: it calls these methods, or
asks whether the model is a `TokenModel` or a `CodeModel`.
"""

import math
import warnings
from collections.abc import Sequence
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

# Images `[batch, height, width, channels]`; lists of images or of numbers; a PIL image is a batch
# of one.
ImagesLike: TypeAlias = "jax.Array | npt.NDArray[Any] | Image | Sequence[Any]"

ROUNDING = 1e-3  # By which floats may be outside of [-1, 1].


def height_and_width(image_size: int | tuple[int, int]) -> tuple[int, int]:
    """The size of images as (height, width), which may be given as one number for squares."""
    if isinstance(image_size, int | np.integer):
        return int(image_size), int(image_size)
    height, width = image_size
    return height, width


# The probabilities of classes by their logits: of classes that exclude one another, or of each by
# itself.
PROBABILITIES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


class About:
    """A record of a model's name and of where it came from.

    Attributes:
      name: of the model, such as `ViT-B/16`.
      preprocessing: what it should see of an image, and class_names, of all classes: where a
        checkpoint says them.
      probabilities: of `PROBABILITIES`.
      objective: what the checkpoint has beside the model, of an objective of training.
    """

    preprocessing: Any = None
    objective: Any = None
    class_names: tuple[str, ...] = ()
    probabilities: str = "softmax"

    def __init__(self, name: str):
        self.name = name

    def lines(self, model: "ImageModel") -> dict[str, str]:
        """More lines of the model's card, by their first word."""
        return {"from": "fresh parameters, not trained"}

    def predict(
        self, model: "ImageModel", images: Any, top: int | None, threshold: float | None
    ) -> list[Prediction]:
        """The likeliest classes of images, as of `ImageModel.predict`."""
        raise UserError(
            "this model is not of a checkpoint, and has not been trained: see vit_jax.load_model"
        )


def as_array(images: ImagesLike, channels: int) -> Any:
    """Returns images as an array `[batch, height, width, channels]`, where lists or PIL's are
    given.

    Whole numbers from 0 to 255 in lists are uint8.

    Raises:
      UserError: images of several sizes, or of a mode of PIL's that would have to be converted.
    """
    if isinstance(images, jax.Array | np.ndarray):
        return images
    if hasattr(images, "getbands"):
        images = [images]
    if not isinstance(images, list | tuple):
        return images
    if any(isinstance(image, jax.Array) for image in images):  # They may be traced.
        return jnp.stack([jnp.asarray(image) for image in images])
    return _stacked([_pixels(image, channels) for image in images])


def _stacked(images: list[np.ndarray]) -> np.ndarray:
    """Returns images of one size as one array; raises UserError for several sizes."""
    if len(shapes := {image.shape for image in images}) > 1:
        sizes = ", ".join(str(list(shape)) for shape in sorted(shapes))
        raise UserError(
            f"the model takes images of one size, not of {sizes}; model.predict resizes them"
        )
    return np.stack(images) if images else np.empty(0)


def _pixels(image: Any, channels: int) -> np.ndarray:
    """Returns the pixels of nested lists or of a PIL image, which is uint8
    `[height, width, channels]`.
    """
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
    """Checks that floats are in [-1, 1], and warns where they seem to be in [0, 1].

    Raises:
      UserError: they are outside of [-1, 1], or NaN.
    """
    with jax.ensure_compile_time_eval():  # Also where a traced function has images of its own.
        if jnp.isnan(images).any():  # XLA's minimum may skip it.
            raise UserError(
                "the model takes images of floats in [-1, 1], not NaN: look at what made them"
            )
        least, most = float(images.min()), float(images.max())
    if not (least >= -1 - ROUNDING and most <= 1 + ROUNDING):
        raise UserError(
            f"the model takes images of floats in [-1, 1], not from {least:.4g} to {most:.4g}: "
            "give uint8, or pixels / 127.5 - 1; the model itself normalises by its mean and "
            "std"
        )
    if 0 <= least < most:
        warnings.warn(
            f"images of floats from {least:.4g} to {most:.4g} are taken to be in [-1, 1]; if they "
            "are in [0, 1], give 2 * images - 1, or uint8",
            stacklevel=2,
        )


class ImageModel(nnx.Module):
    """A model of images: it checks them, and normalises them by the mean and std of its
    training.

    A class of models has `features(images, rngs=None, dense=False)`, which gives what enters its
    linear
    `head`; that is None where there are no classes.

    Attributes:
      options: the arguments of the model, of the class `options_type`, which documents them.
      any_size: images of other sizes are taken too.
    """

    about: About | None = None
    options: Any
    options_type: ClassVar[type[ImageOptions]] = ImageOptions
    # Intermediate results that a call may return.
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
        """Number of the images' channels."""
        return self.options.channels

    @property
    def num_classes(self) -> int:
        """Number of classes; 0: no head."""
        return self.options.num_classes

    @property
    def mean(self) -> Statistic:
        """Mean of pixels in [0, 1] for normalization, of all channels or of each."""
        return self.options.mean

    @property
    def std(self) -> Statistic:
        """Standard deviation of pixels in [0, 1] for normalization, as `mean`."""
        return self.options.std

    @property
    def pixel_kernel(self) -> jax.Array:
        """The kernel of the first layer, which reads pixels, `[height, width, channels,
        filters]`.
        """
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
        """Turns images `[batch, height, width, channels]` into logits `[batch, classes]`.

        A model without a head returns its features.

        Args:
          images: uint8, or floats in [-1, 1]; lists of such, or of PIL images of the model's size.
          rngs: with a `dropout` stream the call is a training call.
          capture: intermediate results to return beside the logits, of the class's `captures`, a
            list of each: `features`, `[batch, rows, columns, channels]` before the first block and
            after each block and each change of resolution.

        Raises:
          UserError: images of another shape or type; nothing of that name can be captured.
        """
        with self.capturing(capture) as found:
            (logits,) = self.each_head(images, rngs)
        return (logits, found) if capture else logits

    @overload
    def features(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: Literal[False] = False
    ) -> jax.Array: ...

    @overload
    def features(self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool) -> Any: ...

    def features(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool = False
    ) -> Any:
        """Turns images into what enters the head, `[batch, features]`, whether there is a head or
        not.

        Args:
          dense: give the features of each place instead, for dense prediction: of a model of tokens
            the last layer's patches, `[batch, rows, columns, dim]`; of another a list of each
            stage's,
            `[batch, rows, columns, channels]`, finest first and not normalised.
        """
        raise NotImplementedError

    @property
    def leaves_out(self) -> int | None:
        """Side in pixels of the patches that `features_of` may leave out of an image, each of them
        one place of the last stage; None: this model has no such features.
        """
        return None

    def features_of(
        self, images: jax.Array, keep: jax.Array, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """Turns some patches into the last stage's features, not normalised, `[batch, kept,
        channels]`.

        They know nothing of the other patches: layers see zeros in their place, and what is
        normalised over an image is so over these. `leaves_out` divides the sides of the images.

        Args:
          keep: int32 `[batch, kept]`, numbers of each image's patches in raster order, each once.
        """
        raise NotImplementedError

    def each_head(self, images: ImagesLike, rngs: nnx.Rngs | None = None) -> tuple[jax.Array, ...]:
        """Turns images into the logits of each head, `[batch, classes]`; a call gives the heads'
        mean.

        Models have one head, but for a ViT with a head on its distillation token besides, the last
        one.
        """
        x = self.features(images, rngs)
        return (x if self.head is None else self.head(x),)

    def capturing(self, names: Sequence[str]) -> AbstractContextManager[dict[str, list[jax.Array]]]:
        """Collects intermediate results of these names while it is entered.

        Raises:
          UserError: the model has nothing of a name.
        """
        for name in names:
            if name not in self.captures:
                raise UserError(
                    f"{name!r} cannot be captured; there are: {', '.join(self.captures)}"
                )
        return capturing(names)

    def resized(self, image_size: int | tuple[int, int]) -> "ImageModel":
        """The same model for images of another size, in pixels or as (height, width).

        It has the same parameters, and gradients of what it computes reach them: an objective may
        look at crops of several sizes in one step. The model itself goes on to refuse images of
        another size.

        Raises:
          UserError: a model of this kind has no such size.
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
        """The likeliest classes of images, which are prepared as the model's checkpoint says.

        Args:
          images: a path of an image or a folder; an image, PIL's or uint8 `[height, width, 3]`; a
            list of such; or uint8 `[images, height, width, 3]`. They may be of any size. A model of
            one channel sees them in grey; a model of four or more takes uint8 arrays with that
            number of channels.
          top: highest number of classes named of each image; None: 3, or with a threshold all.
          threshold: lowest probability of the classes that are named.

        Returns:
          A `Prediction` for each image, with `classes` and `probabilities`, the likeliest first.
          Probabilities are a softmax over the classes or a sigmoid of each class, as the model was
          trained.

        Raises:
          UserError: an image cannot be read; the model has no head, or is not of a checkpoint.
        """
        return (self.about or About(type(self).__name__)).predict(self, images, top, threshold)

    def tree(self) -> str:
        """All modules and parameters, as Flax prints them: thousands of lines."""
        return super().__repr__()

    def __repr__(self):
        return card_of(self)

    def __str__(self):
        return card_of(self)

    def normalize(self, images: ImagesLike) -> jax.Array:
        """Normalises images for the first layer, float32 `[batch, height, width, channels]`.

        Args:
          images: uint8, or floats in [-1, 1].

        Raises:
          UserError: another shape or type.
        """
        x = to_floats(self._checked(images))
        shift, factor = affine(self.mean, self.std)
        return x if np.all(shift == 0) and np.all(factor == 1) else (x - shift) / factor

    def denormalize(self, x: jax.Array) -> jax.Array:
        """Undoes `normalize`: pixels in [0, 255], not rounded, `[..., channels]`."""
        shift, factor = affine(self.mean, self.std)
        return (x * factor + shift + 1) * 127.5

    def _checked(self, images: ImagesLike) -> jax.Array:
        array = as_array(images, self.channels)
        try:
            images = jnp.asarray(array)
        except (TypeError, ValueError) as error:
            found = getattr(array, "dtype", type(array).__name__)
            raise UserError(
                f"the model takes images as arrays of uint8, or of floats in [-1, 1], not {found}; "
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
    """A model of tokens, one for each patch and some before them: ViT and its relatives.

    Its forward pass is `patches`, `assemble`, `encode`, the layer norm `norm` unless that is None,
    and a head; an objective may change the tokens between two of them. Its `__call__` also takes
    `whole`, to compute all tokens of the last layer.

    Attributes:
      prefix_tokens: names of the tokens before the patches, which are those of their parameters.
      grid: rows and columns of patches.
      tokens: number of all tokens, those behind the patches too.
      embeds_pixels: a patch's embedding is of its own pixels alone, not of features that see beyond
        it.
      attends_fully: every patch attends to every other, so that rollout and distance are defined.
      keeps_any: `assemble` may keep any of the patches.
      pools_plainly: the head reads one normalised token or the mean of the patches, nothing
        between.
    """

    prefix_tokens: tuple[str, ...]
    grid: tuple[int, int]
    tokens: int
    embeds_pixels: bool
    attends_fully: bool
    keeps_any: bool
    pools_plainly: bool

    @property
    def patch_size(self) -> int:
        """Side of a patch, in pixels where `embeds_pixels`."""
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
        """Number of the tokens before the patches."""
        return len(self.prefix_tokens)

    @property
    def patch_tokens(self) -> slice:
        """The places of the patches among all tokens."""
        return slice(self.prefix, self.prefix + math.prod(self.grid))

    def patches(self, images: ImagesLike) -> jax.Array:
        """Turns images into patch embeddings in raster order, `[batch, patches, dim]`.

        Raises:
          UserError: images of another shape or type.
        """
        raise NotImplementedError

    def assemble(
        self, patches: jax.Array, rngs: nnx.Rngs | None = None, keep: jax.Array | None = None
    ) -> jax.Array:
        """Turns patch embeddings into all tokens with their positions, `[batch, tokens, dim]`.

        Args:
          keep: int32 `[batch, kept]`: only these patches of each image, in this order, where
            `keeps_any`.
        """
        raise NotImplementedError

    def encode(
        self,
        x: jax.Array,
        rngs: nnx.Rngs | None = None,
        read: int | None = None,
        after: int | None = None,
    ) -> Any:
        """Applies all layers, `[batch, tokens, dim]` to the same shape, not yet normalised.

        Args:
          read: return so many tokens only, the first; the last layer computes no others.
          after: return a pair: these, and all tokens as they are after so many layers, fewer than
            all.
        """
        raise NotImplementedError

    def layer_positions(self, rngs: nnx.Rngs | None = None) -> dict[str, Any]:
        """Makes the arguments of a layer's call that say its tokens' positions, beside what these
        carry.

        Args:
          rngs: in training, by which coordinates are rescaled where they are.
        """
        raise NotImplementedError

    def more_layers(
        self, count: int, first: int, scheme: Scheme | None = None, *, rngs: nnx.Rngs
    ) -> nnx.Dict:
        """Makes layers like its own, which read its tokens and do not belong to it.

        Args:
          count: how many.
          first: the number, from 0, of the first among its layers, by which it is drawn, and
            skipped.
          scheme: how they start; None: as its own.

        Raises:
          UserError: its layers are no plain ones.
        """
        raise NotImplementedError


class CodeModel(ImageModel):
    """A model that says one code of a vocabulary for each place of an image: a tokeniser.

    Its linear `head` has an output for each code.

    Attributes:
      code_stride: side of the square of pixels that a code stands for.
    """

    code_stride: int

    @property
    def code_grid(self) -> tuple[int, int]:
        """Rows and columns of codes of an image of its size."""
        height, width = self.image_size
        return height // self.code_stride, width // self.code_stride

    def code_scores(self, images: jax.Array) -> jax.Array:
        """Scores the codes at each place, the logits, float32 `[batch, rows, columns, codes]`.

        Raises:
          UserError: images of another shape or type.
        """
        raise NotImplementedError

    def codes(self, images: jax.Array) -> jax.Array:
        """Turns images into the likeliest code of each place in raster order, int32 `[batch,
        places]`.
        """
        scores = self.code_scores(images)
        return scores.argmax(-1).astype(jnp.int32).reshape(len(scores), -1)


def card_of(model: ImageModel) -> str:
    """Ten lines or so: the model's name, sizes, parameters by part, and where it came from."""
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
