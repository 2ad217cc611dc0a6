"""Named activations, and functions that run a stack of layers, with rematerialization or a scan."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.models import initializers

# Rematerialization policies: which values are stored for the backward pass.
REMAT = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # Excludes attention scores.
    "full": jax.checkpoint_policies.nothing_saveable,
}

_place: ContextVar[Callable[[str, jax.Array], jax.Array]] = ContextVar(
    "place", default=lambda _, x: x
)
_captured: ContextVar[dict[str, list[jax.Array]] | None] = ContextVar("captured", default=None)
_platform: ContextVar[str | None] = ContextVar("platform", default=None)
# Calls a function `(*arrays, *shared) -> array` for each device's part of a batch.
ByShard = Callable[[Callable[..., jax.Array], Sequence[jax.Array], Sequence[jax.Array]], jax.Array]
_by_shard: ContextVar[ByShard | None] = ContextVar("by_shard", default=None)
_part: ContextVar[jax.Array | int] = ContextVar("part", default=0)


def linear_general(
    inputs: int | tuple[int, ...], outputs: int | tuple[int, ...], *, kernel_init, **values: Any
) -> nnx.LinearGeneral:
    """Returns `nnx.LinearGeneral(inputs, outputs, ...)` with biases of zeros.

    Flax reshapes the initial values. Here NumPy does this, because JAX would compile it and copy
    the values.
    """

    def on_host(initializer):
        def values_on_host(key, shape, dtype):
            values = initializer(key, shape, dtype)
            return values if isinstance(values, jax.core.Tracer) else np.asarray(values)

        return values_on_host

    layer = nnx.LinearGeneral(
        inputs,
        outputs,
        kernel_init=on_host(kernel_init),
        bias_init=on_host(initializers.zeros),
        **values,
    )
    for parameter in (layer.kernel, layer.bias):
        if parameter is not None and isinstance(parameter.get_value(), np.ndarray):
            parameter.set_value(jax.device_put(parameter.get_value(), may_alias=True))
    return layer


def numbered(layers: Iterable[nnx.Module], first: int = 0) -> nnx.Dict:
    """Returns layers by their numbers, as strings with two digits, beginning with `first`.

    The sorted paths of a checkpoint are then in the order of the layers.
    """
    return nnx.Dict({f"{number:02d}": layer for number, layer in enumerate(layers, first)})


def named(name: str, x: jax.Array) -> jax.Array:
    """Returns the activation `x`, constrained to the sharding for activations of this name.

    If a `capturing` context that collects this name is open, `x` is also added to its list.
    """
    capture(name, lambda: x)
    return _place.get()(name, x)


def capture(name: str, compute: Callable[[], jax.Array]) -> None:
    """Records the result of `compute()` if an open `capturing` context collects `name`.

    Otherwise `compute` is not called.
    """
    captured = _captured.get()
    if captured and name in captured:
        captured[name].append(compute())


def captures() -> bool:
    """Returns True within a `capturing` context."""
    return bool(_captured.get())


@contextlib.contextmanager
def capturing(names: Sequence[str]) -> Iterator[dict[str, list[jax.Array]]]:
    """Context manager that collects named activations; yields a list for each name, in call order.

    Args:
      names: names of the activations to collect.
    """
    captured = {name: [] for name in names}
    token = _captured.set(captured)
    try:
        yield captured
    finally:
        _captured.reset(token)


def platform() -> str:
    """Returns the platform that the model is traced for: `cpu`, `gpu` or `tpu`."""
    return _platform.get() or jax.default_backend()


def _exact_gelu(x: jax.Array) -> jax.Array:
    """Computes x times the normal distribution's CDF at x, in float32 or wider, as PyTorch does.

    The CDF is not computed by the function `erfc`, which would be more precise far below zero. On a
    CPU, `erfc` takes twice the memory and more time. On a TPU, a ConvNeXt block in bfloat16 with
    `erfc` takes a quarter more cycles by the compiler's estimate.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (0.5 * wide * (1 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


