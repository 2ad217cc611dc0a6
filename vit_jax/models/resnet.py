"""ResNets with group norm and weight standardization: the paper's baselines and hybrids.

There are two kinds of residual units. BiT's units apply norm and activation before each convolution
(Kolesnikov et al., 2020). The units of hybrids (paper, section 3.1) apply norm and activation after
each convolution, as in the released checkpoints. Names of axes: batch height width channels.
"""

import dataclasses
import math
import re
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.family import Adaptation, Family, Resize
from vit_jax.models.image_model import ImageModel, ImagesLike, height_and_width
from vit_jax.models.layers import named, platform, run_layers
from vit_jax.models.position import interpolation
from vit_jax.models.resize import resize_axis
from vit_jax.options.model import BiTOptions, HeadOptions


class Rules(NamedTuple):
    """Settings in which BiT's code and the hybrids' code differ.

    The order of the layers differs, too, but is not a setting.
    """

    same_padding: bool  # "SAME" padding. False: both sides are padded by (kernel size - 1) // 2.
    norm_epsilon: float
    # Weights are divided by sqrt(variance + variance_epsilon) + std_epsilon.
    variance_epsilon: float
    std_epsilon: float


# The settings, by a pair. The pair's first element is True for BiT's residual units and False for
# the hybrids' residual units. The second element names the library whose epsilons are used. With
# the epsilons of timm and Transformers ("timm"), the outputs differ from those of Google's code in
# the fifth digit.
RULES = {
    (True, "google"): Rules(False, 1e-5, 1e-10, 0.0),
    (True, "timm"): Rules(False, 1e-5, 1e-8, 0.0),
    (False, "google"): Rules(True, 1e-6, 0.0, 1e-5),
    (False, "timm"): Rules(True, 1e-5, 1e-8, 0.0),
}


# Number of residual units in each stage, by the number of layers of the network; a unit has three
# layers. BiT has 50 or more layers. Networks of 14 and 26 layers are for small models and images.
BIT_BLOCKS = {
    "14": (1, 1, 1, 1),
    "26": (2, 2, 2, 2),
    "50": (3, 4, 6, 3),
    "101": (3, 4, 23, 3),
    "152": (3, 8, 36, 3),
    "200": (3, 24, 36, 3),
}

RESNET_AXES = ((r"resnet/.*/kernel", "height width inputs -> outputs"),)
HEAD_AXES = ((r"(head|distillation_head)/kernel", "features -> classes"),)


