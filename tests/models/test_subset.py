"""Tests of stochastic depth that computes a branch only for images that keep it, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import TINY, forward, random_images, random_model

from vit_jax.errors import UserError
from vit_jax.models.dropout import add_for_subset, draw_subset, subset_sizes

SUBSET = dict(depth_by="subset", stochastic_depth=0.4, uniform_depth=True)


def random_tokens(images: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(images, 3, 16)).astype(np.float32)


def drawn_images(images: int, rate: float, rngs: nnx.Rngs) -> list[int]:
    """Returns the batch indices of the images that keep a branch."""
    size = subset_sizes(images, rate)[1]
    drawn = np.asarray(draw_subset(images, rate, rngs))
    return [group * size + image for group, row in enumerate(drawn) for image in row]


@pytest.mark.parametrize(
    ("images", "rate", "sizes"),
    [
        (64, 0.3, (2, 32, 22)),
        (48, 0.4, (3, 16, 10)),
        (24, 0.4, (3, 8, 5)),
        (12, 0.3, (1, 12, 8)),
        (7, 0.99, (1, 7, 1)),
        (32, 0.01, (1, 32, 32)),
    ],
)
def test_groups_are_of_32_or_a_power_of_two_and_keep_their_share(images, rate, sizes):
    assert subset_sizes(images, rate) == sizes


def test_each_image_and_each_pair_of_a_group_is_kept_equally_often():
    draws, groups, size, kept = 4000, 3, 8, 5
    keys = jax.random.split(jax.random.key(0), draws)
    rows = jax.vmap(lambda key: draw_subset(groups * size, 0.4, nnx.Rngs(dropout=key)))(keys)
    chosen = np.zeros((draws, groups, size))
    np.put_along_axis(chosen, np.asarray(rows), 1, axis=-1)
    assert (chosen.sum(axis=-1) == kept).all()  # Images are drawn without replacement.
    chosen = chosen.reshape(draws, -1)
    one, two = kept / size, kept * (kept - 1) / (size * (size - 1))
    same_group = np.kron(np.eye(groups), np.ones((size, size)))
    # Images of different groups are drawn independently.
    expected = np.where(same_group, two, one**2)
    np.fill_diagonal(expected, one)
    np.testing.assert_allclose(chosen.T @ chosen / draws, expected, atol=4.5 * 0.5 / np.sqrt(draws))


def test_mean_over_draws_is_the_full_branch():
    x, draws = random_tokens(16), 4000
    keys = jax.random.split(jax.random.key(0), draws)
    found = jax.vmap(lambda key: add_for_subset(x, jnp.sin, 0.4, nnx.Rngs(dropout=key)))(keys)
    np.testing.assert_allclose(
        found.mean(axis=0), x + np.sin(x), atol=4.5 * np.sqrt(3 / 5) / np.sqrt(draws)
    )


def test_branch_gets_only_the_kept_images():
    x, seen = random_tokens(64), []

    def branch(x):
        seen.append(np.asarray(x))
        return x

    add_for_subset(x, branch, 0.3, nnx.Rngs(dropout=0))
    np.testing.assert_array_equal(seen[0], x[drawn_images(64, 0.3, nnx.Rngs(dropout=0))])
    assert len(seen[0]) == 2 * 22


def test_rate_that_drops_no_image_of_a_group_is_the_plain_sum():
    x = random_tokens(32)
    np.testing.assert_array_equal(
        add_for_subset(x, jnp.sin, 0.01, nnx.Rngs(dropout=0)), x + jnp.sin(x)
    )


@pytest.mark.one_variant
@pytest.mark.parametrize("norm_at", ["before", "after"])
def test_layer_equals_a_loop_over_images(norm_at):
    block = random_model(**TINY, **SUBSET, norm_at=norm_at).blocks["01"]
    x, rngs = random_tokens(48), nnx.Rngs(dropout=0)
    expected, before = np.array(x), norm_at == "before"
    for layer, norm in ((block.attention, block.norm1), (block.mlp, block.norm2)):
        for image in drawn_images(48, 0.4, rngs):
            tokens = expected[image : image + 1]
            change = layer(norm(tokens)) if before else norm(layer(tokens))
            expected[image] += np.asarray(change)[0] * 16 / 10
    np.testing.assert_allclose(forward(block, x, seed=0), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("images", [32, 96])
def test_each_group_changes_the_configured_number_of_images(images):
    block = random_model(**TINY, **SUBSET).blocks["01"]
    block.mlp.fc2.kernel[...] *= 0
    block.mlp.fc2.bias[...] *= 0
    x = random_tokens(images)
    changed = (forward(block, x, seed=0) != x).any(axis=(1, 2)).reshape(-1, 32)
    assert changed.sum(axis=1).tolist() == [19] * (images // 32)
    # Each group has its own random draw.
    assert len({row.tobytes() for row in changed}) == images // 32


def test_gradients_equal_those_of_a_scaled_and_masked_branch():
    rate, images = 0.3, 24
    x = jnp.asarray(random_tokens(images))
    kernel = jnp.asarray(np.random.default_rng(3).normal(size=(16, 16)), jnp.float32)
    mask = np.zeros((images, 1, 1), np.float32)
    mask[drawn_images(images, rate, nnx.Rngs(dropout=0))] = 8 / 6

    def by_subset(x, kernel):
        return add_for_subset(x, lambda x: jnp.tanh(x @ kernel), rate, nnx.Rngs(dropout=0))

    def by_mask(x, kernel):
        return x + mask * jnp.tanh(x @ kernel)

    weights = random_tokens(images)[::-1]
    subset, masked = (
        jax.grad(lambda x, kernel, f=f: (weights * f(x, kernel)).sum(), (0, 1))(x, kernel)
        for f in (by_subset, by_mask)
    )
    for found, expected in zip(subset, masked, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_evaluation_computes_every_image():
    images = random_images(8, 8, 12)
    by_subset, plain = (random_model(**TINY, **values) for values in (SUBSET, {}))
    np.testing.assert_array_equal(forward(by_subset, images), forward(plain, images))


def test_layer_that_computes_only_read_tokens_skips_the_same_images():
    block, x = random_model(**TINY, **SUBSET).blocks["01"], random_tokens(16)
    some, whole = jax.jit(
        lambda x: [block(x, nnx.Rngs(dropout=0), read=read) for read in (1, None)]
    )(x)
    np.testing.assert_allclose(some, whole[:, :1], rtol=1e-4, atol=1e-5)


def test_axial_layers_skip_whole_images():
    values = TINY | SUBSET | dict(attention="axial", pooling="gap")
    block = random_model(**values).blocks["01"]
    for layer in (block.row.mlp.fc2, block.column.mlp.fc2, block.column.attention.out):
        layer.kernel[...] *= 0
        layer.bias[...] *= 0
    x = np.random.default_rng(2).normal(size=(32, 6, 16)).astype(np.float32)
    # Number of changed tokens in each image.
    changed = (forward(block, x, seed=0) != x).any(axis=2).sum(axis=1)
    assert sorted(changed.tolist()) == [0] * 13 + [6] * 19


def test_scanned_layers_skip_the_same_images_as_unrolled_layers():
    images = random_images(16, 8, 12)
    one_by_one, scanned = (
        forward(random_model(**TINY, **SUBSET, scan=scan), images, seed=0) for scan in (False, True)
    )
    np.testing.assert_allclose(scanned, one_by_one, rtol=1e-4, atol=1e-4)


def test_scan_over_layers_that_keep_different_numbers_of_images_is_refused():
    with pytest.raises(UserError, match="model.uniform_depth=True, or model.scan=False"):
        random_model(**(TINY | SUBSET | dict(scan=True, uniform_depth=False)))
