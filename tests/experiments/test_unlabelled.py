"""What compares objectives without labels: equal compute, and attention on objects."""

import numpy as np
import pytest

from vit_jax.ledger.laptop import config, steps_of_equal_compute
from vit_jax.ledger.looking import best_jaccard


def test_steps_have_the_compute_of_the_plain_run():
    run = config("ViT-32x4/4")
    assert steps_of_equal_compute(run, {}, 100) == 100
    # A width of 64 in place of 32 costs nearly four times as much.
    assert 25 <= steps_of_equal_compute(run, {"model__dim": 64, "model__hidden": 256}, 100) <= 30


def test_attention_covers_an_object_as_far_as_its_largest_shares_do():
    heads = np.full((1, 2, 2, 2), 0.25)
    heads[0, 1] = [[0.5, 0.3], [0.15, 0.05]]
    mask = np.zeros((1, 4, 4), bool)
    mask[0, :2] = True
    # The second head's two largest patches hold 0.8, the first of them alone 0.5: they are the upper half.
    assert best_jaccard(heads, mask, 0.6) == pytest.approx([1.0])
    assert best_jaccard(heads[:, 1:], mask, 0.4) == pytest.approx([0.5])
    # Three even patches hold 0.75: two of the object, and one that is not.
    assert best_jaccard(heads[:, :1], mask, 0.6) == pytest.approx([2 / 3])
