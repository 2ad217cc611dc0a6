"""Tables of position embeddings in other libraries' files.

A table contains one embedding for each patch, and may contain embeddings for other tokens. This
module recognizes the fixed sine-cosine table of masked autoencoders. For other tables, it derives
the image size from the number of embeddings.
"""

import math

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models.position import sincos2d
from vit_jax.models.resnet import resnet_stride


def fixed_table(grid: tuple[int, int], dim: int) -> np.ndarray:
    """Returns the sine-cosine position embeddings of masked autoencoders, `[1, 1 + patches, dim]`.

    The first embedding is the class token's, all zeros. `grid` is the rows and columns of patches.
    """
    return np.pad(sincos2d(grid, dim, "sincos2d_mae"), ((1, 0), (0, 0)))[None]


def is_fixed(table: Tensor, grid: tuple[int, int] | None = None) -> bool:
    """Returns True if a table equals the sine-cosine position embeddings of masked autoencoders.

    The table is `[1, embeddings, dim]`. `grid` is the rows and columns of patches; None: the grid
    is square.
    """
    if len(table.shape) != 3 or table.shape[-1] % 4:
        return False
    _, rows, dim = table.shape
    side = math.isqrt(rows)  # isqrt ignores the additional row of the class token.
    grid = grid or (side, side)
    if table.shape != (1, 1 + math.prod(grid), dim):
        return False
    return np.allclose(table.read(), fixed_table(grid, dim), rtol=0, atol=1e-6)


def image_size_of(
    values: dict,
    rows: int | None,
    stated: tuple[int, int] | None,
    image_size: int | tuple[int, int] | None,
) -> tuple[int, int]:
    """Derives the image size of a model from its number of position embeddings.

    Three sizes are tried in this order: the image size in the file, a square, and the image size
    for which the model is loaded. The result is the first size that has the right number of
    patches. If the model has no position embeddings, the result is `stated`, or else `image_size`,
    or else 224 x 224 pixels.

    Args:
      values: the other arguments of the `ViT`.
      rows: number of position embeddings; None: the model has none.
      stated: image size in the file; None: the file does not contain it.
      image_size: image size for which the model is loaded, or None.

    Returns:
      The image size as (height, width) in pixels.

    Raises:
      UserError: none of the three sizes has the right number of patches.
    """
    image_size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if rows is None:
        return stated or image_size or (224, 224)
    stride = values["patch_size"] * resnet_stride(
        values["resnet_blocks"], values.get("resnet_stem", "large")
    )
    cls = values["pooling"] in ("cls", "cls_gap") or values.get("cls_token", False)
    patches = rows - cls - (values.get("distillation", "none") != "none")
    side = math.isqrt(patches)
    square = (side * stride, side * stride)
    for size in (stated, square, image_size):
        if size and math.prod(length // stride for length in size) == patches:
            return tuple(length // stride * stride for length in size)
    raise UserError(
        f"the position table has {patches} patches, which is not a square grid: give the size of "
        "the images that it was trained on, image_size=(height, width) in pixels, for patches of "
        f"{stride}"
    )
