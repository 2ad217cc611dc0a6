"""Position embeddings: learned, fixed, relative and rotary (paper, appendix D.4)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.models import initializers

FIXED = ("sincos2d", "sincos2d_mae")
# A position table is resized by one of the interpolations `POSITION_RESIZES`. The linear one aligns
# the corners, as in the paper's code. The three bicubic ones equal PyTorch's: plain (Transformers),
# with a scale of (new side + 0.1) / old side (DINO, DINOv2), and with antialiasing (timm).


class PositionEmbedding(nnx.Module):
    """Position embeddings that are added to tokens: a vector for each prefix token and each patch.

    Args:
      kind: `1d`: a learned vector for each patch. `2d`: a learned vector for each column is
        concatenated to a learned vector for each row. A name in `FIXED`: fixed sines and cosines.
      grid: rows and columns of patches.
      prefix: number of tokens before the patches. With `1d` and `2d` these tokens have learned
        vectors; in fixed embeddings their vectors are zeros.
      resize: interpolation of learned embeddings, one of `POSITION_RESIZES` (options/model.py).
      drawn: initializer of learned embeddings; None: a normal distribution with std 0.02.
    """

    def __init__(
        self,
        kind: str,
        grid: tuple[int, int],
        prefix: int,
        dim: int,
        rngs: nnx.Rngs,
        resize: str = "linear",
        drawn: initializers.Initializer | None = None,
    ):
        self.kind, self.grid, self.prefix, self.dim, self.resize = kind, grid, prefix, dim, resize
        rows, columns = grid

        def table(*shape):
            return nnx.Param((drawn or initializers.normal(0.02))(rngs.params(), shape))

        if kind == "1d":
            self.table = table(1, prefix + rows * columns, dim)
        elif kind == "2d":
            self.x, self.y = table(columns, dim // 2), table(rows, dim // 2)
            if prefix:
                self.special_table = table(prefix, dim)  # The name in checkpoints.

    def __call__(self) -> jax.Array:
        """Returns the embeddings, `[1, prefix + rows * columns, dim]`."""
        if self.kind == "1d":
            return self.table[...]
        rows, columns = self.grid
        if self.kind in FIXED:
            return jnp.pad(sincos2d(self.grid, self.dim, self.kind), ((self.prefix, 0), (0, 0)))[
                None
            ]
        x = jnp.broadcast_to(self.x[...][None], (rows, columns, self.dim // 2))
        y = jnp.broadcast_to(self.y[...][:, None], (rows, columns, self.dim // 2))
        table = jnp.concatenate([x, y], axis=-1).reshape(-1, self.dim)
        if self.prefix:
            table = jnp.concatenate([self.special_table[...], table])
        return table[None]

    def resized(self, grid: tuple[int, int]) -> "PositionEmbedding":
        """Returns the embeddings for another grid; gradients flow to the original table.

        Learned embeddings are interpolated as in `models.resize.resize_positions` (paper, section
        3.2). Fixed embeddings are computed for the new grid. The vectors of prefix tokens do not
        change.
        """
        other = nnx.clone(self)
        other.grid = tuple(grid)
        sides = zip(self.grid, grid, strict=True)
        rows, columns = (interpolation(old, new, self.resize) for old, new in sides)
        if self.kind == "1d":
            prefix, patches = self.table[:, : self.prefix], self.table[0, self.prefix :]
            patches = jnp.einsum(
                "rR,cC,RCd->rcd", rows, columns, patches.reshape(*self.grid, self.dim)
            )
            other.table = nnx.Param(
                jnp.concatenate([prefix, patches.reshape(1, -1, self.dim)], axis=1)
            )
        elif self.kind == "2d":
            other.x, other.y = nnx.Param(columns @ self.x[...]), nnx.Param(rows @ self.y[...])
        return other


def interpolation(old: int, new: int, kind: str = "linear") -> np.ndarray:
    """Returns the weights `[new, old]` that resize an axis of a position table, float32.

    Args:
      old, new: length of the axis before and after resizing.
      kind: kind of interpolation, one of `POSITION_RESIZES`. `linear` aligns the centres of the
        outermost patches. The bicubic kinds align the outer edges of these patches, and use Keys's
        cubic kernel with the parameter -0.75, or -0.5 with antialiasing.
    """
    if kind == "linear":
        places = np.arange(new) * ((old - 1) / max(1, new - 1))
        return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old))).astype(np.float32)
    scale = old / (new + 0.1 if kind == "bicubic_offset" else new)
    centres = (np.arange(new)[:, None] + 0.5) * scale - 0.5
    if kind == "bicubic_antialias":
        wide = max(scale, 1.0)
        weights = _cubic((np.arange(old) - centres) / wide, -0.5)
        return (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    first = np.floor(centres).astype(int) - 1
    weights = np.zeros((new, old))
    for tap in range(4):  # Places beyond the ends of the table are clamped.
        places = first + tap
        at = np.clip(places, 0, old - 1)
        np.add.at(weights, (np.arange(new)[:, None], at), _cubic(places - centres, -0.75))
    return weights.astype(np.float32)


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """Computes Keys's cubic convolution kernel (1981), which is 0 for |x| >= 2."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def sincos2d(grid: tuple[int, int], dim: int, kind: str) -> np.ndarray:
    """Returns fixed embeddings `[rows * columns, dim]`: sines and cosines of column and row.

    There are D/4 frequencies, where D is `dim`.

    Args:
      grid: rows and columns of patches.
      dim: width of the embeddings.
      kind: `sincos2d`: frequency i is 10,000 ** (-i / (D/4 - 1)), as in "Better plain ViT baselines
        for ImageNet-1k" (Beyer et al., 2022). `sincos2d_mae`: frequency i is 10,000 ** (-i /
        (D/4)), as in masked autoencoders (He et al., 2022).
    """
    frequencies = 10_000.0 ** -np.linspace(0, 1, dim // 4, endpoint=kind == "sincos2d")
    y, x = (part.reshape(-1, 1) * frequencies for part in np.indices(grid))
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


class RelativeLayout(NamedTuple):
    """The layout of a relative position table, `[offsets, head_dim]` (paper, D.4).

    The N patches are numbered in raster order. The number of the query's patch minus the number of
    the key's patch, from -(N-1) to N-1, selects one of the rows 0 to 2N-2. Three more rows are for
    pairs with another token, such as the class token: from another token to a patch, from a patch
    to another token, and between two other tokens.
    """

    grid: tuple[int, int]
    prefix: int
    registers: int

    @property
    def rows(self) -> int:
        """Number of rows of the relative position table."""
        return 2 * math.prod(self.grid) - 1 + (3 if self.prefix + self.registers else 0)

    def offsets(self) -> np.ndarray:
        """Returns the index of the position table's row for each query and key.

        The result has the shape `[tokens, tokens]`.
        """
        patches = math.prod(self.grid)
        number = np.arange(patches)
        last = 2 * patches - 1
        offsets = np.full((self.prefix + patches + self.registers,) * 2, last + 2)
        inside = slice(self.prefix, self.prefix + patches)
        offsets[:, inside] = last
        offsets[inside, :] = last + 1
        offsets[inside, inside] = number[:, None] - number[None, :] + patches - 1
        return offsets if self.prefix + self.registers else offsets[inside, inside]

    def resized(self, table: jax.Array, grid: tuple[int, int]) -> jax.Array:
        """Returns the table for another grid, resized bicubically like Swin's bias tables.

        Patches are numbered in raster order, and a row of a table belongs to the difference of two
        numbers. On a grid with C columns, for example, the offsets of 0 rows and C - 1 columns, and
        of 1 row and -1 columns, both have the difference C - 1. Before the resizing, each offset
        gets a copy of the row of its difference. After the resizing, a row of the new table is the
        mean over all pairs of patches with the row's difference.
        """
        old, new = math.prod(self.grid), math.prod(grid)
        among = table[difference(self.grid) + old - 1]  # [row offset, column offset, head_dim]
        rows, columns = (
            interpolation(2 * before - 1, 2 * after - 1, "bicubic")
            for before, after in zip(self.grid, grid, strict=True)
        )
        among = jnp.einsum("rR,cC,RCd->rcd", rows, columns, among).reshape(-1, table.shape[-1])
        places = difference(grid).reshape(-1) + new - 1
        pairs = np.outer(*(side - np.abs(np.arange(1 - side, side)) for side in grid)).reshape(-1)
        share = (pairs / np.bincount(places, pairs)[places]).astype(np.float32)
        patches = jax.ops.segment_sum(among * share[:, None], places, 2 * new - 1)
        return jnp.concatenate([patches, table[2 * old - 1 :]])


def difference(grid: tuple[int, int]) -> np.ndarray:
    """Returns the difference of raster indices for each offset between two patches of a grid.

    For an offset of r rows and c columns the difference is `r * columns + c`. The result has the
    shape `[2 rows - 1, 2 columns - 1]`. Along its first axis r rises from -(rows - 1) to rows - 1,
    and along its second axis c rises from -(columns - 1) to columns - 1.
    """
    rows, columns = grid
    return np.arange(1 - rows, rows)[:, None] * columns + np.arange(1 - columns, columns)


def spread_offsets(table: jax.Array) -> jax.Array:
    """Expands a bias table of offsets to a bias for each query and key, `[heads, tokens, tokens]`.

    An offset is the query's position minus the key's position. Each axis is expanded by
    broadcasting, whose gradient is a sum; the gradient of a lookup would be a slower scatter.

    Args:
      table: `[2 height - 1, 2 width - 1, heads]`.
    """

    def spread(x):
        """Expands a table of offsets along one axis to all pairs of a query and a key.

        The table `x` has the shape `[2 side - 1, ...]`, the result `[side, side, ...]`. Element
        [query, key] of the result is `x[query - key + side - 1]`.
        """
        side = (len(x) + 1) // 2
        # The table, reversed and padded to 2 * side entries, is repeated `side` times. Reshaping
        # the copies to rows of 2 * side - 1 entries shifts row i by i positions.
        row = jnp.concatenate([x[::-1], jnp.zeros_like(x[:1])])
        rows = jnp.broadcast_to(row, (side, *row.shape)).reshape(-1, *x.shape[1:])
        return rows[: side * len(x)].reshape(side, *x.shape)[:, side - 1 :]

    rows = spread(table)  # [query row, key row, column offset, heads]
    # [query column, key column, query row, key row, heads]
    both = spread(jnp.moveaxis(rows, 2, 0))
    tokens = both.shape[0] * both.shape[2]
    return both.transpose(4, 2, 0, 3, 1).reshape(-1, tokens, tokens)


class BiasLayout(NamedTuple):
    """The layout of a table of attention biases, `[offsets, heads]`, as in BEiT.

    The table has a row for each offset between two patches (position of the query minus position of
    the key), in raster order. If there are other tokens, such as the class token, three more rows
    follow: from another token to a patch, from a patch to another token, and between two other
    tokens.
    """

    grid: tuple[int, int]
    prefix: int
    registers: int

    @property
    def rows(self) -> int:
        """Number of rows of the bias table."""
        return math.prod(2 * side - 1 for side in self.grid) + (
            3 if self.prefix + self.registers else 0
        )

    def spread(self, table: jax.Array) -> jax.Array:
        """Returns the bias of each query and key, `[heads, tokens, tokens]`."""
        heads, patches = table.shape[-1], math.prod(self.grid)
        shape = tuple(2 * side - 1 for side in self.grid)
        among = spread_offsets(table[: math.prod(shape)].reshape(*shape, heads))
        if not self.prefix + self.registers:
            return among

        def block(row, queries, keys):
            return jnp.broadcast_to(table[row][:, None, None], (heads, queries, keys))

        def line(queries, row_of_others, middle):
            parts = block(row_of_others, queries, self.prefix), middle
            return jnp.concatenate([*parts, block(row_of_others, queries, self.registers)], axis=2)

        others = [
            line(count, -1, block(-3, count, patches)) for count in (self.prefix, self.registers)
        ]
        return jnp.concatenate([others[0], line(patches, -2, among), others[1]], axis=1)

    def resized(self, table: jax.Array, grid: tuple[int, int]) -> jax.Array:
        """Returns the table for another grid, resized by splines as in BEiT's fine-tuning.

        The positions of the old offsets on the new axis form a geometric series from the middle
        outwards. Therefore the table keeps its detail at small offsets.
        """
        old, new = (tuple(2 * side - 1 for side in sides) for sides in (self.grid, grid))
        count, heads = math.prod(old), table.shape[-1]
        rows, columns = (spline(*sides) for sides in zip(old, new, strict=True))
        patches = jnp.einsum("rR,cC,RCh->rch", rows, columns, table[:count].reshape(*old, heads))
        return jnp.concatenate([patches.reshape(-1, heads), table[count:]])


def spline(old: int, new: int) -> np.ndarray:
    """Returns the weights `[new, old]` that resize an axis of a bias table by a spline, float32."""
    if old == new:
        return np.eye(old, dtype=np.float32)
    if old == 1:
        return np.ones((new, 1), np.float32)
    # SciPy is imported here, because its import is slow and rarely needed.
    from scipy.interpolate import InterpolatedUnivariateSpline

    places, offsets = spline_places(old, new), np.arange(new) - new // 2
    # A spline is linear in the values that it interpolates. Therefore the weights of value i are
    # the spline through a 1 at i and zeros elsewhere. Beyond the ends of the table a spline is
    # constant.
    units = np.eye(old)
    values = [
        InterpolatedUnivariateSpline(places, unit, k=min(3, old - 1), ext=3)(offsets)
        for unit in units
    ]
    return np.stack(values, axis=1).astype(np.float32)


def spline_places(old: int, new: int) -> np.ndarray:
    """Returns the position of each offset of an old bias table on the new table's axis, `[old]`.

    Offset 0, in the middle, has the position 0. The distances between neighbouring positions form a
    geometric series and grow from the middle outwards.
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        reach = (1 - ratio ** (old // 2)) / (1 - ratio)
        low, high = (low, ratio) if reach > new // 2 else (ratio, high)
    steps = np.cumsum(ratio ** np.arange(old // 2))
    return np.concatenate([-steps[::-1], [0], steps])


class Rope(NamedTuple):
    """A kind of rotary position embedding: how a patch's row and column give rotation angles.

    Attributes:
      base: there are D/4 frequencies, where D is the width of a head. Frequency i is
        base ** (-i / (D/4)).
      columns_first: the first half of a head's channel pairs is rotated by the patch's column, and
        the second half by its row. False: rows first.
      stretched: rows and columns are scaled to the pre-training grid: they are multiplied by the
        size of this grid, divided by the size of the model's grid.
      after_cls: in models with a class token, rows and columns are counted from 1.
      centred: a patch's coordinates are the coordinates of its centre, from -1 to 1, times 2 pi.
    """

    base: float
    columns_first: bool = False
    stretched: bool = False
    after_cls: bool = False
    centred: bool = False


ROPES = {
    "eva02": Rope(10_000, stretched=True),  # Fang et al., 2023.
    # Perception Encoder, 2025.
    "pe": Rope(10_000, columns_first=True, stretched=True, after_cls=True),
    "axial": Rope(100, columns_first=True),  # Heo et al., 2024, "RoPE-Axial".
    "dinov3": Rope(100, centred=True),  # Simeoni et al., 2025.
}
# Cosines and sines for each token, head and channel.
Rotation = tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]


def rotation_angles(
    kind: str,
    grid: tuple[int, int],
    unit: tuple[int, int],
    tokens: Sequence[str],
    registers: int,
    head_dim: int,
) -> np.ndarray:
    """Returns the angles of 2-D rotary positions, `[tokens, 1, head_dim]`; 0 for non-patch tokens.

    Args:
      kind: kind of rotary position embedding, a key of `ROPES`.
      grid: rows and columns of patches.
      unit: rows and columns of the pre-training grid, for kinds that are `stretched`.
      tokens: names of the tokens before the patches.
      registers: number of tokens after the patches.
      head_dim: width of a head.
    """
    rope = ROPES[kind]
    frequencies = rope.base ** (-np.arange(head_dim // 4) / (head_dim // 4))
    axes = []
    for index, new, old in zip(np.indices(grid), grid, unit, strict=True):
        if rope.centred:
            places = 2 * np.pi * (2 * (index + 0.5) / new - 1)
        else:
            first = rope.after_cls and "cls" in tokens
            places = (index + first) * (old / new if rope.stretched else 1)
        axes.append(places.reshape(-1, 1) * frequencies)
    angles = np.concatenate(axes[::-1] if rope.columns_first else axes, axis=1)
    angles = np.tile(angles, 2) if kind == "dinov3" else np.repeat(angles, 2, axis=1)
    return np.pad(angles, ((len(tokens), registers), (0, 0)))[:, None]


def draw_scale(most: float, key: jax.Array) -> jax.Array:
    """Draws a number from 1 / `most` to `most`, uniformly on a logarithmic scale."""
    return jnp.exp(jax.random.uniform(key, minval=-math.log(most), maxval=math.log(most)))


def places_of(grid: tuple[int, int], prefix: int, registers: int) -> np.ndarray:
    """Returns the column and row of each token, float32 `[tokens, 2]`; 0 for non-patch tokens."""
    rows, columns = np.indices(grid).reshape(2, -1)
    return np.pad(np.stack([columns, rows], axis=1), ((prefix, registers), (0, 0))).astype(
        np.float32
    )


def mixed_frequencies(heads: int, head_dim: int, rngs: nnx.Rngs) -> jax.Array:
    """Returns initial values of learned frequencies, `[2, heads, head_dim / 2]`.

    A frequency is a 2-D vector of a factor for the column and a factor for the row; these two
    factors are along the first axis. Each head has two orthogonal vectors of each magnitude. Both
    vectors are rotated by a random angle, one angle for each head (Heo et al., 2024).
    """
    magnitudes = 10.0 ** (-np.arange(0, head_dim, 4) / head_dim)
    turns = initializers.uniform(np.pi)(rngs.params(), (heads, 1))
    turns = jnp.concatenate([turns, turns + np.pi / 2], axis=1)[..., None]
    return jnp.stack([(f(turns) * magnitudes).reshape(heads, -1) for f in (jnp.cos, jnp.sin)])


def mixed_rotation(places: np.ndarray, frequencies: jax.Array) -> Rotation:
    """Returns cosines and sines for learned frequencies, `[tokens, heads, head_dim]` each.

    `places` is the result of `places_of`, and `frequencies` that of `mixed_frequencies`.
    """
    angles = jnp.einsum("tp,phf->thf", places, frequencies.astype(jnp.float32), precision="highest")
    angles = jnp.repeat(angles, 2, axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array, halves: bool = False) -> jax.Array:
    """Rotates pairs of channels of `[batch, tokens, heads, head_dim]` by the given angles.

    Args:
      cosines, sines: cosines and sines of the angles, which broadcast to `x`.
      halves: channel i forms a pair with channel i + head_dim / 2. False: adjacent channels form
        pairs.
    """
    if halves:
        first, second = jnp.split(x, 2, axis=-1)
        turned = jnp.concatenate([-second, first], axis=-1)
    else:
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        turned = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(x.shape)
    return (x * cosines + turned * sines).astype(x.dtype)
