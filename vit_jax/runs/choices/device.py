"""Estimated speed of the devices, and the available time. They determine a run's length."""

import functools
import time

import jax
import jax.numpy as jnp

from vit_jax.options.run import RunOptions
from vit_jax.parallel.chips import peak_flops

MINUTES = 10.0  # Default duration of a run on CPUs.
# Speed of a small model in FLOP/s, divided by the chip's peak FLOP/s. If the peak is unknown, the
# speed is divided by the measured FLOP/s of a large matrix product.
ACHIEVED = 0.4
WIDTH = 1024  # Width of the matrices in the timed product.


def on_cpu() -> bool:
    """Returns True if the run trains on CPUs."""
    return jax.default_backend() == "cpu"


def available_seconds(config: RunOptions) -> float | None:
    """Returns the available time in seconds; None: no limit, the default on accelerators."""
    if config.minutes is not None:
        return 60 * config.minutes
    return 60 * MINUTES if on_cpu() else None


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
