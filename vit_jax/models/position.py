"""Positions of tokens: learned, fixed, relative and rotary (paper, appendix D.4)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.models import initializers

FIXED = ("sincos2d", "sincos2d_mae")
# How a table is resized: linearly from corner to corner, as the paper's code; as PyTorch resizes
# pictures, bicubic (Transformers), with 0.1 more than the new side in its scale (DINO, DINOv2), or
# smoothed (timm).


class PositionEmbedding(nnx.Module):
    """A vector for each prefix token and patch.

    Args:
      kind: `1d`, a learned table; `2d`, learned halves for column and row; or one of `FIXED`.
      grid: rows and columns of patches.
      prefix: tokens before the patches; in `2d` each has a vector of its own, in fixed positions
        zeros.
      resize: of `POSITION_RESIZES` (options/model.py).
      drawn: draws the first values of learned ones; None: from a normal distribution of 0.02.
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
                self.special_table = table(prefix, dim)  # Checkpoints have it by this name.

    def __call__(self) -> jax.Array:
        """`[1, prefix + rows * columns, dim]`."""
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
        """The same positions for another grid, as a function of these: gradients reach their table.

        Learned ones are interpolated as `models.resize.resize_positions` does (paper, section 3.2),
        fixed ones are computed for the new grid; those of the prefix tokens stay.
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
    """The weights `[new, old]` with which an axis of a table is resized, float32.

    Args:
      kind: one of `POSITION_RESIZES`. `linear` keeps the centres of the outermost patches in place;
        the others keep their outer edges, and weigh by Keys's cubic of parameter -0.75, or smoothed
        of -0.5.
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
    for tap in range(4):  # What lies beyond an end is that end.
        places = first + tap
        at = np.clip(places, 0, old - 1)
        np.add.at(weights, (np.arange(new)[:, None], at), _cubic(places - centres, -0.75))
    return weights.astype(np.float32)


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """Keys's cubic convolution kernel (1981), 0 from 2 on."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def sincos2d(grid: tuple[int, int], dim: int, kind: str) -> np.ndarray:
    """Fixed positions `[rows * columns, dim]`: sines and cosines of the column, then of the row.

    Args:
      kind: of `FIXED`. Of its D/4 frequencies, number i is 10,000 to the power -i / (D/4 - 1) in
        `sincos2d`, as in "Better plain ViT baselines for ImageNet-1k" (Beyer et al., 2022), and to
        -i / (D/4) in
        `sincos2d_mae`, as in masked autoencoders (He et al., 2022).
    """
    frequencies = 10_000.0 ** -np.linspace(0, 1, dim // 4, endpoint=kind == "sincos2d")
    y, x = (part.reshape(-1, 1) * frequencies for part in np.indices(grid))
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


class RelativeLayout(NamedTuple):
    """The layout of a table of relative positions, `[offsets, head_dim]`, over queries and keys
    (paper, D.4).

    Patches are numbered in raster order, N of them: their difference p_q - p_k lies from -(N-1) to
    N-1 and takes rows 0 to 2N-2. What is not a patch has three more: to a patch, from a patch, to
    another such token or itself.
    """

    grid: tuple[int, int]
    prefix: int
    registers: int

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return 2 * math.prod(self.grid) - 1 + (3 if self.prefix + self.registers else 0)

    def offsets(self) -> np.ndarray:
        """The row of the table for each query and key, `[tokens, tokens]`."""
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
        """The table for another grid, resized by rows and columns, bicubically as Swin's tables of
        biases.

        A difference of numbers stands for one offset in rows and columns, or two: C - 1 columns of
        C are one row less a column. Its new vector is the mean of theirs over all pairs of patches
        that have it.
        """
        old, new = math.prod(self.grid), math.prod(grid)
        among = table[difference(self.grid) + old - 1]  # [rows' offset, columns' offset, head_dim]
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
    """The difference of two patches' numbers by their offset, `[2 rows - 1, 2 columns - 1]`."""
    rows, columns = grid
    return np.arange(1 - rows, rows)[:, None] * columns + np.arange(1 - columns, columns)


def spread_offsets(table: jax.Array) -> jax.Array:
    """Turns a table by offset, `[2 height - 1, 2 width - 1, heads]`, into one by query and key.

    It is `[heads, tokens, tokens]`: the entry of two places is that of their offset, the query's
    place less the key's. Each axis is laid out by broadcasting, so that gradients are sums and no
    scatters.
    """

    def spread(x):
        """`[2 side - 1, ...]` to `[side, side, ...]`, by query and key."""
        side = (len(x) + 1) // 2
        # Row i of many copies of 2 side numbers, read as rows of 2 side - 1, begins i places
        # earlier.
        row = jnp.concatenate([x[::-1], jnp.zeros_like(x[:1])])
        rows = jnp.broadcast_to(row, (side, *row.shape)).reshape(-1, *x.shape[1:])
        return rows[: side * len(x)].reshape(side, *x.shape)[:, side - 1 :]

    rows = spread(table)  # [query's row, key's row, columns' offset, heads]
    both = spread(
        jnp.moveaxis(rows, 2, 0)
    )  # [query's column, key's column, query's row, key's row, heads]
    tokens = both.shape[0] * both.shape[2]
    return both.transpose(4, 2, 0, 3, 1).reshape(-1, tokens, tokens)


