"""The Vision Transformer (Dosovitskiy et al., 2021, section 3.1), images to logits.

Dimensions are named: batch height width channels tokens dim heads head_dim hidden classes.
A model holds parameters and nothing else: no random state, no statistics. Dropout is active
when a call brings `rngs`, and only then.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.errors import UserError

POOLINGS = ("cls", "gap")
GELUS = {"tanh": lambda x: nnx.gelu(x, approximate=True), "erf": lambda x: nnx.gelu(x, approximate=False)}

_xavier = nnx.initializers.xavier_uniform()


def _layer_norm(dim, dtype, rngs):
    return nnx.LayerNorm(dim, epsilon=1e-6, dtype=dtype, rngs=rngs)  # Statistics stay float32.


class Attention(nnx.Module):
    """Multi-head self-attention (appendix A): softmax(q k / sqrt(head_dim)) v, all heads at once."""

    def __init__(self, dim: int, heads: int, *, dtype, rngs: nnx.Rngs):
        head_dim = dim // heads
        # One product for all three. Scale 2 over the joint kernel is Xavier over each of them.
        self.qkv = nnx.LinearGeneral(
            dim,
            (3, heads, head_dim),
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_avg", "uniform"),
            dtype=dtype,
            rngs=rngs,
        )
        self.out = nnx.LinearGeneral(
            (heads, head_dim), dim, axis=(-2, -1), kernel_init=_xavier, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[batch, tokens, dim]` to the same shape. The softmax is taken in float32."""
        query, key, value = jnp.moveaxis(self.qkv(x), -3, 0)
        return self.out(jax.nn.dot_product_attention(query, key, value))


class Mlp(nnx.Module):
    """Dense, GELU, dropout, dense, applied to each token alone."""

    def __init__(self, dim: int, hidden: int, *, dropout: float, gelu: str, dtype, rngs: nnx.Rngs):
        def dense(width_in, width_out):
            return nnx.Linear(
                width_in,
                width_out,
                kernel_init=_xavier,
                bias_init=nnx.initializers.normal(1e-6),
                dtype=dtype,
                rngs=rngs,
            )

        self.fc1, self.fc2 = dense(dim, hidden), dense(hidden, dim)
        self.gelu = GELUS[gelu]
        self.dropout = nnx.Dropout(dropout)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.gelu(self.fc1(x))
        x = self.dropout(x, deterministic=rngs is None, rngs=rngs)
        return self.fc2(x)


