"""Text towers of CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023)."""

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models.layers import named, numbered
from vit_jax.models.text_tokens import Tokenizer, open_tokenizer, tokenizer_identity
from vit_jax.models.transformer import EncoderBlock, Stack, make_norm
from vit_jax.options.objective import ContrastiveOptions
from vit_jax.options.text import TextOptions


class TextTower(nnx.Module):
    """A pre-norm Transformer over text tokens; one token's output is projected to the embedding.

    In CLIP attention is causal, and the embedding is read from the end-of-text token. In SigLIP
    attention has no mask, and the embedding is read from the last token; therefore texts must be
    padded to the full length.
    """

    def __init__(self, options: TextOptions, *, rngs: nnx.Rngs):
        self.options = options
        stack = Stack(
            dim=options.dim,
            heads=options.heads,
            mlp_dim=options.mlp_dim,
            gelu=options.gelu,
            epsilon=options.norm_epsilon,
            dtype=jnp.dtype(options.dtype),
        )
        # Standard deviations of token and position embeddings in CLIP's and in big_vision's code.
        stds = (0.02, 0.01) if options.causal else (options.dim**-0.5, options.dim**-0.5)
        embed = partial(nnx.Embed, features=options.dim, dtype=stack.dtype, rngs=rngs)
        tokens, positions = map(nnx.initializers.normal, stds)
        self.token_embedding = embed(options.vocabulary, embedding_init=tokens)
        self.position_embedding = embed(options.length, embedding_init=positions)
        self.blocks = numbered(EncoderBlock(stack, rngs=rngs) for _ in range(options.depth))
        self.norm = make_norm(options.dim, stack, rngs)
        self.head = nnx.Linear(
            options.dim, options.output_dim, use_bias=options.head_bias, rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens `[texts, length]` to embeddings, float32 `[texts, output_dim]`.

        The embeddings are not normalized.
        """
        x = self.token_embedding(tokens) + self.position_embedding(jnp.arange(tokens.shape[1]))
        bias = self._causal_mask(tokens.shape[1]) if self.options.causal else None
        for block in self.blocks.values():
            x = named("tokens", block(x, bias=bias))
        return self.head(self.norm(self._pooled(x, tokens))).astype(jnp.float32)

    def _causal_mask(self, length: int) -> jax.Array:
        """Returns the mask that is added to scores, `[1, length, length]`: -inf for later keys."""
        return jnp.where(jnp.tri(length, dtype=bool), 0.0, -jnp.inf)[None]

    def _pooled(self, x: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the output of the end-of-text token (CLIP) or the last token, `[texts, dim]`."""
        if self.options.pooling == "last":
            return jax.lax.index_in_dim(x, -1, axis=1, keepdims=False)
        ends = tokens if self.options.pooling == "highest" else tokens == self.options.end
        place = ends.astype(jnp.int32).argmax(axis=1)
        # The token at position `place` is read by a sum with one-hot weights, because ONNX has no
        # batched lookup at computed indices.
        read = jnp.arange(tokens.shape[1]) == place[:, None]
        return jnp.where(read[:, :, None], x, 0).sum(axis=1)


def tokenizer_of(options: ContrastiveOptions) -> Tokenizer:
    """Opens the tokenizer that a run's config selects.

    Raises:
      UserError: the tokenizer does not exist or is damaged.
    """
    return _opened(
        options.tokenizer,
        options.text_length,
        options.text_cleaning or options.text_tower,
        options.vocabulary,
        tokenizer_identity(Path(options.tokenizer)),
    )


@lru_cache(maxsize=2)  # A run opens its tokenizer several times, which can take a second.
def _opened(
    folder: str, length: int, cleaning: str, vocabulary: int | None, identity: str
) -> Tokenizer:
    return open_tokenizer(Path(folder), length, cleaning, vocabulary)


def text_options(options: ContrastiveOptions, output_dim: int, dtype: str) -> TextOptions:
    """Returns the arguments of a run's text tower.

    `output_dim` is the width of the image tower's embeddings.

    Raises:
      UserError: the tokenizer does not exist, or the number of heads does not divide the width.
    """
    if options.text_dim % options.text_heads:
        raise UserError(
            f"config.contrastive.text_dim={options.text_dim} must be divisible by "
            f"config.contrastive.text_heads={options.text_heads}"
        )
    tokenizer = tokenizer_of(options)
    settings: dict[str, Any] = {}
    if options.text_tower == "clip":
        settings = dict(causal=True, pooling="end", end=tokenizer.end, head_bias=False)
        settings |= dict(gelu="quick", norm_epsilon=1e-5)
    if options.text_gelu is not None:
        settings["gelu"] = options.text_gelu
    return TextOptions(
        vocabulary=options.vocabulary or tokenizer.vocabulary,
        length=options.text_length,
        dim=options.text_dim,
        depth=options.text_depth,
        heads=options.text_heads,
        mlp_dim=options.text_mlp_dim or 4 * options.text_dim,
        output_dim=output_dim,
        dtype=dtype,
        **settings,
    )
