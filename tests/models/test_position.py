"""Every kind of position against a plain forward pass."""

import numpy as np
import pytest
from reference import TINY, assert_vit_equals_reference, count, forward, random_images, random_model

ROPE = dict(position="none", rope=True, heads=2)  # Heads of 8: two angles for a row, two for a column.


@pytest.mark.one_variant
@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("pooling", ["cls", "gap"])
@pytest.mark.parametrize("position", ["none", "1d", "2d", "relative", "sincos2d", "sincos2d_mae"])
def test_positions_equal_a_plain_forward_pass(position, pooling, registers):
    assert_vit_equals_reference(position=position, pooling=pooling, registers=registers)


@pytest.mark.one_variant
@pytest.mark.parametrize(("pooling", "registers"), [("cls", 2), ("gap", 0)])
@pytest.mark.parametrize("position_at", ["every", "shared"])
@pytest.mark.parametrize("position", ["1d", "2d"])
def test_positions_of_all_layers_equal_a_plain_forward_pass(position, position_at, pooling, registers):
    assert_vit_equals_reference(
        position=position, position_at=position_at, pooling=pooling, registers=registers
    )


@pytest.mark.parametrize("position", ["2d", "relative", "sincos2d"])
def test_distillation_token_has_a_place_of_its_own(position):
    assert_vit_equals_reference(position=position, distillation="token")


@pytest.mark.one_variant
@pytest.mark.parametrize(("pooling", "registers"), [("cls", 0), ("cls", 2), ("gap", 2)])
@pytest.mark.parametrize("rope_grid", [None, (5, 4)])
def test_rope_turns_complex_pairs(rope_grid, pooling, registers):
    assert_vit_equals_reference(**ROPE, rope_grid=rope_grid, pooling=pooling, registers=registers)


def test_rope_stands_beside_learned_positions():
    assert_vit_equals_reference(**(ROPE | dict(position="1d")))


def test_rope_grid_is_the_models_own_without_another():
    images = random_images(2, 8, 12)
    own, same, other = (
        forward(random_model(**(TINY | ROPE), rope_grid=grid), images) for grid in (None, (2, 3), (4, 6))
    )
    np.testing.assert_array_equal(own, same)
    assert not np.allclose(own, other, atol=1e-3)


def test_without_positions_the_order_of_patches_is_nothing():
    images = random_images(2, 8, 12)
    swapped = np.concatenate([images[:, 4:], images[:, :4]], axis=1)  # The two rows of patches.
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
        (dict(rope=True), 0),
    ],
)
def test_positions_have_as_many_parameters_as_they_say(overrides, more):
    plain, other = (count("ViT-Ti/4", **(TINY | changed)) for changed in ({}, overrides))
    assert other - plain == more


@pytest.mark.parametrize(("pre_logits", "parameters"), [(False, 21_974_632), (True, 22_122_472)])
def test_fixed_positions_are_no_parameters(pre_logits, parameters):
    assert count("ViT-S/16", position="sincos2d", pooling="gap", pre_logits=pre_logits) == parameters
