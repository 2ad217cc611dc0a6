"""Token merging (ToMe; Bolya et al., 2023, 2210.09461): a faster ViT without training.

After the attention of each layer, the most similar pairs of patches are averaged, so that later
layers have fewer tokens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.models.transformer import EncoderBlock


def encode_merged(
    blocks: list[EncoderBlock], x: jax.Array, patches: slice, count: int, read: int | None = None
) -> tuple[jax.Array, slice]:
    """Applies encoder layers; each layer merges some of its patches into others.

    Args:
      blocks: the layers. Position embeddings must be added to `x` before the first layer, not in
        later layers.
      x: tokens `[batch, tokens, dim]`.
      patches: slice of the token axis that contains the patches. Other tokens are not merged.
      count: number of patches that each layer merges, at most half of the layer's patches.
      read: number of leading tokens to return; None: all.

    Returns:
      The last layer's tokens, and the slice of the token axis that contains the remaining patches.
    """
    sizes = None  # Number of original patches in each token, float32 `[batch, tokens, 1]`.
    for number, block in enumerate(blocks):
        merged = min(count, (patches.stop - patches.start) // 2)
        if read is not None and number == len(blocks) - 1:  # No layer reads merged patches.
            return block(x, sizes=sizes, read=read), slice(patches.start, read)
        if not merged:
            x = block(x, sizes=sizes)
            continue
        inputs = block.norm1(x) if block.norm_at == "before" else x
        merge = _merging(block.attention.keys(inputs), patches, merged)
        before = jnp.ones((*x.shape[:2], 1)) if sizes is None else sizes
        after = merge(before)
        x = block(x, sizes=sizes, between=_mean(merge, before, after))
        sizes, patches = after, slice(patches.start, patches.stop - merged)
    return x, patches


def _mean(merge: Callable, before: jax.Array, after: jax.Array) -> Callable:
    """Returns a function that merges the values of tokens by a weighted mean.

    `merge` sums the values of merged tokens. `before` and `after` are the number of original tokens
    in each token before and after this merging, `[batch, tokens, 1]`.
    """
    return lambda x: (merge(x.astype(jnp.float32) * before) / after).astype(x.dtype)


def _merging(keys: jax.Array, patches: slice, count: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that sums values of merged patches, as in the authors' `merge.py`.

    Patches at even positions among all tokens are compared with patches at odd positions. The
    `count` patches at even positions with the highest similarity to any patch at an odd position
    are merged: each is added to its most similar patch at an odd position. In the result, the
    remaining patches at even positions come before the patches at odd positions.

    Args:
      keys: keys of attention, `[batch, tokens, heads, head_dim]`. Patches are compared by the
        cosine similarity of their keys, averaged over heads.

    Returns:
      A function of values `[batch, tokens, channels]`; it returns `[batch, tokens - count,
      channels]`.
    """

    def split(x):
        x = x[:, patches]
        return x[:, patches.start % 2 :: 2], x[:, 1 - patches.start % 2 :: 2]

    mean = keys.astype(jnp.float32).mean(axis=-2)
    even, odd = split(mean / jnp.linalg.norm(mean, axis=-1, keepdims=True))
    similarities = jnp.einsum("bec,boc->beo", even, odd, precision="highest")
    _, order = jax.lax.top_k(similarities.max(axis=-1), even.shape[1])
    merged, kept = order[:, :count, None], order[:, count:, None]
    if patches.start:  # The authors' code sorts the other patches only after prefix tokens.
        kept = -jax.lax.top_k(-kept[..., 0], kept.shape[1])[0][..., None]
    targets = jnp.take_along_axis(similarities.argmax(axis=-1)[..., None], merged, axis=1)
    receives = (targets == jnp.arange(odd.shape[1])).astype(jnp.float32)

    def merge(x):
        even, odd = split(x)
        added = jnp.take_along_axis(even, merged, axis=1)
        odd = odd + jnp.einsum("bmo,bmc->boc", receives, added, precision="highest")
        parts = x[:, : patches.start], jnp.take_along_axis(even, kept, axis=1), odd
        return jnp.concatenate([*parts, x[:, patches.stop :]], axis=1)

    return merge
