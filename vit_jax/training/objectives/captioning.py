"""Captioning: a decoder predicts the tokens of an image's caption from the patches of the image.

The decoder has the architecture of CapPa's decoder (Tschannen et al., 2023; 2306.07915). LocCa
(2403.19596) and SigLIP 2 (2502.14786) train such a decoder together with the image encoder. The
decoder predicts each token from the earlier tokens, or all tokens in parallel from mask tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models.attention import attend
from vit_jax.models.layers import numbered
from vit_jax.models.transformer import Attention, Mlp, Stack
from vit_jax.options.text import TextOptions

CHUNK = 8  # Number of token positions whose logits are in memory at the same time.


class DecoderBlock(nnx.Module):
    """A pre-norm decoder layer without biases: self-attention, cross-attention to patches, MLP."""

    def __init__(self, stack: Stack, image_dim: int, *, rngs: nnx.Rngs):
        def norm():
            return nnx.LayerNorm(
                stack.dim, epsilon=stack.epsilon, use_bias=False, dtype=stack.dtype, rngs=rngs
            )

        self.norm1, self.norm2, self.norm3 = norm(), norm(), norm()
        self.attention = Attention(stack, rngs=rngs)
        shape, init = (stack.heads, stack.head_dim), stack.scheme.out
        values = dict(use_bias=False, kernel_init=init, dtype=stack.dtype, rngs=rngs)
        self.query = nnx.LinearGeneral(stack.dim, shape, **values)
        self.key = nnx.LinearGeneral(image_dim, shape, **values)
        self.value = nnx.LinearGeneral(image_dim, shape, **values)
        self.out = nnx.LinearGeneral(shape, stack.dim, axis=(-2, -1), **values)
        self.mlp = Mlp(stack, rngs=rngs)

    def __call__(self, x: jax.Array, image: jax.Array, bias: jax.Array) -> jax.Array:
        """Applies the layer to tokens `[batch, length, dim]`; the result has the same shape.

        Args:
          image: encoded patches, `[batch, patches, image_dim]`.
          bias: values added to the self-attention's scores, `[batch, 1, length, length]`, such as
            a causal mask.
        """
        query, key, value = self.attention.project(self.norm1(x))
        x = x + self.attention.out(attend(query, key, value, bias=bias))
        query = self.query(self.norm2(x))
        x = x + self.out(attend(query, self.key(image), self.value(image)))
        return x + self.mlp(self.norm3(x))


class CaptionDecoder(nnx.Module):
    """Transformer decoder of captions.

    Args:
      text: arguments of the text encoder. The decoder has the same vocabulary, text length, width
        and number of heads.
      image_dim: width of the image encoder's patch tokens.
      end: token that ends a text; tokens after the first end token are padding.
    """

    def __init__(self, text: TextOptions, depth: int, image_dim: int, end: int, *, rngs: nnx.Rngs):
        stack = Stack(
            dim=text.dim,
            heads=text.heads,
            mlp_dim=text.mlp_dim,
            bias=False,
            qkv_bias="none",
            dtype=jnp.dtype(text.dtype),
        )
        normal = nnx.initializers.normal
        embed = partial(nnx.Embed, features=text.dim, dtype=stack.dtype, rngs=rngs)
        # The last embedding is the mask token of parallel prediction.
        self.token_embedding = embed(text.vocabulary + 1, embedding_init=normal(1.0))
        self.position_embedding = embed(text.length, embedding_init=normal(text.dim**-0.5))
        self.blocks = numbered(DecoderBlock(stack, image_dim, rngs=rngs) for _ in range(depth))
        self.norm = nnx.LayerNorm(text.dim, epsilon=stack.epsilon, dtype=stack.dtype, rngs=rngs)
        self.head = nnx.Linear(
            text.dim, text.vocabulary, kernel_init=nnx.initializers.zeros, rngs=rngs
        )
        self.mask, self.end = text.vocabulary, end

    def __call__(self, image: jax.Array, tokens: jax.Array, parallel: jax.Array) -> jax.Array:
        """Returns the decoder's output for each token of the captions, `[batch, length, dim]`.

        From output i of a caption, the layer `head` computes the logits of token i.

        Args:
          image: encoded patches, `[batch, patches, image_dim]`.
          tokens: tokens of the captions, int32 `[batch, length]`.
          parallel: bool `[batch]`. True: all tokens of the caption are predicted in parallel.
            False: each token is predicted from the tokens before it.
        """
        length = tokens.shape[1]
        shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        inputs = jnp.where(parallel[:, None], self.mask, shifted)
        x = self.token_embedding(inputs) + self.position_embedding(jnp.arange(length))
        seen = jnp.tri(length, dtype=bool) | parallel[:, None, None]
        bias = jnp.where(seen, 0.0, -jnp.inf)[:, None]
        for block in self.blocks.values():
            x = block(x, image, bias)
        return self.norm(x)

    def losses(self, image: jax.Array, tokens: jax.Array, parallel: jax.Array) -> jax.Array:
        """Returns the mean cross-entropy of each caption's tokens, float32 `[batch]`.

        Args:
          image: encoded patches, `[batch, patches, image_dim]`.
          tokens: tokens of the captions, int32 `[batch, length]`.
          parallel: bool `[batch]`, as in `__call__`.
        """
        x = self(image, tokens, parallel)
        ends = tokens == self.end
        weights = (jnp.cumsum(ends, axis=1) - ends == 0).astype(jnp.float32)
        kernel, bias = self.head.kernel[...], self.head.bias[...]

        @jax.checkpoint
        def crossed(part):
            # The loss is computed for a few tokens at a time. With a vocabulary of 256,000 the
            # logits of whole texts would not fit in memory.
            x, tokens = part
            logits = x.astype(jnp.float32) @ kernel + bias
            target_logits = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
            return jax.nn.logsumexp(logits, axis=-1) - target_logits

        size = tokens.shape[1]
        size = CHUNK if size % CHUNK == 0 else size
        chunks = [y.reshape(len(y), -1, size, *y.shape[2:]).swapaxes(0, 1) for y in (x, tokens)]
        each = jax.lax.map(crossed, tuple(chunks)).swapaxes(0, 1).reshape(tokens.shape)
        return (each * weights).sum(axis=1) / weights.sum(axis=1)
