"""Sigmoid and softmax losses of image-text pairs over a global batch."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from vit_jax.parallel.mesh import BATCH, batch_parts


class Pairs(NamedTuple):
    """A batch of pairs.

    Attributes:
      images, texts: embeddings of length 1, float32 `[batch, dim]`; row i of each is one pair.
      scale: factor of the similarities.
      keep: bool `[batch]`; False for padding, which is not a negative of other pairs.
    """

    images: jax.Array
    texts: jax.Array
    scale: jax.Array
    keep: jax.Array


def softmax_losses(pairs: Pairs) -> tuple[jax.Array, jax.Array]:
    """Returns CLIP's loss of each image, and its `_matched`.

    The loss is the mean of two cross-entropies, over the texts and over the images (Radford et al.,
    2021, figure 3).
    """
    logits = pairs.scale * _similarities(pairs.images, pairs.texts)
    of_texts = jnp.where(pairs.keep[None, :], logits, -jnp.inf)
    of_images = jnp.where(pairs.keep[:, None], logits, -jnp.inf)
    own = jnp.diagonal(logits)
    normalizers = (jax.nn.logsumexp(of_texts, axis=1), jax.nn.logsumexp(of_images, axis=0))
    return sum(normalizers) / 2 - own, _matched(own, *_most_similar(of_texts))


def sigmoid_losses(
    pairs: Pairs, bias: jax.Array, mesh: Mesh | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns SigLIP's loss of each image, and its `_matched`.

    The loss is the binary cross-entropy, summed over all texts of the batch (Zhai et al., 2023,
    equation 1). Blocks of texts are passed around the devices, so that each device computes the
    logits of its images and one block of texts at a time (section 3.3).

    Args:
      bias: offset of the logits.
      mesh: devices over which the batch is split; None: the batch is not split.
    """
    negatives, most, equal = _all_as_negatives(mesh, *pairs, bias)
    own = pairs.scale * _own_similarities(pairs) + bias
    # softplus(-x) = softplus(x) - x corrects the image's own text, the positive.
    return negatives - own, _matched(own, most, equal)


def _matched(own: jax.Array, most: jax.Array, equal: jax.Array) -> jax.Array:
    """Returns the probability that an image's own text is chosen among the most similar ones.

    It is 1 or 0 without ties. With n texts of the largest logit, such as equal captions, it is 1/n.

    Args:
      own: logit of each image and its own text, float32 `[batch]`.
      most: largest logit of each image, float32 `[batch]`.
      equal: number of texts with that logit, float32 `[batch]`.
    """
    own, most, equal = jax.lax.stop_gradient((own, most, equal))
    return jnp.where(own >= _about(most), 1 / equal, 0)


def _most_similar(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns each image's largest logit, and the number of texts with it; each `[images]`."""
    most = logits.max(axis=1)
    return most, (logits >= _about(most)[:, None]).sum(axis=1, dtype=jnp.float32)


def _about(most: jax.Array) -> jax.Array:
    """Returns the smallest logit that counts as equal to the largest, but for rounding."""
    return most - 1e-5 * jnp.abs(most)


def _similarities(images: jax.Array, texts: jax.Array) -> jax.Array:
    return jnp.matmul(images, texts.T, precision="highest")


def _own_similarities(pairs: Pairs) -> jax.Array:
    return (pairs.images * pairs.texts).sum(axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_as_negatives(mesh, images, texts, scale, keep, bias):
    """Returns each image's sum of softplus(logit) over all texts, and its `_most_similar`.

    The backward pass recomputes the logits, because the whole matrix would not fit in memory.
    """

    def on_device(images, texts, scale, keep, bias):
        def block(totals, moving):
            texts, keep = moving
            logits = scale * _similarities(images, texts) + bias
            losses = jnp.where(keep, jax.nn.softplus(logits), 0).sum(axis=1)
            here = _most_similar(jnp.where(keep, logits, -jnp.inf))
            most = jnp.maximum(totals[1], here[0])
            found = (totals[1:], here)
            equal = sum(jnp.where(x >= _about(most), count, 0) for x, count in found)
            return (totals[0] + losses, most, equal), moving

        zeros = jnp.zeros(len(images))
        first = zeros, jnp.full(len(images), -jnp.inf), zeros
        return _around(mesh, block, first, (texts, keep))[0]

    return _split(mesh, on_device, (1, 1, 0, 1, 0), (1, 1, 1))(images, texts, scale, keep, bias)


def _forward(mesh, *inputs):
    return _all_as_negatives(mesh, *inputs), inputs


def _backward(mesh, inputs, gradients):
    def on_device(images, texts, scale, keep, bias, weights):
        def block(totals, moving):
            of_images, of_scale, of_bias = totals
            texts, keep, of_texts = moving
            similarities = _similarities(images, texts)
            slopes = jnp.where(keep, jax.nn.sigmoid(scale * similarities + bias), 0)
            slopes *= weights[:, None]
            of_images += scale * jnp.matmul(slopes, texts, precision="highest")
            of_texts += scale * jnp.matmul(slopes.T, images, precision="highest")
            totals = of_images, of_scale + (slopes * similarities).sum(), of_bias + slopes.sum()
            return totals, (texts, keep, of_texts)

        first = jnp.zeros_like(images), jnp.float32(0), jnp.float32(0)
        (of_images, *of_numbers), moved = _around(
            mesh, block, first, (texts, keep, jnp.zeros_like(texts))
        )
        if mesh is not None:
            of_numbers = jax.lax.psum(of_numbers, BATCH)
        return of_images, moved[2], *of_numbers

    call = _split(mesh, on_device, (1, 1, 0, 1, 0, 1), (1, 1, 0, 0))
    of_images, of_texts, of_scale, of_bias = call(*inputs, gradients[0])
    return of_images, of_texts, of_scale, None, of_bias


_all_as_negatives.defvjp(_forward, _backward)


def _split(mesh: Mesh | None, call: Callable, inputs: tuple, outputs: tuple) -> Callable:
    """Returns a function that runs `call` on each device's part of the batch.

    Args:
      inputs, outputs: 1 for arrays that are split over the batch, 0 for others.
    """
    if mesh is None:
        return call
    spec = (PartitionSpec(), PartitionSpec(BATCH))
    return jax.shard_map(
        call,
        mesh=mesh,
        in_specs=tuple(spec[split] for split in inputs),
        out_specs=tuple(spec[split] for split in outputs),
        check_vma=False,
    )


def _around(mesh: Mesh | None, block: Callable, totals, moving):
    """Passes `moving` around all devices and applies `block` on each, until it is back.

    Returns:
      The totals of this device, and this device's part of `moving`.
    """
    if mesh is None:
        return block(totals, moving)
    parts = batch_parts(mesh)
    shifted = [(place, (place + 1) % parts) for place in range(parts)]

    def turn(carry, _):
        totals, moving = block(*carry)
        return (totals, jax.lax.ppermute(moving, BATCH, shifted)), None

    return jax.lax.scan(turn, (totals, moving), None, length=parts)[0]
