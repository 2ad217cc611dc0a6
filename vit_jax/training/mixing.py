"""Augmentations of the whole batch, on the devices: flips, random erasing, mixup, CutMix.

The augmentations are pure functions inside the compiled step. All random numbers are drawn for the
global batch from the step's key, so they are the same for any number of devices, processes and
micro-batches.
"""

import math
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from vit_jax.models.pixels import Statistic, affine, to_floats


def augment(
    batch: dict[str, jax.Array],
    key: jax.Array,
    *,
    flip: bool = False,
    flips: Mapping[str, str] = {"image": "flip"},
    spatial: Mapping[str, str] = {},
    erasing: float = 0.0,
    mean: Statistic = 0.5,
    std: Statistic = 0.5,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    cutmix_share: float = 0.5,
    repeats: int = 1,
) -> dict[str, jax.Array]:
    """Applies the enabled augmentations to a batch: flips, random erasing, then mixup or CutMix.

    Args:
      batch: `image` uint8 `[batch, height, width, 3]` and `labels` int32 `[batch, max_labels]`.
      key: random key of the step.
      flip: True: each image is mirrored with probability 1/2.
      flips: a dict from each view (an entry of the batch with images) to a name. The name is folded
        into the random key, so views with the same name are flipped together.
      spatial: a dict with the entries of the batch that must be flipped together with `image`, such
        as masks. The values are the kinds of the entries: `map` or `boxes`.
      erasing: probability that an image gets a random rectangle of noise.
      mean, std: the model's normalization of pixels in [0, 1]. The noise of erasing has this mean
        and std.
      mixup: alpha of mixup's beta distribution; 0 disables mixup.
      cutmix: alpha of CutMix's beta distribution; 0 disables CutMix.
      cutmix_share: if mixup and CutMix are both enabled, the probability that a batch uses CutMix.
      repeats: number of consecutive batch entries with the same image (repeated augmentation).
        These entries are not mixed with each other.

    Returns:
      The batch with `image` and `labels` replaced. `image` is float32 in [-1, 1]. If only flips are
      enabled, `image` stays uint8, which takes a quarter of the memory. Mixup and CutMix add
      `partner_labels`, and `share` float32 `[batch]`: the share of the pixels that belongs to
      `labels`, at least 0.5.
    """
    if flip:
        flipped = {
            name: random_flip(batch[name], _fold(key, drawn)) for name, drawn in flips.items()
        }
        mirrored = _mirrored(batch["image"].shape, _fold(key, flips["image"])) if spatial else None
        for name, kind in spatial.items():
            width = batch["image"].shape[-2]
            flipped[name] = flip_field(batch[name], kind, width, mirrored)
        batch = batch | flipped
    if erasing:
        images, erasing_key = to_floats(batch["image"]), _fold(key, "erasing")
        batch = batch | {"image": random_erasing(images, erasing_key, erasing, mean, std)}
    if mixup or cutmix:
        size = batch["image"].shape[1:3]
        batch = mix(batch, mixing_weights(key, size, mixup, cutmix, cutmix_share), repeats)
    return batch


def random_flip(images: jax.Array, key: jax.Array) -> jax.Array:
    """Mirrors each image `[..., height, width, 3]` with probability 1/2."""
    return jnp.where(_mirrored(images.shape, key), images[..., ::-1, :], images)


