"""What a model is before it exists: shapes, number of parameters, cost."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core


@dataclass(frozen=True)
class ModelCard:
    """One line about a model."""

    name: str
    parameters: int
    multiply_adds: int  # Of one image's forward pass: matrix products and convolutions.
    tokens: int | None  # None for a model without.
    image_size: tuple[int, int]
    source: str

    def __str__(self):
        height, width = self.image_size
        tokens = "" if self.tokens is None else f"{self.tokens:,} tokens"
        return (
            f"{self.name:15} {self.parameters / 1e6:9,.2f} M parameters  "
            f"{self.multiply_adds / 1e9:8,.2f} GFLOPs (multiply-adds)  {tokens:>12} at {height}x{width}  "
            f"{self.source}"
        )


class _OneKey:
    """Stands for `nnx.Rngs` where only shapes are wanted: counting keys would take longer than the rest."""

    def __init__(self):
        self._key = jax.random.key(0)

    def params(self):
        return self._key

    dropout = __call__ = params


def abstract(build: Callable[..., nnx.Module]) -> nnx.Module:
    """The model that `build(rngs=...)` makes, with shapes in place of arrays."""
    return nnx.eval_shape(lambda: build(rngs=_OneKey()))


def count_parameters(model: nnx.Module) -> int:
    """Number of parameters; `model` may be abstract."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def count_multiply_adds(model: nnx.Module) -> int:
    """Multiply-adds of one image's forward pass: matrix products and convolutions, as JAX traces them.

    The papers' "GFLOPs" count one multiply-add as one. `model` may be abstract.
    """
    graphdef, params = nnx.split(model)
    images = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.float32)
    return _count(jax.make_jaxpr(lambda params, x: nnx.merge(graphdef, params)(x))(params, images).jaxpr)


def _count(jaxpr: core.Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        kind, shapes = equation.primitive.name, [v.aval.shape for v in equation.invars if hasattr(v, "aval")]
        if kind == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            summed = math.prod(shapes[0][axis] for axis in contracted)
            total += math.prod(equation.outvars[0].aval.shape) * summed
        elif kind == "conv_general_dilated":
            outputs = shapes[1][equation.params["dimension_numbers"].rhs_spec[0]]
            total += math.prod(equation.outvars[0].aval.shape) * math.prod(shapes[1]) // outputs
        else:
            times = equation.params["length"] if kind == "scan" else 1
            total += times * sum(_count(inner) for inner in core.jaxprs_in_params(equation.params))
    return total
