"""Swin Transformer and its second version (Liu et al., 2021 and 2022): attention within shifted windows.

Four stages of blocks, each of half the resolution and twice the width of the one before it. Dimensions are
named: batch height width dim heads head_dim tokens, the last those of a window.

How windows are laid out: the map stays `[batch, height, width, dim]` through norms and MLPs, which look at
each place alone. Before attention it is cut into windows, `[batch, windows, tokens, dim]`, and what attention
gives is joined to a map: each is one transpose of one array, whose rows of `dim` numbers stay together.
Queries, keys and values are made of the windows, so that these three, which have narrow heads, are never
moved for the windows' sake. A shifted map is copied too, before it is cut and after it is joined.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.arguments import SIDE, check_arguments, or_none
from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.dropout import drop
from vit_jax.models.family import Family
from vit_jax.models.image_model import ImageModel, ImagesLike, height_and_width
from vit_jax.models.layers import capture, named, platform, rising, run_blocks
from vit_jax.models.pixels import Statistic
from vit_jax.models.position import PositionEmbedding, spread_offsets
from vit_jax.models.resnet import HEAD_AXES, linear_head
from vit_jax.models.transformer import Mlp, Stack, make_norm
from vit_jax.options import Option, either, number, one_of, several, whole

_COUNTS = several(whole(1, 2**16), least=1)

ARGUMENTS = {
    "patch_size": SIDE,
    "dim": whole(1, 2**20),
    "stage_heads": _COUNTS._replace(words="a tuple of attention heads in each stage, 1 to 65,536"),
    "window": either(SIDE, several(SIDE, least=1))._replace(
        words="a whole number of places from 1 to 65,536, or one for each stage"
    ),
    "version": whole(1, 2),
    "pretrained_windows": or_none(several(whole(1, 2**16), least=1)),
    "position": one_of("1d", "none"),
    "dropout": number(least=0, below=1),
}

OPTIONS = {
    "model.stage_heads": Option(None, ARGUMENTS["stage_heads"], "Attention heads in each stage of a Swin."),
    "model.window": Option(None, ARGUMENTS["window"], "Side of a Swin's windows, in places of its maps."),
    "model.version": Option(None, ARGUMENTS["version"], "Swin, or Swin V2."),
    "model.pretrained_windows": Option(
        None,
        ARGUMENTS["pretrained_windows"],
        "Side of the windows in each stage in a Swin V2's pre-training, by which it counts positions.",
    ),
}

# Tables 6 and 7 of the paper, and the authors' configs.
SIZES = {
    "T": dict(dim=96, blocks=(2, 2, 6, 2), stage_heads=(3, 6, 12, 24)),
    "S": dict(dim=96, blocks=(2, 2, 18, 2), stage_heads=(3, 6, 12, 24)),
    "B": dict(dim=128, blocks=(2, 2, 18, 2), stage_heads=(4, 8, 16, 32)),
    "L": dict(dim=192, blocks=(2, 2, 18, 2), stage_heads=(6, 12, 24, 48)),
}

# Searched for by Chen et al.: windows of each stage (2111.14725).
SEARCHED = {
    "T": SIZES["T"] | dict(window=(7, 7, 14, 7)),
    "S": SIZES["S"] | dict(window=(14, 14, 14, 7)),
    "B": SIZES["T"] | dict(blocks=(2, 2, 30, 2), window=(7, 7, 14, 7)),
}

PATCH, WINDOW = 4, 7  # Of a Swin whose name says no other.
RATIO = 4  # Width of the MLP's hidden layer over the block's.
EPSILON = 1e-5  # Of the layer norms.
MASKED = -100.0  # Added to scores between places that the shift made neighbours.
FIRST_SCALE, MOST_SCALE = math.log(10), math.log(100)  # Logarithm of V2's factor on cosines.
UNITS = 512  # Hidden units of V2's position bias.
MOST_BIAS = 16.0  # Of V2.


class QueryKeyValue(nnx.Module):
    """Queries, keys and values of each place, in one product.

    Args:
      key_bias: keys have a bias too; V2's do not, since cosines would see it.
    """

    def __init__(self, stack: Stack, key_bias: bool, rngs: nnx.Rngs):
        shape = (stack.dim, 3, stack.heads, stack.head_dim)
        self.kernel = nnx.Param(stack.scheme.qkv(rngs.params(), shape))
        # Of queries, keys and values; or of queries and values.
        self.bias = nnx.Param(jnp.zeros((3 if key_bias else 2, *shape[2:])))
        self.key_bias, self.dtype = key_bias, stack.dtype

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`[..., dim]` to three times `[..., heads, head_dim]`."""
        kernel, bias = self.kernel[...].astype(self.dtype), self.bias[...].astype(self.dtype)
        if not self.key_bias:
            bias = jnp.stack([bias[0], jnp.zeros_like(bias[0]), bias[1]])
        if platform() == "tpu":  # Products of their own have better layouts there.
            return tuple(jnp.einsum("...c,chd->...hd", x, kernel[:, i]) + bias[i] for i in range(3))
        fused = jnp.einsum("...c,cshd->...shd", x, kernel) + bias
        return tuple(fused[..., i, :, :] for i in range(3))


