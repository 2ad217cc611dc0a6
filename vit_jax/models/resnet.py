"""ResNets with group normalisation and standardised weights: the paper's baselines and hybrids.

Two kinds of unit share the code. BiT's come with the activation before the convolution (Kolesnikov
et al., 2020); the hybrids' (paper, section 3.1) after it, as their released checkpoints do.
Dimensions are named: batch height width channels.
"""

import math
import re
from numbers import Integral
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.arguments import check_arguments
from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.family import Family
from vit_jax.models.image_model import ImageModel
from vit_jax.models.layers import named, run_layers
from vit_jax.models.pixels import Statistic


class Rules(NamedTuple):
    """The details in which BiT's and the hybrids' code differ, besides the order of layers."""

    same_padding: bool  # Else both sides alike: (size - 1) // 2.
    norm_epsilon: float
    variance_epsilon: float  # Of standardised weights: sqrt(variance + this) +
    deviation_epsilon: float  # this.


# By whether a trunk is pre-activated, and whose numbers it has: timm's and Transformers' code took
# other epsilons than Google's, which show in the fifth digit.
RULES = {
    (True, "google"): Rules(False, 1e-5, 1e-10, 0.0),
    (True, "timm"): Rules(False, 1e-5, 1e-8, 0.0),
    (False, "google"): Rules(True, 1e-6, 0.0, 1e-5),
    (False, "timm"): Rules(True, 1e-5, 1e-8, 0.0),
}


BIT_BLOCKS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3), "200": (3, 24, 36, 3)}

RESNET_AXES = ((r"resnet/.*/kernel", "height width inputs -> outputs"),)
HEAD_AXES = ((r"(head|distillation_head)/kernel", "features -> classes"),)


