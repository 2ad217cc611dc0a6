"""GELU and its gradient equal those from the normal distribution, in float32 and bfloat16."""

import math

import jax
import numpy as np
import pytest

from vit_jax.models.layers import GELUS


@pytest.mark.parametrize("dtype, atol", [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_exact_gelu_is_the_share_of_a_normal_distribution(dtype, atol):
    x = np.linspace(-12, 12, 97).astype(dtype)
    places = x.astype(float)
    share = np.array([0.5 * math.erfc(-place / math.sqrt(2)) for place in places])
    density = np.exp(-(places**2) / 2) / math.sqrt(2 * math.pi)
    value, slope = jax.vmap(jax.value_and_grad(GELUS["erf"]))(x)
    assert value.dtype == slope.dtype == dtype
    np.testing.assert_allclose(value.astype(float), places * share, rtol=1e-2, atol=atol)
    np.testing.assert_allclose(slope.astype(float), share + places * density, rtol=1e-2, atol=atol)
