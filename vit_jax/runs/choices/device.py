"""Estimated speed of the devices. Automatic settings use it to choose a run's length."""

import functools
import time

import jax
import jax.numpy as jnp

from vit_jax.parallel.chips import peak_flops

# Speed of a small model in FLOP/s, divided by the chip's peak FLOP/s. If the peak is unknown, the
# speed is divided by the measured FLOP/s of a large matrix product.
ACHIEVED = 0.4
WIDTH = 1024  # Width of the matrices in the timed product.


@functools.cache
def flops_per_second() -> float:
    """Estimates the speed of a small model on all devices together, in FLOP/s."""
    device = jax.devices()[0]
    if peak := peak_flops(device.device_kind):
        return ACHIEVED * peak * jax.device_count()
    matrix = jnp.ones((WIDTH, WIDTH), jnp.float32)
    product = jax.jit(lambda x: x @ x / WIDTH)
    product(matrix).block_until_ready()
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        product(matrix).block_until_ready()
        seconds.append(time.perf_counter() - begun)
    return ACHIEVED * 2 * WIDTH**3 / min(seconds)
