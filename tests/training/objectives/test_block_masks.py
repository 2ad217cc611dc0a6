"""Tests of block masks: exact numbers of masked patches, and the authors' distribution of masks."""

import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.training.objectives.block_masks import SMALLEST, block_masks

GRID = 14, 14
# Tests compile without optimization by default. Here, optimized code draws the masks of 3,000
# images ten times as fast, which saves more time than its compilation costs.
draw = jax.jit(
    block_masks,
    static_argnums=(2, 3),
    compiler_options={"xla_backend_optimization_level": 1},
)


def masks_of(count: int, images: int, grid=GRID, seed=0, smallest=4):
    keys = jax.random.split(jax.random.key(seed), images)
    made = draw(keys, jnp.full(images, count, jnp.int32), grid, smallest)
    return np.asarray(made).reshape(images, *grid)


@pytest.mark.parametrize("grid", [(14, 14), (4, 4), (2, 2), (5, 9)])
def test_masks_have_exactly_the_given_number_of_patches(grid):
    patches = math.prod(grid)
    counts = jnp.array([1, patches // 3 or 1, patches // 2, patches - 1], jnp.int32)
    found = draw(jax.random.split(jax.random.key(1), 4), counts, grid, SMALLEST)
    assert found.sum(1).tolist() == counts.tolist()


def by_the_definition(count: int, rng: random.Random, smallest: int) -> np.ndarray:
    """Draws a mask step by step, by BEiT's algorithm 1 with DINOv3's completion."""
    rows, columns = GRID
    mask, left = np.zeros(GRID, bool), count
    while left > 0:
        for _ in range(10):
            area = rng.uniform(smallest, left)
            aspect = math.exp(rng.uniform(math.log(0.3), -math.log(0.3)))
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if height >= rows or width >= columns:
                continue
            top, first = rng.randint(0, rows - height), rng.randint(0, columns - width)
            block = mask[top : top + height, first : first + width]
            added = block.size - np.count_nonzero(block)
            if 0 < added <= left:
                block[:] = True
                left -= added
                break
        else:
            free = np.flatnonzero(~mask)
            mask.reshape(-1)[rng.sample(free.tolist(), left)] = True
            break
    return mask


@pytest.mark.parametrize(("count", "smallest"), [(20, 4), (60, 4), (98, 4), (80, 16)])
def test_masks_have_the_distribution_of_the_definition(count, smallest):
    rng, images = random.Random(0), 3000
    ours = masks_of(count, images, smallest=smallest).astype(float)
    theirs = np.stack([by_the_definition(count, rng, smallest) for _ in range(images)]).astype(
        float
    )
    # Compares the fraction of images in which a patch is masked, and how often neighbours are
    # masked together.
    error = math.sqrt(0.5 / images)
    assert np.abs(ours.mean(0) - theirs.mean(0)).max() < 5 * error
    together = [(x[:, 1:] * x[:, :-1]).sum((1, 2)) for x in (ours, theirs)]
    spread = max(np.std(each) for each in together)
    assert abs(together[0].mean() - together[1].mean()) < 5 * spread * math.sqrt(2 / images)
    assert np.std(together[0]) == pytest.approx(np.std(together[1]), rel=0.15)


def test_images_have_different_masks_that_depend_only_on_keys():
    made = masks_of(40, 8)
    assert len({mask.tobytes() for mask in made}) == 8
    np.testing.assert_array_equal(made, masks_of(40, 8))
