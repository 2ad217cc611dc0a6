"""Speed of a job's device, from which the job's length is chosen."""

import functools
import time

import jax
import jax.numpy as jnp

from vit_jax.parallel.chips import peak_flops

# The share of a chip's peak, and of a large product's speed, that a small model reaches.
ACHIEVED = 0.4
WIDTH = 1024  # Of the matrices whose product is timed.


@functools.cache
def flops_per_second() -> float:
    """Returns the FLOP/s that a small model may reach on all devices together."""
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
