"""Initializers that use NumPy on the CPU; compiling JAX's random functions takes seconds.

The values depend only on the key and the shape, not on the devices or the mesh. Each initializer
has Flax's signature: a key, a shape and a dtype. While JAX traces an initializer, no values are
drawn; the traced program contains a callback that draws them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Initializer = Callable[..., jax.Array]  # (key, shape, dtype)
# Number of values that are drawn at once. A block of this size fits in the processor's cache.
BLOCK = 2**16
CUT_STD = 0.87962566103423978  # Standard deviation of a standard normal truncated at -2 and 2.


def full(shape: int | tuple[int, ...], value: float, dtype=np.float32) -> jax.Array:
    """Returns an array of equal values. Unlike `jnp.full`, it compiles nothing."""
    return jax.device_put(np.full(shape, value, dtype), may_alias=True)


def constant(value: float) -> Initializer:
    """Returns an initializer with equal values."""

    def initializer(key, shape, dtype=np.float32):
        if isinstance(key, jax.core.Tracer):
            return jnp.full(shape, value, dtype)
        return full(shape, value, dtype)

    return initializer


zeros, ones = constant(0), constant(1)


def normal(std: float) -> Initializer:
    """Returns an initializer that draws from a normal distribution with mean 0 and std `std`."""

    def draw(generator, out):
        generator.standard_normal(out=out, dtype=np.float32)
        out *= std

    return _initializer(draw)


def xavier(parts: int = 1, dense: bool = False) -> Initializer:
    """Returns Glorot's uniform initializer, applied separately to `parts` concatenated kernels.

    Args:
      parts: number of kernels of equal size that are concatenated along the outputs.
      dense: treat the kernel of a patch embedding as a dense layer over the pixels of a patch. The
        fan-out is then the number of output channels, not multiplied by the kernel's area.
    """

    def draw(generator, out):
        inputs, outputs = _fans(out.shape)
        outputs = out.shape[-1] if dense else outputs
        _fill_evenly(generator, out, math.sqrt(6 / (inputs + outputs / parts)))

    return _initializer(draw)


def xavier_normal(parts: int = 1, factors: tuple[float, ...] = (1.0,)) -> Initializer:
    """Returns Glorot's normal initializer, applied separately to `parts` concatenated kernels.

    Args:
      parts: number of kernels of equal size that are concatenated along the outputs.
      factors: the outputs are divided into as many groups of equal size as there are factors, and
        the values of each group are multiplied by its factor.
    """

    def draw(generator, out):
        inputs, outputs = _fans(out.shape)
        generator.standard_normal(out=out, dtype=np.float32)
        out *= math.sqrt(2 / (inputs + outputs / parts))
        for group, factor in zip(np.split(out, len(factors), axis=-1), factors, strict=True):
            group *= factor

    return _initializer(draw)


def lecun() -> Initializer:
    """Returns LeCun's normal initializer: truncated at 2 std, with variance 1 / inputs."""

    def draw(generator, out):
        generator.standard_normal(out=out, dtype=np.float32)
        while (beyond := np.abs(out) > 2).any():
            out[beyond] = generator.standard_normal(np.count_nonzero(beyond), dtype=np.float32)
        out *= math.sqrt(1 / _fans(out.shape)[0]) / CUT_STD

    return _initializer(draw)


def cut_normal(std: float) -> Initializer:
    """Returns an initializer that draws from a normal distribution truncated at one std.

    The std of the truncated values is 0.54 times `std` (timm's `trunc_normal_` with a=-std and
    b=std).
    """

    def draw(generator, out):
        flat = out.reshape(-1)
        generator.standard_normal(out=flat, dtype=np.float32)
        beyond = np.flatnonzero(np.abs(flat) > 1)
        while beyond.size:
            flat[beyond] = generator.standard_normal(beyond.size, dtype=np.float32)
            beyond = beyond[np.abs(flat[beyond]) > 1]
        flat *= std

    return _initializer(draw)