class PositionMlp(nnx.Module):
    """V2's position bias: an MLP of the offset between two places, on a logarithmic scale.

    Args:
      window: height and width of the windows.
      unit: height and width of the windows in which offsets count, those of pre-training.
    """

    def __init__(self, heads: int, window: tuple[int, int], unit: tuple[int, int], rngs: nnx.Rngs):
        self.window, self.unit = window, unit
        dense = partial(nnx.Linear, kernel_init=initializers.normal(0.02), rngs=rngs)
        self.fc1, self.fc2 = dense(2, UNITS), dense(UNITS, heads, use_bias=False)

    def __call__(self) -> jax.Array:
        """The table of biases by offset, float32 `[2 height - 1, 2 width - 1, heads]`."""
        hidden = nnx.relu(self.fc1(jnp.asarray(log_offsets(self.window, self.unit))))
        return MOST_BIAS * nnx.sigmoid(self.fc2(hidden))


def log_offsets(window: tuple[int, int], unit: tuple[int, int]) -> np.ndarray:
    """Offsets between the places of a window, float32 `[2 height - 1, 2 width - 1, 2]`.

    Offset d in windows of side M is sign(d) log2(1 + 8 |d| / (M - 1)) / log2(8), within -1.06 and 1.06.
    """
    axes = [
        np.arange(1 - side, side) * (8 / max(1, base - 1)) for side, base in zip(window, unit, strict=True)
    ]
    offsets = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    return (np.sign(offsets) * np.log2(1 + np.abs(offsets)) / 3).astype(np.float32)


