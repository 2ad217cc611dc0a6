"""Positions of tokens: learned, fixed, relative and rotary (paper, appendix D.4)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.models import initializers

FIXED = ("sincos2d", "sincos2d_mae")
# How a table is resized: linearly from corner to corner, as the paper's code; as PyTorch resizes pictures,
# bicubic (Transformers), with 0.1 more than the new side in its scale (DINO, DINOv2), or smoothed (timm).
RESIZES = ("linear", "bicubic", "bicubic_offset", "bicubic_antialias")


class PositionEmbedding(nnx.Module):
    """A vector for each prefix token and patch.

    Args:
      kind: `1d`, a learned table; `2d`, learned halves for column and row; or one of `FIXED`.
      grid: rows and columns of patches.
      prefix: tokens before the patches; in `2d` each has a vector of its own, in fixed positions zeros.
      resize: of `RESIZES`.
    """

    def __init__(
        self,
        kind: str,
        grid: tuple[int, int],
        prefix: int,
        dim: int,
        rngs: nnx.Rngs,
        resize: str = "linear",
    ):
        self.kind, self.grid, self.prefix, self.dim, self.resize = kind, grid, prefix, dim, resize
        rows, columns = grid

        def table(*shape):
            return nnx.Param(initializers.normal(0.02)(rngs.params(), shape))

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
            return jnp.pad(sincos2d(self.grid, self.dim, self.kind), ((self.prefix, 0), (0, 0)))[None]
        x = jnp.broadcast_to(self.x[...][None], (rows, columns, self.dim // 2))
        y = jnp.broadcast_to(self.y[...][:, None], (rows, columns, self.dim // 2))
        table = jnp.concatenate([x, y], axis=-1).reshape(-1, self.dim)
        if self.prefix:
            table = jnp.concatenate([self.special_table[...], table])
        return table[None]

    def resized(self, grid: tuple[int, int]) -> "PositionEmbedding":
        """The same positions for another grid, as a function of these: gradients reach their table.

        Learned ones are interpolated as `interop.positions.resize_positions` does (paper, section 3.2), fixed
        ones are computed for the new grid; those of the prefix tokens stay.
        """
        other = nnx.clone(self)
        other.grid = tuple(grid)
        sides = zip(self.grid, grid, strict=True)
        rows, columns = (interpolation(old, new, self.resize) for old, new in sides)
        if self.kind == "1d":
            prefix, patches = self.table[:, : self.prefix], self.table[0, self.prefix :]
            patches = jnp.einsum("rR,cC,RCd->rcd", rows, columns, patches.reshape(*self.grid, self.dim))
            other.table = nnx.Param(jnp.concatenate([prefix, patches.reshape(1, -1, self.dim)], axis=1))
        elif self.kind == "2d":
            other.x, other.y = nnx.Param(columns @ self.x[...]), nnx.Param(rows @ self.y[...])
        return other


def interpolation(old: int, new: int, kind: str = "linear") -> np.ndarray:
    """The weights `[new, old]` with which an axis of a table is resized, float32.

    Args:
      kind: of `RESIZES`. `linear` keeps both ends where they are; the others keep the outer edges of the
        outermost patches, and weigh by Keys's cubic of parameter -0.75, or smoothed of -0.5.
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
      kind: of `FIXED`. Of its D/4 frequencies, number i is 10,000 to the power -i / (D/4 - 1) in `sincos2d`,
        as in "Better plain ViT baselines for ImageNet-1k" (Beyer et al., 2022), and to -i / (D/4) in
        `sincos2d_mae`, as in masked autoencoders (He et al., 2022).
    """
    frequencies = 10_000.0 ** -np.linspace(0, 1, dim // 4, endpoint=kind == "sincos2d")
    y, x = (part.reshape(-1, 1) * frequencies for part in np.indices(grid))
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def count_offsets(grid: tuple[int, int], prefix: int, registers: int) -> int:
    """Rows of the table of relative positions, to which `relative_offsets` points."""
    return 2 * grid[0] * grid[1] - 1 + (3 if prefix + registers else 0)


def relative_offsets(grid: tuple[int, int], prefix: int, registers: int) -> np.ndarray:
    """The row of the table of relative positions for each query and key, `[tokens, tokens]`.

    Patches are numbered in raster order, N of them: their difference p_q - p_k lies from -(N-1) to
    N-1 and takes rows 0 to 2N-2. What is not a patch has three more: to a patch, from a patch, to
    another such token or itself.
    """
    patches = grid[0] * grid[1]
    number = np.arange(patches)
    last = 2 * patches - 1
    offsets = np.full((prefix + patches + registers,) * 2, last + 2)
    inside = slice(prefix, prefix + patches)
    offsets[:, inside] = last
    offsets[inside, :] = last + 1
    offsets[inside, inside] = number[:, None] - number[None, :] + patches - 1
    return offsets if prefix + registers else offsets[inside, inside]


def spread_offsets(table: jax.Array) -> jax.Array:
    """Turns a table by offset, `[2 height - 1, 2 width - 1, heads]`, into one by query and key.

    It is `[heads, tokens, tokens]`: the entry of two places is that of their offset, the query's
    place less the key's. Each axis is laid out by broadcasting, so that gradients are sums and no scatters.
    """

    def spread(x):
        """`[2 side - 1, ...]` to `[side, side, ...]`, by query and key."""
        side = (len(x) + 1) // 2
        # Row i of many copies of 2 side numbers, read as rows of 2 side - 1, begins i places earlier.
        row = jnp.concatenate([x[::-1], jnp.zeros_like(x[:1])])
        rows = jnp.broadcast_to(row, (side, *row.shape)).reshape(-1, *x.shape[1:])
        return rows[: side * len(x)].reshape(side, *x.shape)[:, side - 1 :]

    rows = spread(table)  # [query's row, key's row, columns' offset, heads]
    both = spread(jnp.moveaxis(rows, 2, 0))  # [query's column, key's column, query's row, key's row, heads]
    tokens = both.shape[0] * both.shape[2]
    return both.transpose(4, 2, 0, 3, 1).reshape(-1, tokens, tokens)


def rotation_tables(
    grid: tuple[int, int], unit: tuple[int, int], prefix: int, registers: int, head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines `[tokens, head_dim]` of 2-D rotary positions (EVA-02, Fang et al., 2023).

    The first half of a head turns with the row, the second with the column, neighbours in pairs;
    base 10,000. A grid other than `unit` is stretched onto it. What is not a patch does not turn.
    """
    frequencies = np.repeat(10_000.0 ** (-np.arange(0, head_dim // 2, 2) / (head_dim // 2)), 2)
    angles = [
        (position.reshape(-1, 1) * (old / new)) * frequencies
        for position, old, new in zip(np.indices(grid), unit, grid, strict=True)
    ]
    angles = np.pad(np.concatenate(angles, axis=1), ((prefix, registers), (0, 0)))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: jax.Array, cosines: np.ndarray, sines: np.ndarray) -> jax.Array:
    """Turns the pairs (2i, 2i+1) of `[batch, tokens, heads, head_dim]` by the tables' angles."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    turned = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(x.shape)
    return (x * cosines[:, None] + turned * sines[:, None]).astype(x.dtype)
