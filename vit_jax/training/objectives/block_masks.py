"""Patch masks made of blocks (BEiT, 2106.08254, algorithm 1).

Unlike BEiT's, these masks have exactly the requested number of patches.
"""

import functools
import math

import jax
import jax.numpy as jnp

SMALLEST = 4  # Minimum number of patches of a block, as in DINOv2; BEiT uses 16.
ASPECTS = 0.3, 1 / 0.3  # Height over width of a block.
ATTEMPTS = 10  # Number of candidates for a block. If none is valid, no more blocks are drawn.


def block_masks(
    keys: jax.Array, counts: jax.Array, grid: tuple[int, int], smallest: int = SMALLEST
) -> jax.Array:
    """Draws a mask for each image, bool `[images, patches]`, True for masked patches.

    Blocks are added to the mask one after the other. A block's area is uniform between `smallest`
    and the number of patches that are left to mask. Its aspect ratio is log-uniform, and its
    position is uniform.

    For each block `ATTEMPTS` candidates are drawn, and the first valid candidate is added. If no
    candidate is valid, for example because all are too large, no more blocks are added. The
    patches that are left to mask are then drawn one by one, as in DINOv3.

    Args:
      keys: a random key for each image.
      counts: number of patches to mask in each image, int32 `[images]`.
      grid: rows and columns of patches.
      smallest: minimum number of patches of a block. A block may be smaller if fewer patches are
        left to mask.
    """
    return jax.vmap(functools.partial(_mask, grid=grid, smallest=smallest))(keys, counts)


def _mask(key: jax.Array, count: jax.Array, grid: tuple[int, int], smallest: int) -> jax.Array:
    blocks, rest = jax.random.split(key)

    def add_block(state):
        mask, number, _ = state
        left = count - mask.sum()
        candidates, fits = _blocks(jax.random.fold_in(blocks, number), mask, left, grid, smallest)
        chosen = candidates[fits.argmax()] & fits.any()
        return mask | chosen, number + 1, ~fits.any()

    mask, _, _ = jax.lax.while_loop(
        lambda state: (state[0].sum() < count) & ~state[2],
        add_block,
        (jnp.zeros(grid, bool), jnp.int32(0), jnp.bool_(False)),
    )
    mask = mask.reshape(-1)
    # `order` starts with the patches of the blocks. All other patches follow in random order. The
    # first `count` patches are masked.
    order = jnp.argsort(jnp.where(mask, -1.0, jax.random.uniform(rest, mask.shape)))
    return jnp.zeros_like(mask).at[order].set(jnp.arange(mask.size) < count)


def _blocks(key: jax.Array, mask: jax.Array, left: jax.Array, grid: tuple[int, int], smallest: int):
    """Draws candidates for a block, bool `[attempts, rows, columns]`, and checks each of them.

    The second result is bool `[attempts]`, True for valid blocks. A block is valid if it is smaller
    than the grid along both axes, and masks at least one and at most `left` patches that are not in
    `mask` yet.
    """
    rows, columns = grid
    area, aspect, down, right = jax.random.uniform(key, (4, ATTEMPTS))
    area = smallest + area * (left - smallest)
    low, high = map(math.log, ASPECTS)
    aspect = jnp.exp(low + aspect * (high - low))
    height = jnp.round(jnp.sqrt(area * aspect)).astype(jnp.int32)
    width = jnp.round(jnp.sqrt(area / aspect)).astype(jnp.int32)
    inside = (height < rows) & (width < columns)
    top = jnp.floor(down * (rows - height + 1)).astype(jnp.int32)
    first = jnp.floor(right * (columns - width + 1)).astype(jnp.int32)
    row, column = jnp.arange(rows)[:, None], jnp.arange(columns)

    def block(top, height, first, width):
        return (row >= top) & (row < top + height) & (column >= first) & (column < first + width)

    made = jax.vmap(block)(top, height, first, width)
    new = (made & ~mask).sum((1, 2))
    return made, inside & (new > 0) & (new <= left)