class EncoderBlock(nnx.Module):
    """One pre-norm layer (equations 2 and 3)."""

    def __init__(self, dim, heads, hidden, *, dropout: float, gelu: str, dtype, rngs: nnx.Rngs):
        self.norm1 = _layer_norm(dim, dtype, rngs)
        self.attention = Attention(dim, heads, dtype=dtype, rngs=rngs)
        self.norm2 = _layer_norm(dim, dtype, rngs)
        self.mlp = Mlp(dim, hidden, dropout=dropout, gelu=gelu, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        def drop(branch):
            return self.dropout(branch, deterministic=rngs is None, rngs=rngs)

        x = x + drop(self.attention(self.norm1(x)))
        return x + drop(self.mlp(self.norm2(x), rngs))


class ViT(nnx.Module):
    """A Vision Transformer for images of one size.

    Args:
      image_size: height and width in pixels, or one number for a square.
      num_classes: width of the linear head.
      patch_size: side of a patch P in pixels; must divide the image.
      dim, depth, hidden, heads: the paper's D, number of layers L, MLP size and heads (table 1).
      channels: of the images.
      pooling: `cls` reads the class token, `gap` averages all tokens (then there is no class token).
      pre_logits: put the pre-training head's hidden tanh layer before the linear head (section 3.1).
      dropout: rate after every dense layer but q, k, v, and after the position embeddings.
      head_bias: initial value of the head's biases (-10 for sigmoid pre-training); its kernel is zero.
      gelu: `tanh` (Flax's approximation, as the authors trained) or `erf` (exact).
      dtype: of the computation; parameters, normalisation statistics, softmax and logits are float32.
      rngs: the key for initialisation.

    Raises:
      UserError: sizes that do not fit one another.
    """

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        num_classes: int,
        patch_size: int,
        dim: int,
        depth: int,
        hidden: int,
        heads: int,
        channels: int = 3,
        pooling: str = "cls",
        pre_logits: bool = False,
        dropout: float = 0.0,
        head_bias: float = 0.0,
        gelu: str = "tanh",
        dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        if height % patch_size or width % patch_size:
            down = max(patch_size, height // patch_size * patch_size)
            raise UserError(
                f"patch size {patch_size} does not divide the image of {height}x{width} pixels; "
                f"use an image size such as {down} or {down + patch_size}, or another patch size"
            )
        if dim % heads:
            raise UserError(f"{heads} heads do not divide the width {dim} (model.heads, model.dim)")
        if pooling not in POOLINGS:
            raise UserError(f"unknown pooling {pooling!r} (model.pooling); there are: {', '.join(POOLINGS)}")
        if gelu not in GELUS:
            raise UserError(f"unknown gelu {gelu!r} (model.gelu); there are: {', '.join(GELUS)}")

        self.image_size, self.channels = (height, width), channels
        self.patch_size, self.num_classes = patch_size, num_classes
        self.dim, self.depth, self.hidden, self.heads = dim, depth, hidden, heads
        self.pooling = pooling
        self.grid = (height // patch_size, width // patch_size)
        self.tokens = math.prod(self.grid) + (pooling == "cls")

        compute = jnp.dtype(dtype)
        self.patch_embedding = nnx.Conv(
            channels,
            dim,
            kernel_size=(patch_size, patch_size),
            strides=(patch_size, patch_size),
            padding="VALID",
            dtype=compute,
            rngs=rngs,
        )
        if pooling == "cls":
            self.cls = nnx.Param(jnp.zeros((1, 1, dim)))
        self.position_embedding = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (1, self.tokens, dim))
        )
        self.dropout = nnx.Dropout(dropout)
        # Named by depth, so that a checkpoint's paths are strings that sort in order.
        self.blocks = nnx.Dict(
            {
                f"{layer:02d}": EncoderBlock(
                    dim, heads, hidden, dropout=dropout, gelu=gelu, dtype=compute, rngs=rngs
                )
                for layer in range(depth)
            }
        )
        self.norm = _layer_norm(dim, compute, rngs)
        self.pre_logits = nnx.Linear(dim, dim, dtype=compute, rngs=rngs) if pre_logits else None
        self.head = nnx.Linear(
            dim,
            num_classes,
            kernel_init=nnx.initializers.zeros_init(),
            bias_init=nnx.initializers.constant(head_bias),
            dtype=jnp.float32,
            rngs=rngs,
        )

    def __call__(self, images: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Float images in [-1, 1], `[batch, height, width, channels]`, to logits `[batch, classes]`.

        Args:
          rngs: a `dropout` stream; with it the call is a training call.
        """
        x = self.patch_embedding(images)
        batch, _, _, dim = x.shape
        x = x.reshape(batch, -1, dim)
        if self.pooling == "cls":
            cls = jnp.broadcast_to(self.cls[...].astype(x.dtype), (batch, 1, dim))
            x = jnp.concatenate([cls, x], axis=1)
        x = x + self.position_embedding[...].astype(x.dtype)
        x = self.dropout(x, deterministic=rngs is None, rngs=rngs)

        for layer in range(self.depth):
            x = self.blocks[f"{layer:02d}"](x, rngs)

        x = self.norm(x)
        x = x[:, 0] if self.pooling == "cls" else x.mean(axis=1)
        if self.pre_logits is not None:
            x = jnp.tanh(self.pre_logits(x))
        return self.head(x)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one image's forward pass, matrix products only."""
        n, dim = self.tokens, self.dim
        patches = math.prod(self.grid) * self.patch_size**2 * self.channels * dim
        block = 4 * n * dim**2 + 2 * n**2 * dim + 2 * n * dim * self.hidden
        head = (dim**2 if self.pre_logits is not None else 0) + dim * self.num_classes
        return patches + self.depth * block + head
