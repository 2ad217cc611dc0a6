"""The order of examples: permutations, mixtures, and random access to any step of a run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vit_jax.data.order import BLOCK, Order, permute
from vit_jax.errors import UserError

FAR = 2**61


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 2**40))
def test_permutation_takes_every_place_once(size, seed, epoch):
    assert sorted(permute(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**20, 2**31 + 11, 3 * 10**9])
def test_large_permutation_stays_inside_and_distinct(size):
    places = np.random.default_rng(0).choice(size, 5000, replace=False)
    moved = permute(places, size, 1)
    assert len(set(moved.tolist())) == len(set(places.tolist()))
    assert moved.min() >= 0 and moved.max() < size


@pytest.mark.parametrize("size", [3, 5, 8, 37])
def test_every_pair_of_neighbours_is_equally_likely(size):
    draws = 4000
    counts = np.zeros((size, size))
    seeds = np.arange(draws)
    np.add.at(counts, (permute(0 * seeds, size, seeds), permute(0 * seeds + 1, size, seeds)), 1)
    pairs = counts[~np.eye(size, dtype=bool)]
    expected = draws / len(pairs)
    deviation = ((pairs - expected) ** 2 / expected).sum() / (
        len(pairs) - 1
    )  # The expected value is 1 for a random permutation.
    assert deviation < 2


@given(st.integers(1, 500), st.integers(0, 10**6))
def test_epoch_holds_every_example_once(size, epoch):
    order = Order(0, (size,))
    assert sorted(order(np.arange(epoch * size, (epoch + 1) * size)).tolist()) == list(range(size))


def test_seeds_do_not_share_epochs():
    epochs = {
        tuple(Order(seed, (50,))(np.arange(epoch * 50, (epoch + 1) * 50)))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(epochs) == 25


def test_index_at_a_position_does_not_depend_on_other_positions():
    order = Order(3, (100, 7), (0.7, 0.3))
    positions = np.arange(FAR, FAR + 300)
    alone = [order(positions[i : i + 1])[0] for i in range(300)]
    assert order(positions).tolist() == alone


def test_parts_without_weights_are_one_permutation():
    order = Order(0, (10, 5))
    assert sorted(order(np.arange(15)).tolist()) == list(range(15))


def test_mixture_meets_its_shares_in_every_block():
    order = Order(0, (1000, 10), (3, 1))
    for block in (0, 7, FAR // BLOCK):
        indices = order(np.arange(block * BLOCK, (block + 1) * BLOCK))
        assert (indices >= 1000).sum() == BLOCK // 4


def test_mixture_meets_its_shares_in_every_batch():
    indices = Order(0, (1000, 1000, 10), (0.5, 0.3, 0.2))(np.arange(4096)).reshape(16, 256)
    for batch in indices:
        assert np.abs((batch < 1000).sum() - 128) <= 1
        assert np.abs((batch >= 2000).sum() - 51.2) <= 2


def test_every_part_of_a_mixture_goes_through_its_own_epochs():
    indices = Order(0, (40, 9), (0.6, 0.4))(np.arange(2000))
    for start, size in ((0, 40), (40, 9)):
        own = [i - start for i in indices.tolist() if start <= i < start + size]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_mixture_continues_across_blocks():
    size = 70_000  # Larger than a block.
    indices = Order(0, (size, 3), (0.5, 0.5))(np.arange(3 * BLOCK))
    own = indices[indices < size][:size]
    assert len(set(own.tolist())) == size


def test_share_below_a_block_is_refused():
    with pytest.raises(UserError, match="data.weights"):
        Order(0, (10, 10), (1.0, 1e-7))(np.arange(3))


@pytest.mark.parametrize("epoch", [0, 3])
def test_repeats_are_the_first_images_of_each_epochs_permutation_in_a_row(epoch):
    positions = np.arange(epoch * 60, (epoch + 1) * 60)
    plain, repeated = Order(1, (60,))(positions), Order(1, (60,), repeats=3)(positions)
    assert repeated.tolist() == np.repeat(plain[:20], 3).tolist()


@given(st.integers(8, 500), st.integers(2, 4), st.integers(0, 10**6))
def test_images_are_repeated_as_often_where_epochs_do_not_divide(size, repeats, turn):
    groups = Order(0, (size,), repeats=repeats)(np.arange(turn * repeats, turn * repeats + size))
    images = groups[: size // repeats * repeats].reshape(-1, repeats)
    assert (images == images[:, :1]).all()


def test_mixture_repeats_the_images_of_its_parts_and_meets_its_shares():
    sizes, weights = (40, 9), (0.6, 0.4)
    positions = np.arange(3000)
    once, thrice = Order(0, sizes, weights)(positions), Order(0, sizes, weights, 3)(positions)
    assert ((once >= 40)[:1000] == (thrice >= 40)[::3]).all()
    assert (thrice.reshape(-1, 3) == thrice[::3, None]).all()
    assert len({*thrice.tolist()}) == 49
