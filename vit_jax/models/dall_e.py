"""The encoder of DALL-E's discrete autoencoder (Ramesh et al., 2021): images to codes.

A 7x7 convolution is followed by stages of residual blocks of four convolutions, with 2x2 max
pooling between the stages. At each position a 1x1 convolution computes the logits of the codes. By
default a code represents 8x8 pixels. Names of axes: batch height width channels.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.family import Family
from vit_jax.models.image_model import CodeModel, ImagesLike
from vit_jax.models.layers import named, run_layers
from vit_jax.models.resnet import HEAD_AXES
from vit_jax.options.model import DVAEOptions
from vit_jax.options.option import options_of

STEM = 7  # Side of the kernel of the first convolution.


class CodeBlock(nnx.Module):
    """A residual block of four convolutions, each preceded by a ReLU, with a scaled output.

    Args:
      inputs, outputs: numbers of channels; the block's hidden width is a quarter of `outputs`.
      sides: sizes of the four kernels.
      gain: factor that multiplies the output of the convolutions before the skip connection is
        added.
      dtype: dtype of the computation.
      rngs: random keys for the initialization.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        sides: tuple[int, ...],
        gain: float,
        *,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        hidden, self.gain = outputs // 4, gain
        channels = (inputs, hidden, hidden, hidden, outputs)
        for number, side in enumerate(sides, start=1):
            conv = convolution(channels[number - 1], channels[number], side, dtype=dtype, rngs=rngs)
            setattr(self, f"conv{number}", conv)
        differ = inputs != outputs
        self.shortcut = convolution(inputs, outputs, 1, dtype=dtype, rngs=rngs) if differ else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, height, width, inputs]` to `[batch, height, width, outputs]`."""
        branch = x
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            branch = conv(nnx.relu(branch))
        return (x if self.shortcut is None else self.shortcut(x)) + self.gain * branch


class DVAE(CodeModel):
    """The encoder of DALL-E's discrete autoencoder; its stride must divide the size of the images.

    `code_scores` applies the linear head to the features of each position in the last stage.
    Calling the model applies the head to the mean of these features over all positions.
    `DVAEOptions` describes the arguments.

    Raises:
      UserError: `blocks` and `widths` have different lengths, or the stride does not divide the
        image size.
    """

    options: DVAEOptions
    options_type = DVAEOptions

    def __init__(self, options: DVAEOptions, *, rngs: nnx.Rngs):
        super().__init__(options, any_size=True)
        blocks, widths = options.blocks, options.widths
        if len(blocks) != len(widths):
            raise UserError(
                f"model.blocks has {len(blocks)} stages and model.widths {len(widths)}: each "
                "stage needs its width"
            )
        self.code_stride = 2 ** (len(blocks) - 1)
        check_divides(self.image_size, self.code_stride)
        values: dict[str, Any] = dict(dtype=jnp.dtype(options.dtype), rngs=rngs)
        self.stem = convolution(options.channels, widths[0], STEM, **values)
        gain = 1 / sum(blocks) ** 2
        # The keys, the numbers of stage and block, are zero-padded strings. Therefore the sorted
        # paths of a checkpoint are in the order of the blocks.
        self.stages, before = nnx.Dict(), widths[0]
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
            parts = {}
            for place in range(1, count + 1):
                parts[f"{place:02d}"] = CodeBlock(before, width, (3, 3, 3, 1), gain, **values)
                before = width
            self.stages[f"{stage}"] = nnx.Dict(parts)
        drawn, codes = initializers.normal(1 / math.sqrt(before)), options.num_classes
        self.head = (
            nnx.Linear(before, codes, kernel_init=drawn, dtype=jnp.float32, rngs=rngs)
            if codes
            else None
        )

    @property
    def pixel_kernel(self) -> jax.Array:
        return self.stem.kernel[...]

    def features(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool = False
    ) -> Any:
        """Returns the mean over positions of relu(last stage's features), `[batch, features]`.

        Args:
          dense: return a list of each stage's features before the ReLU instead, `[batch, rows,
            columns, channels]`, the finest first. The first stage has the image's resolution.
        """
        pixels = self.normalize(images)
        check_divides(pixels.shape[1:3], self.code_stride)
        x, stages = named("features", self.stem(pixels)), []

        def call(block, x, _):
            return named("features", block(x))

        for parts in self.stages.values():
            if stages:
                x = named("features", nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2)))
            blocks = list(parts.values())
            x = run_layers(call, blocks, x, [None] * len(blocks), remat=self.options.remat)
            stages.append(x)
        return stages if dense else nnx.relu(x).mean((1, 2))

    def code_scores(self, images: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.features(images, dense=True)[-1]))


def convolution(inputs: int, outputs: int, side: int, *, dtype: Any, rngs: nnx.Rngs) -> nnx.Conv:
    """Returns a convolution that keeps height and width; its weights have variance 1 / fan-in."""
    drawn = initializers.normal(1 / math.sqrt(inputs * side**2))
    return nnx.Conv(inputs, outputs, (side, side), kernel_init=drawn, dtype=dtype, rngs=rngs)


def check_divides(size: tuple[int, ...], stride: int) -> None:
    """Raises UserError if the encoder's stride does not divide an image's height and width."""
    if len(size) == 2 and (size[0] % stride or size[1] % stride):
        raise UserError(
            f"images of {size[0]}x{size[1]} pixels do not divide into places of "
            f"{stride}x{stride}: take multiples of {stride}"
        )


# Number of blocks in each stage, and number of channels of each stage, in OpenAI's model.
_SIZE = {name: options_of(DVAEOptions)[name].default for name in ("blocks", "widths")}


def _parse(name: str) -> dict | None:
    return dict(_SIZE) if name == "DVAE" else None


def _spell(values: dict) -> str:
    size = {name: tuple(values[name]) for name in _SIZE}
    return "DVAE" if size == _SIZE else "DVAE (blocks {blocks}, widths {widths})".format(**size)


def _smallest(values: dict) -> dict:
    stages = len(values["blocks"])
    widths = tuple(8 * 2**stage for stage in range(stages))
    return dict(blocks=(1,) * stages, widths=widths, image_size=2 ** (stages + 1))


def _layer(blocks: tuple[int, ...], path: str) -> float:
    first, *rest = path.split("/")
    if first == "stem":
        return -1
    if first != "stages":
        return math.inf
    stage, place = int(rest[0]), int(rest[1])  # Both are counted from 1.
    return sum(blocks[: stage - 1]) + place - 1


FAMILY = Family(
    model=DVAE,
    names=("DVAE",),
    parse=_parse,
    spell=_spell,
    source=lambda name: "Ramesh et al., 2021 (DALL-E)",
    smallest=_smallest,
    axes=(
        (r"stem/kernel", "height width inputs -> outputs"),
        (r"(conv\d|shortcut)/kernel", "height width inputs -> outputs"),
        *HEAD_AXES,
    ),
    layer=lambda model: partial(_layer, model.options.blocks),
    any_size=True,
)
