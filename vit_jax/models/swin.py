"""Swin Transformer V1 and V2 (Liu et al., 2021 and 2022): attention within shifted windows.

Four stages of blocks; each stage has half the resolution and twice the width of the previous stage.
Names of axes: batch height width dim heads head_dim tokens. The tokens are the positions of one
window.

Layout of windows: norms and MLPs treat each position independently, on a map
`[batch, height, width, dim]`. Before attention the map is cut into windows,
`[batch, windows, tokens, dim]`; after attention the windows are joined to a map again. Each of
these two steps is a transpose that keeps vectors of `dim` numbers contiguous. Queries, keys and
values are computed after the cut. If they were computed before the cut, three arrays would have to
be transposed instead of one, and only the narrow vectors of one head would be contiguous. Shifted
windows require a cyclic shift of the map before the cut and after the join, which is a copy.

With `VIT_JAX_KERNELS=1`, training steps of V1 on TPUs compute the attention of windows by a kernel
(`window_attention.py`).
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.dropout import drop
from vit_jax.models.family import Adaptation, Family, Resize
from vit_jax.models.image_model import ImageModel, ImagesLike, height_and_width
from vit_jax.models.layers import (
    by_shard,
    capture,
    captures,
    dense_dot,
    linear_general,
    named,
    platform,
    rising,
    run_blocks,
)
from vit_jax.models.position import PositionEmbedding, spread_offsets
from vit_jax.models.resize import PATCHES, POSITIONS, resize_bias_table
from vit_jax.models.resnet import HEAD_AXES, classifier
from vit_jax.models.transformer import Mlp, Stack, cut_windows, join_windows, make_norm
from vit_jax.options.model import SwinOptions

# The model sizes in tables 6 and 7 of the Swin paper and in the authors' configs.
SIZES = {
    "T": dict(dim=96, blocks=(2, 2, 6, 2), stage_heads=(3, 6, 12, 24)),
    "S": dict(dim=96, blocks=(2, 2, 18, 2), stage_heads=(3, 6, 12, 24)),
    "B": dict(dim=128, blocks=(2, 2, 18, 2), stage_heads=(4, 8, 16, 32)),
    "L": dict(dim=192, blocks=(2, 2, 18, 2), stage_heads=(6, 12, 24, 48)),
}

# Sizes from an architecture search, with the windows of each stage (Chen et al., 2111.14725).
SEARCHED = {
    "T": SIZES["T"] | dict(window=(7, 7, 14, 7)),
    "S": SIZES["S"] | dict(window=(14, 14, 14, 7)),
    "B": SIZES["T"] | dict(blocks=(2, 2, 30, 2), window=(7, 7, 14, 7)),
}

PATCH, WINDOW = 4, 7  # Default patch size in pixels, and default side of a window in positions.
RATIO = 4  # Width of the MLP's hidden layer, relative to the block's width.
EPSILON = 1e-5  # Epsilon of the layer norms.
# Number that is added to an attention score if only the cyclic shift brought the query's and the
# key's positions into one window.
MASKED = -100.0
# Initial and maximum value of the logarithm of the factor that multiplies V2's cosines.
FIRST_SCALE, MOST_SCALE = math.log(10), math.log(100)
UNITS = 512  # Width of the hidden layer of V2's MLP for position biases.
MOST_BIAS = 16.0  # Maximum of V2's position bias.


class QueryKeyValue(nnx.Module):
    """Projection of each position to query, key and value, in one product.

    Args:
      key_bias: True if the projection to keys has a bias. False in V2, where a bias would change
        the cosines of queries and keys.
    """

    def __init__(self, stack: Stack, key_bias: bool, rngs: nnx.Rngs):
        shape = (stack.dim, 3, stack.heads, stack.head_dim)
        self.kernel = nnx.Param(stack.scheme.qkv(rngs.params(), shape))
        # With `key_bias`: biases of queries, keys and values. Without: of queries and values.
        self.bias = nnx.Param(initializers.full((3 if key_bias else 2, *shape[2:]), 0))
        self.key_bias, self.dtype = key_bias, stack.dtype

    def __call__(
        self, x: jax.Array, heads_in_lanes: bool = False
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Maps `[..., dim]` to three arrays `[..., heads, head_dim]`.

        Args:
          heads_in_lanes: compute products `[..., heads * head_dim]`. A TPU then keeps all heads
            of a token in one row of memory.
        """
        kernel, bias = self.kernel[...].astype(self.dtype), self.bias[...].astype(self.dtype)
        if not self.key_bias:
            bias = jnp.stack([bias[0], jnp.zeros_like(bias[0]), bias[1]])
        if heads_in_lanes:
            kernels, biases = kernel.reshape(len(kernel), 3, -1), bias.reshape(3, -1)
            flat = [jnp.dot(x, kernels[:, i]) + biases[i] for i in range(3)]
            return tuple(part.reshape(*x.shape[:-1], *kernel.shape[2:]) for part in flat)
        # On a TPU, separate products for queries, keys and values lead to better memory layouts.
        if platform() == "tpu":
            return tuple(jnp.einsum("...c,chd->...hd", x, kernel[:, i]) + bias[i] for i in range(3))
        fused = dense_dot(x, kernel, (((x.ndim - 1,), (0,)), ((), ()))) + bias
        return tuple(fused[..., i, :, :] for i in range(3))


