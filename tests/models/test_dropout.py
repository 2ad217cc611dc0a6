"""Tests of dropout's random numbers: their rate, independence and cost."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.models.dropout import draw16, drop

ODD = (64, 197, 96)  # The number of tokens is not divisible by four.


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_rate_is_the_share_of_zeros_and_the_mean_is_kept(rate):
    x = np.asarray(drop(jnp.ones(ODD), rate, nnx.Rngs(dropout=0)))
    four_deviations = 4 * np.sqrt(rate * (1 - rate) / x.size)
    assert (x == 0).mean() == pytest.approx(rate, abs=four_deviations)
    np.testing.assert_allclose(x[x != 0], 1 / (1 - rate), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.1, np.float32(0.1)])
def test_bfloat16_keeps_its_dtype_and_is_scaled_up_to_rounding(rate):
    x = jnp.full((64, 4, 4), 3.0, jnp.bfloat16)
    dropped = drop(
        x, jnp.asarray(rate) if isinstance(rate, np.floating) else rate, nnx.Rngs(dropout=0)
    )
    assert dropped.dtype == jnp.bfloat16
    assert set(np.unique(dropped.astype(np.float32))) == {0, float(jnp.bfloat16(3 / 0.9))}


def test_numbers_are_uniform():
    numbers = np.stack(draw16(jax.random.key(0), ODD))
    assert numbers.shape == (4, 64, 50, 96) and numbers.max() < 2**16
    # A chi-squared test with 255 degrees of freedom and a bound of four standard deviations.
    for bits in (numbers & 0xFF, numbers >> 8):
        expected = numbers.size / 256
        deviation = ((np.bincount(bits.ravel(), minlength=256) - expected) ** 2 / expected).sum()
        assert abs(deviation - 255) < 4 * np.sqrt(2 * 255)


def test_numbers_of_one_block_are_independent():
    quarters = np.stack(draw16(jax.random.key(0), (50, 200, 96))).reshape(4, -1).astype(np.float64)
    for one, other in itertools.combinations(quarters, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(one.size)
        assert abs(np.corrcoef(one < 6554, other < 6554)[0, 1]) < 4 / np.sqrt(one.size)


def test_no_axis_repeats_its_numbers():
    numbers = np.stack(draw16(jax.random.key(0), (5, 3, 7, 6)))
    for axis in range(5):
        lines = np.moveaxis(numbers, axis, 0)
        assert len({line.tobytes() for line in lines}) == len(lines)


def test_one_number_is_drawn_for_axes_of_size_one():
    x = np.asarray(drop(jnp.ones((2000, 3, 4)), 0.5, nnx.Rngs(dropout=0), (2000, 1, 1)))
    assert (x == x[:, :1, :1]).all()
    assert (x[:, 0, 0] == 0).mean() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(2000))


def test_a_block_of_random_bits_gives_four_numbers():
    jaxpr = jax.make_jaxpr(lambda key: draw16(key, (8, 200, 96)))(jax.random.key(0))
    (drawn,) = [e for e in jaxpr.eqns if e.primitive.name == "threefry2x32"]
    assert drawn.outvars[0].aval.size == 8 * 200 * 96 // 4
