"""Tests of augmentation on devices: distributions, equality with NumPy, several devices."""

import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from tests.conftest import FAST_COMPILE
from vit_jax.models.pixels import to_floats
from vit_jax.training.mixing import (
    augment,
    cutmix_weights,
    mix,
    mixing_weights,
    mixup_weights,
    random_erasing,
    random_flip,
)
from vit_jax.training.objectives.classification import (
    batch_targets,
    class_targets,
    classification_loss,
)

ROOT = Path(__file__).parents[2]
EVERYTHING = dict(flip=True, erasing=0.5, mixup=0.8, cutmix=1.0, cutmix_share=0.5)
SIZE = (64, 48)


def make_batch(size=16) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(size, 8, 6, 3), dtype=np.uint8)
    labels = rng.integers(5, size=(size, 2)).astype(np.int32)
    labels[::3, 1] = -1
    return {"image": jnp.asarray(images), "labels": jnp.asarray(labels)}


def keys(count: int) -> jax.Array:
    return jax.random.split(jax.random.key(7), count)


def test_bytes_are_scaled_to_minus_one_to_one():
    assert to_floats(jnp.array([0, 255], jnp.uint8)).tolist() == [-1.0, 1.0]


def test_without_augmentations_a_batch_does_not_change():
    batch = make_batch()
    same = augment(batch, jax.random.key(0))
    assert same.keys() == batch.keys()
    assert all(same[name] is batch[name] for name in batch)


def test_every_image_is_flipped_half_of_the_time():
    images = jnp.broadcast_to(jnp.arange(4, dtype=jnp.uint8)[None, None, :, None], (4000, 2, 4, 3))
    rows = np.asarray(random_flip(images, jax.random.key(0)))[:, 0, :, 0]
    flipped = (rows == [3, 2, 1, 0]).all(1)
    assert (flipped | (rows == [0, 1, 2, 3]).all(1)).all()
    assert 0.47 < flipped.mean() < 0.53


def test_flipped_images_stay_bytes():
    assert augment(make_batch(), jax.random.key(0), flip=True)["image"].dtype == jnp.uint8