class PositionMlp(nnx.Module):
    """V2's position bias: an MLP of the offset between two positions, on a logarithmic scale.

    Args:
      window: height and width of the windows.
      unit: height and width of the pre-training windows; offsets are divided by them.
    """

    def __init__(self, heads: int, window: tuple[int, int], unit: tuple[int, int], rngs: nnx.Rngs):
        self.window, self.unit = window, unit
        dense = partial(nnx.Linear, kernel_init=initializers.normal(0.02), rngs=rngs)
        self.fc1, self.fc2 = dense(2, UNITS), dense(UNITS, heads, use_bias=False)

    def __call__(self) -> jax.Array:
        """Returns the bias of each offset, float32 `[2 height - 1, 2 width - 1, heads]`."""
        hidden = nnx.relu(self.fc1(jnp.asarray(log_offsets(self.window, self.unit))))
        return MOST_BIAS * nnx.sigmoid(self.fc2(hidden))


def log_offsets(window: tuple[int, int], unit: tuple[int, int]) -> np.ndarray:
    """Returns the log-scaled offsets in a window, float32 `[2 height - 1, 2 width - 1, 2]`.

    Offset d is mapped to sign(d) log2(1 + 8 |d| / (M - 1)) / log2(8), where M is the side of the
    pre-training windows (`unit`). In these windows the result lies between -1.06 and 1.06.
    """
    axes = [
        np.arange(1 - side, side) * (8 / max(1, base - 1))
        for side, base in zip(window, unit, strict=True)
    ]
    offsets = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    return (np.sign(offsets) * np.log2(1 + np.abs(offsets)) / 3).astype(np.float32)


