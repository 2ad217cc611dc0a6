"""Heads for monocular depth: the distance from the camera in metres, for each output position.

A head predicts the distance directly, or it predicts a score for each of several distances ("bins")
and returns the mean of these distances, weighted by the scores. DINOv2 and DINOv3 evaluate depth
with the linear head and with DPT (Ranftl et al., 2103.13413). The code follows `eval/depth/models`
in their repositories.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.dense.batch_norm import BatchNorm, Moments, Statistics
from vit_jax.models.dense.neck import Upsampling
from vit_jax.models.dense.pyramid import pyramid, resized, widths_of
from vit_jax.models.image_model import ImageModel, TokenModel
from vit_jax.models.layers import GELUS
from vit_jax.options.objective import DepthOptions

# This number is added to the score of each bin, as in AdaBins. Without it some bins would have no
# gradient.
LEAST_SCORE = 0.1
CLASS_TOKEN = "cls"
HIDDEN = 32  # Number of input channels of DPT's last convolution.


def expected_depth(scores: jax.Array, nearest: float, farthest: float) -> jax.Array:
    """Returns the mean distance of the bins, weighted by the bins' scores, float32 `[...]`.

    Negative scores count as 0. Then 0.1 is added to each score (AdaBins' "linear" normalization).

    Args:
      scores: score of each bin, `[..., bins]`.
      nearest, farthest: distances of the first and the last bin; bins are evenly spaced.
    """
    weights = nnx.relu(scores.astype(jnp.float32)) + LEAST_SCORE
    bins = jnp.linspace(nearest, farthest, scores.shape[-1])
    return weights @ bins / weights.sum(-1)


def predicted_depth(scores: jax.Array, nearest: float, farthest: float, bounded: bool) -> jax.Array:
    """Returns the depth in metres that a head without bins predicts, float32 `[...]`.

    Where a score is negative, the depth is `nearest`, as in DINOv2's DPT.

    Args:
      scores: depth in metres minus `nearest`, `[..., 1]`.
      nearest, farthest: range of distances.
      bounded: clip depths to `farthest`, as in evaluation.
    """
    depth = nnx.relu(scores[..., 0].astype(jnp.float32)) + nearest
    return jnp.minimum(depth, farthest) if bounded else depth


class Layer(NamedTuple):
    """Output of an encoder layer.

    Attributes:
      patches: patch tokens, `[batch, rows, columns, dim]`.
      class_token: class tokens, `[batch, dim]`; None: unused.
    """

    patches: jax.Array
    class_token: jax.Array | None


def even_layers(depth: int) -> tuple[int, ...]:
    """Returns the indices, from 0, of the four encoder layers that a depth head reads.

    These are the last layers of the four quarters of the encoder, such as 2, 5, 8 and 11 of 12
    layers. With 24 layers the indices are 4 (not 5), 11, 17 and 23, as in DINOv2 and DINOv3. An
    encoder of fewer than four layers has repeated indices.
    """
    if depth == 24:
        return 4, 11, 17, 23
    return tuple(max(0, quarter * depth // 4 - 1) for quarter in range(1, 5))


class DepthHead(nnx.Module):
    """Base class of depth heads: selects the encoder layers to read and stores the range of depths.

    Args:
      num_layers: number of encoder layers to read: 1 (the last layer) or 4.
      frozen: True if the model is not trained. The model then runs without dropout.

    Raises:
      UserError: `num_layers` is 4 and the model is no ViT, or `options.class_token` is True and the
        model has no class token.
    """

    def __init__(
        self, options: DepthOptions, model: ImageModel, num_layers: int, *, frozen: bool = False
    ):
        self.frozen, self.normalize = frozen, options.normalize
        self.range = options.min_depth, options.max_depth
        self.class_token, self.layers = options.class_token, ()
        if isinstance(model, TokenModel):
            last = (model.depth - 1,)
            self.layers = last if num_layers == 1 else even_layers(model.depth)
        elif num_layers > 1:
            raise UserError(
                f"the head reads {num_layers} layers of a ViT, and the model is a "
                f"{type(model).__name__}: use config.depth.head='linear' with "
                "config.depth.layers=1, or a ViT"
            )
        tokens = model.prefix_tokens if isinstance(model, TokenModel) else ()
        if options.class_token and CLASS_TOKEN not in tokens:
            raise UserError(
                f"config.depth.class_token=True needs a class token, and this "
                f"{type(model).__name__} has none: use config.depth.class_token=False"
            )
        width = widths_of(model)[-1]
        self.norms = nnx.List(
            [BatchNorm(f"norm_{layer}", width) for layer in range(num_layers)]
            if options.normalize
            else []
        )

    def __call__(
        self,
        model: ImageModel,
        images: jax.Array,
        rngs: nnx.Rngs | None = None,
        state: Moments | None = None,
    ) -> dict[str, Any]:
        """Returns a dictionary with the key `depth`: float32 `[batch, rows, columns]`, in metres.

        In training the dictionary also contains `moments`, the statistics of the batch norms.
        """
        statistics = Statistics(state if rngs is None else None)
        layers = self._read(model, images, None if self.frozen else rngs)
        if self.norms:
            layers = [
                layer._replace(patches=norm(layer.patches, statistics))
                for norm, layer in zip(self.norms, layers, strict=True)
            ]
        scores = self.decode(layers)
        if scores.shape[-1] > 1:
            depth = expected_depth(scores, *self.range)
        else:
            depth = predicted_depth(scores, *self.range, bounded=rngs is None)
        return {"depth": depth, "moments": statistics.moments}

    def decode(self, layers: Sequence[Layer]) -> jax.Array:
        """Returns the score of each bin, `[batch, rows, columns, bins]`.

        A head that predicts the depth directly returns one score: the depth minus the minimum
        depth.
        """
        raise NotImplementedError

    def scores(self, outputs: dict[str, Any]) -> jax.Array:
        """Returns the depth in metres, float32 `[batch, rows, columns, 1]`."""
        return outputs["depth"][..., None]

    def _read(self, model: Any, images: jax.Array, rngs: nnx.Rngs | None) -> list[Layer]:
        """Returns the outputs of the encoder layers that the head reads."""
        if not isinstance(model, TokenModel):
            return [Layer(pyramid(model, images, rngs)[-1], None)]
        x = model.assemble(model.patches(images), rngs)
        with model.capturing(("tokens",)) as captured:
            model.encode(x, rngs)
        tokens = [captured["tokens"][layer + 1][:, : model.tokens] for layer in self.layers]
        norm: Any = getattr(model, "norm", None)
        if self.normalize and norm is not None:
            tokens = [*map(norm, tokens)]
        place = model.prefix_tokens.index(CLASS_TOKEN) if self.class_token else None
        return [
            Layer(
                x[:, model.patch_tokens].reshape(-1, *model.grid, model.dim),
                None if place is None else x[:, place],
            )
            for x in tokens
        ]


class LinearDepth(DepthHead):
    """A linear layer on the tokens of the last encoder layer, or of four encoder layers.

    If the class token is used, it is concatenated to each patch. The scores of the bins are
    upsampled before they are normalized. In a model with stages, such as a Swin, the head reads the
    last stage.
    """

    def __init__(
        self, options: DepthOptions, model: ImageModel, *, frozen: bool = False, rngs: nnx.Rngs
    ):
        super().__init__(options, model, options.layers, frozen=frozen)
        self.upsample = options.upsample
        width = widths_of(model)[-1] * options.layers * (2 if options.class_token else 1)
        self.classifier = nnx.Linear(
            width, options.bins, kernel_init=initializers.normal(0.01), rngs=rngs
        )

    def decode(self, layers: Sequence[Layer]) -> jax.Array:
        parts = []
        for patches, token in layers:
            parts.append(patches)
            if token is not None:
                parts.append(jnp.broadcast_to(token[:, None, None], patches.shape))
        scores = self.classifier(jnp.concatenate(parts, -1).astype(jnp.float32))
        if self.upsample == 1:
            return scores
        _, rows, columns, _ = scores.shape
        return resized(scores, (self.upsample * rows, self.upsample * columns))


class DPT(DepthHead):
    """DPT: four layers of a ViT form a feature pyramid, which is fused from coarse to fine.

    The strides of the pyramid are 1/4, 1/2, 1 and 2 times the patch size. The stride of the output
    is 1/16 of the patch size. If the class token is used, a linear layer combines it with each
    patch ("project" in the paper).
    """

    def __init__(
        self, options: DepthOptions, model: ImageModel, *, frozen: bool = False, rngs: nnx.Rngs
    ):
        super().__init__(options, model, 4, frozen=frozen)
        values: dict[str, Any] = dict(dtype=jnp.dtype(model.options.dtype), rngs=rngs)
        dim, width, lecun = options.dim, widths_of(model)[-1], initializers.lecun()
        widths = [max(1, width // 2 ** (3 - level)) for level in range(4)]
        dense = partial(nnx.Linear, kernel_init=lecun, **values)
        readouts = 4 if self.class_token else 0
        self.readout = nnx.List([dense(2 * width, width) for _ in range(readouts)])
        self.project = nnx.List([dense(width, channels) for channels in widths])
        self.resize = nnx.List(
            [
                Upsampling(widths[0], widths[0], 4, **values),
                Upsampling(widths[1], widths[1], 2, **values),
                conv(widths[3], widths[3], stride=2, **values),
            ]
        )
        self.convs = nnx.List([conv(channels, dim, bias=False, **values) for channels in widths])
        self.fusion = nnx.List([Fusion(dim, skips=level > 0, **values) for level in range(4)])
        self.fused = conv(dim, dim, **values)
        half = max(1, dim // 2)
        self.halve = conv(dim, half, **values)
        self.hidden = conv(half, HIDDEN, **values)
        self.classifier = nnx.Linear(HIDDEN, options.bins, kernel_init=lecun, rngs=rngs)

    def decode(self, layers: Sequence[Layer]) -> jax.Array:
        pyramid = [
            convolve(x) for convolve, x in zip(self.convs, self._reassembled(layers), strict=True)
        ]
        x = self.fusion[0](pyramid[-1])
        for block, level in zip(self.fusion[1:], pyramid[-2::-1], strict=True):
            x = block(x, level)
        x = doubled(self.halve(nnx.relu(self.fused(x))))
        return self.classifier(nnx.relu(self.hidden(x)).astype(jnp.float32))

    def _reassembled(self, layers: Sequence[Layer]) -> list[jax.Array]:
        """Returns the levels of the feature pyramid, the finest first; their widths differ."""
        levels = []
        for level, (x, token) in enumerate(layers):
            if token is not None:
                token = jnp.broadcast_to(token[:, None, None], x.shape)
                x = GELUS["erf"](self.readout[level](jnp.concatenate([x, token], -1)))
            levels.append(self.project[level](x))
        finest, fine, plain, coarse = levels
        quarter, half, twice = self.resize
        return [quarter(finest), half(fine), plain, twice(coarse)]


def conv(
    inputs: int, outputs: int, *, stride: int = 1, bias: bool = True, dtype: Any, rngs: nnx.Rngs
) -> nnx.Conv:
    """Returns a 3x3 convolution with padding 1, initialized as in mmcv (Kaiming)."""
    return nnx.Conv(
        inputs,
        outputs,
        (3, 3),
        strides=stride,
        padding=((1, 1), (1, 1)),
        use_bias=bias,
        kernel_init=initializers.normal(math.sqrt(2 / (9 * outputs))),
        dtype=dtype,
        rngs=rngs,
    )


class Residual(nnx.Module):
    """Two convolutions, each preceded by a ReLU, and a skip connection."""

    def __init__(self, dim: int, *, dtype: Any, rngs: nnx.Rngs):
        self.first = conv(dim, dim, bias=False, dtype=dtype, rngs=rngs)
        self.second = conv(dim, dim, bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.second(nnx.relu(self.first(nnx.relu(x))))


class Fusion(nnx.Module):
    """DPT's fusion block: adds a level of the pyramid to the input and doubles the resolution.

    Args:
      dim: number of channels.
      skips: add a level of the pyramid. False for the first block, which has only one input.
    """

    def __init__(self, dim: int, *, skips: bool, dtype: Any, rngs: nnx.Rngs):
        self.skip = Residual(dim, dtype=dtype, rngs=rngs) if skips else None
        self.residual = Residual(dim, dtype=dtype, rngs=rngs)
        self.project = nnx.Linear(
            dim, dim, kernel_init=initializers.lecun(), dtype=dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array, level: jax.Array | None = None) -> jax.Array:
        """Maps `[batch, rows, columns, dim]` to twice the rows and columns."""
        if self.skip is not None and level is not None:
            x = x + self.skip(resized(level, x.shape[1:3]))
        return self.project(doubled(self.residual(x)))


def doubled(x: jax.Array) -> jax.Array:
    """Doubles rows and columns bilinearly, with PyTorch's `align_corners=True`."""
    rows, columns = (jnp.asarray(_doubling(size), x.dtype) for size in x.shape[1:3])
    # The highest precision, as in jax.image.resize: a TPU's default precision is bfloat16.
    return jnp.einsum("brcd,Rr,Cc->bRCd", x, rows, columns, precision=jax.lax.Precision.HIGHEST)


def _doubling(size: int) -> np.ndarray:
    """Returns the matrix `[2 * size, size]` that doubles an axis by linear interpolation."""
    places = np.linspace(0, size - 1, 2 * size)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(size)))


_KINDS = {"linear": LinearDepth, "dpt": DPT}


def depth_head(
    options: DepthOptions, model: ImageModel, *, frozen: bool = False, rngs: nnx.Rngs
) -> DepthHead:
    """Returns the depth head that a config selects.

    Args:
      model: the image model; it may contain shapes in place of arrays.
      frozen: True if the model is not trained. The model then runs without dropout.

    Raises:
      UserError: the head does not support the model.
    """
    return _KINDS[options.head](options, model, frozen=frozen, rngs=rngs)
