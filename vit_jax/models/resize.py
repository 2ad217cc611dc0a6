"""Resizes position tables (paper, section 3.2), bias tables and patch embeddings."""

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.family import Change, Resize
from vit_jax.models.position import interpolation


def _zoom(array: np.ndarray, factors: tuple[float, ...]) -> np.ndarray:
    from scipy.ndimage import zoom  # The import takes a third of a second; few runs need it.

    return np.asarray(zoom(array, factors, order=1))


def resize_positions(
    table: np.ndarray, old: tuple[int, int], new: tuple[int, int], prefix: int, kind: str = "linear"
) -> np.ndarray:
    """Interpolates a learned position table to another grid of patches.

    The vectors of prefix tokens are copied.

    Args:
      table: `[1, prefix + old rows * columns, dim]`.
      old, new: rows and columns of patches.
      kind: kind of interpolation, one of `POSITION_RESIZES`. `linear` aligns the corners of the two
        grids.

    Returns:
      `[1, prefix + new rows * columns, dim]`.
    """
    table = np.asarray(table)
    dim = table.shape[-1]
    grid = table[0, prefix:].reshape(*old, dim)
    if kind == "linear" or old == new:
        grid = _zoom(grid, (new[0] / old[0], new[1] / old[1], 1))
    else:
        rows, columns = (interpolation(*sides, kind) for sides in zip(old, new, strict=True))
        grid = np.einsum("rR,cC,RCd->rcd", rows, columns, grid, optimize=True).astype(table.dtype)
    return np.concatenate([table[:, :prefix], grid.reshape(1, -1, dim)], axis=1)


def resize_axis(table: np.ndarray, length: int, kind: str = "linear") -> np.ndarray:
    """Interpolates the rows of a table, `[old length, dim]` to `[length, dim]`.

    `kind` is one of `POSITION_RESIZES`.
    """
    if kind == "linear":
        return _zoom(np.asarray(table), (length / len(table), 1))
    return interpolation(len(table), length, kind) @ np.asarray(table)


def resize_bias_table(table: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Resizes Swin's relative position bias table to another window, bicubically as its authors do.

    Args:
      table: `[old rows, old columns, heads]`.

    Returns:
      `[rows, columns, heads]`, float32; equals PyTorch's `interpolate(mode="bicubic")`.
    """
    table = np.asarray(table)
    sides = zip(table.shape[:2], (rows, columns), strict=True)
    down, across = (interpolation(old, new, "bicubic") for old, new in sides)
    return np.einsum("rR,cC,RCh->rch", down, across, table)


def resize_patches(kernel: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Resizes the kernel of a patch embedding to another patch size (FlexiViT; Beyer et al., 2023).

    If the new patch size is larger, the new kernel maps a bilinearly enlarged patch to exactly the
    embedding that the old kernel computes from the original patch. If the new patch size is
    smaller, the new kernel is the least-squares approximation over white-noise patches.

    Args:
      kernel: `[old rows, old columns, channels, dim]`.

    Returns:
      `[rows, columns, channels, dim]`, float32.
    """
    kernel = np.asarray(kernel)
    down, across = (
        np.linalg.pinv(_bilinear(old, new).T)
        for old, new in zip(kernel.shape[:2], (rows, columns), strict=True)
    )
    return np.einsum("rR,cC,RCid->rcid", down, across, kernel, optimize=True).astype(np.float32)


def _bilinear(old: int, new: int) -> np.ndarray:
    """Returns the weights `[new, old]` of bilinear resizing without antialiasing."""
    centres = np.clip((np.arange(new)[:, None] + 0.5) * (old / new) - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(centres - np.arange(old)))


def grid_of(model, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Implements `Resize.size` for position tables: returns the grid of patches."""
    return model.grid


def _resize_table(table: np.ndarray, change: Change) -> np.ndarray:
    """Resizes a position table to the new grid; removes rows of tokens that the new model lacks."""
    before, after = change.before, change.after
    if missing := [token for token in after.prefix_tokens if token not in before.prefix_tokens]:
        token = missing[0].removesuffix("_token")
        raise UserError(
            f"{change.path} has no row for the {token} token, which the requested model has"
        )
    kept = [before.prefix_tokens.index(token) for token in after.prefix_tokens]
    table = np.concatenate([table[:, kept], table[:, len(before.prefix_tokens) :]], axis=1)
    return resize_positions(table, before.grid, after.grid, len(kept), after.position_resize)


def _resize_coordinate(table: np.ndarray, change: Change) -> np.ndarray:
    """Resizes the learned vectors of rows (`y`) or columns (`x`) to the new grid."""
    return resize_axis(
        table, change.after.grid[change.path.endswith("/x")], change.after.position_resize
    )


def _patch_note(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    shrinks = any(new < old for old, new in zip(before, after, strict=True))
    return ", an approximation, as patches shrink" if shrinks else ""


POSITIONS = (
    Resize("position_embedding/(.*/)?table", grid_of, _resize_table, has_tokens=True),
    Resize("position_embedding/(.*/)?[xy]", grid_of, _resize_coordinate),
)
PATCHES = Resize(
    "patch_embedding/kernel",
    size=lambda model, shape: shape[:2],
    resize=lambda kernel, change: resize_patches(kernel, *change.shape[:2]),
    note=_patch_note,
)