class StdConv(nnx.Module):
    """A convolution with weight standardization: mean 0 and std 1 for each output channel."""

    def __init__(self, inputs, outputs, size, *, stride=1, rules: Rules, dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(initializers.lecun()(rngs.params(), (size, size, inputs, outputs)))
        self.size, self.stride, self.rules, self.dtype = size, stride, rules, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolves `[batch, height, width, inputs]`; divides height and width by the stride."""
        kernel = self.kernel[...]
        mean = kernel.mean(axis=(0, 1, 2))
        std = jnp.sqrt(kernel.var(axis=(0, 1, 2)) + self.rules.variance_epsilon)
        kernel = (kernel - mean) / (std + self.rules.std_epsilon)
        x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
        small = self.size == 3 and self.stride == 1 and max(x.shape[1:3]) <= 2
        if small and platform() == "cpu":
            return _convolve_small_maps(x, kernel)
        pad = (self.size - 1) // 2
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(self.stride, self.stride),
            padding="SAME" if self.rules.same_padding else ((pad, pad), (pad, pad)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


def _convolve_small_maps(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes a 3x3 convolution of feature maps of at most 2x2 positions as one matrix product.

    On CPUs, XLA's convolution of such maps takes 8 to 20 times as long as the matrix product, and
    with gradients 3 to 7 times as long (docs/measurements.md).
    """
    # For each pair of an input row and an output row: the kernel row (0 to 2) that connects the two
    # rows. The same for columns.
    rows, columns = (
        np.subtract.outer(np.arange(size), np.arange(size)) + 1 for size in x.shape[1:3]
    )
    between = kernel[rows[:, :, None, None], columns]
    return jnp.einsum("bhwi,hHwWio->bHWo", x, between)


class AxialAttention(nnx.Module):
    """Attention within columns, then within rows, in place of a 3x3 convolution (appendix D.6).

    As in Axial-DeepLab (Wang et al., 2020), there are 8 heads, queries and keys have half the width
    of values, and queries, keys and values have learned relative positions. Axial-DeepLab has batch
    norms after the projection, on the logits and at the end. Here, group norms replace the first
    and the last batch norm. The logits have no norm and are scaled by 1 / sqrt(width of a query).

    Args:
      span: height and width of the input.
    """

    HEADS = 8

    def __init__(
        self, width: int, span: tuple[int, int], *, stride: int, rules: Rules, dtype, rngs
    ):
        def axis(length):
            return _AxisAttention(width, length, self.HEADS, rules=rules, dtype=dtype, rngs=rngs)

        self.column, self.row, self.stride = axis(span[0]), axis(span[1]), stride

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies attention to `[batch, height, width, channels]`, and then average pooling."""
        x = self.column(x.swapaxes(1, 2)).swapaxes(1, 2)
        x = self.row(x)
        if self.stride > 1:
            x = nnx.avg_pool(x, (self.stride,) * 2, strides=(self.stride,) * 2)
        return x


class _AxisAttention(nnx.Module):
    """Attention within each line (row or column) of `[batch, lines, length, width]`."""

    def __init__(self, width: int, length: int, heads: int, *, rules: Rules, dtype, rngs):
        self.heads, self.length = heads, length
        self.qkv = StdConv(width, 2 * width, 1, rules=rules, dtype=dtype, rngs=rngs)
        self.norm = group_norm(2 * width, rules, dtype, rngs)
        self.out_norm = group_norm(width, rules, dtype, rngs)
        head = width // heads
        # Each row belongs to an offset from -(length - 1) to length - 1. It contains the embeddings
        # of the offset for queries, keys and values, one after another.
        self.relative_embedding = nnx.Param(
            initializers.normal(head**-0.5)(rngs.params(), (2 * length - 1, 2 * head))
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, lines, length, width = x.shape
        half = width // self.heads // 2
        x = self.norm(self.qkv(x)).reshape(batch, lines, length, self.heads, 4 * half)

        def parts(x):
            return x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]

        query, key, value = parts(x)
        place = np.arange(length)
        table = self.relative_embedding[...].astype(x.dtype)[
            place[:, None] - place[None, :] + length - 1
        ]
        for_query, for_key, for_value = parts(table)
        logits = (
            jnp.einsum("blqhd,blkhd->blhqk", query, key)
            + jnp.einsum("blqhd,qkd->blhqk", query, for_query)
            + jnp.einsum("blkhd,qkd->blhqk", key, for_key)
        )
        weights = jax.nn.softmax(logits.astype(jnp.float32) / math.sqrt(half), axis=-1).astype(
            x.dtype
        )
        x = jnp.einsum("blhqk,blkhd->blqhd", weights, value)
        x = x + jnp.einsum("blhqk,qkd->blqhd", weights, for_value)
        return self.out_norm(x.reshape(batch, lines, length, width))

    def resize(self, length: int) -> None:
        """Bicubically resizes the relative position table for rows or columns of another length."""
        weights = interpolation(2 * self.length - 1, 2 * length - 1, "bicubic")
        self.relative_embedding = nnx.Param(weights @ self.relative_embedding[...])
        self.length = length


class PreActivationUnit(nnx.Module):
    """BiT's residual unit: norm, ReLU, convolution, three times; no activation after the sum."""

    def __init__(self, inputs: int, middle: int, stride: int, span, rules: Rules, dtype, rngs):
        conv = partial(StdConv, rules=rules, dtype=dtype, rngs=rngs)
        self.norm1 = group_norm(inputs, rules, dtype, rngs)
        self.conv1 = conv(inputs, middle, 1)
        self.norm2 = group_norm(middle, rules, dtype, rngs)
        if span is None:
            self.conv2 = conv(middle, middle, 3, stride=stride)
        else:
            self.conv2 = AxialAttention(
                middle, span, stride=stride, rules=rules, dtype=dtype, rngs=rngs
            )
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
    """The hybrids' residual unit: convolution, norm, ReLU, three times.

    The last ReLU comes after the sum. The scale of the last norm is initialized with zero.
    """

    def __init__(self, inputs: int, middle: int, stride: int, span, rules: Rules, dtype, rngs):
        conv = partial(StdConv, rules=rules, dtype=dtype, rngs=rngs)
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
    """A ResNet trunk that returns the features of each stage.

    Args:
      blocks: number of residual units in each stage, such as (3, 4, 6, 3). The first stage keeps
        the resolution of the stem, and each later stage halves it. With an empty tuple there is
        only the stem.
      width: factor that multiplies all numbers of channels.
      stem: layers before the first stage. `large`: a 7x7 convolution and a pooling, each with
        stride 2. `small`: a 3x3 convolution with stride 1, for images of about 32 pixels.
      preactivation: True for BiT's units, False for the hybrids' units.
      epsilons: library whose epsilons the norms and the weight standardization use, `google` or
        `timm`.
      axial_span: height and width of the images. If it is given, axial attention replaces the 3x3
        convolutions.
      remat: rematerialization policy of the units, as in `ViTOptions`.

    Raises:
      UserError: the number of channels is not divisible by the number of groups of a group norm, or
        not divisible by twice the number of heads of axial attention.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        width: float,
        channels: int,
        *,
        stem: str = "large",
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
        self.pools, first = stem == "large", round(64 * width)
        root = (7, 2) if self.pools else (3, 1)
        if axial_span and first % (2 * AxialAttention.HEADS):
            raise UserError(
                f"axial attention needs a width of {2 * AxialAttention.HEADS} channels or a "
                f"multiple, not {first}: a multiple of 1/4 (model.resnet_width)"
            )
        self.channels = first
        self.root = StdConv(
            channels, first, root[0], stride=root[1], rules=rules, dtype=dtype, rngs=rngs
        )
        self.root_norm = None if preactivation else group_norm(self.channels, rules, dtype, rngs)
        self.stages = nnx.Dict()
        shrunk = resnet_stride((), stem)
        for stage, count in enumerate(blocks, start=1):
            units = {}
            for place in range(1, count + 1):
                stride = 2 if stage > 1 and place == 1 else 1
                span = axial_span and tuple(math.ceil(side / shrunk) for side in axial_span)
                middle = first * 2 ** (stage - 1)
                units[f"{place:02d}"] = unit(
                    self.channels, middle, stride, span, rules, dtype, rngs
                )
                self.channels = 4 * middle
                shrunk *= stride
            self.stages[f"{stage}"] = nnx.Dict(units)

    def __call__(self, images: jax.Array) -> list[jax.Array]:
        """Returns a list with the features of the stem and of each stage.

        For images `[batch, height, width, channels]` the last features are `[batch, height /
        stride, width / stride, self.channels]`.
        """
        x = self.root(images)
        if not self.preactivation:
            x = nnx.relu(self.root_norm(x))
        if self.pools and self.preactivation:
            # Zero padding, as in BiT's code.
            x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        if self.pools:
            padding = "VALID" if self.preactivation else "SAME"
            x = nnx.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding=padding)

        def call(unit, x, _):
            return named("features", unit(x))

        features = [named("features", x)]
        for stage in self.stages.values():
            units = list(stage.values())
            features.append(
                run_layers(call, units, features[-1], [None] * len(units), remat=self.remat)
            )
        return features


def resnet_stride(blocks: tuple[int, ...] | None, stem: str) -> int:
    """Returns the stride of a ResNet's last features in pixels; 1 if `blocks` is None."""
    return 1 if blocks is None else dict(large=4, small=1)[stem] * 2 ** max(0, len(blocks) - 1)


class BiT(ImageModel):
    """A BiT ResNet: the paper's baseline (Kolesnikov et al., 2020).

    A BiT accepts images of any size; with axial attention it accepts one size only. `BiTOptions`
    describes the arguments.

    Raises:
      UserError: the groups of the group norms do not divide the number of channels, or the model
        has axial attention and its stride does not divide the image size.
    """

    options: BiTOptions
    options_type = BiTOptions

    def __init__(self, options: BiTOptions, *, rngs: nnx.Rngs):
        super().__init__(options, any_size=not options.axial)
        blocks, epsilons = options.resnet_blocks, options.resnet_epsilons
        if not blocks:
            raise UserError(
                f"resnet_blocks is {blocks!r} and must have a stage (model.resnet_blocks)"
            )
        self.stride = resnet_stride(blocks, options.resnet_stem)
        if options.axial:
            _check_size(self.image_size, self.stride)
        dtype = jnp.dtype(options.dtype)
        self.resnet = ResNet(
            blocks,
            options.resnet_width,
            options.channels,
            stem=options.resnet_stem,
            preactivation=True,
            epsilons=epsilons,
            axial_span=self.image_size if options.axial else None,
            remat=options.remat,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = group_norm(self.resnet.channels, RULES[True, epsilons], dtype, rngs)
        self.head = classifier(self.resnet.channels, options, rngs)

    @property
    def pixel_kernel(self) -> jax.Array:
        return self.resnet.root.kernel[...]

    def features(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool = False
    ) -> Any:
        """Returns the last stage's features, averaged over all positions, `[batch, features]`.

        Args:
          dense: return a list of each stage's features instead, `[batch, rows, columns, channels]`,
            the finest first. No norm and activation are applied to the features of a stage.
        """
        _, *stages = self.resnet(self.normalize(images))
        return stages if dense else nnx.relu(self.norm(stages[-1])).mean(axis=(1, 2))

    def resized(self, image_size: int | tuple[int, int]) -> "BiT":
        """Returns the same model for another image size.

        The relative positions of axial attention are interpolated.

        Raises:
          UserError: the model has axial attention, and its stride does not divide the image size.
        """
        size = height_and_width(image_size)
        if size == self.image_size or self.any_size:
            return self
        _check_size(size, self.stride)
        other = nnx.clone(self)
        other.options = dataclasses.replace(self.options, image_size=size)
        for stage in other.resnet.stages.values():
            for unit in stage.values():
                axes = unit.conv2.column, unit.conv2.row
                for axis, old, new in zip(axes, self.image_size, size, strict=True):
                    axis.resize(axis.length * new // old)
        return other


def _check_size(size: tuple[int, int], stride: int) -> None:
    """Raises UserError if the stride of the ResNet does not divide an image's height and width."""
    if size[0] % stride or size[1] % stride:
        raise UserError(
            f"axial attention needs an image of multiples of {stride} pixels, not "
            f"{size[0]}x{size[1]}"
        )


def classifier(inputs: int, options: HeadOptions, rngs: nnx.Rngs) -> nnx.Linear | None:
    """Returns the linear head of a model; None if the number of classes is 0."""
    if not options.num_classes:
        return None
    return linear_head(inputs, options.num_classes, options.head_bias, rngs, options.head_std)


def linear_head(
    inputs: int, num_classes: int, bias: float, rngs: nnx.Rngs, std: float = 0.0
) -> nnx.Linear:
    """Returns a linear classification head in float32, whose biases are initially `bias`.

    `std` is the standard deviation of the initial kernel; 0: zeros.
    """
    return nnx.Linear(
        inputs,
        num_classes,
        kernel_init=initializers.normal(std) if std else initializers.zeros,
        bias_init=initializers.constant(bias),
        dtype=jnp.float32,
        rngs=rngs,
    )


WIDTH = r"[1-9]\d*(?:/[1-9]\d*)?"  # Matches the width factor in a name: 2 in R50x2, 1/4 in R26x1/4.


def parse_width(text: str) -> float:
    """Converts the width factor of a name, such as "2" or "1/4", to a number."""
    width = Fraction(text)
    return int(width) if width.denominator == 1 else float(width)


def spell_width(width: float) -> str:
    """Inverts `parse_width`: returns the text of a width factor in a model name, such as "1/4"."""
    return str(Fraction(width))


def group_norm(channels, rules, dtype, rngs, scale=1.0):
    """Returns a group norm with 32 groups; below 64 channels, with groups of two channels each.

    BiT has 32 groups at every width. Its smallest groups, in the first stage of R50x1, have two
    channels, too. Statistics are computed in float32.

    Raises:
      UserError: the groups do not divide the channels.
    """
    groups = min(32, channels // 2)
    if channels % groups:
        raise UserError(
            f"{groups} groups of a norm do not divide {channels} channels; use a power of two or "
            "a multiple of 1/2 (model.resnet_width)"
        )
    return nnx.GroupNorm(
        channels,
        num_groups=groups,
        epsilon=rules.norm_epsilon,
        scale_init=initializers.constant(scale),
        bias_init=initializers.zeros,
        dtype=dtype,
        rngs=rngs,
    )


def _parse(name: str) -> dict | None:
    if name == "AxialResNet50":
        return dict(resnet_blocks=BIT_BLOCKS["50"], axial=True)
    match = re.fullmatch(rf"BiT-R(\d+)x({WIDTH})", name)
    if not match or match[1] not in BIT_BLOCKS:
        return None
    return dict(resnet_blocks=BIT_BLOCKS[match[1]], resnet_width=parse_width(match[2]))


def _spell(values: dict) -> str:
    blocks, stem = values["resnet_blocks"], values.get("resnet_stem", "large")
    name = f"BiT-R{3 * sum(blocks) + 2}x{spell_width(values['resnet_width'])}"
    return name if stem == "large" else f"{name} ({stem} stem)"


def _smallest(values: dict) -> dict:
    size = 16 * resnet_stride((), values.get("resnet_stem", "large"))
    return dict(resnet_blocks=(1, 1), resnet_width=1, image_size=size)


# Resizes the relative positions of axial attention along the rows and columns of a feature map.
LINES = Resize(
    ".*/relative_embedding",
    size=lambda model, shape: shape[:1],
    resize=lambda table, change: resize_axis(table, change.shape[0], "bicubic"),
)
FAMILY = Family(
    model=BiT,
    names=(
        *(f"BiT-{name}" for name in ("R50x1", "R50x2", "R50x3", "R101x1", "R101x3")),
        *(f"BiT-{name}" for name in ("R152x1", "R152x2", "R152x4", "R200x3")),
        *(
            f"BiT-{name}"
            for name in ("R14x1/8", "R14x1/4", "R26x1/8", "R26x1/4", "R26x1/2", "R26x1")
        ),
        "AxialResNet50",
    ),
    parse=_parse,
    spell=_spell,
    source=lambda name: (
        "Kolesnikov et al., 2020 (BiT)"
        if name.startswith("BiT")
        else "Dosovitskiy et al., 2021 (ViT)"
    ),
    smallest=_smallest,
    axes=(*RESNET_AXES, *HEAD_AXES),
    any_size=True,
    adaptation=Adaptation((LINES,)),
)