class StdConv(nnx.Module):
    """A convolution whose kernel is brought to mean 0 and deviation 1 for each output channel."""

    def __init__(self, inputs, outputs, size, *, stride=1, rules: Rules, dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(initializers.lecun()(rngs.params(), (size, size, inputs, outputs)))
        self.size, self.stride, self.rules, self.dtype = size, stride, rules, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, height, width, inputs]` to `[batch, height / stride, width / stride, outputs]`."""
        kernel = self.kernel[...]
        mean = kernel.mean(axis=(0, 1, 2))
        deviation = jnp.sqrt(kernel.var(axis=(0, 1, 2)) + self.rules.variance_epsilon)
        kernel = (kernel - mean) / (deviation + self.rules.deviation_epsilon)
        pad = (self.size - 1) // 2
        return jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            kernel.astype(self.dtype),
            window_strides=(self.stride, self.stride),
            padding="SAME" if self.rules.same_padding else ((pad, pad), (pad, pad)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


class AxialAttention(nnx.Module):
    """Attention within columns, then within rows, in place of a 3x3 convolution (appendix D.6).

    As in Axial-DeepLab (Wang et al., 2020): 8 heads, queries and keys of half the values' width, and
    learned relative positions for queries, keys and values. Group norms stand for their batch norms
    after the projection and at the end, the scale 1 / sqrt(width) for those of the logits.

    Args:
      span: height and width of the input.
    """

    HEADS = 8

    def __init__(self, width: int, span: tuple[int, int], *, stride: int, rules: Rules, dtype, rngs):
        def axis(length):
            return _AxisAttention(width, length, self.HEADS, rules=rules, dtype=dtype, rngs=rngs)

        self.column, self.row, self.stride = axis(span[0]), axis(span[1]), stride

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, height, width, channels]`, the sides divided by the stride, by averaging."""
        x = self.column(x.swapaxes(1, 2)).swapaxes(1, 2)
        x = self.row(x)
        if self.stride > 1:
            x = nnx.avg_pool(x, (self.stride,) * 2, strides=(self.stride,) * 2)
        return x


class _AxisAttention(nnx.Module):
    """Attention of `[batch, lines, length, width]` within each line."""

    def __init__(self, width: int, length: int, heads: int, *, rules: Rules, dtype, rngs):
        self.heads, self.length = heads, length
        self.qkv = StdConv(width, 2 * width, 1, rules=rules, dtype=dtype, rngs=rngs)
        self.norm = group_norm(2 * width, rules, dtype, rngs)
        self.out_norm = group_norm(width, rules, dtype, rngs)
        head = width // heads
        # Of offsets -(length - 1) to length - 1, for queries, keys and values.
        self.relative_embedding = nnx.Param(
            initializers.normal(head**-0.5)(rngs.params(), (2 * length - 1, 2 * head))
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, lines, length, width = x.shape
        half = width // self.heads // 2
        x = self.norm(self.qkv(x)).reshape(batch, lines, length, self.heads, 4 * half)
        query, key, value = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        place = np.arange(length)
        table = self.relative_embedding[...].astype(x.dtype)[place[:, None] - place[None, :] + length - 1]
        for_query, for_key, for_value = (
            table[..., :half],
            table[..., half : 2 * half],
            table[..., 2 * half :],
        )
        logits = (
            jnp.einsum("blqhd,blkhd->blhqk", query, key)
            + jnp.einsum("blqhd,qkd->blhqk", query, for_query)
            + jnp.einsum("blkhd,qkd->blhqk", key, for_key)
        )
        weights = jax.nn.softmax(logits.astype(jnp.float32) / math.sqrt(half), axis=-1).astype(x.dtype)
        x = jnp.einsum("blhqk,blkhd->blqhd", weights, value)
        x = x + jnp.einsum("blhqk,qkd->blqhd", weights, for_value)
        return self.out_norm(x.reshape(batch, lines, length, width))


class PreActivationUnit(nnx.Module):
    """BiT's bottleneck: normalise, activate, convolve, three times; the sum is left as it is."""

    def __init__(self, inputs: int, middle: int, stride: int, span, rules: Rules, dtype, rngs):
        def conv(*sizes, stride=1):
            return StdConv(*sizes, stride=stride, rules=rules, dtype=dtype, rngs=rngs)

        self.norm1 = group_norm(inputs, rules, dtype, rngs)
        self.conv1 = conv(inputs, middle, 1)
        self.norm2 = group_norm(middle, rules, dtype, rngs)
        if span is None:
            self.conv2 = conv(middle, middle, 3, stride=stride)
        else:
            self.conv2 = AxialAttention(middle, span, stride=stride, rules=rules, dtype=dtype, rngs=rngs)
        self.norm3 = group_norm(middle, rules, dtype, rngs)
        self.conv3 = conv(middle, 4 * middle, 1)
        changes = stride != 1 or inputs != 4 * middle
        self.conv_proj = conv(inputs, 4 * middle, 1, stride=stride) if changes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        first = nnx.relu(self.norm1(x))
        shortcut = x if self.conv_proj is None else self.conv_proj(first)
        x = self.conv1(first)
        x = self.conv2(nnx.relu(self.norm2(x)))
        return shortcut + self.conv3(nnx.relu(self.norm3(x)))


class PostActivationUnit(nnx.Module):
    """The hybrids' bottleneck: convolve, normalise, activate; the last norm starts at zero."""

    def __init__(self, inputs: int, middle: int, stride: int, span, rules: Rules, dtype, rngs):
        def conv(*sizes, stride=1):
            return StdConv(*sizes, stride=stride, rules=rules, dtype=dtype, rngs=rngs)

        self.conv1, self.norm1 = conv(inputs, middle, 1), group_norm(middle, rules, dtype, rngs)
        self.conv2 = conv(middle, middle, 3, stride=stride)
        self.norm2 = group_norm(middle, rules, dtype, rngs)
        self.conv3 = conv(middle, 4 * middle, 1)
        self.norm3 = group_norm(4 * middle, rules, dtype, rngs, scale=0.0)
        changes = stride != 1 or inputs != 4 * middle
        self.conv_proj = conv(inputs, 4 * middle, 1, stride=stride) if changes else None
        self.norm_proj = group_norm(4 * middle, rules, dtype, rngs) if changes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = x if self.conv_proj is None else self.norm_proj(self.conv_proj(x))
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return nnx.relu(shortcut + self.norm3(self.conv3(x)))


