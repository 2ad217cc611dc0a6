"""ConvNeXt and ConvNeXt V2 (Liu et al., 2022; Woo et al., 2023).

Four stages of blocks: a 7x7 depthwise convolution, a layer norm, and an MLP over the channels. V1
scales a block's output by a learned factor (LayerScale). V2 applies global response normalization
(GRN) to the MLP's hidden values. Names of axes: batch height width channels.
"""

import math
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.depthwise import depthwise
from vit_jax.models.dropout import drop
from vit_jax.models.family import Family
from vit_jax.models.image_model import ImageModel, ImagesLike, height_and_width
from vit_jax.models.kept_patches import KeptPatches
from vit_jax.models.layers import GELUS, dense_dot, named, rising, run_blocks
from vit_jax.models.resnet import HEAD_AXES, classifier
from vit_jax.options.model import ConvNeXtOptions

# Number of blocks and channels of each stage, by the name of the model size in the papers. The
# sizes Atto to Nano were introduced with V2. Small exists in V1 only.
SIZES = {
    "Atto": dict(blocks=(2, 2, 6, 2), widths=(40, 80, 160, 320)),
    "Femto": dict(blocks=(2, 2, 6, 2), widths=(48, 96, 192, 384)),
    "Pico": dict(blocks=(2, 2, 6, 2), widths=(64, 128, 256, 512)),
    "Nano": dict(blocks=(2, 2, 8, 2), widths=(80, 160, 320, 640)),
    "T": dict(blocks=(3, 3, 9, 3), widths=(96, 192, 384, 768)),
    "S": dict(blocks=(3, 3, 27, 3), widths=(96, 192, 384, 768)),
    "B": dict(blocks=(3, 3, 27, 3), widths=(128, 256, 512, 1024)),
    "L": dict(blocks=(3, 3, 27, 3), widths=(192, 384, 768, 1536)),
    "XL": dict(blocks=(3, 3, 27, 3), widths=(256, 512, 1024, 2048)),
    "H": dict(blocks=(3, 3, 27, 3), widths=(352, 704, 1408, 2816)),
    # From OpenCLIP.
    "XXL": dict(blocks=(3, 4, 30, 3), widths=(384, 768, 1536, 3072), norm_epsilon=1e-5),
    "Zepto": dict(blocks=(2, 2, 4, 2), widths=(32, 64, 128, 256), centred_norm=False),  # From timm.
}
SMALL = ("Atto", "Femto", "Pico", "Nano")
_ABSENT = ("ConvNeXtV2-XL", "ConvNeXtV2-XXL", "ConvNeXtV2-Zepto")
VERSIONS = {"ConvNeXt": {}, "ConvNeXtV2": dict(grn=True, layer_scale=None)}

KERNEL = 7  # Side of the kernel of a block's convolution.
RATIO = 4  # Width of the MLP's hidden layer, relative to the block's width.


