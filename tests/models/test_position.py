"""Tests of all kinds of position embeddings against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import TINY, assert_vit_equals_reference, count, forward, random_images, random_model
from scipy import interpolate, stats

from vit_jax.models.position import BiasLayout, draw_scale

ROPE = dict(
    position="none", rope="eva02", heads=2
)  # Heads of width 8 have two angles for the row and two for the column.


@pytest.mark.one_variant
@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("pooling", ["cls", "gap"])
@pytest.mark.parametrize(
    "position", ["none", "1d", "2d", "relative", "bias", "sincos2d", "sincos2d_mae"]
)
def test_positions_equal_a_plain_forward_pass(position, pooling, registers):
    assert_vit_equals_reference(position=position, pooling=pooling, registers=registers)


@pytest.mark.one_variant
@pytest.mark.parametrize(("pooling", "registers"), [("cls", 2), ("gap", 0)])
@pytest.mark.parametrize(
    ("position", "position_at"),
    [("1d", "every"), ("2d", "every"), ("1d", "shared"), ("2d", "shared"), ("bias", "shared")],
)
def test_positions_of_all_layers_equal_a_plain_forward_pass(
    position, position_at, pooling, registers
):
    assert_vit_equals_reference(
        position=position, position_at=position_at, pooling=pooling, registers=registers
    )


@pytest.mark.parametrize("position", ["2d", "relative", "sincos2d"])
def test_distillation_token_has_its_own_position(position):
    assert_vit_equals_reference(position=position, distillation="token")


@pytest.mark.one_variant
@pytest.mark.parametrize(("pooling", "registers"), [("cls", 0), ("cls", 2), ("gap", 2)])
@pytest.mark.parametrize("rope_grid", [None, (5, 4)])
def test_rope_turns_complex_pairs(rope_grid, pooling, registers):
    assert_vit_equals_reference(**ROPE, rope_grid=rope_grid, pooling=pooling, registers=registers)


@pytest.mark.one_variant
@pytest.mark.parametrize(("pooling", "registers"), [("cls", 2), ("gap", 0)])
@pytest.mark.parametrize("rope", ["pe", "axial", "dinov3", "mixed"])
def test_every_rope_turns_complex_pairs(rope, pooling, registers):
    assert_vit_equals_reference(**(ROPE | dict(rope=rope)), pooling=pooling, registers=registers)


def test_rope_of_pe_uses_the_pretraining_grid_and_starts_with_the_column():
    assert_vit_equals_reference(**(ROPE | dict(rope="pe")), rope_grid=(5, 4))


def test_rope_can_be_combined_with_learned_positions():
    assert_vit_equals_reference(**(ROPE | dict(position="1d")))


def test_rope_grid_is_the_models_grid_by_default():
    images = random_images(2, 8, 12)
    own, same, other = (
        forward(random_model(**(TINY | ROPE), rope_grid=grid), images)
        for grid in (None, (2, 3), (4, 6))
    )
    np.testing.assert_array_equal(own, same)
    assert not np.allclose(own, other, atol=1e-3)


def test_training_stretches_coordinates_evenly_on_a_logarithmic_scale():
    scales = np.array([draw_scale(2.0, key) for key in jax.random.split(jax.random.key(0), 500)])
    assert stats.kstest(np.log2(scales), "uniform", (-1, 2)).pvalue > 0.01


def test_only_training_stretches_coordinates():
    images, rope = random_images(2, 8, 12), ROPE | dict(rope="dinov3")
    plain, stretched = (random_model(**(TINY | rope), rope_rescale=most) for most in (1.0, 2.0))
    np.testing.assert_array_equal(forward(stretched, images), forward(plain, images))
    np.testing.assert_array_equal(forward(plain, images, seed=0), forward(plain, images))
    first, other = (forward(stretched, images, seed=seed) for seed in (0, 1))
    assert not np.allclose(first, other, atol=1e-3)


def test_biases_are_resized_by_a_spline_through_the_old_ones():
    """Equals BEiT's interpolation of biases.

    The reference uses another spline of SciPy, and computes the sums of the geometric series in a
    loop.
    """
    layout, table = BiasLayout((4, 5), 1, 0), np.random.default_rng(0).normal(size=(7 * 9 + 3, 2))
    resized = np.asarray(layout.resized(jnp.asarray(table, jnp.float32), (6, 7)))
    axes = []
    for old, reach in (
        (3, 5),
        (4, 6),
    ):  # Finds the ratio with which a sum of `old` terms reaches the new end.
        low, high = 1.01, 1.5
        for _ in range(60):
            ratio = (low + high) / 2
            low, high = (low, ratio) if sum(ratio**i for i in range(old)) > reach else (ratio, high)
        steps = [sum(ratio**i for i in range(count)) for count in range(1, old + 1)]
        axes.append(np.array([-step for step in steps[::-1]] + [0] + steps))
    for head in range(2):
        spline = interpolate.RectBivariateSpline(*axes, table[:63, head].reshape(7, 9))
        expected = spline(np.arange(-5, 6), np.arange(-6, 7)).ravel()
        np.testing.assert_allclose(resized[:-3, head], expected, atol=2e-4)
    np.testing.assert_array_equal(resized[-3:], table[-3:].astype(np.float32))


def test_without_positions_the_order_of_patches_has_no_effect():
    images = random_images(2, 8, 12)
    # Swaps the two rows of patches.
    swapped = np.concatenate([images[:, 4:], images[:, :4]], axis=1)
    for position, same in (("none", True), ("1d", False)):
        model = random_model(**TINY, position=position)
        assert np.allclose(forward(model, images), forward(model, swapped), atol=1e-5) is same


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        (dict(position="none"), -7 * 16),
        (dict(position="2d"), (2 + 3) * 8 + 16 - 7 * 16),
        (dict(position="sincos2d"), -7 * 16),
        (dict(position="relative"), 2 * (11 + 3) * 4 - 7 * 16),
        (dict(position="relative", pooling="gap"), 2 * 11 * 4 - 7 * 16 - 16),
        (dict(position_at="every"), 7 * 16),
        (dict(position_at="shared"), 0),
        (dict(position="2d", position_at="every"), 2 * ((2 + 3) * 8 + 16) - 7 * 16),
        (dict(position="bias"), 2 * (3 * 5 + 3) * 4 - 7 * 16),
        (dict(position="bias", pooling="gap"), 2 * 3 * 5 * 4 - 7 * 16 - 16),
        (dict(rope="eva02"), 0),
        (dict(rope="mixed"), 2 * 2 * 4 * 2),
    ],
)
def test_positions_have_the_expected_number_of_parameters(overrides, more):
    plain, other = (count("ViT-Ti/4", **(TINY | changed)) for changed in ({}, overrides))
    assert other - plain == more


@pytest.mark.parametrize(("pre_logits", "parameters"), [(False, 21_974_632), (True, 22_122_472)])
def test_fixed_positions_are_no_parameters(pre_logits, parameters):
    assert (
        count("ViT-S/16", position="sincos2d", pooling="gap", pre_logits=pre_logits) == parameters
    )
