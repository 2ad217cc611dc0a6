"""Tests of prototype heads, Sinkhorn-Knopp and KoLeo against NumPy and their definitions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.training.objectives.prototypes import (
    PrototypeHead,
    entropy,
    koleo,
    sinkhorn,
    views_matched,
)

ERF = np.vectorize(math.erf)
RNG = np.random.default_rng(3)


def balanced(logits, iterations=3):
    """Returns the result of Sinkhorn-Knopp iterations, in float64."""
    plan = np.exp(logits.astype(np.float64)).T
    plan /= plan.sum()
    prototypes, samples = plan.shape
    for _ in range(iterations):
        plan /= plan.sum(1, keepdims=True) * prototypes
        plan /= plan.sum(0, keepdims=True) * samples
    return (plan * samples).T


def test_sinkhorn_is_that_of_its_definition():
    logits = RNG.uniform(-1, 1, size=(24, 10)).astype(np.float32) / 0.05
    found = jax.jit(sinkhorn)(logits, np.ones(24, np.float32))
    np.testing.assert_allclose(found, balanced(logits), rtol=2e-4, atol=1e-7)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)


def test_sinkhorn_of_logits_that_overflow_is_finite():
    found = sinkhorn(jnp.asarray(RNG.normal(size=(8, 4)).astype(np.float32)) * 1e4, jnp.ones(8))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)


def test_samples_of_weight_zero_change_nothing():
    logits = RNG.normal(size=(12, 6)).astype(np.float32) * 5
    weights = np.arange(12) < 7
    found = sinkhorn(jnp.asarray(logits), jnp.asarray(weights, jnp.float32))
    np.testing.assert_allclose(found[:7], sinkhorn(jnp.asarray(logits[:7]), jnp.ones(7)), rtol=1e-5)
    assert not np.asarray(found[7:]).any()


@pytest.mark.parametrize("group", [None, 4])
def test_koleo_is_minus_the_log_of_the_distance_to_the_nearest(group):
    x = RNG.normal(size=(12, 5)).astype(np.float32)
    directions = x / np.linalg.norm(x, axis=1, keepdims=True)
    distances = np.linalg.norm(directions[:, None] - directions, axis=-1)
    distances[np.arange(12)[:, None] // (group or 12) != np.arange(12) // (group or 12)] = np.inf
    np.fill_diagonal(distances, np.inf)
    np.testing.assert_allclose(koleo(jnp.asarray(x), group), -np.log(distances.min(1)), rtol=1e-4)


@pytest.mark.parametrize("images", [1, 7])
def test_koleo_ignores_padding(images):
    x = RNG.normal(size=(images, 5)).astype(np.float32)
    filled = np.concatenate([x, x[:1], np.zeros((3, 5), np.float32)])
    seen = jax.jit(koleo)(filled, real=np.arange(len(filled)) < images)[:images]
    expected = jax.jit(koleo)(x) if images > 1 else [0.0]
    np.testing.assert_array_equal(seen, expected)


def test_a_view_is_matched_if_its_nearest_view_is_of_the_same_image():
    x = RNG.normal(size=(9, 2, 3)).astype(np.float32)
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    x[5:] = x[0, :1]  # Copies of the first view of the first image; some of them are padding.
    nearest = [np.argmin([np.linalg.norm(a[0] - b[1]) for b in x[:7]]) for a in x]
    expected = np.array(nearest) == np.arange(9)
    assert 0 < expected[:7].mean() < 1
    np.testing.assert_array_equal(views_matched(jnp.asarray(x), jnp.arange(9) < 7), expected)


def test_the_gradient_of_koleo_increases_the_distance_of_neighbours():
    x = jnp.array([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0]])
    slope = jax.grad(lambda x: koleo(x).mean())(x)
    assert slope[0, 1] > 0 > slope[1, 1]


@pytest.mark.parametrize("lengths", ["one", "learned", "free"])
def test_head_compares_directions_with_prototypes(lengths):
    head = PrototypeHead(6, 8, 4, 10, lengths, rngs=nnx.Rngs(0))
    if lengths == "learned":
        head.gains[...] = jnp.linspace(0.5, 2, 10)
    x = RNG.normal(size=(3, 6)).astype(np.float32)
    hidden = x
    for index, layer in head.layers.items():
        if index != "0":
            gelu = 0.5 * hidden * (1 + ERF(hidden / np.sqrt(2)))
            hidden = gelu
        hidden = hidden @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
    hidden = hidden / np.linalg.norm(hidden, axis=1, keepdims=True)
    prototypes = np.asarray(head.prototypes[...])
    length = np.linalg.norm(prototypes, axis=0)
    factor = {"one": 1 / length, "learned": np.linspace(0.5, 2, 10) / length, "free": 1}[lengths]
    np.testing.assert_allclose(
        head(jnp.asarray(x)), hidden @ (prototypes * factor), rtol=2e-4, atol=1e-6
    )


def test_entropy_of_an_even_distribution_is_the_log_of_its_size():
    assert entropy(jnp.full((2, 8), 1 / 8)) == pytest.approx(np.log([8, 8]))
    assert entropy(jnp.eye(3)) == pytest.approx([0, 0, 0])