def uniform(limit: float) -> Initializer:
    """Returns an initializer that draws uniformly from -limit to limit."""
    return _initializer(lambda generator, out: _fill_evenly(generator, out, limit))


def torch_convolution(share: float = 1.0) -> Initializer:
    """Returns PyTorch's initializer of dense layers and convolutions.

    The values are uniform with variance 1 / (3 * fan-in).

    Args:
      share: factor that multiplies the std.
    """
    return _initializer(
        lambda generator, out: _fill_evenly(generator, out, share * _fans(out.shape)[0] ** -0.5)
    )


def _fill_evenly(generator: np.random.Generator, out: np.ndarray, limit: float) -> None:
    flat = out.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        generator.random(out=block, dtype=np.float32)
        block *= 2 * limit
        block -= limit


def _fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns fan-in and fan-out of a kernel `[..., inputs, outputs]`."""
    places = math.prod(shape[:-2])
    return places * shape[-2], places * shape[-1]


def _initializer(draw: Callable[[np.random.Generator, np.ndarray], None]) -> Initializer:
    """Returns an initializer whose values are drawn by the function `draw`.

    `draw` overwrites a float32 array with random values from a NumPy generator.
    """

    def initializer(key, shape, dtype=np.float32):
        def on_host(words):
            values = _aligned(shape)
            draw(np.random.Generator(np.random.SFC64(np.asarray(words))), values)
            return values.astype(dtype, copy=False)

        words = jax.random.key_data(key)
        if isinstance(words, jax.core.Tracer):
            return jax.pure_callback(on_host, jax.ShapeDtypeStruct(shape, dtype), words)
        return jax.device_put(on_host(words), may_alias=True)

    return initializer


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Returns an empty float32 array, aligned in memory so that JAX on a CPU does not copy it.

    NumPy reuses memory. Newly mapped memory, as for checkpoints, would take 20 % longer to fill.
    """
    memory = np.empty(math.prod(shape) + 16, np.float32)
    start = -memory.ctypes.data // memory.itemsize % 16
    return memory[start : start + math.prod(shape)].reshape(shape)


class Scheme(NamedTuple):
    """The initializers of a Transformer's parameters, which differ between libraries."""

    patches: Initializer  # Kernel of the patch embedding.
    patches_bias: Callable[[int], Initializer]  # Bias of the patch embedding, given its fan-in.
    qkv: Initializer
    mlp_bias: Initializer
    dense: Initializer = xavier()  # Kernel of the MLP's first layer.
    gated: Initializer = xavier(parts=2)  # Kernel of the first layer of a gated MLP.
    out: Initializer = xavier()  # Kernel of the last layer of attention and of the MLP.

    # Returns the initializers that depend on the layer; see `of_layer` for the arguments.
    own: Callable[[int, int, bool], dict[str, Initializer]] = lambda layer, depth, sub_norm: {}

    # Initializer of the class token, the mask token and other tokens. None: tokens with a learned
    # position embedding start at zero, and other tokens are drawn from a normal distribution.
    token: Initializer | None = None
    positions: Initializer = normal(0.02)  # Learned positions.

    def of_layer(self, layer: int, depth: int, sub_norm: bool) -> "Scheme":
        """Returns the initializers of one encoder layer.

        Args:
          layer: index of the layer, from 0.
          depth: number of layers.
          sub_norm: the layer's branches contain norms (sub-LN; Wang et al., 2022).
        """
        return self._replace(**self.own(layer, depth, sub_norm))


def _falling(make: Callable[[float], Initializer], std: float) -> Callable[..., dict]:
    """Returns `Scheme.own` for a `Scheme.out` whose std falls with the layer: BEiT's rule.

    The std is divided by sqrt(2 (layer + 1)), where `layer` is counted from 0. With
    `torch_convolution`, `std` is a factor of PyTorch's default values.
    """
    return lambda layer, depth, sub_norm: {"out": make(std / math.sqrt(2 * (layer + 1)))}