def shifted_regions(
    size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]
) -> np.ndarray:
    """Returns the region number of each position after a cyclic shift, int32 `[windows, tokens]`.

    A cyclic shift brings positions from opposite edges of the map into one window. Such positions
    are in different regions, and attention between them is masked.

    Args:
      size: height and width of the map, multiples of the window's height and width.
      window: height and width of a window.
      shift: rows and columns by which the map is shifted.
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
    """Multi-head self-attention within each window, with learned relative position biases.

    A bias belongs to an offset, which is the query's position minus the key's position. V1 computes
    softmax(q k / sqrt(head_dim) + bias) v. V2 replaces q k / sqrt(head_dim) by the cosine of q and
    k, times a learned factor of each head, at most 100.

    Args:
      window: height and width of the windows.
      unit: height and width of the pre-training windows, used by version 2.
    """

    def __init__(
        self, stack: Stack, window: tuple[int, int], version: int, unit: tuple[int, int], rngs
    ):
        self.window, self.version = window, version
        self.qkv = QueryKeyValue(stack, version == 1, rngs)
        if version == 1:
            shape = (2 * window[0] - 1, 2 * window[1] - 1, stack.heads)
            self.bias_table = nnx.Param(initializers.normal(0.02)(rngs.params(), shape))
        else:
            self.logit_scale = nnx.Param(initializers.full(stack.heads, FIRST_SCALE))
            self.bias_mlp = PositionMlp(stack.heads, window, unit, rngs)
        self.out = linear_general(
            (stack.heads, stack.head_dim),
            stack.dim,
            axis=(-2, -1),
            kernel_init=stack.scheme.dense,
            dtype=stack.dtype,
            dot_general=dense_dot,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, shift: tuple[int, int]) -> jax.Array:
        """Maps `[batch, height, width, dim]` to the same shape.

        `shift` is the number of rows and of columns by which the windows are shifted.
        """
        height, width = x.shape[1:3]
        if any(shift):
            x = jnp.roll(x, (-shift[0], -shift[1]), axis=(1, 2))
        # The last windows are padded with zeros. The padding is not masked: other tokens attend to
        # it, as in the authors' detection code.
        missing = tuple(
            -size % side for size, side in zip((height, width), self.window, strict=True)
        )
        if any(missing):
            x = jnp.pad(x, ((0, 0), (0, missing[0]), (0, missing[1]), (0, 0)))
        # The windows are cut before the projection to queries, keys and values. If they were cut
        # after it, attention would take 2.4 times as many cycles by the TPU compiler's estimate.
        size, cut = x.shape[1:3], cut_windows(x, self.window)
        by_kernel = self._by_kernel()
        if by_kernel:
            cut = _in_order(jnp.pad(cut, ((0, 0), (0, 0), (0, -cut.shape[2] % 8), (0, 0))))
        query, key, value = (named("heads", part) for part in self.qkv(cut, by_kernel))
        regions = shifted_regions(size, self.window, shift) if any(shift) else None

        def in_place(x):
            x = join_windows(x, size, self.window)[:, :height, :width]
            return jnp.roll(x, shift, axis=(1, 2)) if any(shift) else x

        if by_kernel:
            out = self._attend_by_kernel(query, key, value, regions)
        else:
            out, weights = self._attend(query, key, value, regions)
            capture("attention", weights)
            capture("attended", lambda: in_place(weights().sum(3).swapaxes(2, 3)))
        out = self.out(named("heads", out))
        return in_place(out[:, :, : math.prod(self.window)])

    def _by_kernel(self) -> bool:
        """Returns True if the attention is computed by the TPU kernel."""
        if platform() != "tpu" or by_shard() is None or self.version != 1 or captures():
            return False
        # Other platforms do not import Pallas.
        from vit_jax.models.window_attention import supported

        return supported(math.prod(self.window), self.qkv.kernel.shape[-1])

    def _attend_by_kernel(
        self, query: jax.Array, key: jax.Array, value: jax.Array, regions: np.ndarray | None
    ) -> jax.Array:
        """Computes the same outputs as `_attend` by the TPU kernel."""
        from vit_jax.models.window_attention import attend_in_windows

        windows, tokens = query.shape[1], math.prod(self.window)
        masks, classes = np.zeros((1, tokens, tokens), np.float32), np.zeros(windows, np.int32)
        if regions is not None:
            apart = regions[:, :, None] != regions[:, None, :]
            different, classes = np.unique(apart, axis=0, return_inverse=True)
            masks = np.where(different, np.float32(MASKED), np.float32(0))
        bias = spread_offsets(self.bias_table[...].astype(jnp.float32))
        attend = partial(attend_in_windows, masks=masks, classes=classes.reshape(-1))
        return by_shard()(attend, (query, key, value), (bias,))

    def _attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, regions: np.ndarray | None
    ):
        """Computes attention of `[batch, windows, tokens, heads, head_dim]` with a float32 softmax.

        Args:
          regions: int32 `[windows, tokens]`; attention between tokens of different regions is
            masked.

        Returns:
          The outputs, in the shape of the inputs; and a function that returns the attention
          weights, `[batch, windows, heads, tokens, tokens]`.
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
            # Without this optimization barrier XLA would compute the mask of all windows at compile
            # time and store it as a constant.
            regions = jax.lax.optimization_barrier(jnp.asarray(regions))
            scores += jnp.where(regions[:, None, :, None] == regions[:, None, None, :], 0, MASKED)
        weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        share = 1 / weights.sum(-1, keepdims=True)
        # The softmax's division comes after the product with the values, because the outputs are
        # smaller than the scores. The division then takes fewer operations.
        narrow = weights.astype(value.dtype)
        out = (
            jnp.einsum("bwhqk,bwkhd->bwhqd", narrow, value, preferred_element_type=jnp.float32)
            * share
        )
        return out.astype(value.dtype).swapaxes(2, 3), lambda: weights * share