class Common(NamedTuple):
    """The dtype, norm and activation settings, which are equal in all layers of a ConvNeXt."""

    grn: bool
    gelu: str
    layer_scale: float | None
    epsilon: float
    dtype: Any
    centred: bool

    def norm(self, channels: int, rngs: nnx.Rngs) -> nnx.Module:
        """Returns a norm over the channels; its statistics are computed in float32."""
        if not self.centred:
            return DeviationNorm(channels, self.epsilon)
        return nnx.LayerNorm(
            channels,
            epsilon=self.epsilon,
            dtype=self.dtype,
            scale_init=initializers.ones,
            bias_init=initializers.zeros,
            rngs=rngs,
        )

    def dense(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
        """Returns a dense layer over the channels."""
        return nnx.Linear(
            inputs,
            outputs,
            kernel_init=_small,
            bias_init=initializers.zeros,
            dtype=self.dtype,
            dot_general=dense_dot,
            rngs=rngs,
        )

    def conv(self, inputs: int, outputs: int, side: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
        """Returns a convolution with zero padding of half the kernel's side, rounded down.

        If the stride equals the kernel's side, there is no padding.
        """
        pad = 0 if stride == side else side // 2
        return nnx.Conv(
            inputs,
            outputs,
            (side, side),
            strides=(stride, stride),
            padding=((pad, pad), (pad, pad)),
            kernel_init=_small,
            bias_init=initializers.zeros,
            dtype=self.dtype,
            rngs=rngs,
        )


# The authors' initializer also truncates the normal distribution at -2 and 2. At a std of 0.02 this
# truncation has no effect.
_small = initializers.normal(0.02)


class ResponseNorm(nnx.Module):
    """Global response normalization (GRN; Woo et al., 2023).

    Each channel is multiplied by its L2 norm over the image, divided by the mean norm of all
    channels. The product is scaled and shifted by learned parameters, and added to the input.
    """

    def __init__(self, channels: int):
        self.scale, self.bias = nnx.Param(jnp.zeros(channels)), nnx.Param(jnp.zeros(channels))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, height, width, channels]` to the same shape; norms are in float32."""
        squares = jnp.square(x.astype(jnp.float32)).sum((1, 2), keepdims=True)
        # A channel of a small feature map can be all zeros. The square root has no finite gradient
        # at zero; here the gradient is 0, as in PyTorch's norm.
        strength = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)
        share = (strength / (strength.mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)
        return x + self.scale[...].astype(x.dtype) * (x * share) + self.bias[...].astype(x.dtype)


class Depthwise(nnx.Conv):
    """A depthwise convolution that keeps the height and width."""

    bias: nnx.Param[jax.Array]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, height, width, channels]` to the same shape."""
        x, kernel, bias = self.promote_dtype(
            (x, self.kernel[...], self.bias[...]), dtype=self.dtype
        )
        return depthwise(x, kernel) + bias


class DeviationNorm(nnx.Module):
    """A norm that divides by the std of the channels without centring (timm's SimpleNorm)."""

    def __init__(self, channels: int, epsilon: float):
        self.scale, self.epsilon = nnx.Param(jnp.ones(channels)), epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., channels]` to the same shape; the variance is unbiased."""
        variance = x.astype(jnp.float32).var(-1, keepdims=True, ddof=1)
        return x * (jax.lax.rsqrt(variance + self.epsilon) * self.scale[...]).astype(x.dtype)


class ConvNeXtBlock(nnx.Module):
    """A residual block: depthwise convolution, layer norm, and an MLP over the channels."""

    def __init__(self, width: int, common: Common, rngs: nnx.Rngs):
        self.depthwise = Depthwise(
            width,
            width,
            (KERNEL, KERNEL),
            feature_group_count=width,
            kernel_init=_small,
            bias_init=initializers.zeros,
            dtype=common.dtype,
            rngs=rngs,
        )
        self.norm = common.norm(width, rngs)
        self.fc1 = common.dense(width, RATIO * width, rngs)
        self.response_norm = ResponseNorm(RATIO * width) if common.grn else None
        self.fc2 = common.dense(RATIO * width, width, rngs)
        scaled = common.layer_scale is not None
        self.scale1 = nnx.Param(initializers.full(width, common.layer_scale)) if scaled else None
        self.gelu = common.gelu

    def __call__(
        self,
        x: jax.Array,
        rngs: nnx.Rngs | None,
        stochastic_depth: float,
        kept: KeptPatches | None = None,
    ) -> jax.Array:
        """Maps `[batch, height, width, channels]` to the same shape.

        Args:
          kept: the positions of the unmasked patches in each image. `x` then contains only these
            patches, and the convolution reads zeros in place of the masked patches. None: `x`
            contains whole images.
        """
        around = self.depthwise(x) if kept is None else kept.gather(self.depthwise(kept.scatter(x)))
        branch = self.fc1(self.norm(around))
        branch = named("hidden_features", GELUS[self.gelu](branch))
        if self.response_norm is not None:
            branch = self.response_norm(branch)
        branch = self.fc2(branch)
        if self.scale1 is not None:
            branch = branch * self.scale1[...].astype(branch.dtype)
        return x + drop(branch, stochastic_depth, rngs, (x.shape[0], 1, 1, 1))


class ConvNeXt(ImageModel):
    """A ConvNeXt, V1 or V2, for images of any size.

    The stem divides the image's height and width by 4, and each later stage divides them by 2.
    If a side is not divisible, the remaining pixels at the right or bottom are ignored, as in the
    authors' code. `ConvNeXtOptions` describes the arguments.

    Raises:
      UserError: `blocks` and `widths` have different lengths, or the images are too small.
    """

    options: ConvNeXtOptions
    options_type = ConvNeXtOptions

    def __init__(self, options: ConvNeXtOptions, *, rngs: nnx.Rngs):
        super().__init__(options, any_size=True)
        _check_together(options)
        widths, head_hidden = options.widths, options.head_hidden
        common = Common(
            options.grn,
            options.gelu,
            options.layer_scale,
            options.norm_epsilon,
            jnp.dtype(options.dtype),
            options.centred_norm,
        )
        self.stem = nnx.Dict(_stem(options.stem, options.channels, widths[0], common, rngs))
        self.stem_norm = common.norm(widths[0], rngs)
        # The keys, the numbers of stage and block, are zero-padded strings. Therefore the sorted
        # paths of a checkpoint are in the order of the blocks.
        self.stages = nnx.Dict()
        for stage, (count, width) in enumerate(zip(options.blocks, widths, strict=True)):
            before = widths[stage - 1]
            parts = {}
            if stage:
                parts["norm"] = common.norm(before, rngs)
                parts["downsample"] = common.conv(before, width, 2, 2, rngs)
            parts |= {f"{place:02d}": ConvNeXtBlock(width, common, rngs) for place in range(count)}
            self.stages[f"{stage}"] = nnx.Dict(parts)
        last = common._replace(epsilon=options.head_epsilon or options.norm_epsilon)
        self.norm = last.norm(widths[-1], rngs)
        self.pre_logits = common.dense(widths[-1], head_hidden, rngs) if head_hidden else None
        self.head = classifier(head_hidden or widths[-1], options, rngs)

    @property
    def pixel_kernel(self) -> jax.Array:
        return self.stem["0"].kernel[...]

    def features(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool = False
    ) -> Any:
        """Returns the input of the head, `[batch, features]`.

        Args:
          dense: return a list of each stage's features instead, `[batch, rows, columns, channels]`,
            the finest first. These features are not normalized, because in the authors' code the
            heads for dense prediction contain the norms.
        """
        stages = self._stages(images, rngs)
        if dense:
            return stages
        x = stages[-1]
        x = self.norm(x).mean((1, 2)) if self.options.norm_first else self.norm(x.mean((1, 2)))
        if self.pre_logits is not None:
            x = GELUS[self.options.gelu](self.pre_logits(x))
        return x

    @property
    def mask_patch_size(self) -> int | None:
        return None if len(self.stem) > 1 else 4 * 2 ** (len(self.options.blocks) - 1)

    def features_of(
        self, images: jax.Array, keep: jax.Array, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        x = self._stages(images, rngs, keep)[-1]
        return x.reshape(x.shape[0], -1, x.shape[-1])

    def _stages(
        self, images: jax.Array, rngs: nnx.Rngs | None, keep: jax.Array | None = None
    ) -> list[jax.Array]:
        """Returns the features of each stage, `[batch, rows, columns, channels]`, the finest first.

        Args:
          keep: raster indices of the patches of each image that are not masked, int32 `[batch,
            kept]`. The features then contain only these patches, stacked vertically: `[batch, kept
            * side, side, channels]`. A patch covers `side` rows and `side` columns of the stage's
            feature map. None: all patches.
        """
        options = self.options
        _check_size(jnp.shape(images)[1:3], len(options.blocks))
        x = self.normalize(images)
        kept = None
        if keep is not None:
            kept = KeptPatches(
                keep, (x.shape[1] // self.mask_patch_size, x.shape[2] // self.mask_patch_size)
            )
            x = kept.gather(x)
        for place, conv in self.stem.items():
            x = conv(x)
            if options.stem == "activated" and place == "0":
                x = GELUS[options.gelu](x)
        x = named("features", self.stem_norm(x))
        key, first, stages = None if rngs is None else rngs.dropout(), 0, []
        for count, parts in zip(options.blocks, self.stages.values(), strict=True):
            if "downsample" in parts:
                x = named("features", parts["downsample"](parts["norm"](x)))
            blocks = [parts[f"{place:02d}"] for place in range(count)]
            x = run_blocks(blocks, x, first, self.block_rate, key, remat=options.remat, kept=kept)
            stages.append(x)
            first += count
        return stages

    def block_rate(self, block: int) -> float:
        """Returns the stochastic depth rate of a block; `block` is its index across all stages."""
        return rising(self.options.stochastic_depth, block, sum(self.options.blocks))


def _stem(
    kind: str, channels: int, width: int, common: Common, rngs: nnx.Rngs
) -> dict[str, nnx.Conv]:
    """Returns the convolutions that divide an image's height and width by 4."""
    if kind == "patches":
        return {"0": common.conv(channels, width, 4, 4, rngs)}
    middle = _divisible(width // 2) if kind == "tiered" else width
    return {
        "0": common.conv(channels, middle, 3, 2, rngs),
        "1": common.conv(middle, width, 3, 2, rngs),
    }


def _divisible(channels: int) -> int:
    """Rounds a number of channels to a multiple of 8, as in timm.

    The result is the nearest multiple, or the next multiple if the nearest one is less than 90 % of
    `channels`.
    """
    near = max(8, (channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


def _check_together(options: ConvNeXtOptions) -> None:
    """Raises UserError if `blocks` and `widths` differ in length, or the images are too small."""
    blocks, widths = len(options.blocks), len(options.widths)
    if blocks != widths:
        raise UserError(
            f"model.blocks has {blocks} stages and model.widths {widths}: each stage needs its "
            "width"
        )
    _check_size(height_and_width(options.image_size), blocks)


def _check_size(size: tuple[int, ...], stages: int) -> None:
    """Raises UserError for images so small that the last stage would be empty."""
    least = 4 * 2 ** (stages - 1)
    if len(size) == 2 and min(size) < least:
        raise UserError(
            f"images of {size[0]}x{size[1]} pixels are too small for {stages} stages: use {least} "
            "or more"
        )


def _parse(name: str) -> dict | None:
    match = re.fullmatch(r"(ConvNeXt(?:V2)?)-(\w+)", name)
    if not match or match[2] not in SIZES or name in _ABSENT:
        return None
    return SIZES[match[2]] | VERSIONS[match[1]]


def _spell(values: dict) -> str:
    version = "ConvNeXtV2" if values.get("grn") else "ConvNeXt"
    shape = dict(blocks=tuple(values["blocks"]), widths=tuple(values["widths"]))
    for name, known in SIZES.items():
        if {key: known[key] for key in shape} == shape:
            return f"{version}-{name}"
    return f"{version} (blocks {shape['blocks']}, widths {shape['widths']})"


def _source(name: str) -> str:
    if name in ("ConvNeXt-XXL", "ConvNeXt-Zepto"):
        return "Ilharco et al., 2021 (OpenCLIP)" if "XXL" in name else "Wightman, 2019 (timm)"
    later = name.startswith("ConvNeXtV2") or name.partition("-")[2] in SMALL
    return "Woo et al., 2023 (ConvNeXt V2)" if later else "Liu et al., 2022 (ConvNeXt)"


def _smallest(values: dict) -> dict:
    stages = len(values["blocks"])
    widths = tuple(16 * 2**stage for stage in range(stages))
    return dict(blocks=(1,) * stages, widths=widths, image_size=2 ** (stages + 1) * 2)


def _layer(model: ConvNeXt, path: str) -> float:
    """Returns the layer number of a parameter, for layer-wise decay.

    There are two rules. In V1 and in V2, the number of blocks in the third stage selects the rule:

    - 27 or more blocks (Small and larger): three consecutive blocks of the third stage form one
      layer, and each of the other stages is one layer. With 27 blocks there are twelve layers, as
      in both papers' fine-tuning. The stem has the number -1.
    - Fewer blocks (Tiny and smaller): each block is one layer, as in V2's fine-tuning. The stem
      belongs to the first layer, number 0.
    """
    blocks = model.options.blocks
    grouped = len(blocks) == 4 and blocks[2] >= 27
    first, *rest = path.split("/")
    if first in ("stem", "stem_norm"):
        return -1 if grouped else 0
    if first != "stages":
        return math.inf
    stage, place = int(rest[0]), int(rest[1]) if rest[1].isdigit() else 0
    if not grouped:
        return sum(blocks[:stage]) + place
    return stage + (place // 3 if stage == 2 else 0) if stage < 3 else 2 + math.ceil(blocks[2] / 3)


FAMILY = Family(
    model=ConvNeXt,
    names=(
        *(f"ConvNeXt-{size}" for size in ("T", "S", "B", "L", "XL", "XXL", "Zepto", *SMALL)),
        *(f"ConvNeXtV2-{size}" for size in (*SMALL, "T", "S", "B", "L", "H")),
    ),
    parse=_parse,
    spell=_spell,
    source=_source,
    smallest=_smallest,
    axes=(
        (r"depthwise/kernel", "height width one -> channels"),
        (r"(stem/\d+|downsample)/kernel", "height width inputs -> outputs"),
        (r"(stages/\d+|blocks)/\d+/fc1/kernel", "dim -> mlp_dim"),
        (r"(stages/\d+|blocks)/\d+/fc1/bias", "mlp_dim"),
        (r"(stages/\d+|blocks)/\d+/fc2/kernel", "mlp_dim -> dim"),
        (r"response_norm/(scale|bias)", "mlp_dim"),
        (r"pre_logits/kernel", "dim -> dim"),
        *HEAD_AXES,
    ),
    layer=lambda model: partial(_layer, model),
    any_size=True,
)
