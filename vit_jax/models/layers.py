"""Names of activations, and running a stack of layers: one by one or as a scan, kept or
rematerialised.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# What is kept of a layer for the backward pass; the rest is computed anew there.
REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # Not attention's scores.
    "full": jax.checkpoint_policies.nothing_saveable,
}

_place: ContextVar[Callable[[str, jax.Array], jax.Array]] = ContextVar(
    "place", default=lambda _, x: x
)
_captured: ContextVar[dict[str, list[jax.Array]] | None] = ContextVar("captured", default=None)
_platform: ContextVar[str | None] = ContextVar("platform", default=None)
_part: ContextVar[jax.Array | int] = ContextVar("part", default=0)


def named(name: str, x: jax.Array) -> jax.Array:
    """The activation itself; whoever calls the model may say where activations of this name live,
    and capture them.
    """
    capture(name, lambda: x)
    return _place.get()(name, x)


def capture(name: str, compute: Callable[[], jax.Array]) -> None:
    """Computes an intermediate result of this name where it has been asked for, and only there."""
    found = _captured.get()
    if found and name in found:
        found[name].append(compute())


def captures() -> bool:
    """Returns True while intermediate results are collected."""
    return bool(_captured.get())


@contextlib.contextmanager
def capturing(names: Sequence[str]) -> Iterator[dict[str, list[jax.Array]]]:
    """Collects what models compute under these names while it is entered, in the order of the
    call.
    """
    found = {name: [] for name in names}
    token = _captured.set(found)
    try:
        yield found
    finally:
        _captured.reset(token)


def platform() -> str:
    """The platform that a model is traced for: `cpu`, `gpu` or `tpu`."""
    return _platform.get() or jax.default_backend()


def _exact_gelu(x: jax.Array) -> jax.Array:
    """x times the share of a normal distribution that lies below it, computed in float32 at least.

    As PyTorch has it. erfc, which has more digits far below zero, takes twice the memory and longer
    on a CPU, and by the TPU compiler's estimate a quarter more cycles of a whole ConvNeXt block in
    bfloat16.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (0.5 * wide * (1 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


GELUS = {
    "tanh": nnx.gelu,
    "erf": _exact_gelu,
    "quick": lambda x: x * nnx.sigmoid(1.702 * x),  # OpenAI's CLIP.
}


def part() -> jax.Array | int:
    """Number of the part of the batch that a model is traced for, where it sees no more than a
    part.
    """
    return _part.get()


@contextlib.contextmanager
def placing(
    place: Callable[[str, jax.Array], jax.Array], platform: str, part: jax.Array | int = 0
) -> Iterator[None]:
    """Traces models for such devices while it is entered, and applies `place(name, x)` to every
    named activation; models are given this part of the batch, of parts that are alike.
    """
    tokens = _place.set(place), _platform.set(platform), _part.set(part)
    try:
        yield
    finally:
        for variable, token in zip((_place, _platform, _part), tokens, strict=True):
            variable.reset(token)


def rising(rate: float, number: int, layers: int) -> float:
    """Stochastic depth of a layer, counted from 0: it rises linearly from 0 to the rate in the last
    one.
    """
    return rate * number / max(1, layers - 1)


def run_blocks(
    blocks: Sequence[nnx.Module],
    x: jax.Array,
    first: int,
    rate: Callable[[int], float],
    key: jax.Array | None,
    *,
    remat: str,
    **given: Any,
) -> jax.Array:
    """Applies the blocks of a stage, `[batch, height, width, channels]` to the same shape.

    Args:
      blocks: called as `block(x, rngs, stochastic_depth, **given)`.
      first: number of the first of them among all blocks of the model.
      rate: stochastic depth by that number.
      key: in training; each block's own is folded from it and its number.
      remat: a key of `REMAT`.
    """

    def call(block, x, number):
        rngs = None if key is None else nnx.Rngs(dropout=jax.random.fold_in(key, number))
        return named("features", block(x, rngs, rate(number), **given))

    return run_layers(call, blocks, x, range(first, first + len(blocks)), remat=remat)


def run_layers(
    call: Callable[[nnx.Module, jax.Array, Any], jax.Array],
    layers: Sequence[nnx.Module],
    x: jax.Array,
    inputs: Sequence[Any],
    *,
    remat: str,
    scan: bool = False,
) -> jax.Array:
    """`x = call(layer, x, inputs of the layer)` for one layer after the other.

    Args:
      remat: a key of `REMAT`.
      scan: compile one layer for all, which must be alike; their parameters are stacked for it.

    What is captured must come out of the call: then neither is done.
    """
    if captures():
        remat, scan = "none", False

    def step(graphdef, params, x, values):
        return call(nnx.merge(graphdef, params), x, values)

    if scan and layers:
        graphdef, params = zip(*map(nnx.split, layers), strict=True)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *zip(params, inputs, strict=True))

        def body(x, layer):
            return step(graphdef[0], layer[0], x, layer[1]), None

        if remat != "none":
            body = jax.checkpoint(body, policy=REMAT[remat], prevent_cse=False)
        return jax.lax.scan(body, x, stacked)[0]

    for layer, values in zip(layers, inputs, strict=True):
        if remat == "none":
            x = call(layer, x, values)
        else:
            graphdef, params = nnx.split(layer)
            again = jax.checkpoint(
                lambda params, x, graphdef=graphdef, values=values: step(
                    graphdef, params, x, values
                ),
                policy=REMAT[remat],
            )
            x = again(params, x)
    return x
