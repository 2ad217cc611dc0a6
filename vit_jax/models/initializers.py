"""Initial values that NumPy draws on the host: to compile JAX's own draws takes seconds.

They are functions of the key and the shape alone, whatever the devices and the mesh. Each is called
as Flax calls an initialiser, with a key, a shape and a dtype; while JAX traces it is a callback,
and draws nothing.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

Initializer = Callable[..., jax.Array]  # (key, shape, dtype)
BLOCK = 2**16  # Numbers that stay in the processor's cache while they are worked on.
CUT_STD = 0.87962566103423978  # Of a standard normal cut at -2 and 2.


def normal(std: float) -> Initializer:
    """An initialiser that draws from a normal distribution around 0."""

    def draw(generator, out):
        generator.standard_normal(out=out, dtype=np.float32)
        out *= std

    return _initializer(draw)


def xavier(parts: int = 1, dense: bool = False) -> Initializer:
    """Glorot's uniform values, for each of `parts` kernels that lie side by side in one.

    Args:
      dense: a convolution's kernel is that of a dense layer, whose outputs count once.
    """

    def draw(generator, out):
        inputs, outputs = _fans(out.shape)
        outputs = out.shape[-1] if dense else outputs
        limit = math.sqrt(6 / (inputs + outputs / parts))
        flat = out.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            block = flat[start : start + BLOCK]
            generator.random(out=block, dtype=np.float32)
            block *= 2 * limit
            block -= limit

    return _initializer(draw)


def xavier_normal(parts: int = 1, factors: tuple[float, ...] = (1.0,)) -> Initializer:
    """Glorot's normal values, for each of `parts` kernels that lie side by side in one.

    Args:
      factors: of the kernel's outputs, in as many groups as there are factors.
    """

    def draw(generator, out):
        inputs, outputs = _fans(out.shape)
        generator.standard_normal(out=out, dtype=np.float32)
        out *= math.sqrt(2 / (inputs + outputs / parts))
        for group, factor in zip(np.split(out, len(factors), axis=-1), factors, strict=True):
            group *= factor

    return _initializer(draw)


def lecun() -> Initializer:
    """Normal values, cut at two standard deviations, of variance 1 / inputs after it."""

    def draw(generator, out):
        generator.standard_normal(out=out, dtype=np.float32)
        while (beyond := np.abs(out) > 2).any():
            out[beyond] = generator.standard_normal(np.count_nonzero(beyond), dtype=np.float32)
        out *= math.sqrt(1 / _fans(out.shape)[0]) / CUT_STD

    return _initializer(draw)


def cut_normal(std: float) -> Initializer:
    """An initialiser that draws from a normal distribution around 0, cut at its own std.

    What is drawn deviates by 0.54 of it (timm's `trunc_normal_` with a=-std and b=std).
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
    """Uniform values from -limit to limit."""

    return _initializer(lambda generator, out: _fill_evenly(generator, out, limit))


def torch_convolution(share: float = 1.0) -> Initializer:
    """Uniform values of variance 1 / (3 inputs), as PyTorch starts convolutions and dense layers.

    Args:
      share: of that std.
    """
    return _initializer(
        lambda generator, out: _fill_evenly(generator, out, share * _fans(out.shape)[0] ** -0.5)
    )


def _fill_evenly(generator: np.random.Generator, out: np.ndarray, limit: float) -> None:
    generator.random(out=out, dtype=np.float32)
    out *= 2 * limit
    out -= limit


def _fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of a kernel `[..., inputs, outputs]`, at all its places."""
    places = math.prod(shape[:-2])
    return places * shape[-2], places * shape[-1]


def _initializer(draw: Callable[[np.random.Generator, np.ndarray], None]) -> Initializer:
    """Makes an initialiser of a function that fills a float32 array."""

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
    """An array that JAX takes on a CPU as it is; to copy it would take as long as to draw it."""
    memory = np.empty(math.prod(shape) + 16, np.float32)
    start = -memory.ctypes.data // memory.itemsize % 16
    return memory[start : start + math.prod(shape)].reshape(shape)


class Scheme(NamedTuple):
    """The first values of those parameters of a Transformer that libraries start differently."""

    patches: Initializer  # Kernel of the patch embedding,
    patches_bias: Callable[[int], Initializer]  # and its bias, by the kernel's number of inputs.
    qkv: Initializer
    mlp_bias: Initializer
    dense: Initializer = xavier()  # Kernel of the MLP's first layer,
    gated: Initializer = xavier(parts=2)  # where it has a gate,
    out: Initializer = xavier()  # and of the last layer of either branch.

    own: Callable[[int, int, bool], dict[str, Initializer]] = (
        lambda layer, depth, sub_norm: {}
    )  # `of_layer`'s.

    # Class, mask and other tokens; None: zeros where a token's learned position starts it, else
    # normal.
    token: Initializer | None = None
    positions: Initializer = normal(0.02)  # Learned ones.

    def of_layer(self, layer: int, depth: int, sub_norm: bool) -> "Scheme":
        """The values of one layer, counted from 0, of `depth` layers.

        Args:
          sub_norm: its branches are normalised within (Wang et al., 2022).
        """
        return self._replace(**self.own(layer, depth, sub_norm))


def _of_beit(std: float) -> "Scheme":
    """BEiT's values, all of one standard deviation before they are cut."""
    drawn, zeros = cut_normal(std), jax.nn.initializers.zeros

    def own(layer: int, depth: int, sub_norm: bool) -> dict[str, Initializer]:
        """The last layers of branches, divided by sqrt(2 (layer + 1))."""
        return {"out": cut_normal(std / math.sqrt(2 * (layer + 1)))}

    return Scheme(drawn, lambda inputs: zeros, drawn, zeros, *[drawn] * 3, own, drawn, drawn)


def _vqkds_own(layer: int, depth: int, sub_norm: bool) -> dict[str, Initializer]:
    """The last layers of branches of BEiT's code for fine-tuning, divided in the same way."""
    return {"out": normal(0.02 / math.sqrt(2 * (layer + 1)))}


def _plain_own(layer: int, depth: int, sub_norm: bool) -> dict[str, Initializer]:
    """PyTorch's dense layers as the last ones of branches, divided in the same way."""
    return {"out": torch_convolution(1 / math.sqrt(2 * (layer + 1)))}


def aggregation(dim: int) -> "Scheme":
    """The values of the layers, of this width, of BEiT v2's patch aggregation, which are PyTorch's
    own.

    Biases are zeros all the same.
    """
    return SCHEMES["beit"]._replace(
        qkv=uniform(dim**-0.5),
        dense=torch_convolution(),
        gated=uniform(dim**-0.5),
        own=_plain_own,
    )


def _eva02s_own(layer: int, depth: int, sub_norm: bool) -> dict[str, Initializer]:
    """EVA-02's kernels but those of queries and keys, sqrt(log(2 depth)) larger where
    `sub_norm`.
    """
    if not sub_norm:
        return {}
    factor = math.sqrt(math.log(2 * depth))
    one, gated = xavier_normal(factors=(factor,)), xavier_normal(parts=2, factors=(factor, factor))
    qkv = xavier_normal(parts=3, factors=(1, 1, factor))  # Kernels of their own there.
    return {"qkv": qkv, "dense": one, "gated": gated, "out": one}


# DeiT's, DINO's and Swin's in PyTorch, whose cut at -2 and 2 cuts nothing; patches as PyTorch's
# convolutions.
_DEIT = Scheme(
    torch_convolution(),
    lambda inputs: uniform(inputs**-0.5),
    normal(0.02),
    jax.nn.initializers.zeros,
    *[normal(0.02)] * 3,
    token=normal(0.02),
)

SCHEMES = {
    # The paper's code, by Flax.
    "flax": Scheme(
        lecun(), lambda inputs: jax.nn.initializers.zeros, xavier(parts=3), normal(1e-6)
    ),
    # Masked autoencoders' in PyTorch: Xavier for patches as for a dense layer, and for q, k and v
    # at once.
    "mae": Scheme(
        xavier(dense=True),
        lambda inputs: uniform(inputs**-0.5),
        xavier(),
        jax.nn.initializers.zeros,
    ),
    "deit": _DEIT,
    # DeiT III's class token has no position embedding: here it is zero, and its position starts as
    # the token.
    "deit3": _DEIT._replace(token=None),
    "dinov2": _DEIT._replace(token=normal(1e-6)),
    # BEiT's in PyTorch, and EVA-g's.
    "beit": _of_beit(0.02),
    "eva": _of_beit(0.015),
    # Of BEiT v2's tokeniser in PyTorch, encoder and decoder: DeiT's, and BEiT's division of last
    # layers.
    "vqkd": _DEIT._replace(own=_vqkds_own),
    # EVA-02's in PyTorch: Xavier's normal values, q, k and v at once; patches as MAE has them.
    "eva02": Scheme(
        xavier(dense=True),
        lambda inputs: uniform(inputs**-0.5),
        xavier_normal(),
        jax.nn.initializers.zeros,
        xavier_normal(),
        xavier_normal(parts=2),
        xavier_normal(),
        _eva02s_own,
        cut_normal(0.02),
        cut_normal(0.02),
    ),
}