def _in_order(x: jax.Array) -> jax.Array:
    """Sets the memory layout that the kernel reads, so that only `x` is copied, not q, k and v."""
    layout = Layout(major_to_minor=tuple(range(x.ndim)))
    return jax.lax.platform_dependent(
        x, tpu=lambda x: with_layout_constraint(x, layout), default=lambda x: x
    )


def unit_length(x: jax.Array) -> jax.Array:
    """Normalizes vectors along the last axis to unit L2 norm in float32; zeros stay zeros."""
    wide = x.astype(jnp.float32)
    # The maximum is inside the square root because the root's gradient at zero is infinite.
    return (wide * jax.lax.rsqrt(jnp.maximum((wide**2).sum(-1, keepdims=True), 1e-24))).astype(
        x.dtype
    )


class SwinBlock(nnx.Module):
    """Window attention and an MLP with residual connections: pre-norm in V1, post-norm in V2.

    The scales of V2's norms start at zero, so each block is initially the identity.

    Args:
      window: height and width of the windows.
      shifted: shift the windows by half of their height and width. An axis with only one window is
        not shifted.
      unit: height and width of the pre-training windows, used by version 2.
    """

    def __init__(self, stack: Stack, window, shifted: bool, version: int, unit, rngs: nnx.Rngs):
        self.window, self.shifted, self.version = window, shifted, version
        self.dropout = stack.dropout

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
        """Maps `[batch, height, width, dim]` to the same shape.

        `stochastic_depth` is the probability that an image skips a branch in training.
        """
        several = self.shifted and [
            size > side for size, side in zip(x.shape[1:3], self.window, strict=True)
        ]
        shift = tuple(
            side // 2 * moves for side, moves in zip(self.window, several or (0, 0), strict=True)
        )

        def add(x, norm, branch):
            if self.version == 1:
                change = drop(branch(norm(x)), self.dropout, rngs)
            else:
                change = norm(drop(branch(x), self.dropout, rngs))
            return x + drop(change, stochastic_depth, rngs, (x.shape[0], 1, 1, 1))

        x = add(x, self.norm1, lambda x: self.attention(x, shift))
        return add(x, self.norm2, lambda x: self.mlp(x, rngs))


