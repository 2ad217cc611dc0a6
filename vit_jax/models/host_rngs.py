"""Random keys computed with NumPy: they equal JAX's keys, but nothing must be compiled.

Compiling JAX's functions for keys takes longer than all other work for the first small model.
"""

import jax
import numpy as np
from flax import nnx

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_WORD = 2**32 - 1  # Largest value of a word of 32 bits.


def host_rngs(seed: int) -> nnx.Rngs:
    """Returns an object that gives the same keys as `nnx.Rngs(seed)`."""
    if jax.config.jax_default_prng_impl != "threefry2x32" or not 0 <= seed <= _WORD:
        return nnx.Rngs(seed)
    rngs = nnx.Rngs()
    rngs.default = _HostStream(jax.random.wrap_key_data(np.array([0, seed], np.uint32)))
    return rngs


class _HostStream(nnx.RngStream):
    """Stream of keys like `nnx.RngStream`; keys are computed on the host unless JAX traces them."""

    def __init__(self, key: jax.Array, *, tag: str = "default"):
        self.tag = tag
        self.key = nnx.RngKey(key, tag=tag)
        self.count = nnx.RngCount(np.uint32(0), tag=tag)

    def __call__(self) -> jax.Array:
        key, count = self.key[...], self.count.get_value()
        self.count.set_value(count + np.uint32(1))
        words = jax.random.key_data(key)
        if isinstance(words, jax.core.Tracer) or isinstance(count, jax.core.Tracer):
            return jax.random.fold_in(key, count)
        words = _threefry(*np.asarray(words).tolist(), 0, int(count))
        return jax.random.wrap_key_data(np.array(words, np.uint32))


def _threefry(key0: int, key1: int, x0: int, x1: int) -> tuple[int, int]:
    """Encrypts two words with the block cipher Threefry-2x32-20 (Salmon et al., 2011)."""
    keys = (key0, key1, key0 ^ key1 ^ 0x1BD11BDA)
    x0, x1 = (x0 + key0) & _WORD, (x1 + key1) & _WORD
    for group in range(1, 6):
        for rotation in _ROTATIONS[(group - 1) % 2]:
            x0 = (x0 + x1) & _WORD
            x1 = x0 ^ ((x1 << rotation | x1 >> (32 - rotation)) & _WORD)
        x0 = (x0 + keys[group % 3]) & _WORD
        x1 = (x1 + keys[(group + 1) % 3] + group) & _WORD
    return x0, x1
