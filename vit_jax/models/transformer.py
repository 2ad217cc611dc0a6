"""The layers of a Transformer: attention, MLP, encoder blocks, attention pooling (paper, section 3.1).

Dimensions are named: batch tokens dim heads head_dim hidden. Dropout is active when a call brings `rngs`, and
only then.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.models import initializers
from vit_jax.models.attention import attend
from vit_jax.models.dropout import drop
from vit_jax.models.layers import named, platform
from vit_jax.models.position import rotate


@dataclasses.dataclass(frozen=True)
class Stack:
    """The values that all layers of a Transformer share.

    Attributes:
      dim, heads, hidden: width, attention heads, and width of the MLP.
      mlp, gelu, dropout, layer_scale, qk_norm: as of `ViT`.
      offsets: rows of each layer's table of relative positions; 0: none.
      epsilon: of the layer norms.
      scheme: how the parameters start.
      dtype: of the computation.
    """

    dim: int
    heads: int
    hidden: int
    mlp: str = "gelu"
    gelu: str = "tanh"
    dropout: float = 0.0
    layer_scale: float | None = None
    qk_norm: bool = False
    offsets: int = 0
    epsilon: float = 1e-6
    scheme: initializers.Scheme = initializers.SCHEMES["flax"]
    dtype: Any = jnp.float32

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.heads


def layer_norm(dim: int, stack: Stack, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A layer norm with the stack's epsilon, whose statistics are float32."""
    return nnx.LayerNorm(dim, epsilon=stack.epsilon, dtype=stack.dtype, rngs=rngs)