class PatchMerging(nnx.Module):
    """A layer that merges 2x2 positions into one position of twice the width.

    The norm comes before the linear layer in V1, and after it in V2.
    """

    def __init__(self, stack: Stack, version: int, rngs: nnx.Rngs):
        dim = stack.dim
        self.version = version
        self.norm = make_norm(4 * dim if version == 1 else 2 * dim, stack, rngs)
        self.reduction = nnx.Linear(
            4 * dim,
            2 * dim,
            use_bias=False,
            kernel_init=stack.scheme.dense,
            dtype=stack.dtype,
            dot_general=dense_dot,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, height, width, dim]` to `[batch, height / 2, width / 2, 2 dim]`.

        Odd heights and widths are rounded up.
        """
        batch, height, width, dim = x.shape
        if height % 2 or width % 2:
            x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
        x = x.reshape(batch, (height + 1) // 2, 2, (width + 1) // 2, 2, dim)
        # The four positions are concatenated column by column: the lower neighbour before the right
        # one.
        x = x.transpose(0, 1, 3, 4, 2, 5).reshape(
            batch, (height + 1) // 2, (width + 1) // 2, 4 * dim
        )
        return self.reduction(self.norm(x)) if self.version == 1 else self.norm(self.reduction(x))


class Swin(ImageModel):
    """A Swin Transformer, V1 or V2, for images of one size.

    In addition to `features`, a call can capture, for each block:

    - `attention`, float32 `[batch, windows, heads, tokens, tokens]`. The windows and the tokens of
      a window are in raster order. In a shifted block this is the raster order of the shifted map.
    - `attended`, float32 `[batch, rows, columns, heads]`: the sum of the attention weights that a
      position receives from all positions of its window. With uniform attention the sum is 1.

    `SwinOptions` describes the arguments.

    Raises:
      UserError: arguments contradict one another.
    """

    options: SwinOptions
    options_type = SwinOptions
    captures = ("attention", "attended", "features")

    def __init__(self, options: SwinOptions, *, rngs: nnx.Rngs):
        super().__init__(options)
        self.grid = _grid(self.image_size, options.patch_size)
        _check_together(options)
        stack = Stack(
            options.dim,
            options.stage_heads[0],
            RATIO * options.dim,
            gelu="erf",
            dropout=options.dropout,
            epsilon=EPSILON,
            scheme=initializers.SCHEMES["deit"],
            dtype=jnp.dtype(options.dtype),
        )
        self._make_stem(stack, rngs)
        self.stages, self.merges = nnx.Dict(), nnx.Dict()
        for stage, stage_stack in enumerate(_stacks(stack, options.stage_heads), start=1):
            if stage > 1:  # A patch merging has the number of the stage before it.
                previous = dataclasses.replace(stage_stack, dim=stage_stack.dim // 2)
                self.merges[f"{stage - 1}"] = PatchMerging(previous, options.version, rngs)
            self._make_stage(stage, stage_stack, rngs)
        width = options.dim * 2 ** (len(options.blocks) - 1)
        self.norm = make_norm(width, stack, rngs)
        self.head = classifier(width, options, rngs)

    def _make_stem(self, stack: Stack, rngs: nnx.Rngs) -> None:
        """Creates the layers before the first stage."""
        patch, channels, dim = self.options.patch_size, self.channels, self.options.dim
        limit = initializers.uniform((patch**2 * channels) ** -0.5)  # As PyTorch's convolutions.
        self.patch_embedding = nnx.Conv(
            channels,
            dim,
            kernel_size=(patch, patch),
            strides=(patch, patch),
            padding="VALID",
            kernel_init=limit,
            bias_init=limit,
            dtype=stack.dtype,
            rngs=rngs,
        )
        self.patch_norm = make_norm(dim, stack, rngs)
        # The position table has no rows for prefix tokens, and the authors resize it bicubically.
        self.prefix_tokens, self.prefix, self.position_resize = (), 0, "bicubic"
        learned = self.options.position == "1d"
        self.position_embedding = (
            PositionEmbedding("1d", self.grid, 0, dim, rngs) if learned else None
        )

    def _make_stage(self, stage: int, stack: Stack, rngs: nnx.Rngs) -> None:
        """Creates the blocks of a stage; every second block has shifted windows.

        `stage` is counted from 1.
        """
        options, index = self.options, stage - 1
        window = windows(self.grid, options.window, len(options.blocks))[index]
        unit = (options.pretrained_windows[index],) * 2 if options.pretrained_windows else window
        self.stages[f"{stage}"] = nnx.Dict(
            {
                f"{place:02d}": SwinBlock(
                    stack, window, place % 2 == 0, options.version, unit, rngs
                )
                for place in range(1, options.blocks[index] + 1)
            }
        )

    @property
    def pixel_kernel(self) -> jax.Array:
        return self.patch_embedding.kernel[...]

    def features(
        self, images: ImagesLike, rngs: nnx.Rngs | None = None, *, dense: bool = False
    ) -> Any:
        """Returns the mean of the last stage's normalized features, `[batch, features]`.

        Args:
          dense: return a list of each stage's features instead, `[batch, rows, columns, dim]`, the
            finest first. These features are not normalized, because in the authors' code the heads
            for dense prediction contain the norms.
        """
        stages = self._stages(images, rngs)
        return stages if dense else self.norm(stages[-1]).mean(axis=(1, 2))

    def _stages(self, images: jax.Array, rngs: nnx.Rngs | None) -> list[jax.Array]:
        """Returns the features of each stage, `[batch, rows, columns, dim]`, the finest first."""
        x = self.patch_norm(self.patch_embedding(self.normalize(images)))
        if self.position_embedding is not None:
            x = x + self.position_embedding().reshape(1, *x.shape[1:]).astype(x.dtype)
        x = named("features", drop(x, self.options.dropout, rngs))
        key, first, stages = None if rngs is None else rngs.dropout(), 0, []
        for stage, blocks in self.stages.items():
            remat = self.options.remat
            x = run_blocks(list(blocks.values()), x, first, self.block_rate, key, remat=remat)
            first += len(blocks)
            stages.append(x)
            if stage in self.merges:
                x = named("features", self.merges[stage](x))
        return stages

    def block_rate(self, block: int) -> float:
        """Returns the stochastic depth rate of a block; `block` is its index across all stages."""
        return rising(self.options.stochastic_depth, block, sum(self.options.blocks))

    def resized(self, image_size: int | tuple[int, int]) -> "Swin":
        """Returns the same model for images of another size, with the same windows.

        Raises:
          UserError: the patch size does not divide the image size, the windows of a stage would
            change, or the model has learned position embeddings.
        """
        size = height_and_width(image_size)
        if size == self.image_size:
            return self
        options, grid = self.options, _grid(size, self.options.patch_size)
        if self.position_embedding is not None:
            raise UserError(
                "a Swin with model.position='1d' has parameters for each patch: it is not resized"
            )
        stages = len(options.blocks)
        old, new = (windows(where, options.window, stages) for where in (self.grid, grid))
        for stage, (before, after) in enumerate(zip(old, new, strict=True), start=1):
            if before != after:
                raise UserError(
                    f"a Swin for {self.image_size[0]}x{self.image_size[1]} pixels has windows of "
                    f"{before[0]}x{before[1]} in stage {stage}, for {size[0]}x{size[1]} pixels of "
                    f"{after[0]}x{after[1]}, and is not resized"
                )
        other = nnx.clone(self)
        other.options, other.grid = dataclasses.replace(options, image_size=size), grid
        return other


def _stacks(stack: Stack, heads: tuple[int, ...]) -> list[Stack]:
    """Returns the settings of each stage's blocks; the width doubles with each stage."""
    return [
        dataclasses.replace(
            stack, dim=stack.dim * 2**stage, heads=count, mlp_dim=stack.mlp_dim * 2**stage
        )
        for stage, count in enumerate(heads)
    ]


def windows(
    grid: tuple[int, int], window: int | tuple[int, ...], stages: int
) -> list[tuple[int, int]]:
    """Returns height and width of each stage's windows, limited to the size of its feature map.

    Args:
      grid: rows and columns of patches in the first stage. Each further stage has half as many rows
        and columns, rounded up.
      window: side of the windows, or the side in each stage.
    """
    maps = [tuple(-(-side // 2**stage) for side in grid) for stage in range(stages)]
    sides = (window,) * stages if isinstance(window, int) else window
    return [
        (min(height, side), min(width, side))
        for (height, width), side in zip(maps, sides, strict=True)
    ]


def _check_together(options: SwinOptions) -> None:
    stages = len(options.blocks)
    for name in ("stage_heads", "pretrained_windows", "window"):
        values = getattr(options, name)
        if isinstance(values, Sequence) and len(values) != stages:
            raise UserError(
                f"model.{name} has {len(values)} stages, and model.blocks {stages}: each needs one "
                "value"
            )
    for stage, heads in enumerate(options.stage_heads):
        width = options.dim * 2**stage
        if width % heads:
            raise UserError(
                f"{heads} heads do not divide the width {width} of stage {stage + 1} "
                "(model.stage_heads, model.dim)"
            )
    if options.version == 1 and options.pretrained_windows is not None:
        raise UserError(
            "model.pretrained_windows is for model.version=2, which has positions to be scaled"
        )


def _grid(size: tuple[int, int], patch: int) -> tuple[int, int]:
    """Returns rows and columns of patches.

    Raises:
      UserError: the patch size does not divide the image size.
    """
    height, width = size
    if height % patch or width % patch:
        down = max(patch, height // patch * patch)
        raise UserError(
            f"patch size {patch} does not divide the image of {height}x{width} pixels; use an "
            f"image size such as {down} or {down + patch}, or another model.patch_size"
        )
    return height // patch, width // patch


def _parse(name: str) -> dict | None:
    if name.startswith("Swin-S3-"):
        return SEARCHED.get(name.removeprefix("Swin-S3-"))
    match = re.fullmatch(r"Swin(V2)?-(\w+?)(?:/w([1-9]\d{0,4})(?:to([1-9]\d{0,4}))?)?", name)
    if not match or match[2] not in SIZES:
        return None
    size, version, default = SIZES[match[2]], *((2, []) if match[1] else (1, [WINDOW]))
    windows = [int(side) for side in match.groups()[2:] if side] or default
    if len(windows) == 1:
        return size | dict(window=windows[0], version=version)
    # The names of some V2 models contain two windows: those of pre-training and of fine-tuning.
    if len(windows) != 2 or version == 1 or windows[0] % 2:
        return None
    # In the last stage the pre-training windows had half the side, because the feature map of this
    # stage was only half as large as a window.
    pretrained = (windows[0],) * 3 + (windows[0] // 2,)
    return size | dict(window=windows[1], version=2, pretrained_windows=pretrained)


def _spell(values: dict) -> str:
    size = {key: values[key] for key in ("dim", "blocks", "stage_heads")}
    patch, window = values.get("patch_size", PATCH), values.get("window", WINDOW)
    for name, known in SEARCHED.items():
        if size | dict(window=window) == known and patch == PATCH:
            return f"Swin-S3-{name}"
    version = "SwinV2" if values.get("version", 1) == 2 else "Swin"
    named = f"{version}-{_spell_size(size)}{_spell_windows(values)}"
    return named if patch == PATCH else f"{named} (patches of {patch})"


def _spell_size(size: dict) -> str:
    """Returns the letter of an official size, such as `T`, or the numbers of another size.

    An example of such numbers is `96x2-2-6-2 (3-6-12-24 heads)`: dim, blocks and heads.
    """
    for name, known in SIZES.items():
        if known == size:
            return name
    blocks, heads = ("-".join(map(str, size[key])) for key in ("blocks", "stage_heads"))
    return f"{size['dim']}x{blocks} ({heads} heads)"


def _spell_windows(values: dict) -> str:
    """Returns the end of a name, such as `/w8to16`; empty for V1 with the default window."""
    window, former = values.get("window", WINDOW), values.get("pretrained_windows")
    if former and former == (former[0],) * 3 + (former[0] // 2,):
        return f"/w{former[0]}to{window}"
    if values.get("version", 1) == 1 and window == WINDOW:
        return ""
    return f"/w{window if isinstance(window, int) else '-'.join(map(str, window))}"


def _source(name: str) -> str:
    if "S3" in name:
        return "Chen et al., 2021 (S3)"
    return "Liu et al., 2022 (Swin V2)" if "V2" in name else "Liu et al., 2021 (Swin)"


def _smallest(values: dict) -> dict:
    patch = values.get("patch_size", PATCH)
    small = dict(dim=32, blocks=(2, 1), stage_heads=(2, 4), window=2, image_size=5 * patch)
    return small | (dict(pretrained_windows=(2, 2)) if values.get("pretrained_windows") else {})


def _layer(model: Swin, path: str) -> float:
    """Returns the index of a parameter's block across all stages (SimMIM, 2111.09886).

    As in SimMIM's fine-tuning, the patch merging after a stage belongs to the stage's last block.
    """
    first, *rest = path.split("/")
    if first == "stages":
        return sum(model.options.blocks[: int(rest[0]) - 1]) + int(rest[1]) - 1
    if first == "merges":
        return sum(model.options.blocks[: int(rest[0])]) - 1
    return -1 if first in ("patch_embedding", "patch_norm", "position_embedding") else math.inf


BIASES = Resize(
    "stages/.*/bias_table",
    size=lambda model, shape: shape[:2],
    resize=lambda table, change: resize_bias_table(table, *change.shape[:2]),
)
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
        (r"mlp/fc1/kernel", "dim -> mlp_dim"),
        (r"mlp/fc1/bias", "mlp_dim"),
        (r"mlp/fc2/kernel", "mlp_dim -> dim"),
        (r"merges/\d+/reduction/kernel", "dim -> dim"),
        (r"patch_embedding/kernel", "height width channels -> dim"),
        *HEAD_AXES,
    ),
    layer=lambda model: partial(_layer, model),
    embedding=("patch_embedding", "patch_norm"),
    # As in the authors' code, there is no weight decay for bias tables, for the layers that compute
    # position biases and for the factors of cosines.
    undecayed=(r"stages/\d+/\d+/attention/bias_table", r"bias_mlp/.*", r"attention/logit_scale"),
    fixed_size=True,
    loose=("window", "pretrained_windows"),
    adaptation=Adaptation((*POSITIONS, PATCHES, BIASES)),
)
