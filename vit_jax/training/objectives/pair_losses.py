"""Sigmoid and softmax losses of image-text pairs over a global batch."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from vit_jax.parallel.mesh import BATCH, batch_parts


class Pairs(NamedTuple):
    """A batch of image-text pairs.

    Attributes:
      images: image embeddings of unit norm, float32 `[batch, dim]`.
      texts: text embeddings of unit norm, float32 `[batch, dim]`. Image i and text i are a pair.
      scale: factor by which cosine similarities are multiplied.
      keep: bool `[batch]`; False for padding. Padding is not a negative for other pairs.
    """

    images: jax.Array
    texts: jax.Array
    scale: jax.Array
    keep: jax.Array


def softmax_losses(pairs: Pairs) -> tuple[jax.Array, jax.Array]:
    """Returns CLIP's loss and the retrieval accuracy of each image, both `[batch]`.

    The loss is the mean of two cross-entropies: one over the texts of the batch, given the image,
    and one over the images, given the text (Radford et al., 2021, figure 3). `_matched` defines the
    accuracy.
    """
    logits = pairs.scale * _similarities(pairs.images, pairs.texts)
    of_texts = jnp.where(pairs.keep[None, :], logits, -jnp.inf)
    of_images = jnp.where(pairs.keep[:, None], logits, -jnp.inf)
    positive_logits = jnp.diagonal(logits)
    normalizers = (jax.nn.logsumexp(of_texts, axis=1), jax.nn.logsumexp(of_images, axis=0))
    return sum(normalizers) / 2 - positive_logits, _matched(
        positive_logits, *_most_similar(of_texts)
    )


def sigmoid_losses(
    pairs: Pairs, bias: jax.Array, mesh: Mesh | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns SigLIP's loss and the retrieval accuracy of each image, both `[batch]`.

    The loss is the binary cross-entropy, summed over all texts of the batch (Zhai et al., 2023,
    equation 1). Blocks of texts are passed around the devices. In each turn, a device computes the
    logits of its own images with one block of texts (section 3.3). `_matched` defines the accuracy.

    Args:
      pairs: batch of image-text pairs.
      bias: offset of the logits.
      mesh: devices over which the batch is split; None: the batch is not split.
    """
    negatives, most, equal = _all_as_negatives(mesh, *pairs, bias)
    positive_logits = pairs.scale * (pairs.images * pairs.texts).sum(axis=-1) + bias
    # `_all_as_negatives` counts an image's own text as a negative, too, with the loss softplus(x).
    # As a positive, its loss is softplus(-x) = softplus(x) - x, so x is subtracted.
    return negatives - positive_logits, _matched(positive_logits, most, equal)


def _matched(positive_logits: jax.Array, most: jax.Array, equal: jax.Array) -> jax.Array:
    """Returns the accuracy of each image: 1 if its own text has the largest logit, else 0.

    If n texts have the largest logit, such as n equal captions, the accuracy is 1/n. This is the
    probability of a correct choice if one of them is chosen at random.

    Args:
      positive_logits: logit of each image and its own text, float32 `[batch]`.
      most: largest logit of each image, float32 `[batch]`.
      equal: number of texts with that logit, float32 `[batch]`.
    """
    positive_logits, most, equal = jax.lax.stop_gradient((positive_logits, most, equal))
    return jnp.where(positive_logits >= _about(most), 1 / equal, 0)


def _most_similar(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest logit of each image, and the number of texts with this logit.

    `logits` is `[images, texts]`; both results are `[images]`.
    """
    most = logits.max(axis=1)
    return most, (logits >= _about(most)[:, None]).sum(axis=1, dtype=jnp.float32)


def _about(most: jax.Array) -> jax.Array:
    """Returns the smallest logit that counts as equal to the largest logit, `[images]`.

    Because of rounding errors, equal logits may differ. A logit counts as equal if it is smaller
    than the largest logit by a relative difference of at most 1e-5.
    """
    return most - 1e-5 * jnp.abs(most)


def _similarities(images: jax.Array, texts: jax.Array) -> jax.Array:
    return jnp.matmul(images, texts.T, precision="highest")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_as_negatives(mesh, images, texts, scale, keep, bias):
    """Returns three values of each image's logits with all texts, each `[images]`.

    The values are the sum of softplus(logit), the largest logit, and the number of texts with the
    largest logit. The sum would be the loss of the image if all texts were negatives. The backward
    pass recomputes the logits, because the matrix of all logits would not fit in memory.
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
    """Returns a function that runs `call` on each device's part of the batch, by `shard_map`.

    Args:
      mesh: mesh of devices; None: `call` itself is returned.
      inputs: for each argument of `call`, 1 if its batch axis is split over the devices, else 0.
      outputs: for each result of `call`, 1 if its batch axis is split over the devices, else 0.
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
    """Passes blocks of data, such as texts, around a ring of all devices.

    In each turn, a device calls `totals, moving = block(totals, moving)` and passes `moving` to the
    next device. After as many turns as devices, each device has processed all blocks, and each
    block is on its first device again. The final `totals` and `moving` of this device are returned.

    Args:
      mesh: mesh of devices; None: `block` is called once.
      block: function `(totals, moving) -> (totals, moving)`.
      totals: initial sums of this device, which stay on this device.
      moving: first block of this device.
    """
    if mesh is None:
        return block(totals, moving)
    parts = batch_parts(mesh)
    shifted = [(place, (place + 1) % parts) for place in range(parts)]

    def turn(carry, _):
        totals, moving = block(*carry)
        return (totals, jax.lax.ppermute(moving, BATCH, shifted)), None

    return jax.lax.scan(turn, (totals, moving), None, length=parts)[0]
