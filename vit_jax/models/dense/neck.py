"""Necks: feature pyramids, with fine levels for small objects, and coarse levels for large ones."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models import initializers
from vit_jax.models.layers import GELUS

EPSILON = 1e-6  # Epsilon of the layer norms.


class NormedConv(nnx.Module):
    """A convolution without bias, followed by a layer norm over the channels."""

    def __init__(self, channels: int, dim: int, side: int, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(
            channels,
            dim,
            (side, side),
            use_bias=False,
            kernel_init=nnx.initializers.he_uniform(),
            rngs=rngs,
        )
        self.norm = nnx.LayerNorm(dim, epsilon=EPSILON, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, rows, columns, channels]` to `[batch, rows, columns, dim]`."""
        return self.norm(self.conv(x))


class Upsampling(nnx.Module):
    """A transposed convolution with kernel size equal to the stride, so outputs do not overlap.

    Args:
      factor: the stride.
      dtype: dtype of the computation; None: the dtype of the input.
    """

    def __init__(
        self, channels: int, dim: int, factor: int = 2, *, dtype: Any = None, rngs: nnx.Rngs
    ):
        self.factor = factor
        self.dense = nnx.LinearGeneral(
            channels,
            (factor, factor, dim),
            kernel_init=initializers.lecun(),
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiplies rows and columns of `[batch, rows, columns, channels]` by `factor`."""
        batch, rows, columns, _ = x.shape
        sides = self.factor * rows, self.factor * columns
        return self.dense(x).swapaxes(2, 3).reshape(batch, *sides, -1)


class SimplePyramid(nnx.Module):
    """ViTDet's simple feature pyramid: four levels from the last layer of a ViT (Li et al., 2022).

    The strides of the levels are 1/4, 1/2, 1 and 2 times the patch size (2203.16527; in detectron2
    `SimpleFeaturePyramid`).

    `channels` is the width of the ViT's tokens, and `dim` the width of each level.
    """

    def __init__(self, channels: int, dim: int, *, rngs: nnx.Rngs):
        half, quarter = channels // 2, channels // 4
        self.double = Upsampling(channels, half, rngs=rngs)
        self.double_first = Upsampling(channels, half, rngs=rngs)
        self.norm = nnx.LayerNorm(half, epsilon=EPSILON, rngs=rngs)
        self.double_again = Upsampling(half, quarter, rngs=rngs)
        widths = quarter, half, channels, channels
        self.project = nnx.List([NormedConv(width, dim, 1, rngs=rngs) for width in widths])
        self.smooth = nnx.List([NormedConv(dim, dim, 3, rngs=rngs) for _ in widths])

    def __call__(self, stages: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the features of each level, `[batch, rows, columns, dim]`, the finest first.

        Args:
          stages: a list of one array, the ViT's patches `[batch, rows, columns, channels]`.
        """
        (x,) = stages
        finest = self.double_again(GELUS["erf"](self.norm(self.double_first(x))))
        coarsest = nnx.max_pool(x, (2, 2), (2, 2), padding="SAME")
        levels = finest, self.double(x), x, coarsest
        return [
            smooth(project(level))
            for project, smooth, level in zip(self.project, self.smooth, levels, strict=True)
        ]


class FeaturePyramid(nnx.Module):
    """A feature pyramid network on the stages of a Swin or a ConvNeXt (Lin et al., 1612.03144).

    `channels` contains the width of each stage, the finest first. `dim` is the width of each level.
    """

    def __init__(self, channels: Sequence[int], dim: int, *, rngs: nnx.Rngs):
        self.project = nnx.List([NormedConv(width, dim, 1, rngs=rngs) for width in channels])
        self.smooth = nnx.List([NormedConv(dim, dim, 3, rngs=rngs) for _ in channels])

    def __call__(self, stages: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns features `[batch, rows, columns, dim]` of each stage, the finest first."""
        x, levels = None, []
        for project, smooth, stage in reversed(
            [*zip(self.project, self.smooth, stages, strict=True)]
        ):
            lateral = project(stage)
            x = lateral if x is None else lateral + jax.image.resize(x, lateral.shape, "nearest")
            levels.append(smooth(x))
        return levels[::-1]


def make_neck(channels: Sequence[int], dim: int, *, rngs: nnx.Rngs) -> nnx.Module:
    """Returns the neck: a `SimplePyramid` for one stage (a ViT), else a `FeaturePyramid`.

    `channels` contains the width of each stage, the finest first. `dim` is the width of each level.
    """
    if len(channels) == 1:
        return SimplePyramid(channels[0], dim, rngs=rngs)
    return FeaturePyramid(channels, dim, rngs=rngs)


def places_of(levels: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Concatenates the positions of all levels of a feature pyramid to one sequence.

    Returns:
      A tuple of the features `[batch, positions, dim]`; the centre of each position, x and y in
      [0, 1], float32 `[positions, 2]`; and the level of each position, int32 `[positions]`.
    """
    features, centres, numbers = [], [], []
    for number, level in enumerate(levels):
        batch, rows, columns, dim = level.shape
        features.append(level.reshape(batch, rows * columns, dim))
        y, x = jnp.meshgrid(
            (jnp.arange(rows) + 0.5) / rows, (jnp.arange(columns) + 0.5) / columns, indexing="ij"
        )
        centres.append(jnp.stack([x, y], axis=-1).reshape(-1, 2))
        numbers.append(jnp.full(rows * columns, number))
    return jnp.concatenate(features, 1), jnp.concatenate(centres), jnp.concatenate(numbers)