def rectangles(erased: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds rectangles of changed pixels in images of 5s.

    Returns which images have a rectangle, and the rectangles' sides and corners.
    """
    mask = (erased != 5).all(-1)
    hit = mask.any((1, 2))
    rows, columns = mask[hit].any(2), mask[hit].any(1)
    sides = np.stack([rows.sum(1), columns.sum(1)])
    assert (sides.prod(0) == mask[hit].sum((1, 2))).all()
    return hit, sides, np.stack([rows.argmax(1), columns.argmax(1)])


def test_rectangles_and_noise_of_erasing_are_distributed_as_timms(torch, timm):
    from timm.data.random_erasing import RandomErasing

    images = 6000
    mean, std = (0.485, 0.5, 0.406), (0.229, 0.5, 0.225)
    erase = jax.jit(partial(random_erasing, mean=mean, std=std))
    ours = np.asarray(erase(jnp.full((images, 32, 24, 3), 5.0), jax.random.key(0), 0.5))
    random.seed(0)
    torch.manual_seed(0)
    theirs = RandomErasing(0.5, mode="pixel", device="cpu")(torch.full((images, 3, 32, 24), 5.0))
    theirs = theirs.numpy().transpose(0, 2, 3, 1)
    (hit, sides, corners), (their_hit, their_sides, their_corners) = (
        rectangles(ours),
        rectangles(theirs),
    )
    assert abs(hit.mean() - 0.5) < 0.02 and abs(their_hit.mean() - 0.5) < 0.02
    for one, other in (
        (sides[0], their_sides[0]),
        (sides[1], their_sides[1]),
        (sides.prod(0), their_sides.prod(0)),
        (sides[0] / sides[1], their_sides[0] / their_sides[1]),
        (corners[0], their_corners[0]),
        (corners[1], their_corners[1]),
    ):
        assert ks_2samp(one, other).pvalue > 0.01
    assert sides[0].max() < 32 and sides[1].max() < 24
    # timm's noise is in units of the normalized image.
    ours = (((ours + 1) / 2 - mean) / std)[ours != 5].reshape(-1, 3)
    for noise in (ours, theirs[theirs != 5].reshape(-1, 3)):
        np.testing.assert_allclose([noise.mean(0), noise.std(0)], [[0] * 3, [1] * 3], atol=0.01)


def test_erased_rectangles_reach_every_pixel():
    erased = jax.jit(random_erasing)(jnp.full((2000, 8, 8, 3), 5.0), jax.random.key(0), 1.0)
    assert (np.asarray(erased) != 5).any((0, 3)).all()


many_mixups = jax.jit(
    jax.vmap(lambda key, alpha: mixup_weights(key, (1, 1), alpha), in_axes=(0, None))
)


@pytest.mark.parametrize("alpha", [0.2, 0.8])
@pytest.mark.slow
def test_mixup_keeps_the_larger_share_of_a_beta(alpha):
    a = np.asarray(many_mixups(keys(4000), alpha))
    assert a.min() >= 0.5 and a.max() <= 1
    # The variance of Beta(alpha, alpha), whose mean is 1/2.
    np.testing.assert_allclose(((a - 0.5) ** 2).mean(), 1 / (4 * (2 * alpha + 1)), rtol=0.05)


@pytest.mark.slow
def test_cutmix_cuts_one_rectangle_of_the_area_in_the_paper():
    masks = (
        np.asarray(jax.jit(jax.vmap(lambda key: cutmix_weights(key, SIZE, 1.0)))(keys(3000))) == 0
    )
    height, width = masks.any(2).sum(1), masks.any(1).sum(1)
    assert (height * width == masks.sum((1, 2))).all()
    # The image's edge cuts a side of s to s - s^2 / 4 on average. The mean of the square of that is
    # 0.321, if s^2 is uniform.
    np.testing.assert_allclose(masks.mean(), 0.321, atol=0.02)
    assert masks.any(0).all()


def cut_areas(side: int, rounded_up: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns all fractions of a square that CutMix can leave, with probabilities for alpha 1.

    This follows `rand_bbox` of timm 0.3.2 to 0.5.4. The rectangle has a side of int(side * sqrt(1 -
    a)). Half of that, rounded down, lies on each side of a random pixel. Later versions round one
    half up.
    """
    sides, pixels = np.arange(side + 1), np.arange(side)
    chances = np.minimum(1, ((sides + 1) / side) ** 2) - (sides / side) ** 2
    covered = np.minimum(pixels + (sides[:, None] + rounded_up) // 2, side)
    covered = covered - np.maximum(pixels - sides[:, None] // 2, 0)
    left = 1 - np.einsum("si,sj->sij", covered, covered) / side**2
    return left.ravel(), np.repeat(chances / side**2, side**2)


@pytest.mark.slow
def test_shares_of_cutmix_are_those_of_the_recipes_timm_version():
    left, chances = cut_areas(32)
    drawn = jax.jit(jax.vmap(lambda key: cutmix_weights(key, (32, 32), 1.0).mean()))(keys(20_000))
    drawn = np.asarray(drawn, np.float64)
    assert chances.sum() == pytest.approx(1) and chances @ left == pytest.approx(0.70075, abs=1e-5)
    assert drawn.mean() == pytest.approx(chances @ left, abs=4 * drawn.std() / 20_000**0.5)
    for share in (0.3, 0.5, 0.7, 0.9):
        below = chances[left < share].sum()
        assert (drawn < share - 1e-6).mean() == pytest.approx(below, abs=4 * 0.5 / 20_000**0.5)
    later, later_chances = cut_areas(32, rounded_up=True)
    assert later_chances @ later == pytest.approx(0.68977, abs=1e-5)


def test_mixup_and_cutmix_are_drawn_with_their_probabilities():
    weights = jax.vmap(lambda key: mixing_weights(key, (4, 4), 0.8, 1.0, 0.25))
    w = np.asarray(jax.jit(weights)(keys(2000)))
    assert 0.71 < ((w > 0) & (w < 1)).all((1, 2)).mean() < 0.79


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
@pytest.mark.parametrize("share", [0.8, 0.25])
def test_mixing_is_that_of_numpy(name, share):
    batch = make_batch()
    mixed = mix(batch, jnp.full((8, 6), share))
    images = np.asarray(batch["image"]) / 127.5 - 1
    np.testing.assert_allclose(
        mixed["image"], share * images + (1 - share) * np.roll(images, 1, 0), atol=1e-6
    )
    own = np.zeros((16, 5))
    for row, labels in zip(own, np.asarray(batch["labels"]), strict=True):
        row[[label for label in labels if label >= 0]] = 1
    if name == "softmax":
        own /= own.sum(1, keepdims=True)
    expected = share * own + (1 - share) * np.roll(own, 1, 0)
    np.testing.assert_allclose(batch_targets(mixed, 5, name), expected, atol=1e-6)


@pytest.mark.parametrize("share", [0.8, 0.25, 1.0])
def test_binary_loss_of_mixed_images_is_deits(share, torch, timm):
    """DeiT's loss sets timm's mixed targets above 0 to 1, and takes the mean over the classes."""
    from timm.data.mixup import mixup_target

    classes, rng = 5, np.random.default_rng(0)
    labels, logits = rng.integers(classes, size=16), rng.normal(0, 3, (16, classes))
    # timm mixes image i of a batch of n with image n - 1 - i.
    reversed_labels = dict(
        labels=jnp.asarray(labels)[:, None], partner_labels=jnp.asarray(labels[::-1])[:, None]
    )
    batch = reversed_labels | {"share": jnp.full(16, share)}
    ours = classification_loss(
        jnp.asarray(logits), batch_targets(batch, classes, "binary"), "binary", 0.0
    )

    target = mixup_target(torch.tensor(labels), classes, lam=share, smoothing=0.0).gt(0.0).double()
    theirs = torch.nn.BCEWithLogitsLoss()(torch.tensor(logits), target)
    np.testing.assert_allclose(ours.mean(), theirs.item(), rtol=1e-6)


def test_repeats_of_an_image_are_mixed_with_another_one():
    rows = jnp.arange(12) // 3
    batch = {
        "image": jnp.broadcast_to(rows[:, None, None, None] / 4, (12, 2, 2, 3)),
        "labels": rows[:, None],
    }
    mixed = augment(batch, jax.random.key(0), mixup=0.8, repeats=3)
    np.testing.assert_array_equal(mixed["partner_labels"][:, 0], np.roll(rows, 3))
    expected = np.roll(rows, 3) + np.asarray(mixed["share"]) * (rows - np.roll(rows, 3))
    np.testing.assert_allclose(4 * mixed["image"][:, 0, 0, 0], expected, atol=1e-5)


def test_cut_images_share_by_the_area_that_is_left():
    batch = make_batch()
    weights = np.ones((8, 6), np.float32)
    weights[:3, 4:] = 0
    mixed = mix(batch, jnp.asarray(weights))
    own, partner = to_floats(batch["image"]), np.roll(to_floats(batch["image"]), 1, 0)
    np.testing.assert_allclose(mixed["image"][:, :3, 4:], partner[:, :3, 4:], atol=1e-6)
    np.testing.assert_allclose(mixed["image"][:, 3:], own[:, 3:], atol=1e-6)
    np.testing.assert_allclose(mixed["share"], 42 / 48, rtol=1e-6)


@pytest.mark.parametrize(("share", "roll"), [(0.8, 0), (0.2, 1)])
def test_labels_are_those_of_the_larger_share(share, roll):
    batch = make_batch()
    mixed = mix(batch, jnp.full((8, 6), share))
    np.testing.assert_array_equal(mixed["labels"], np.roll(batch["labels"], roll, 0))
    np.testing.assert_allclose(mixed["share"], 0.8, rtol=1e-6)


jitted = jax.jit(lambda batch, key: augment(batch, key, **EVERYTHING | dict(erasing=0.0)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(["softmax", "sigmoid"]))
def test_targets_keep_their_sum(seed, name):
    batch = make_batch()
    mixed = jitted(batch, jax.random.key(seed))
    sums = class_targets(batch["labels"], 5, name).sum(-1)
    total = batch_targets(mixed, 5, name).sum()
    np.testing.assert_allclose(total, sums.sum(), rtol=1e-5)
    assert mixed["image"].shape == batch["image"].shape and mixed["image"].dtype == jnp.float32


def test_one_augmentation_does_not_change_the_draws_of_another():
    batch, key = make_batch(), jax.random.key(3)
    alone = augment(batch, key, flip=True)["image"]
    with_mixup = augment(batch, key, flip=True, mixup=0.5)
    own = mix(
        {"image": alone, "labels": batch["labels"]}, mixing_weights(key, (8, 6), 0.5, 0.0, 0.5)
    )
    np.testing.assert_array_equal(with_mixup["image"], own["image"])


EIGHT = """
import jax, numpy as np
from vit_jax.parallel.mesh import make_mesh, split_batch
from tests.training.test_augment import EVERYTHING, augment, make_batch
assert jax.device_count() == 8
results = []
for devices in (1, 8):
    sharding = split_batch(make_mesh(devices=jax.devices()[:devices]))
    step = jax.jit(lambda b, key: augment(b, key, **EVERYTHING), in_shardings=(sharding, None))
    results.append([
        jax.device_get(step(jax.device_put(make_batch(), sharding), jax.random.key(seed)))
        for seed in range(4)
    ])
jax.tree.map(lambda one, eight: np.testing.assert_allclose(one, eight, atol=1e-6), *results)
"""


@pytest.mark.slow
def test_eight_devices_augment_as_one():
    eight = {
        "XLA_FLAGS": f"{FAST_COMPILE} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", EIGHT],
        cwd=ROOT,
        env=os.environ | eight,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