def _of_beit(std: float) -> "Scheme":
    """Returns BEiT's initializers: normal distributions with std `std`, truncated at one std.

    The std of `Scheme.out` is smaller in later layers (`_falling`).
    """
    drawn, own = cut_normal(std), _falling(cut_normal, std)
    return Scheme(drawn, lambda inputs: zeros, drawn, zeros, *[drawn] * 3, own, drawn, drawn)


def aggregation(dim: int) -> "Scheme":
    """Returns the initializers of layers of width `dim` for BEiT v2's patch aggregation.

    Kernels have PyTorch's default values, and biases are zero.
    """
    return SCHEMES["beit"]._replace(
        qkv=uniform(dim**-0.5),
        dense=torch_convolution(),
        gated=uniform(dim**-0.5),
        own=_falling(torch_convolution, 1),
    )


def _eva02s_own(layer: int, depth: int, sub_norm: bool) -> dict[str, Initializer]:
    """Returns the initializers of an EVA-02 layer that differ from `SCHEMES["eva02"]`.

    With `sub_norm`, the kernels of values, of the attention's output and of the MLP are multiplied
    by sqrt(log(2 depth)). The kernels of queries and keys are not. Without `sub_norm` the
    dictionary is empty.
    """
    if not sub_norm:
        return {}
    factor = math.sqrt(math.log(2 * depth))
    one, gated = xavier_normal(factors=(factor,)), xavier_normal(parts=2, factors=(factor, factor))
    # Queries, keys and values have separate kernels in EVA-02.
    qkv = xavier_normal(parts=3, factors=(1, 1, factor))
    return {"qkv": qkv, "dense": one, "gated": gated, "out": one}


# The initializers of DeiT, DINO and Swin in PyTorch. Their normal distributions with std 0.02 are
# truncated at -2 and 2, which has no effect. The patch embedding is initialized like PyTorch's
# convolutions.
_DEIT = Scheme(
    torch_convolution(),
    lambda inputs: uniform(inputs**-0.5),
    normal(0.02),
    zeros,
    *[normal(0.02)] * 3,
    token=normal(0.02),
)

SCHEMES = {
    # The paper's code, in Flax.
    "flax": Scheme(lecun(), lambda inputs: zeros, xavier(parts=3), normal(1e-6)),
    # The authors' masked autoencoders in PyTorch: Xavier's values. The patch embedding is treated
    # as a dense layer, and q, k and v as one kernel.
    "mae": Scheme(xavier(dense=True), lambda inputs: uniform(inputs**-0.5), xavier(), zeros),
    "deit": _DEIT,
    # In the authors' code, DeiT III's class token has no position embedding. In this code the class
    # token has a position embedding. Therefore the class token is initialized with zeros, and its
    # position embedding is initialized like the class token in the authors' code.
    "deit3": _DEIT._replace(token=None),
    "dinov2": _DEIT._replace(token=normal(1e-6)),
    # BEiT's and EVA-g's schemes in PyTorch.
    "beit": _of_beit(0.02),
    "eva": _of_beit(0.015),
    # Encoder and decoder of BEiT v2's tokenizer in PyTorch: DeiT's initializers. As in BEiT, the
    # std of the last layer of attention and MLP is divided by sqrt(2 (layer + 1)).
    "vqkd": _DEIT._replace(own=_falling(normal, 0.02)),
    # EVA-02's initializers in PyTorch: Xavier's normal values, with q, k and v treated as one
    # kernel. The patch embedding is initialized as in masked autoencoders.
    "eva02": Scheme(
        xavier(dense=True),
        lambda inputs: uniform(inputs**-0.5),
        xavier_normal(),
        zeros,
        xavier_normal(),
        xavier_normal(parts=2),
        xavier_normal(),
        _eva02s_own,
        cut_normal(0.02),
        cut_normal(0.02),
    ),
}
