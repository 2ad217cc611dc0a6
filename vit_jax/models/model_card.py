"""Computes a model's shapes, number of parameters and cost without allocating its parameters."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core

from vit_jax.models.image_model import TokenModel
from vit_jax.models.layers import placing

Kind = TypeVar("Kind", bound=nnx.Module)


@dataclass(frozen=True)
class ModelCard:
    """The name, sizes and cost of a model; printed as one line.

    Attributes:
      name: name of the model, such as `ViT-B/16`.
      parameters: number of parameters.
      multiply_adds: number of multiply-adds in the matrix products and convolutions of one image's
        forward pass.
      tokens: number of tokens of an image; None for a model without tokens.
      image_size: height and width of an image in pixels.
      source: the paper or library that defines the model.
    """

    name: str
    parameters: int
    multiply_adds: int
    tokens: int | None
    image_size: tuple[int, int]
    source: str

    def __str__(self):
        height, width = self.image_size
        tokens = "" if self.tokens is None else f"{self.tokens:,} tokens"
        return (
            f"{self.name:15} {self.parameters / 1e6:9,.2f} M parameters  "
            f"{self.multiply_adds / 1e9:8,.2f} GFLOPs (multiply-adds)  {tokens:>12} at "
            f"{height}x{width}  {self.source}"
        )


class _OneKey:
    """A fast substitute for `nnx.Rngs` with equal keys, for code that only computes shapes."""

    def __init__(self):
        self._key = jax.random.key(0)

    def params(self):
        return self._key

    dropout = __call__ = params


def abstract(build: Callable[..., Kind]) -> Kind:
    """Returns the model that `build(rngs=...)` builds, with shapes in place of arrays."""
    return nnx.eval_shape(lambda: build(rngs=_OneKey()))


def count_parameters(model: nnx.Module) -> int:
    """Returns the number of parameters; `model` may contain shapes in place of arrays."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def parameter_shapes(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter, by its path, such as `blocks/00/norm1/scale`.

    `model` may contain shapes in place of arrays.
    """
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): leaf.shape for path, leaf in flat}


def count_multiply_adds(model: nnx.Module) -> int:
    """Returns the multiply-adds of matrix products and convolutions in one image's forward pass.

    As in the papers' "GFLOPs", a multiply-add counts as one operation, and products with padding do
    not count. All tokens of the last layer count, although a model may skip the tokens that no head
    reads. `model` may contain shapes in place of arrays.
    """
    graphdef, params = nnx.split(model)
    images = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.float32)

    def forward(params, images):
        model = nnx.merge(graphdef, params)
        return model(images, whole=True) if isinstance(model, TokenModel) else model(images)

    return traced_multiply_adds(forward, params, images)


def training_flops(multiply_adds: float) -> float:
    """Returns the minimum FLOPs of a training step: six times the multiply-adds of a forward pass.

    A multiply-add is two operations, and the backward pass costs twice as much as the forward pass.
    """
    return 6.0 * multiply_adds


def traced_multiply_adds(function: Callable, *arguments) -> int:
    """Returns the multiply-adds of `function(*arguments)`; the arguments may be shapes."""
    with placing(lambda _, x: x, platform="cpu"):
        return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: core.Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += multiply_adds(equation)
        total += times * sum(_count(inner) for inner in core.jaxprs_in_params(equation.params))
    return total


def multiply_adds(equation: core.JaxprEqn) -> int:
    """Returns the multiply-adds of a matrix product or convolution; 0 for other operations."""
    kind = equation.primitive.name
    shapes = [v.aval.shape for v in equation.invars if hasattr(v, "aval")]
    if kind == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        summed = math.prod(shapes[0][axis] for axis in contracted)
        return math.prod(equation.outvars[0].aval.shape) * summed
    if kind == "conv_general_dilated":
        return _convolution(*shapes, equation.outvars[0].aval.shape, equation.params)
    return 0


def _convolution(inputs: tuple, kernel: tuple, outputs: tuple, params: dict) -> int:
    """Returns the multiply-adds of one convolution."""
    in_axes, kernel_axes, out_axes = params["dimension_numbers"]
    total = outputs[out_axes[0]] * outputs[out_axes[1]] * kernel[kernel_axes[1]]
    for i, (stride, padding, dilation, kernel_dilation) in enumerate(
        zip(
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    ):
        sizes = inputs[in_axes[i + 2]], kernel[kernel_axes[i + 2]], outputs[out_axes[i + 2]]
        total *= count_taps(*sizes, stride, padding[0], dilation, kernel_dilation)
    return total


def count_taps(
    inputs: int,
    kernel: int,
    outputs: int,
    stride: int,
    padding: int,
    dilation: int,
    kernel_dilation: int,
) -> int:
    """Returns the number of products along one axis of a convolution that do not read padding.

    There is one product for each output o and kernel element k. The input is dilated: there are
    `dilation - 1` zeros between two input values. In the dilated input, the product reads position
    `p = o * stride + k * kernel_dilation - padding`. This position contains an input value if p
    lies within the dilated input and is a multiple of `dilation`; otherwise it contains a zero. For
    a fixed k, every `period`-th output o reads an input value.
    """
    start = np.arange(kernel) * kernel_dilation - padding
    common = math.gcd(stride, dilation)
    period = dilation // common
    phase = -start // common * pow(stride // common, -1, period) % period
    first = np.maximum(-(start // stride), 0)
    last = np.minimum(((inputs - 1) * dilation - start) // stride, outputs - 1)
    meetings = np.maximum((last - phase) // period - (first - 1 - phase) // period, 0)
    return int(meetings[start % common == 0].sum())