class ResNet(nnx.Module):
    """Images to the features of the last stage.

    Args:
      blocks: units in each stage, such as (3, 4, 6, 3); the first stage keeps the root's resolution,
        each other halves it. An empty tuple is the root alone.
      width: factor on all channels.
      channels: of the images.
      preactivation: BiT's units, or else the hybrids'.
      epsilons: `google` or `timm`, whose small constants.
      axial_span: height and width of the images, for attention instead of 3x3 convolutions.
      remat: what of a unit the backward pass computes anew, as of `ViT`.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        width: int,
        channels: int,
        *,
        preactivation: bool,
        epsilons: str = "google",
        axial_span: tuple[int, int] | None = None,
        remat: str = "none",
        dtype,
        rngs: nnx.Rngs,
    ):
        rules = RULES[preactivation, epsilons]
        unit = PreActivationUnit if preactivation else PostActivationUnit
        self.preactivation, self.remat = preactivation, remat
        self.channels = 64 * width
        self.root = StdConv(channels, self.channels, 7, stride=2, rules=rules, dtype=dtype, rngs=rngs)
        self.root_norm = None if preactivation else group_norm(self.channels, rules, dtype, rngs)
        self.stages = nnx.Dict()
        shrunk = 4
        for stage, count in enumerate(blocks, start=1):
            units = {}
            for number in range(1, count + 1):
                stride = 2 if stage > 1 and number == 1 else 1
                span = axial_span and tuple(math.ceil(side / shrunk) for side in axial_span)
                middle = 64 * width * 2 ** (stage - 1)
                units[f"{number:02d}"] = unit(self.channels, middle, stride, span, rules, dtype, rngs)
                self.channels = 4 * middle
                shrunk *= stride
            self.stages[f"{stage}"] = nnx.Dict(units)

    def __call__(self, images: jax.Array) -> jax.Array:
        """`[batch, height, width, channels]` to `[batch, height / stride, width / stride, self.channels]`."""
        x = self.root(images)
        if self.preactivation:
            x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))  # With zeros, as BiT's code does.
            x = nnx.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding="VALID")
        else:
            x = nnx.relu(self.root_norm(x))
            x = nnx.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding="SAME")
        units = [unit for stage in self.stages.values() for unit in stage.values()]

        def call(unit, x, _):
            return named("features", unit(x))

        return run_layers(call, units, named("features", x), [None] * len(units), remat=self.remat)


def resnet_stride(blocks: tuple[int, ...] | None) -> int:
    """Pixels for each position of the features; 1 without a ResNet (None)."""
    return 1 if blocks is None else 2 ** (2 + max(0, len(blocks) - 1))


class BiT(ImageModel):
    """A BiT ResNet: the paper's baseline (Kolesnikov et al., 2020).

    Args:
      image_size: height and width in pixels, or one number for a square; other sizes work too,
        except for `axial`.
      num_classes: width of the linear head; 0 for none: the call then returns what would enter it.
      resnet_blocks: units in each stage.
      resnet_width: factor on all channels.
      resnet_epsilons: `google` or `timm`, whose small constants.
      channels: of the images.
      mean, deviation: of the pixels that it is trained on, as of `ViT`.
      axial: attention along columns and rows instead of 3x3 convolutions (appendix D.6).
      head_bias: initial value of the head's biases; its kernel is zero.
      remat: what of a unit the backward pass computes anew, as of `ViT`.
      dtype: of the computation; parameters, normalisation statistics and logits are float32.
      rngs: the key for initialisation.

    Raises:
      UserError: an argument of another type or out of its bounds; an image that `axial` cannot halve as often
        as it must.
    """

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        num_classes: int,
        resnet_blocks: tuple[int, ...] = (3, 4, 6, 3),
        resnet_width: int = 1,
        resnet_epsilons: str = "google",
        channels: int = 3,
        mean: Statistic = 0.5,
        deviation: Statistic = 0.5,
        axial: bool = False,
        head_bias: float = 0.0,
        remat: str = "none",
        dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        check_arguments(locals())
        if not resnet_blocks:
            raise UserError(f"resnet_blocks is {resnet_blocks!r} and must have a stage (model.resnet_blocks)")
        size = (image_size,) * 2 if isinstance(image_size, Integral) else tuple(image_size)
        stride = 2 ** (1 + len(resnet_blocks))
        if axial and (size[0] % stride or size[1] % stride):
            raise UserError(
                f"axial attention needs an image of multiples of {stride} pixels, not {size[0]}x{size[1]}"
            )
        compute = jnp.dtype(dtype)
        super().__init__(size, channels, mean, deviation, any_size=not axial)
        self.num_classes = num_classes
        self.resnet = ResNet(
            tuple(resnet_blocks),
            resnet_width,
            channels,
            preactivation=True,
            epsilons=resnet_epsilons,
            axial_span=size if axial else None,
            remat=remat,
            dtype=compute,
            rngs=rngs,
        )
        self.norm = group_norm(self.resnet.channels, RULES[True, resnet_epsilons], compute, rngs)
        self.head = linear_head(self.resnet.channels, num_classes, head_bias, rngs) if num_classes else None

    def __call__(self, images: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Turns images `[batch, height, width, channels]` into logits `[batch, classes]`.

        Args:
          images: uint8, or floats in [-1, 1].
          rngs: taken as all models do; a BiT has no dropout.

        Raises:
          UserError: images of another type or number of channels; of another size, if `axial`.
        """
        x = self.features(images)
        return x if self.head is None else self.head(x)

    def features(self, images: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Turns images into the mean of the last stage's features over all places, `[batch, features]`."""
        return nnx.relu(self.norm(self.resnet(self.normalize(images)))).mean(axis=(1, 2))


def linear_head(inputs: int, num_classes: int, bias: float, rngs: nnx.Rngs) -> nnx.Linear:
    """Kernel zero, so that the first logits are the bias; float32."""
    return nnx.Linear(
        inputs,
        num_classes,
        kernel_init=nnx.initializers.zeros_init(),
        bias_init=nnx.initializers.constant(bias),
        dtype=jnp.float32,
        rngs=rngs,
    )


def group_norm(channels, rules, dtype, rngs, scale=1.0):
    """32 groups, statistics in float32."""
    return nnx.GroupNorm(
        channels,
        num_groups=32,
        epsilon=rules.norm_epsilon,
        scale_init=nnx.initializers.constant(scale),
        dtype=dtype,
        rngs=rngs,
    )


def _parse(name: str) -> dict | None:
    if name == "AxialResNet50":
        return dict(resnet_blocks=BIT_BLOCKS["50"], axial=True)
    match = re.fullmatch(r"BiT-R(\d+)x([1-9]\d*)", name)
    if not match or match[1] not in BIT_BLOCKS:
        return None
    return dict(resnet_blocks=BIT_BLOCKS[match[1]], resnet_width=int(match[2]))


FAMILY = Family(
    model=BiT,
    names=(
        *(f"BiT-{name}" for name in ("R50x1", "R50x2", "R50x3", "R101x1", "R101x3")),
        *(f"BiT-{name}" for name in ("R152x1", "R152x2", "R152x4", "R200x3")),
        "AxialResNet50",
    ),
    parse=_parse,
    spell=lambda values: f"BiT-R{3 * sum(values['resnet_blocks']) + 2}x{values['resnet_width']}",
    source=lambda name: (
        "Kolesnikov et al., 2020 (BiT)" if name.startswith("BiT") else "Dosovitskiy et al., 2021 (ViT)"
    ),
    smallest=lambda values: dict(resnet_blocks=(1, 1), resnet_width=1, image_size=64),
    axes=(*RESNET_AXES, *HEAD_AXES),
    any_size=True,
)