class Attention(nnx.Module):
    """Multi-head self-attention (appendix A): softmax(q k / sqrt(head_dim)) v, all heads at once.

    Queries and keys of each head may be normalised (Dehghani et al., 2023). With relative positions an
    embedding for each offset is added to the keys, for all heads the same (appendix D.4).
    """

    def __init__(self, stack: Stack, *, rngs: nnx.Rngs):
        dim, heads, head_dim = stack.dim, stack.heads, stack.head_dim
        dtype, scheme = stack.dtype, stack.scheme
        self.qkv = nnx.LinearGeneral(
            dim, (3, heads, head_dim), kernel_init=scheme.qkv, dtype=dtype, rngs=rngs
        )
        self.query_norm = layer_norm(head_dim, stack, rngs) if stack.qk_norm else None
        self.key_norm = layer_norm(head_dim, stack, rngs) if stack.qk_norm else None
        if stack.offsets:
            shape = (stack.offsets, head_dim)
            self.relative_embedding = nnx.Param(initializers.normal(0.02)(rngs.params(), shape))
        self.out = nnx.LinearGeneral(
            (heads, head_dim), dim, axis=(-2, -1), kernel_init=scheme.dense, dtype=dtype, rngs=rngs
        )

    def __call__(
        self,
        x: jax.Array,
        offsets: np.ndarray | None = None,
        rotation: tuple[np.ndarray, np.ndarray] | None = None,
        read: int | None = None,
    ) -> jax.Array:
        """`[batch, ..., tokens, dim]` to the same shape. The softmax is taken in float32.

        Args:
          offsets: `[tokens, tokens]`, row of the table of relative positions for each query and key.
          rotation: cosines and sines `[tokens, head_dim]` that turn queries and keys.
          read: attend from so many tokens only, the first.
        """
        query, key, value = (named("heads", part) for part in self.project(x, read))
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            query, key = rotate(query, *(table[:read] for table in rotation)), rotate(key, *rotation)
        bias = None
        if offsets is not None:
            table = self.relative_embedding[...].astype(query.dtype)[offsets[:read]]
            bias = jnp.einsum("bqhd,qkd->bhqk", query, table) / math.sqrt(query.shape[-1])
        # More axes before the tokens than the batch are lines of a grid, each for itself.
        lines = [part.reshape(-1, *part.shape[-3:]) for part in (query, key, value)]
        attended = attend(*lines, bias=bias)
        return self.out(named("heads", attended.reshape(query.shape)))

    def project(self, x: jax.Array, read: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries of the first `read` tokens, keys and values, `[batch, ..., tokens, heads, head_dim]`."""
        kernel, bias = self.qkv.kernel[...], self.qkv.bias[...].astype(x.dtype)
        if read is None and platform() != "tpu":
            fused = jnp.einsum("...c,cshd->...shd", x, kernel.astype(x.dtype)) + bias
            return tuple(jnp.moveaxis(fused, -3, 0))
        # Products of their own have better layouts on a TPU.
        return tuple(
            jnp.einsum("...c,chd->...hd", tokens, kernel[:, part].astype(x.dtype)) + bias[part]
            for part, tokens in enumerate((x if read is None else x[..., :read, :], x, x))
        )


class Mlp(nnx.Module):
    """Dense, GELU, dropout, dense, applied to each token alone.

    With `swiglu` the first layer is twice as wide: SiLU of one half gates the other (Shazeer, 2020).
    """

    def __init__(self, stack: Stack, *, rngs: nnx.Rngs):
        dim, hidden = stack.dim, stack.hidden
        values = dict(bias_init=stack.scheme.mlp_bias, dtype=stack.dtype, rngs=rngs)
        if stack.mlp == "swiglu":
            self.fc1 = nnx.LinearGeneral(dim, (2, hidden), kernel_init=initializers.xavier(parts=2), **values)
        else:
            self.fc1 = nnx.Linear(dim, hidden, kernel_init=stack.scheme.dense, **values)
        self.fc2 = nnx.Linear(hidden, dim, kernel_init=stack.scheme.dense, **values)
        self.kind, self.gelu, self.dropout = stack.mlp, stack.gelu, stack.dropout

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.fc1(x)
        if self.kind == "swiglu":
            x = nnx.silu(x[..., 0, :]) * x[..., 1, :]
        else:
            x = nnx.gelu(x, approximate=self.gelu == "tanh")
        return self.fc2(drop(named("hidden", x), self.dropout, rngs))


class EncoderBlock(nnx.Module):
    """One pre-norm layer (equations 2 and 3).

    With LayerScale each channel of a branch has a learned factor (Touvron et al., 2021).

    Args:
      stochastic_depth: chance that an image skips a branch in training (Huang et al., 2016).
    """

    def __init__(self, stack: Stack, stochastic_depth: float = 0.0, *, rngs: nnx.Rngs):
        self.norm1 = layer_norm(stack.dim, stack, rngs)
        self.attention = Attention(stack, rngs=rngs)
        self.norm2 = layer_norm(stack.dim, stack, rngs)
        self.mlp = Mlp(stack, rngs=rngs)
        self.dropout, self.stochastic_depth = stack.dropout, stochastic_depth
        scaled = stack.layer_scale is not None
        self.scale1 = nnx.Param(jnp.full(stack.dim, stack.layer_scale)) if scaled else None
        self.scale2 = nnx.Param(jnp.full(stack.dim, stack.layer_scale)) if scaled else None

    def __call__(
        self,
        x: jax.Array,
        rngs: nnx.Rngs | None = None,
        stochastic_depth=None,
        read: int | None = None,
        **positions,
    ) -> jax.Array:
        """`[batch, ..., tokens, dim]` to the same shape; `positions` are those of `Attention`.

        Args:
          stochastic_depth: in place of the block's own, which a scan over blocks cannot tell apart.
          read: return so many tokens only, the first.
        """
        skipped = self.stochastic_depth if stochastic_depth is None else stochastic_depth

        def finish(branch, scale):
            branch = branch if scale is None else branch * scale[...].astype(branch.dtype)
            branch = drop(branch, self.dropout, rngs)
            return drop(branch, skipped, rngs, (x.shape[0],) + (1,) * (x.ndim - 1))

        branch = self.attention(self.norm1(x), read=read, **positions)
        x = (x if read is None else x[..., :read, :]) + finish(branch, self.scale1)
        return x + finish(self.mlp(self.norm2(x), rngs), self.scale2)


class AxialBlock(nnx.Module):
    """Attention and MLP within each row of the grid, then within each column (appendix D.6)."""

    def __init__(self, grid: tuple[int, int], stack: Stack, stochastic_depth: float = 0.0, *, rngs: nnx.Rngs):
        self.grid = grid
        self.row = EncoderBlock(stack, stochastic_depth, rngs=rngs)
        self.column = EncoderBlock(stack, stochastic_depth, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None, stochastic_depth=None) -> jax.Array:
        """`[batch, rows * columns, dim]` to the same shape."""
        grid = x.reshape(x.shape[0], *self.grid, x.shape[-1])
        grid = self.row(grid, rngs, stochastic_depth).swapaxes(1, 2)
        return self.column(grid, rngs, stochastic_depth).swapaxes(1, 2).reshape(x.shape)


class AttentionPooling(nnx.Module):
    """One learned query attends to all tokens; then an MLP (Zhai et al., 2022)."""

    def __init__(self, stack: Stack, *, rngs: nnx.Rngs):
        dim, heads, head_dim, dtype = stack.dim, stack.heads, stack.head_dim, stack.dtype
        self.probe = nnx.Param(initializers.xavier()(rngs.params(), (1, 1, dim)))
        self.query = nnx.LinearGeneral(
            dim, (heads, head_dim), kernel_init=initializers.xavier(), dtype=dtype, rngs=rngs
        )
        self.key_value = nnx.LinearGeneral(
            dim, (2, heads, head_dim), kernel_init=initializers.xavier(parts=2), dtype=dtype, rngs=rngs
        )
        self.out = nnx.LinearGeneral(
            (heads, head_dim), dim, axis=(-2, -1), kernel_init=initializers.xavier(), dtype=dtype, rngs=rngs
        )
        self.norm = layer_norm(dim, stack, rngs)
        plain = dict(mlp="gelu", dropout=0.0, scheme=initializers.SCHEMES["flax"])
        self.mlp = Mlp(dataclasses.replace(stack, **plain), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, tokens, dim]` to `[batch, dim]`."""
        query = jnp.broadcast_to(self.query(self.probe[...]), (x.shape[0], 1, *self.query.out_features))
        key, value = jnp.moveaxis(self.key_value(x), -3, 0)
        x = self.out(jax.nn.dot_product_attention(query, key, value))
        return (x + self.mlp(self.norm(x)))[:, 0]
