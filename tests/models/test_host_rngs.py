"""Keys of random numbers that are computed with NumPy equal JAX's keys."""

import jax
import jax.monitoring
import numpy as np
import pytest
from flax import nnx

import vit_jax
from vit_jax.models.host_rngs import host_rngs


def assert_equal(keys, other) -> None:
    assert keys.dtype == other.dtype
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(other))


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 5, 2**32 - 1, 2**33 + 1, -1])
def test_keys_equal_those_of_flax(seed):
    ours, flax = host_rngs(seed), nnx.Rngs(seed)
    for _ in range(20):
        assert_equal(ours.params(), flax.params())
        assert_equal(ours(), flax())
    assert_equal(ours.default.fork()(), flax.default.fork()())
    assert_equal(ours.split(3).default.key[...], flax.split(3).default.key[...])
    assert_equal(ours.dropout(), flax.dropout())


def test_keys_of_another_generator_equal_those_of_flax():
    with jax.default_prng_impl("rbg"):
        assert_equal(host_rngs(3)(), nnx.Rngs(3)())


def test_keys_in_compiled_functions_equal_those_of_flax():
    @nnx.jit
    def draw(rngs):
        return rngs.params(), rngs()

    ours, flax = host_rngs(3), nnx.Rngs(3)
    for _ in range(2):
        for key, other in zip(draw(ours), draw(flax), strict=True):
            assert_equal(key, other)
        assert_equal(ours(), flax())
    assert_equal(jax.jit(lambda: host_rngs(3)())(), nnx.Rngs(3)())


def test_creating_a_model_compiles_nothing():
    compiled = []

    def listen(event: str, seconds: float, **details) -> None:
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        # Sizes that no other test uses, so that nothing was compiled before.
        sizes = dict(dim=44, heads=2, mlp_dim=92, depth=1, num_classes=13)
        vit_jax.create_model("ViT-Ti/16", image_size=80, **sizes)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
