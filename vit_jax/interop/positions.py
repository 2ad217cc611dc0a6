"""Parameters of one grid of patches for another: positions (paper, section 3.2), biases, patch embeddings."""

import math

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models.position import interpolation, sincos2d
from vit_jax.models.resnet import resnet_stride


def _zoom(array: np.ndarray, factors: tuple[float, ...]) -> np.ndarray:
    from scipy.ndimage import zoom  # A third of a second to import, which every run would wait for.

    return zoom(array, factors, order=1)


def resize_positions(
    table: np.ndarray, old: tuple[int, int], new: tuple[int, int], prefix: int, kind: str = "linear"
) -> np.ndarray:
    """A learned table for another grid, interpolated between its patches.

    The rows of prefix tokens are kept as they are.

    Args:
      table: `[1, prefix + old rows * columns, dim]`.
      old, new: rows and columns of patches.
      kind: of `RESIZES`; `linear`: the corners of the old grid become the corners of the new one.

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
    """The same for the rows or the columns of a 2-D table, `[old length, dim]` to `[length, dim]`."""
    if kind == "linear":
        return _zoom(np.asarray(table), (length / len(table), 1))
    return interpolation(len(table), length, kind) @ np.asarray(table)


def resize_bias_table(table: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A Swin's table of biases by offset for windows of another size, as its authors resize it: bicubic.

    Args:
      table: `[old rows, old columns, heads]`.

    Returns:
      `[rows, columns, heads]`, float32; PyTorch's `interpolate(mode="bicubic")` gives the same.
    """
    table = np.asarray(table)
    sides = zip(table.shape[:2], (rows, columns), strict=True)
    down, across = (interpolation(old, new, "bicubic") for old, new in sides)
    return np.einsum("rR,cC,RCh->rch", down, across, table)


def resize_patches(kernel: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A patch embedding's kernel for patches of another size (FlexiViT; Beyer et al., 2023).

    A patch that is enlarged bilinearly, to any size, has the embedding that it had; for smaller patches it is
    the nearest to that, in the mean over patches of white noise.

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
    """The weights `[new, old]` by which an axis of a picture is resized bilinearly, without smoothing."""
    centres = np.clip((np.arange(new)[:, None] + 0.5) * (old / new) - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(centres - np.arange(old)))


def fixed_table(grid: tuple[int, int], dim: int) -> np.ndarray:
    """Masked autoencoders' positions as their files have them, `[1, 1 + rows * columns, dim]`: zeros of the
    class token first."""
    return np.pad(sincos2d(grid, dim, "sincos2d_mae"), ((1, 0), (0, 0)))[None]


def is_fixed(table: Tensor, grid: tuple[int, int] | None = None) -> bool:
    """True for a table that is masked autoencoders' own, which is not learned.

    Args:
      grid: rows and columns; None: as many of both.
    """
    if len(table.shape) != 3 or table.shape[-1] % 4:
        return False
    _, rows, dim = table.shape
    side = math.isqrt(rows)  # One row is over: the class token's.
    wanted = grid or (side, side)
    if table.shape != (1, 1 + math.prod(wanted), dim):
        return False
    return np.allclose(table.read(), fixed_table(wanted, dim), rtol=0, atol=1e-6)


def image_size_of(
    values: dict,
    rows: int | None,
    stated: tuple[int, int] | None,
    wanted: int | tuple[int, int] | None,
) -> tuple[int, int]:
    """Size of the images that a table of positions was learned for, which not every file says.

    Args:
      values: the other arguments of the `ViT`.
      rows: of the table; None if there is none.
      stated: size that a file says, taken if the table has its rows.
      wanted: size of the images that the model is loaded for; taken for tables that are not of a square.

    Raises:
      UserError: the table is not of a square grid, and not of `wanted`.
    """
    wanted = (wanted, wanted) if isinstance(wanted, int) else wanted
    if rows is None:
        return stated or wanted or (224, 224)
    stride = values["patch_size"] * resnet_stride(values["resnet_blocks"], values.get("resnet_stem", "large"))
    cls = values["pooling"] in ("cls", "cls_gap") or values.get("cls_token", False)
    patches = rows - cls - (values.get("distillation", "none") != "none")
    side = math.isqrt(patches)
    square = (side * stride, side * stride)
    for size in (stated, square, wanted):
        if size and math.prod(length // stride for length in size) == patches:
            return tuple(length // stride * stride for length in size)
    raise UserError(
        f"the position table has {patches} patches, not of a square image; say which image it was "
        f"trained on with image_size=(height, width) in pixels, for patches of {stride}"
    )
