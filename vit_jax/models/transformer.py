"""Layers of a Transformer (paper, section 3.1): attention, MLP, encoder block, attention pooling.

Names of axes: batch tokens dim heads head_dim mlp_dim. Dropout is applied only in calls with
`rngs`.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.models import initializers
from vit_jax.models.attention import attend
from vit_jax.models.dropout import add_for_subset, drop
from vit_jax.models.layers import GELUS, linear_general, named, platform
from vit_jax.models.position import BiasLayout, Rotation, mixed_frequencies, mixed_rotation, rotate

MASKED = -1e9  # Added to the scores of tokens that a query does not attend to.


@dataclasses.dataclass(frozen=True)
class Stack:
    """Settings that all layers of a Transformer share.

    Attributes:
      dim: width of a token.
      heads: number of attention heads.
      mlp_dim: width of the MLP's hidden layer.
      mlp, gelu, dropout, attention_dropout, depth_by, layer_scale, qk_norm, qkv_bias, bias, norm,
        norm_at, sub_norm, rope: as in `ViTOptions`.
      offsets: number of rows of each layer's relative position table; 0: no table.
      biases: number of rows of each layer's table of attention biases; 0: no table.
      epsilon: epsilon of the norms.
      scheme: initializers of the parameters.
      dtype: dtype of the computation.
    """

    dim: int
    heads: int
    mlp_dim: int
    mlp: str = "gelu"
    gelu: str = "tanh"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    depth_by: str = "image"
    layer_scale: float | None = None
    qk_norm: bool = False
    qkv_bias: str = "all"
    bias: bool = True
    norm: str = "layer"
    norm_at: str = "before"
    sub_norm: str = "none"
    rope: str = "none"
    offsets: int = 0
    biases: int = 0
    epsilon: float = 1e-6
    scheme: initializers.Scheme = initializers.SCHEMES["flax"]
    dtype: Any = jnp.float32

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.heads


def make_norm(dim: int, stack: Stack, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """Returns a norm with the type and epsilon of `stack`; statistics are computed in float32."""
    kind = dict(layer=nnx.LayerNorm, rms=nnx.RMSNorm)[stack.norm]
    first = dict(scale_init=initializers.ones)
    if stack.norm == "layer":
        first["bias_init"] = initializers.zeros
    return kind(dim, epsilon=stack.epsilon, dtype=stack.dtype, rngs=rngs, **first)


def cut_windows(x: jax.Array, window: tuple[int, int]) -> jax.Array:
    """Cuts maps `[batch, height, width, ...]` into windows, `[batch, windows, positions, ...]`.

    `window` is the height and width of a window, which must divide those of the map.
    """
    (batch, height, width, *rest), (rows, columns) = x.shape, window
    x = x.reshape(batch, height // rows, rows, width // columns, columns, *rest).swapaxes(2, 3)
    return x.reshape(batch, -1, rows * columns, *rest)


def join_windows(x: jax.Array, size: tuple[int, int], window: tuple[int, int]) -> jax.Array:
    """Inverts `cut_windows` for maps of the height and width `size`."""
    (height, width), (rows, columns) = size, window
    # Not `len(x)`: exported programs have a symbolic batch size.
    batch, rest = x.shape[0], x.shape[3:]
    x = x.reshape(batch, height // rows, width // columns, rows, columns, *rest).swapaxes(2, 3)
    return x.reshape(batch, height, width, *rest)


class Attention(nnx.Module):
    """Multi-head self-attention (appendix A): softmax(q k / sqrt(head_dim)) v, all heads at once.

    The queries and keys of each head can be normalized (QK norm; Dehghani et al., 2023). The
    concatenated output of the heads can be normalized, too (sub-LN; Wang et al., 2022). There are
    two kinds of relative positions. Either an embedding of each offset is added to the keys, the
    same for all heads (appendix D.4). Or a bias for each offset and head is added to the scores.
    """

    def __init__(self, stack: Stack, *, rngs: nnx.Rngs):
        dim, heads, head_dim = stack.dim, stack.heads, stack.head_dim
        dense, scheme = partial(linear_general, dtype=stack.dtype, rngs=rngs), stack.scheme
        biased = stack.qkv_bias == "all"
        self.qkv = dense(dim, (3, heads, head_dim), kernel_init=scheme.qkv, use_bias=biased)
        if stack.qkv_bias == "qv":
            self.qkv.bias = nnx.Param(initializers.full((2, heads, head_dim), 0))
        self.query_norm = make_norm(head_dim, stack, rngs) if stack.qk_norm else None
        self.key_norm = make_norm(head_dim, stack, rngs) if stack.qk_norm else None
        if stack.offsets:
            shape = (stack.offsets, head_dim)
            self.relative_embedding = nnx.Param(initializers.normal(0.02)(rngs.params(), shape))
        if stack.biases:
            self.bias_table = nnx.Param(initializers.full((stack.biases, heads), 0))
        if stack.rope == "mixed":
            self.frequencies = nnx.Param(mixed_frequencies(heads, head_dim, rngs))
        self.norm = make_norm(dim, stack, rngs) if stack.sub_norm == "both" else None
        self.out = dense(
            (heads, head_dim), dim, axis=(-2, -1), kernel_init=scheme.out, use_bias=stack.bias
        )
        self.qkv_bias, self.rope, self.dropout = stack.qkv_bias, stack.rope, stack.attention_dropout

    def __call__(
        self,
        x: jax.Array,
        rngs: nnx.Rngs | None = None,
        *,
        offsets: np.ndarray | None = None,
        layout: BiasLayout | None = None,
        bias: jax.Array | None = None,
        rotation: Rotation | None = None,
        places: np.ndarray | None = None,
        read: int | None = None,
        attended: int | None = None,
        mask: jax.Array | None = None,
        sizes: jax.Array | None = None,
    ) -> jax.Array:
        """Maps `[batch, ..., tokens, dim]` to the same shape, with a float32 softmax.

        Args:
          rngs: random keys for dropout, in training.
          offsets: `[tokens, tokens]`, the row of the relative position table for each query and
            key.
          layout: layout of the layer's table of attention biases.
          bias: `[heads, tokens, tokens]`, added to the scores; ignored with `offsets` or `layout`.
          rotation: cosines and sines that rotate queries and keys.
          places: `[tokens, 2]`, column and row of each token, for rotary positions with the layer's
            learned frequencies.
          read: number of leading tokens that are queries; None: all.
          attended: number of leading tokens to attend to; None: all.
          mask: bool `[batch, queries, tokens]`. The last `queries` tokens attend only to tokens for
            which the mask is True, and all other tokens attend to all tokens. A mask cannot be
            combined with positions that are added to the scores. None: no mask.
          sizes: `[batch, tokens, 1]`, the number of original tokens that were merged into each
            token (ToMe's proportional attention). None: no token was merged.
        """
        query, key, value = (named("heads", part) for part in self.project(x, read))
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if places is not None:
            rotation = mixed_rotation(places, self.frequencies[...])
        if rotation is not None:
            halves = self.rope == "dinov3"
            query = rotate(query, *(table[:read] for table in rotation), halves=halves)
            key = rotate(key, *rotation, halves=halves)
        bias = self._scores_bias(query, read, offsets, layout, bias, sizes)
        # In axial attention there is an axis of lines (rows or columns of the grid) between the
        # batch and the tokens. It is merged into the batch axis, so attention is computed within
        # each line.
        lines = [part.reshape(-1, *part.shape[-3:]) for part in (query, key, value)]
        drops = dict(dropout=self.dropout, rngs=rngs)
        if mask is None:
            out = attend(*lines, bias=bias, attended=attended, **drops)
        else:
            # The attention of the first tokens is computed separately, because it needs no mask.
            # Attention with a mask is slower.
            first, last = jnp.split(query, [query.shape[1] - mask.shape[1]], axis=1)
            masked = jnp.where(mask, 0, MASKED)[:, None]
            first = attend(first, key, value, **drops)
            last = attend(last, key, value, bias=masked, **drops)
            out = jnp.concatenate([first, last], axis=1)
        out = named("heads", out.reshape(query.shape))
        if self.norm is not None:
            out = named("heads", self.norm(out.reshape(*out.shape[:-2], -1)).reshape(out.shape))
        return self.out(out)

    def _scores_bias(
        self,
        query: jax.Array,
        read: int | None,
        offsets: np.ndarray | None,
        layout: BiasLayout | None,
        bias: jax.Array | None,
        sizes: jax.Array | None,
    ) -> jax.Array | None:
        """Returns the term that is added to the attention scores; None if nothing is added.

        The term has the shape `[batch or 1, heads or 1, queries, tokens]`. `__call__` describes the
        arguments.
        """
        if sizes is not None:
            return jnp.log(sizes)[:, None, None, :, 0]
        if layout is not None:
            return layout.spread(self.bias_table[...].astype(jnp.float32))[None, :, :read]
        if offsets is not None:
            table = self.relative_embedding[...].astype(query.dtype)[offsets[:read]]
            return jnp.einsum("bqhd,qkd->bhqk", query, table) / math.sqrt(query.shape[-1])
        return None if bias is None else bias[None, :, :read]

    def keys(self, x: jax.Array) -> jax.Array:
        """Returns the keys of tokens, `[batch, tokens, heads, head_dim]`."""
        key = self.project(x)[1]
        return key if self.key_norm is None else self.key_norm(key)

    def project(
        self, x: jax.Array, read: int | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values, each `[batch, ..., tokens, heads, head_dim]`.

        With `read`, queries are computed only for the first `read` tokens; None: for all tokens.
        """
        kernel = self.qkv.kernel[...].astype(x.dtype)
        bias = self._biases(x.dtype)
        if platform() == "gpu":
            # The backward pass of a single product would concatenate the gradients of q, k and v
            # twice: for the gradient of the inputs and for the gradient of the kernel.
            return tuple(
                _flat_product(tokens, kernel[:, part], None if bias is None else bias[part])
                for part, tokens in enumerate((x if read is None else x[..., :read, :], x, x))
            )
        if read is None and platform() != "tpu":
            fused = jnp.einsum("...c,cshd->...shd", x, kernel)
            return tuple(jnp.moveaxis(fused if bias is None else fused + bias, -3, 0))
        # On a TPU, separate products for queries, keys and values lead to better memory layouts.
        parts = (
            jnp.einsum("...c,chd->...hd", tokens, kernel[:, part])
            for part, tokens in enumerate((x if read is None else x[..., :read, :], x, x))
        )
        return tuple(parts if bias is None else (x + bias[part] for part, x in enumerate(parts)))

    def _biases(self, dtype: Any) -> jax.Array | None:
        """Returns the biases of queries, keys and values, `[3, heads, head_dim]`."""
        if self.qkv_bias == "none":
            return None
        bias = self.qkv.bias[...].astype(dtype)
        return jnp.insert(bias, 1, 0, axis=0) if self.qkv_bias == "qv" else bias


def _flat_product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Computes `x @ kernel + bias` by one product of 2-D matrices.

    The shapes are `[..., dim]`, `[dim, heads, head_dim]` and `[heads, head_dim]`; the result is
    `[..., heads, head_dim]`.
    """
    product = x @ kernel.reshape(kernel.shape[0], -1)
    product = product if bias is None else product + bias.reshape(-1)
    return product.reshape(*product.shape[:-1], *kernel.shape[1:])


class Mlp(nnx.Module):
    """MLP of each token: dense layer, GELU, dropout, dense layer.

    With `swiglu` the first layer is twice as wide, and SiLU of one half of its outputs is
    multiplied by the other half (Shazeer, 2020). The hidden layer can be normalized (sub-LN; Wang
    et al., 2022).
    """

    def __init__(self, stack: Stack, *, rngs: nnx.Rngs):
        dim, mlp_dim = stack.dim, stack.mlp_dim
        values = dict(
            bias_init=stack.scheme.mlp_bias, use_bias=stack.bias, dtype=stack.dtype, rngs=rngs
        )
        if stack.mlp == "swiglu":
            self.fc1 = nnx.LinearGeneral(
                dim, (2, mlp_dim), kernel_init=stack.scheme.gated, **values
            )
        else:
            self.fc1 = nnx.Linear(dim, mlp_dim, kernel_init=stack.scheme.dense, **values)
        self.norm = make_norm(mlp_dim, stack, rngs) if stack.sub_norm != "none" else None
        self.fc2 = nnx.Linear(mlp_dim, dim, kernel_init=stack.scheme.out, **values)
        self.kind, self.gelu, self.dropout = stack.mlp, stack.gelu, stack.dropout

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self._first(x)
        x = drop(named("hidden", x), self.dropout, rngs)
        return self.fc2(x if self.norm is None else named("hidden", self.norm(x)))

    def _first(self, x: jax.Array) -> jax.Array:
        """Applies the first dense layer and the activation or gate; returns `[..., mlp_dim]`."""
        if self.kind == "swiglu":
            x = self.fc1(x)
            return nnx.silu(x[..., 0, :]) * x[..., 1, :]
        gelu = GELUS[self.gelu]
        if platform() != "gpu":
            return gelu(self.fc1(x))
        # The backward pass recomputes GELU's derivative, which is cheaper than storing it.
        product = x @ self.fc1.kernel[...].astype(x.dtype)
        if self.fc1.bias is None:
            return jax.checkpoint(gelu)(product)
        return jax.checkpoint(lambda x, bias: gelu(x + bias))(
            product, self.fc1.bias[...].astype(x.dtype)
        )


class EncoderBlock(nnx.Module):
    """One encoder layer: attention and MLP, each with a norm and a residual connection.

    The norms come before attention and MLP (equations 2 and 3) or after them. With LayerScale each
    output channel of attention and MLP has a learned factor (Touvron et al., 2021).

    Args:
      stochastic_depth: probability that an image skips a branch in training (Huang et al., 2016).
    """

    def __init__(self, stack: Stack, stochastic_depth: float = 0.0, *, rngs: nnx.Rngs):
        self.norm1 = make_norm(stack.dim, stack, rngs)
        self.attention = Attention(stack, rngs=rngs)
        self.norm2 = make_norm(stack.dim, stack, rngs)
        self.mlp = Mlp(stack, rngs=rngs)
        self.dropout, self.stochastic_depth = stack.dropout, stochastic_depth
        self.norm_at, self.depth_by = stack.norm_at, stack.depth_by
        scaled = stack.layer_scale is not None
        self.scale1 = nnx.Param(initializers.full(stack.dim, stack.layer_scale)) if scaled else None
        self.scale2 = nnx.Param(initializers.full(stack.dim, stack.layer_scale)) if scaled else None

    def __call__(
        self,
        x: jax.Array,
        rngs: nnx.Rngs | None = None,
        stochastic_depth=None,
        read: int | None = None,
        between: Callable[[jax.Array], jax.Array] | None = None,
        **positions,
    ) -> jax.Array:
        """Maps `[batch, ..., tokens, dim]` to the same shape.

        Args:
          stochastic_depth: stochastic depth rate that replaces the block's own rate, for a scan
            over blocks. It is ignored with `depth_by="subset"`, because the size of the subset must
            be static.
          read: number of leading tokens to return; None: all.
          between: function that is applied to the tokens after attention and before the MLP, such
            as token merging.
          **positions: further arguments of the call of `Attention`, such as `rotation`.
        """
        skipped = self.stochastic_depth if stochastic_depth is None else stochastic_depth

        def add(x, layer, norm, scale, read=None):
            """Adds the output of attention or MLP, with norm and LayerScale, to the tokens."""

            def branch(x):
                changes = layer(norm(x)) if self.norm_at == "before" else norm(layer(x))
                changes = changes if scale is None else changes * scale[...].astype(changes.dtype)
                return drop(changes, self.dropout, rngs)

            if self.depth_by == "subset" and rngs is not None:
                return add_for_subset(x, branch, self.stochastic_depth, rngs, read)
            return x[..., :read, :] + drop(
                branch(x), skipped, rngs, (x.shape[0],) + (1,) * (x.ndim - 1)
            )

        attention = partial(self.attention, rngs=rngs, read=read, **positions)
        x = add(x, attention, self.norm1, self.scale1, read)
        x = x if between is None else between(x)
        return add(x, partial(self.mlp, rngs=rngs), self.norm2, self.scale2)


class AxialBlock(nnx.Module):
    """Two encoder layers: one within each row of patches, one within each column (appendix D.6)."""

    def __init__(
        self, grid: tuple[int, int], stack: Stack, stochastic_depth: float = 0.0, *, rngs: nnx.Rngs
    ):
        self.grid = grid
        self.row = EncoderBlock(stack, stochastic_depth, rngs=rngs)
        self.column = EncoderBlock(stack, stochastic_depth, rngs=rngs)

    def __call__(
        self, x: jax.Array, rngs: nnx.Rngs | None = None, stochastic_depth=None
    ) -> jax.Array:
        """Maps `[batch, rows * columns, dim]` to the same shape."""
        grid = x.reshape(x.shape[0], *self.grid, x.shape[-1])
        grid = self.row(grid, rngs, stochastic_depth).swapaxes(1, 2)
        return self.column(grid, rngs, stochastic_depth).swapaxes(1, 2).reshape(x.shape)


class WindowBlock(EncoderBlock):
    """An encoder layer within each square window of the grid (ViTDet; Li et al., 2203.16527).

    The layer has the same parameters as an `EncoderBlock`. The grid is padded with zeros to whole
    windows. Patches attend to the padding, because it is not masked. (detectron2 pads after the
    first norm.)
    """

    def __init__(
        self,
        grid: tuple[int, int],
        window: int,
        stack: Stack,
        stochastic_depth: float = 0.0,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(stack, stochastic_depth, rngs=rngs)
        self.grid, self.window = grid, window

    def __call__(
        self,
        x: jax.Array,
        rngs: nnx.Rngs | None = None,
        stochastic_depth=None,
        read: int | None = None,
        rotation: Rotation | None = None,
    ) -> jax.Array:
        """Maps `[batch, rows * columns, dim]` to the same shape; arguments as in `EncoderBlock`."""
        if rotation is not None:
            rotation = tuple(self._windows(jnp.asarray(table)[None])[0] for table in rotation)
        x = super().__call__(
            self._windows(x), rngs, stochastic_depth, **({"rotation": rotation} if rotation else {})
        )
        return self._joined(x)[:, :read]

    def _windows(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, rows * columns, ...]` to `[batch, windows, window * window, ...]`."""
        (rows, columns), side = self.grid, self.window
        more = -rows % side, -columns % side
        x = x.reshape(x.shape[0], rows, columns, *x.shape[2:])
        if any(more):
            x = jnp.pad(x, ((0, 0), (0, more[0]), (0, more[1]), *((0, 0),) * (x.ndim - 3)))
        return cut_windows(x, (side, side))

    def _joined(self, x: jax.Array) -> jax.Array:
        """Inverts `_windows`: returns `[batch, rows * columns, dim]`."""
        (rows, columns), side = self.grid, self.window
        size = rows + -rows % side, columns + -columns % side
        x = join_windows(x, size, (side, side))[:, :rows, :columns]
        return x.reshape(x.shape[0], rows * columns, -1)


class AttentionPooling(nnx.Module):
    """Attention pooling (Zhai et al., 2022): a learned query attends to all tokens.

    An MLP with a residual connection follows.
    """

    def __init__(self, stack: Stack, *, rngs: nnx.Rngs):
        dim, heads, xavier = stack.dim, (stack.heads, stack.head_dim), initializers.xavier
        dense = partial(nnx.LinearGeneral, dtype=stack.dtype, rngs=rngs)
        self.probe = nnx.Param(xavier()(rngs.params(), (1, 1, dim)))
        self.query = dense(dim, heads, kernel_init=xavier())
        self.key_value = dense(dim, (2, *heads), kernel_init=xavier(parts=2))
        self.out = dense(heads, dim, axis=(-2, -1), kernel_init=xavier())
        self.norm = make_norm(dim, stack, rngs)
        plain = dict(
            mlp="gelu", dropout=0.0, bias=True, sub_norm="none", scheme=initializers.SCHEMES["flax"]
        )
        self.mlp = Mlp(dataclasses.replace(stack, **plain), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, tokens, dim]` to `[batch, dim]`."""
        query = jnp.broadcast_to(
            self.query(self.probe[...]), (x.shape[0], 1, *self.query.out_features)
        )
        key, value = jnp.moveaxis(self.key_value(x), -3, 0)
        x = self.out(jax.nn.dot_product_attention(query, key, value))
        return (x + self.mlp(self.norm(x)))[:, 0]