def shifted_regions(size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]) -> np.ndarray:
    """The region of each place after a cyclic shift, int32 `[windows, tokens]`.

    Places of a window that are of two regions were no neighbours before the shift, and do not see each other.

    Args:
      size: height and width of the map, multiples of the window's.
    """
    axes = []
    for length, side, by in zip(size, window, shift, strict=True):
        place = np.arange(length)
        axes.append((place >= length - side) * 1 + (place >= length - by) if by else 0 * place)
    regions = axes[0][:, None] * 3 + axes[1]
    (height, width), (rows, columns) = size, window
    cut = regions.reshape(height // rows, rows, width // columns, columns).transpose(0, 2, 1, 3)
    return cut.reshape(-1, rows * columns).astype(np.int32)


class WindowAttention(nnx.Module):
    """Multi-head self-attention within each window, with a learned bias for each offset between two places.

    V1: softmax(q k / sqrt(head_dim) + bias) v. V2: the cosine of q and k, times a learned factor of each head
    that is at most 100, in place of their scaled product.

    Args:
      window: height and width.
      version: 1 or 2.
      unit: as of `PositionMlp`, for version 2.
    """

    def __init__(self, stack: Stack, window: tuple[int, int], version: int, unit: tuple[int, int], rngs):
        self.window, self.version = window, version
        self.qkv = QueryKeyValue(stack, version == 1, rngs)
        if version == 1:
            shape = (2 * window[0] - 1, 2 * window[1] - 1, stack.heads)
            self.bias_table = nnx.Param(initializers.normal(0.02)(rngs.params(), shape))
        else:
            self.logit_scale = nnx.Param(jnp.full(stack.heads, FIRST_SCALE))
            self.bias_mlp = PositionMlp(stack.heads, window, unit, rngs)
        self.out = nnx.LinearGeneral(
            (stack.heads, stack.head_dim),
            stack.dim,
            axis=(-2, -1),
            kernel_init=stack.scheme.dense,
            dtype=stack.dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, shift: tuple[int, int]) -> jax.Array:
        """`[batch, height, width, dim]` to the same shape.

        Args:
          shift: rows and columns by which the windows begin later.
        """
        height, width = x.shape[1:3]
        if any(shift):
            x = jnp.roll(x, (-shift[0], -shift[1]), axis=(1, 2))
        # Zeros fill the last windows, and are attended to, as in the authors' code for detection.
        missing = tuple(-size % side for size, side in zip((height, width), self.window, strict=True))
        if any(missing):
            x = jnp.pad(x, ((0, 0), (0, missing[0]), (0, missing[1]), (0, 0)))
        size = x.shape[1:3]
        query, key, value = (named("heads", part) for part in self.qkv(self._cut(x)))
        regions = shifted_regions(size, self.window, shift) if any(shift) else None

        def in_place(x):
            x = self._join(x, size)[:, :height, :width]
            return jnp.roll(x, shift, axis=(1, 2)) if any(shift) else x

        out, weights = self._attend(query, key, value, regions)
        capture("attention", weights)
        capture("attended", lambda: in_place(weights().sum(3).swapaxes(2, 3)))
        return in_place(self.out(named("heads", out)))

    def _cut(self, x: jax.Array) -> jax.Array:
        """`[batch, height, width, dim]` to `[batch, windows, tokens, dim]`.

        Before the heads are made: three arrays of narrow heads would be moved in its place, at 2.4 times the
        estimated cycles of the attention on a TPU.
        """
        batch, height, width, dim = x.shape
        rows, columns = self.window
        x = x.reshape(batch, height // rows, rows, width // columns, columns, dim)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, rows * columns, dim)

    def _join(self, x: jax.Array, size: tuple[int, int]) -> jax.Array:
        """Undoes `_cut` for a map of this height and width."""
        (height, width), (rows, columns) = size, self.window
        batch, dim = x.shape[0], x.shape[-1]
        x = x.reshape(batch, height // rows, width // columns, rows, columns, dim)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height, width, dim)

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, regions: np.ndarray | None):
        """`[batch, windows, tokens, heads, head_dim]` each; the softmax is taken in float32.

        Returns:
          The same of what was attended to, and a function that computes the weights,
          `[batch, windows, heads, tokens, tokens]`.

        Args:
          regions: int32 `[windows, tokens]`; tokens of two regions see little of each other.
        """
        if self.version == 1:
            factor, table = 1 / math.sqrt(query.shape[-1]), self.bias_table[...].astype(jnp.float32)
        else:
            query, key = unit_length(query), unit_length(key)
            scale = self.logit_scale[...].astype(jnp.float32)
            factor, table = jnp.exp(jnp.minimum(scale, MOST_SCALE))[:, None, None], self.bias_mlp()
        scores = jnp.einsum("bwqhd,bwkhd->bwhqk", query, key, preferred_element_type=jnp.float32)
        scores = scores * factor + spread_offsets(table)
        if regions is not None:
            # Behind the barrier, or the compiler would keep the mask of all windows as a constant.
            regions = jax.lax.optimization_barrier(jnp.asarray(regions))
            scores += jnp.where(regions[:, None, :, None] == regions[:, None, None, :], 0, MASKED)
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        share = 1 / weights.sum(-1, keepdims=True)
        # Divided on the way out, where there are fewer numbers than scores.
        narrow = weights.astype(value.dtype)
        out = jnp.einsum("bwhqk,bwkhd->bwhqd", narrow, value, preferred_element_type=jnp.float32) * share
        return out.astype(value.dtype).swapaxes(2, 3), lambda: weights * share


def unit_length(x: jax.Array) -> jax.Array:
    """Vectors along the last axis, brought to length 1 in float32; zeros stay zeros."""
    wide = x.astype(jnp.float32)
    # Within the root, whose gradient at zero is infinite.
    return (wide * jax.lax.rsqrt(jnp.maximum((wide**2).sum(-1, keepdims=True), 1e-24))).astype(x.dtype)


class SwinBlock(nnx.Module):
    """Window attention and an MLP, each beside a shortcut: normalised before them in V1, after them in V2.

    V2's norms start at zero, so that each block first changes nothing.

    Args:
      window: height and width.
      shifted: the windows are shifted by half of their sides, along each axis that has several.
      version, unit: as of `WindowAttention`.
    """

    def __init__(self, stack: Stack, window, shifted: bool, version: int, unit, rngs: nnx.Rngs):
        self.window, self.shifted, self.version, self.dropout = window, shifted, version, stack.dropout

        def norm():
            if version == 1:
                return make_norm(stack.dim, stack, rngs)
            zeros = nnx.initializers.zeros_init()
            values = dict(epsilon=stack.epsilon, dtype=stack.dtype, rngs=rngs)
            return nnx.LayerNorm(stack.dim, scale_init=zeros, **values)

        self.norm1 = norm()
        self.attention = WindowAttention(stack, window, version, unit, rngs)
        self.norm2 = norm()
        self.mlp = Mlp(stack, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None, stochastic_depth: float) -> jax.Array:
        """`[batch, height, width, dim]` to the same shape.

        Args:
          stochastic_depth: chance that an image skips a branch in training.
        """
        several = self.shifted and [size > side for size, side in zip(x.shape[1:3], self.window, strict=True)]
        shift = tuple(side // 2 * moves for side, moves in zip(self.window, several or (0, 0), strict=True))

        def add(x, norm, branch):
            if self.version == 1:
                change = drop(branch(norm(x)), self.dropout, rngs)
            else:
                change = norm(drop(branch(x), self.dropout, rngs))
            return x + drop(change, stochastic_depth, rngs, (x.shape[0], 1, 1, 1))

        x = add(x, self.norm1, lambda x: self.attention(x, shift))
        return add(x, self.norm2, lambda x: self.mlp(x, rngs))


class PatchMerging(nnx.Module):
    """Four neighbours side by side, normalised, to one of twice the width; V2 normalises behind."""

    def __init__(self, stack: Stack, version: int, rngs: nnx.Rngs):
        dim = stack.dim
        self.version = version
        self.norm = make_norm(4 * dim if version == 1 else 2 * dim, stack, rngs)
        self.reduction = nnx.Linear(
            4 * dim, 2 * dim, use_bias=False, kernel_init=stack.scheme.dense, dtype=stack.dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, height, width, dim]` to half the sides and twice the width; odd sides get zeros."""
        batch, height, width, dim = x.shape
        if height % 2 or width % 2:
            x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
        x = x.reshape(batch, (height + 1) // 2, 2, (width + 1) // 2, 2, dim)
        # The lower neighbour comes before the right one.
        x = x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, (height + 1) // 2, (width + 1) // 2, 4 * dim)
        return self.reduction(self.norm(x)) if self.version == 1 else self.norm(self.reduction(x))


class Swin(ImageModel):
    """A Swin Transformer, of the first or second version, for images of one size.

    A call may capture `attention` besides `features`: of each block, float32
    `[batch, windows, heads, tokens, tokens]`. The windows, and the places of each, are in raster order, in a
    shifted block those of the shifted map. And `attended`: how much the places of its window attend to each
    place, float32 `[batch, rows, columns, heads]`; 1 where they attend to all alike.

    Args:
      image_size: height and width in pixels, or one number for a square.
      num_classes: width of the linear head; 0 for none: the call then returns what would enter it.
      dim: width of the first stage; each stage's is twice that of the one before it.
      blocks, stage_heads: blocks and attention heads of each stage.
      window: side of a window in places, or its side in each stage. Where a stage's map is no larger, the map
        is the window, and is not shifted; where windows do not divide it, zeros fill the last ones.
      version: 1 or 2.
      pretrained_windows: in each stage the side of the windows in pre-training, by which V2 counts offsets;
        None: of the model's own windows.
      patch_size: side of a patch in pixels.
      channels: of the images.
      mean, deviation: of the pixels that it is trained on, as of `ViT`.
      position: `1d` adds a learned vector for each patch, `none` does not.
      dropout: rate after every dense layer but q, k, v, and after the position embeddings.
      stochastic_depth: rate of skipped branches in the last block; it rises linearly from 0 over all stages.
      head_bias: initial value of the head's biases.
      head_deviation: of the normal values that the head's kernel starts from; 0: zeros.
      remat: what of a block the backward pass computes anew, as of `ViT`.
      dtype: of the computation; parameters, statistics, softmax and logits are float32.
      rngs: the key for initialisation.

    Raises:
      UserError: an argument of another type or out of its bounds, or some that do not fit one another.
    """

    arguments = ARGUMENTS
    captures = ("attention", "attended", "features")

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        num_classes: int,
        dim: int = 96,
        blocks: tuple[int, ...] = (2, 2, 6, 2),
        stage_heads: tuple[int, ...] = (3, 6, 12, 24),
        window: int | tuple[int, ...] = WINDOW,
        version: int = 1,
        pretrained_windows: tuple[int, ...] | None = None,
        patch_size: int = PATCH,
        channels: int = 3,
        mean: Statistic = 0.5,
        deviation: Statistic = 0.5,
        position: str = "none",
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        head_bias: float = 0.0,
        head_deviation: float = 0.0,
        remat: str = "none",
        dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        given = SimpleNamespace(**locals())
        check_arguments(vars(given), self.arguments)
        size = height_and_width(image_size)
        _check_size(size, patch_size)
        _check_together(given)
        super().__init__(size, channels, mean, deviation)
        self.num_classes, self.dim, self.window, self.patch_size = num_classes, dim, window, patch_size
        self.grid = (size[0] // patch_size, size[1] // patch_size)
        self.blocks, self.remat = tuple(blocks), remat
        self.dropout, self.stochastic_depth = dropout, stochastic_depth
        stack = Stack(
            dim,
            stage_heads[0],
            RATIO * dim,
            gelu="erf",
            dropout=dropout,
            epsilon=EPSILON,
            scheme=initializers.SCHEMES["deit"],
            dtype=jnp.dtype(dtype),
        )
        self._make_stem(given, stack, rngs)
        self.stages, self.merges = nnx.Dict(), nnx.Dict()
        for stage, own in enumerate(_stacks(stack, stage_heads), start=1):
            if stage > 1:  # Named by the stage behind which it comes.
                previous = dataclasses.replace(own, dim=own.dim // 2)
                self.merges[f"{stage - 1}"] = PatchMerging(previous, version, rngs)
            self._make_stage(stage, given, own, rngs)
        width = dim * 2 ** (len(blocks) - 1)
        self.norm = make_norm(width, stack, rngs)
        self.head = linear_head(width, num_classes, head_bias, rngs, head_deviation) if num_classes else None

    def _make_stem(self, given: SimpleNamespace, stack: Stack, rngs: nnx.Rngs) -> None:
        """Makes what comes before the first stage."""
        limit = initializers.uniform((given.patch_size**2 * given.channels) ** -0.5)  # PyTorch's own.
        self.patch_embedding = nnx.Conv(
            given.channels,
            given.dim,
            kernel_size=(given.patch_size, given.patch_size),
            strides=(given.patch_size, given.patch_size),
            padding="VALID",
            kernel_init=limit,
            bias_init=limit,
            dtype=stack.dtype,
            rngs=rngs,
        )
        self.patch_norm = make_norm(given.dim, stack, rngs)
        # Nothing is before the patches in the table of positions, which the authors resize so.
        self.prefix_tokens, self.prefix, self.position_resize = (), 0, "bicubic"
        learned = given.position == "1d"
        self.position_embedding = PositionEmbedding("1d", self.grid, 0, given.dim, rngs) if learned else None

    def _make_stage(self, stage: int, given: SimpleNamespace, stack: Stack, rngs: nnx.Rngs) -> None:
        """Makes the blocks of a stage, counted from 1; every second one is shifted."""
        window = windows(self.grid, given.window, len(given.blocks))[stage - 1]
        unit = (given.pretrained_windows[stage - 1],) * 2 if given.pretrained_windows else window
        self.stages[f"{stage}"] = nnx.Dict(
            {
                f"{place:02d}": SwinBlock(stack, window, place % 2 == 0, given.version, unit, rngs)
                for place in range(1, given.blocks[stage - 1] + 1)
            }
        )

    @property
    def pixel_kernel(self) -> jax.Array:
        return self.patch_embedding.kernel[...]

    def features(self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool = False) -> Any:
        """Turns images into the mean of the last stage's normalised places, `[batch, features]`.

        Args:
          dense: give the features of each stage instead, `[batch, rows, columns, dim]`, finest first. They
            are not normalised, as in the authors' code for dense prediction before its norms.
        """
        stages = self._stages(images, rngs)
        return stages if dense else self.norm(stages[-1]).mean(axis=(1, 2))

    def _stages(self, images: jax.Array, rngs: nnx.Rngs | None) -> list[jax.Array]:
        """Turns images into the features of each stage, finest first."""
        x = self.patch_norm(self.patch_embedding(self.normalize(images)))
        if self.position_embedding is not None:
            x = x + self.position_embedding().reshape(1, *x.shape[1:]).astype(x.dtype)
        x = named("features", drop(x, self.dropout, rngs))
        key, first, found = None if rngs is None else rngs.dropout(), 0, []
        for stage, blocks in self.stages.items():
            x = run_blocks(list(blocks.values()), x, first, self.block_rate, key, remat=self.remat)
            first += len(blocks)
            found.append(x)
            if stage in self.merges:
                x = named("features", self.merges[stage](x))
        return found

    def block_rate(self, block: int) -> float:
        """Stochastic depth of a block, counted from 0 through all stages."""
        return rising(self.stochastic_depth, block, sum(self.blocks))

    def resized(self, image_size: int | tuple[int, int]) -> "Swin":
        """The same model for images of another size, where its windows stay what they are.

        Raises:
          UserError: the patches do not divide the size, a stage would have other windows, or there are
            learned positions.
        """
        size = height_and_width(image_size)
        if size == self.image_size:
            return self
        _check_size(size, self.patch_size)
        if self.position_embedding is not None:
            raise UserError(
                "a Swin with model.position='1d' has parameters for each patch: it is not resized"
            )
        grid, stages = (size[0] // self.patch_size, size[1] // self.patch_size), len(self.blocks)
        old, new = (windows(where, self.window, stages) for where in (self.grid, grid))
        for stage, (before, after) in enumerate(zip(old, new, strict=True), start=1):
            if before != after:
                raise UserError(
                    f"a Swin for {self.image_size[0]}x{self.image_size[1]} pixels has windows of "
                    f"{before[0]}x{before[1]} in stage {stage}, for {size[0]}x{size[1]} pixels of "
                    f"{after[0]}x{after[1]}, and is not resized"
                )
        other = nnx.clone(self)
        other.image_size, other.grid = size, grid
        return other


def _stacks(stack: Stack, heads: tuple[int, ...]) -> list[Stack]:
    """The values of each stage's blocks: twice the width of the stage before."""
    return [
        dataclasses.replace(stack, dim=stack.dim * 2**stage, heads=count, hidden=stack.hidden * 2**stage)
        for stage, count in enumerate(heads)
    ]


def windows(grid: tuple[int, int], window: int | tuple[int, ...], stages: int) -> list[tuple[int, int]]:
    """Height and width of the windows in each stage: the map's, where it is smaller than a window.

    Args:
      grid: rows and columns of patches, of which each further stage has half, rounded up.
    """
    maps = [tuple(-(-side // 2**stage) for side in grid) for stage in range(stages)]
    sides = (window,) * stages if isinstance(window, int) else window
    return [(min(height, side), min(width, side)) for (height, width), side in zip(maps, sides, strict=True)]


def _check_together(given: SimpleNamespace) -> None:
    """Raises UserError for arguments of `Swin` that do not fit one another."""
    for name in ("stage_heads", "pretrained_windows", "window"):
        values = getattr(given, name)
        if isinstance(values, Sequence) and len(values) != len(given.blocks):
            raise UserError(
                f"model.{name} has {len(values)} stages, and model.blocks {len(given.blocks)}: each needs "
                "one value"
            )
    for stage, heads in enumerate(given.stage_heads):
        if given.dim * 2**stage % heads:
            raise UserError(
                f"{heads} heads do not divide the width {given.dim * 2**stage} of stage {stage + 1} "
                "(model.stage_heads, model.dim)"
            )
    if given.version == 1 and given.pretrained_windows is not None:
        raise UserError("model.pretrained_windows is for model.version=2, which has positions to be scaled")


def _check_size(size: tuple[int, int], patch: int) -> None:
    """Raises UserError unless patches divide the height and width of the images."""
    height, width = size
    if height % patch or width % patch:
        down = max(patch, height // patch * patch)
        raise UserError(
            f"patch size {patch} does not divide the image of {height}x{width} pixels; use an image size "
            f"such as {down} or {down + patch}, or another model.patch_size"
        )


def _parse(name: str) -> dict | None:
    if (searched := SEARCHED.get(name.removeprefix("Swin-S3-"))) and name.startswith("Swin-S3-"):
        return searched
    match = re.fullmatch(r"Swin(V2)?-(\w+?)(?:/w([1-9]\d{0,4})(?:to([1-9]\d{0,4}))?)?", name)
    if not match or match[2] not in SIZES:
        return None
    second, window, later = bool(match[1]), match[3] and int(match[3]), match[4] and int(match[4])
    if second and window is None or later is not None and (not second or window % 2):
        return None
    values = SIZES[match[2]] | dict(window=later or window or WINDOW, version=2 if second else 1)
    if later is not None:  # Pre-trained where the last stage's map is half a window.
        values["pretrained_windows"] = (window, window, window, window // 2)
    return values


def _spell(values: dict) -> str:
    size = {key: values[key] for key in ("dim", "blocks", "stage_heads")}
    for name, known in SEARCHED.items():
        if size | dict(window=values.get("window")) == known and values.get("patch_size", PATCH) == PATCH:
            return f"Swin-S3-{name}"
    name = next((name for name, known in SIZES.items() if known == size), None)
    if name is None:
        blocks, heads = ("-".join(map(str, values[key])) for key in ("blocks", "stage_heads"))
        name = f"{values['dim']}x{blocks} ({heads} heads)"
    version, window = values.get("version", 1), values.get("window", WINDOW)
    former = values.get("pretrained_windows")
    name = f"{'SwinV2' if version == 2 else 'Swin'}-{name}"
    if former and former == (former[0],) * 3 + (former[0] // 2,):
        name += f"/w{former[0]}to{window}"
    elif version == 2 or window != WINDOW:
        name += f"/w{window if isinstance(window, int) else '-'.join(map(str, window))}"
    patch = values.get("patch_size", PATCH)
    return name if patch == PATCH else f"{name} (patches of {patch})"


def _source(name: str) -> str:
    if "S3" in name:
        return "Chen et al., 2021 (S3)"
    return "Liu et al., 2022 (Swin V2)" if "V2" in name else "Liu et al., 2021 (Swin)"


def _smallest(values: dict) -> dict:
    patch = values.get("patch_size", PATCH)
    small = dict(dim=32, blocks=(2, 1), stage_heads=(2, 4), window=2, image_size=5 * patch)
    return small | (dict(pretrained_windows=(2, 2)) if values.get("pretrained_windows") else {})


def _layer(model: Swin, path: str) -> float:
    """The number of a parameter's block through all stages, as SimMIM's fine-tuning counts (2111.09886).

    The merging of patches behind a stage belongs to the stage's last block.
    """
    first, *rest = path.split("/")
    if first == "stages":
        return sum(model.blocks[: int(rest[0]) - 1]) + int(rest[1]) - 1
    if first == "merges":
        return sum(model.blocks[: int(rest[0])]) - 1
    return -1 if first in ("patch_embedding", "patch_norm", "position_embedding") else math.inf


FAMILY = Family(
    model=Swin,
    names=(
        *("Swin-T", "Swin-S", "Swin-B", "Swin-B/w12", "Swin-L", "Swin-L/w12"),
        *(f"SwinV2-{size}/w{window}" for size in "TSB" for window in (8, 16)),
        *(f"SwinV2-{size}/w{windows}" for size in "BL" for windows in ("12", "12to16", "12to24")),
        *(f"Swin-S3-{size}" for size in SEARCHED),
    ),
    parse=_parse,
    spell=_spell,
    source=_source,
    smallest=_smallest,
    axes=(
        (r"attention/qkv/kernel", "dim -> part heads head_dim"),
        (r"attention/qkv/bias", "part heads head_dim"),
        (r"attention/bias_table", "rows columns heads"),
        (r"attention/logit_scale", "heads"),
        (r"bias_mlp/fc1/kernel", "offset -> units"),
        (r"bias_mlp/fc2/kernel", "units -> heads"),
        (r"attention(_pooling)?/out/kernel", "heads head_dim -> dim"),
        (r"mlp/fc1/kernel", "dim -> hidden"),
        (r"mlp/fc1/bias", "hidden"),
        (r"mlp/fc2/kernel", "hidden -> dim"),
        (r"merges/\d+/reduction/kernel", "dim -> dim"),
        (r"patch_embedding/kernel", "height width channels -> dim"),
        *HEAD_AXES,
    ),
    layer=lambda model: partial(_layer, model),
    embedding=("patch_embedding", "patch_norm"),
    # The biases by offset, the layers that compute them and the factors on cosines: the authors decay none.
    undecayed=(r"stages/\d+/\d+/attention/bias_table", r"bias_mlp/.*", r"attention/logit_scale"),
    loose=("window", "pretrained_windows"),
)
