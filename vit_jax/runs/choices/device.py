"""Speed of a job's device, which determines the job's length."""

import functools
import time

import jax
import jax.numpy as jnp

from vit_jax.parallel.chips import peak_flops

# Speed of a small model relative to a chip's peak, and to a large matrix product.
ACHIEVED = 0.4
WIDTH = 1024  # Width of the matrices in the timed product.


@functools.cache
def flops_per_second() -> float:
    """Estimates the FLOP/s of a small model on all devices together."""
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