GELUS = {
    "tanh": nnx.gelu,
    "erf": _exact_gelu,
    "quick": lambda x: x * nnx.sigmoid(1.702 * x),  # OpenAI's CLIP.
}


def dense_dot(
    x: jax.Array, kernel: jax.Array, dimension_numbers: jax.lax.DotDimensionNumbers, **keywords: Any
) -> jax.Array:
    """Multiplies `x` by the kernel of a dense layer, over the last axes of `x`.

    The result equals `lax.dot_general`'s up to rounding. On a CPU the function reshapes the
    operands to two matrices. With more axes XLA would transpose the output's gradient in memory
    before it computes the kernel's gradient.

    Args:
      x: `[..., *inputs]`.
      kernel: `[*inputs, *outputs]`.
      dimension_numbers: of `lax.dot_general`, without batch axes.
      keywords: further arguments of `lax.dot_general`.

    Returns:
      `[..., *outputs]`.
    """
    if platform() != "cpu":
        return jax.lax.dot_general(x, kernel, dimension_numbers, **keywords)
    count = len(dimension_numbers[0][0])
    rows, inputs, outputs = x.shape[:-count], kernel.shape[:count], kernel.shape[count:]
    x, kernel = (
        x.reshape(math.prod(rows), math.prod(inputs)),
        kernel.reshape(math.prod(inputs), math.prod(outputs)),
    )
    product = jax.lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), **keywords)
    return product.reshape(*rows, *outputs)


def part() -> jax.Array | int:
    """Returns the index of the batch shard for which the model is traced; 0 without sharding."""
    return _part.get()


def by_shard() -> ByShard | None:
    """Returns the function that calls kernels, which XLA cannot divide over devices.

    It is called as `by_shard()(function, arrays, shared)`. `arrays` have the batch as their first
    axis, and `shared` are the same on all devices. None: use no kernels.
    """
    return _by_shard.get()


@contextlib.contextmanager
def placing(
    place: Callable[[str, jax.Array], jax.Array],
    platform: str,
    part: jax.Array | int = 0,
    by_shard: ByShard | None = None,
) -> Iterator[None]:
    """Context manager that sets the platform and the sharding of models that are traced within it.

    Args:
      place: called as `place(name, x)` for every activation that the model passes to `named`;
        returns `x` with a sharding constraint.
      platform: `cpu`, `gpu` or `tpu`.
      part: index of the batch shard that is traced; all shards have the same size.
      by_shard: the result of `by_shard()` in the context.
    """
    values = {_place: place, _platform: platform, _part: part, _by_shard: by_shard}
    tokens = [(variable, variable.set(value)) for variable, value in values.items()]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


def rising(rate: float, number: int, layers: int) -> float:
    """Returns a layer's stochastic depth rate, which rises linearly from 0 to `rate`.

    `number` is the layer's index, from 0, and `layers` the number of layers.
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
    """Applies the blocks of a stage in turn to `x`, `[batch, height, width, channels]`.

    The result has the same shape.

    Args:
      blocks: the blocks, called as `block(x, rngs, stochastic_depth, **given)`.
      first: index of the first of these blocks among all blocks of the model.
      rate: returns the stochastic depth rate for a block's index.
      key: random key, in training. A block's key is `jax.random.fold_in(key, index of the block)`.
      remat: rematerialization policy, a key of `REMAT`.
      **given: further arguments of all blocks.
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
    """Runs a stack of layers: replaces `x` by `call(layer, x, inputs[i])` for each layer i in turn.

    Within a `capturing` context `remat` and `scan` are ignored, because JAX's transformations would
    not return the captured results.

    Args:
      call: applies a layer to `x`.
      inputs: further inputs of each layer, such as its stochastic depth rate.
      remat: rematerialization policy, a key of `REMAT`.
      scan: stack the parameters of the layers and run the layers with `lax.scan`, which compiles
        only one layer.
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