class BiasLayout(NamedTuple):
    """The layout of a table of biases by offset, `[offsets, heads]`, over queries and keys (BEiT).

    Its rows are those of all offsets between two patches, query less key, in raster order; where
    there are
    other tokens, three more: from one of these to a patch, from a patch to one, and among them.
    """

    grid: tuple[int, int]
    prefix: int
    registers: int

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return math.prod(2 * side - 1 for side in self.grid) + (
            3 if self.prefix + self.registers else 0
        )

    def spread(self, table: jax.Array) -> jax.Array:
        """The table by query and key, `[heads, tokens, tokens]`."""
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
        """The table for another grid, as BEiT's authors resize it for fine-tuning: by cubic
        splines.

        The old offsets stand at places whose distances grow from the middle like a geometric
        series, so that the outermost are those of the new grid; near offsets keep their fine
        differences.
        """
        old, new = (tuple(2 * side - 1 for side in sides) for sides in (self.grid, grid))
        count, heads = math.prod(old), table.shape[-1]
        rows, columns = (spline(*sides) for sides in zip(old, new, strict=True))
        patches = jnp.einsum("rR,cC,RCh->rch", rows, columns, table[:count].reshape(*old, heads))
        return jnp.concatenate([patches.reshape(-1, heads), table[count:]])


def spline(old: int, new: int) -> np.ndarray:
    """The weights `[new, old]` with which an axis of a table of biases is resized, float32."""
    if old == new:
        return np.eye(old, dtype=np.float32)
    if old == 1:
        return np.ones((new, 1), np.float32)
    from scipy.interpolate import InterpolatedUnivariateSpline  # Slow to import, and seldom needed.

    places, wanted = spline_places(old, new), np.arange(new) - new // 2
    units = np.eye(
        old
    )  # A spline is linear in its values. Beyond its ends it stays as it is there.
    values = [
        InterpolatedUnivariateSpline(places, unit, k=min(3, old - 1), ext=3)(wanted)
        for unit in units
    ]
    return np.stack(values, axis=1).astype(np.float32)


def spline_places(old: int, new: int) -> np.ndarray:
    """The places of an old axis's offsets among the new one's, `[old]`: a geometric series from
    0.
    """
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        reach = (1 - ratio ** (old // 2)) / (1 - ratio)
        low, high = (low, ratio) if reach > new // 2 else (ratio, high)
    steps = np.cumsum(ratio ** np.arange(old // 2))
    return np.concatenate([-steps[::-1], [0], steps])


class Rope(NamedTuple):
    """A kind of rotary positions: what makes angles of a patch's row and column.

    Attributes:
      base: of D/4 frequencies, number i is this to the power -i / (D/4), D the width of a head.
      columns_first: the first half of a head's pairs turns with the column, in place of the row.
      stretched: rows and columns count in the grid of pre-training.
      after_cls: they count from 1 where there is a class token.
      centred: they are the patch's centre from -1 to 1, in full turns.
    """

    base: float
    columns_first: bool = False
    stretched: bool = False
    after_cls: bool = False
    centred: bool = False


ROPES = {
    "eva02": Rope(10_000, stretched=True),  # Fang et al., 2023.
    "pe": Rope(
        10_000, columns_first=True, stretched=True, after_cls=True
    ),  # Perception Encoder, 2025.
    "axial": Rope(100, columns_first=True),  # Heo et al., 2024, "RoPE-Axial".
    "dinov3": Rope(100, centred=True),  # Simeoni et al., 2025.
}
# Cosines and sines by token, head and channel.
Rotation = tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]


def rotation_angles(
    kind: str,
    grid: tuple[int, int],
    unit: tuple[int, int],
    tokens: Sequence[str],
    registers: int,
    head_dim: int,
) -> np.ndarray:
    """Angles `[tokens, 1, head_dim]` of 2-D rotary positions; what is not a patch does not turn.

    Args:
      kind: a key of `ROPES`.
      unit: the grid of pre-training, for kinds that are stretched.
      tokens: names of those before the patches.
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
    """A number between 1 / most and most, drawn evenly on a logarithmic scale."""
    return jnp.exp(jax.random.uniform(key, minval=-math.log(most), maxval=math.log(most)))


def places_of(grid: tuple[int, int], prefix: int, registers: int) -> np.ndarray:
    """Column and row of each token, float32 `[tokens, 2]`; 0 of what is no patch."""
    rows, columns = np.indices(grid).reshape(2, -1)
    return np.pad(np.stack([columns, rows], axis=1), ((prefix, registers), (0, 0))).astype(
        np.float32
    )


def mixed_frequencies(heads: int, head_dim: int, rngs: nnx.Rngs) -> jax.Array:
    """The first values of learned frequencies by column and row, `[2, heads, head_dim / 2]`.

    Each magnitude has two orthogonal directions, turned at random for each head (Heo et al., 2024).
    """
    magnitudes = 10.0 ** (-np.arange(0, head_dim, 4) / head_dim)
    turns = initializers.uniform(np.pi)(rngs.params(), (heads, 1))
    turns = jnp.concatenate([turns, turns + np.pi / 2], axis=1)[..., None]
    return jnp.stack([(f(turns) * magnitudes).reshape(heads, -1) for f in (jnp.cos, jnp.sin)])


def mixed_rotation(places: np.ndarray, frequencies: jax.Array) -> Rotation:
    """The rotation by learned frequencies, `[tokens, heads, head_dim]` each.

    Args:
      places: as of `places_of`.
      frequencies: as of `mixed_frequencies`.
    """
    angles = jnp.einsum("tp,phf->thf", places, frequencies.astype(jnp.float32), precision="highest")
    angles = jnp.repeat(angles, 2, axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array, halves: bool = False) -> jax.Array:
    """Turns pairs of channels of `[batch, tokens, heads, head_dim]` by the tables' angles.

    Args:
      halves: a pair is a channel of the first half and its fellow of the second; else two
        neighbours.
    """
    if halves:
        first, second = jnp.split(x, 2, axis=-1)
        turned = jnp.concatenate([-second, first], axis=-1)
    else:
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        turned = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(x.shape)
    return (x * cosines + turned * sines).astype(x.dtype)