def _mirrored(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Draws the images that `random_flip` mirrors: True for these images, bool `[..., 1, 1, 1]`."""
    return jax.random.bernoulli(key, shape=(*shape[:-3], 1, 1, 1))


def flip_field(values: jax.Array, kind: str, width: int, mirrored: jax.Array) -> jax.Array:
    """Mirrors the maps or boxes that belong to mirrored images.

    Args:
      values: maps `[batch, height, width, ...]`, or boxes `[batch, ..., 4 or more]`. The first four
        values of a box are left, top, right and bottom in pixels.
      kind: `map` or `boxes`.
      width: width of the images in pixels.
      mirrored: True for mirrored images, bool `[batch, 1, 1, 1]`.
    """
    mirrored = mirrored.reshape(-1, *(1,) * (values.ndim - 1))
    if kind == "map":
        return jnp.where(mirrored, values[:, :, ::-1], values)
    left, top, right, bottom = jnp.split(values[..., :4], 4, axis=-1)
    corners = [width - right, top, width - left, bottom]
    return jnp.where(mirrored, jnp.concatenate([*corners, values[..., 4:]], -1), values)


def random_erasing(
    images: jax.Array,
    key: jax.Array,
    probability: float,
    mean: Statistic = 0.5,
    std: Statistic = 0.5,
) -> jax.Array:
    """Fills a random rectangle of some images with noise (1708.04896; timm's mode "pixel").

    The rectangle covers 2 % to a third of the area, and its aspect ratio (height over width) is
    log-uniform from 0.3 to 1/0.3. Area and aspect ratio are drawn up to ten times, until the
    rectangle is smaller than the image along both axes. Each pixel and channel gets its own normal
    noise, with the mean and std of the model's normalization.

    Args:
      images: float32 `[batch, height, width, channels]`, in [-1, 1].
      probability: probability that an image gets a rectangle.
      mean, std: the model's normalization of pixels in [0, 1].
    """
    batch, height, width, _ = images.shape
    keys = jax.random.split(key, 4)
    draws = jax.random.uniform(keys[0], (2, batch, 10))
    area = (0.02 + draws[0] * (1 / 3 - 0.02)) * height * width
    ratio = jnp.exp((2 * draws[1] - 1) * -math.log(0.3))
    sides = jnp.round(jnp.sqrt(jnp.stack([area * ratio, area / ratio], axis=-1)))
    fits = (sides < jnp.array([height, width])).all(-1)
    sides = jnp.take_along_axis(sides, fits.argmax(1)[:, None, None], axis=1)[:, 0]
    chosen = fits.any(1) & (jax.random.uniform(keys[1], (batch,)) < probability)
    places = jax.random.uniform(keys[2], (2, batch))
    rows = _interval(places[0], sides[:, 0], height)
    columns = _interval(places[1], sides[:, 1], width)
    erased = chosen[:, None, None] & rows[:, :, None] & columns[:, None, :]
    mean, std = affine(mean, std)
    noise = mean + std * jax.random.normal(keys[3], images.shape)
    return jnp.where(erased[..., None], noise, images)


def _interval(draw: jax.Array, length: jax.Array, side: int) -> jax.Array:
    """Draws an interval of pixels for each image: bool `[batch, side]`, True in the interval.

    `draw` `[batch]` is a uniform random number in [0, 1], which determines the first pixel.
    `length` `[batch]` is the number of pixels of each interval.
    """
    start = jnp.floor(draw * (side - length + 1))[:, None]
    position = jnp.arange(side)
    return (position >= start) & (position < start + length[:, None])


def mixing_weights(
    key: jax.Array, size: tuple[int, int], mixup: float, cutmix: float, cutmix_share: float
) -> jax.Array:
    """Draws the mixing weights of a batch's pixels for mixup or CutMix, `[height, width]`.

    A mixed pixel is `weight * image + (1 - weight) * partner`. All images of the batch have the
    same weights. In mixup all pixels have the same weight. In CutMix a pixel's weight is 0 or 1.

    If `mixup` and `cutmix` are both above 0, CutMix is used with the probability `cutmix_share`.
    """
    if not cutmix:
        return mixup_weights(_fold(key, "mixup"), size, mixup)
    cut = cutmix_weights(_fold(key, "cutmix"), size, cutmix)
    if not mixup:
        return cut
    cutting = jax.random.bernoulli(_fold(key, "cutting"), cutmix_share)
    return jnp.where(cutting, cut, mixup_weights(_fold(key, "mixup"), size, mixup))


def mixup_weights(key: jax.Array, size: tuple[int, int], alpha: float) -> jax.Array:
    """Returns mixup's weight, the same for all pixels: max(a, 1 - a), a ~ Beta(alpha, alpha).

    Mixup is from 1710.09412; AugReg also takes the maximum.
    """
    a = jax.random.beta(key, alpha, alpha)
    return jnp.full(size, jnp.maximum(a, 1 - a))


def cutmix_weights(key: jax.Array, size: tuple[int, int], alpha: float) -> jax.Array:
    """Returns CutMix's weights: 0 in a rectangle around a random pixel, else 1 (1905.04899).

    The rectangle has the image's aspect ratio and 1 - a of the image's area, a ~ Beta(alpha,
    alpha). The rectangle is cropped at the image's edge. The rectangle's sides are rounded down to
    even numbers, as in the paper's code and in timm 0.3.2 to 0.5.4, which the recipes use. Later
    versions of timm round down to whole pixels.
    """
    keys = jax.random.split(key, 3)
    side = jnp.sqrt(1 - jax.random.beta(keys[0], alpha, alpha))

    def inside(key, length):
        middle, half = jax.random.randint(key, (), 0, length), jnp.floor(side * length) // 2
        position = jnp.arange(length)
        return (position >= middle - half) & (position < middle + half)

    return 1.0 - (inside(keys[1], size[0])[:, None] & inside(keys[2], size[1]))


def mix(batch: dict[str, jax.Array], weights: jax.Array, repeats: int = 1) -> dict[str, jax.Array]:
    """Mixes each image with a partner: `weights * image + (1 - weights) * partner`.

    The partner is the image `repeats` positions earlier in the batch. `weights` is
    `[height, width]`.
    """
    images, labels = to_floats(batch["image"]), batch["labels"]
    partners, partner_labels = jnp.roll(images, repeats, axis=0), jnp.roll(labels, repeats, axis=0)
    share = weights.mean()
    larger = share >= 0.5
    return batch | {
        "image": partners + weights[:, :, None] * (images - partners),
        "labels": jnp.where(larger, labels, partner_labels),
        "partner_labels": jnp.where(larger, partner_labels, labels),
        "share": jnp.full(len(images), jnp.maximum(share, 1 - share)),
    }


def _fold(key: jax.Array, name: str) -> jax.Array:
    """Folds a name, such as "erasing", into a random key."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))
