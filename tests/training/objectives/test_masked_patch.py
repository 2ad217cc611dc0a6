"""Tests of masked patch prediction (paper, appendix B.1.2) against NumPy."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.objectives.small import (
    keys,
    losses,
    make,
    pictures,
    predict,
    prepare,
    random_images,
    refused,
)
from vit_jax.errors import UserError


def drawn(images: int = 3000, ratio: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Returns the corrupted positions, and the source of the embedding at each position.

    Images have 24 patches. The arrays are `[images, corrupted]` and `[images, 24]`; a source is the
    index of a patch, or -1 for the mask token.
    """
    _, objective = make("masked_patch", mask_ratio=ratio)
    batch = jax.device_get(prepare(objective, {}, keys(images)))
    return batch["corrupted"], batch["source"]


@pytest.mark.parametrize("ratio", [0.5, 0.15])
def test_patches_are_masked_replaced_and_kept_in_the_stated_shares(ratio):
    corrupted, source = drawn(ratio=ratio)
    count = round(24 * ratio)
    assert corrupted.shape == (3000, count)
    assert all(len(set(row)) == count for row in corrupted.tolist())
    chosen = np.zeros_like(source, bool)
    np.put_along_axis(chosen, corrupted, True, axis=1)
    own = np.arange(24)
    assert (source == own)[~chosen].all()
    among = source[chosen]
    kept = np.broadcast_to(own, source.shape)[chosen] == among
    for share, found in ((0.8, among == -1), (0.1, kept), (0.1, (among >= 0) & ~kept)):
        sigma = np.sqrt(share * (1 - share) / found.size)
        assert abs(found.mean() - share) < 5 * sigma


def test_every_patch_is_corrupted_equally_often():
    corrupted, _ = drawn()
    counts = np.bincount(corrupted.ravel(), minlength=24)
    assert np.abs(counts - 1500).max() < 5 * np.sqrt(3000 * 0.25)


def test_replacements_are_uniform_over_the_other_patches_of_the_image():
    _, source = drawn()
    steps = (source - np.arange(24)) % 24
    counts = np.bincount(steps[(source >= 0) & (steps > 0)], minlength=24)
    assert counts[0] == 0
    expected = counts.sum() / 23
    assert np.abs(counts[1:] - expected).max() < 5 * np.sqrt(expected)


def test_an_images_mask_depends_only_on_its_key():
    _, objective = make("masked_patch")
    many, few = (prepare(objective, {}, some) for some in (keys(8), keys(8)[5:]))
    for name in many:
        np.testing.assert_array_equal(many[name][5:], few[name])


def color_class(pixels: np.ndarray) -> int:
    """Returns a patch's colour class, computed with exact fractions.

    There are 512 classes, 3 bits for each channel. The patch is uint8 `[height, width, 3]`.
    """
    from fractions import Fraction

    levels = [
        min(7, int(8 * Fraction(int(pixels[..., c].sum()), 255 * pixels[..., c].size)))
        for c in range(3)
    ]
    return 64 * levels[0] + 8 * levels[1] + levels[2]


@pytest.mark.parametrize("target", ["color", "cells"])
def test_classes_equal_exact_fractions(target):
    images = np.array(random_images())
    images[0, :4, :4], images[1, :8, :8], images[2, :, ::2] = 255, 0, 255
    # Mean colours on the boundary between two levels, and one just below it.
    images[3, :4, :4] = 0
    images[3, :4, :4].reshape(-1, 3)[:2] = 255
    images[3, 4:8, :4] = images[3, :4, :4]
    images[3, 4, 0, 1] = 254
    side = {"color": 4, "cells": 1}[target]
    _, objective = make("masked_patch", target=target)
    got = np.asarray(targets_of(objective, images))
    for image, patches in zip(images, got, strict=True):
        for number, cells in enumerate(patches):
            row, column = divmod(number, 6)
            patch = image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            expected = [
                color_class(patch[y : y + side, x : x + side])
                for y in range(0, 4, side)
                for x in range(0, 4, side)
            ]
            assert cells.tolist() == expected


@settings(max_examples=30, deadline=None)
@given(patch=st.sampled_from([8, 16, 32]), seed=st.integers(0, 99), low=st.integers(0, 255))
def test_cells_of_larger_patches_equal_exact_fractions(patch, seed, low):
    _, objective = make(
        "masked_patch", model=f"ViT-Ti/{patch}", image_size=2 * patch, target="cells"
    )
    rng = np.random.default_rng(seed)
    image = rng.integers(low, 256, size=(2 * patch, 2 * patch, 3)).astype(np.uint8)
    cell = rng.integers(16)
    y, x = np.array(divmod(cell, 4)) * patch // 4
    expected = color_class(image[patch + y : patch + y + patch // 4, x : x + patch // 4])
    assert int(targets_of(objective, image[None])[0, 2, cell]) == expected


def test_pixel_targets_are_the_patches_in_raster_order():
    _, objective = make("masked_patch", target="pixels")
    images = random_images()
    got = np.asarray(targets_of(objective, images)).reshape(4, 4, 6, 4, 4, 3)
    expected = np.asarray(images, np.float32) / 127.5 - 1
    for row in range(4):
        for column in range(6):
            patch = expected[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            np.testing.assert_allclose(
                got[:, row, column], patch, rtol=0, atol=2**-22
            )  # One rounding error.


targets_of = jax.jit(lambda objective, images: objective.targets(images))
patches_of = jax.jit(lambda model, images: model.patches(images))
encode = jax.jit(lambda model, x: model.norm(model.encode(model.assemble(x))))


def expected_outputs(model, objective, images, batch) -> np.ndarray:
    """Returns the head's outputs for the corrupted patches, with embeddings replaced one by one."""
    embeddings = np.asarray(patches_of(model, images))
    spoiled, mask = embeddings.copy(), np.asarray(objective.mask[0, 0])
    for image, sources in enumerate(np.asarray(batch["source"])):
        for position, source in enumerate(sources):
            spoiled[image, position] = mask if source < 0 else embeddings[image, source]
    tokens = np.asarray(encode(model, spoiled))[:, model.prefix :]
    kernel, bias = np.asarray(objective.head.kernel[...]), np.asarray(objective.head.bias[...])
    return np.stack(
        [
            rows[where] @ kernel + bias
            for rows, where in zip(tokens, np.asarray(batch["corrupted"]), strict=True)
        ]
    )


@pytest.mark.parametrize(
    "options", [{}, dict(pooling="gap", position="2d"), dict(registers=2, distillation="token")]
)
def test_prediction_is_computed_from_the_corrupted_embeddings(options):
    model, objective = make("masked_patch", target="pixels", options=options)
    images = random_images()
    batch = prepare(objective, {"image": images}, keys(4))
    expected = expected_outputs(model, objective, images, batch)
    np.testing.assert_allclose(predict(objective, model, batch), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("target", ["color", "cells", "pixels"])
def test_loss_is_the_mean_over_corrupted_patches_only(target):
    model, objective = make("masked_patch", target=target)
    images = random_images()
    batch = prepare(objective, {"image": images}, keys(4))
    found, metrics, *_ = losses(objective, model, batch)
    predicted = np.asarray(predict(objective, model, batch), np.float64)
    targets = np.asarray(targets_of(objective, images))
    for image, where in enumerate(np.asarray(batch["corrupted"])):
        wanted = targets[image, where]
        if target == "pixels":
            assert metrics == {}
            expected = np.square(predicted[image] - wanted).mean()
        else:
            logits = predicted[image]
            log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            expected = -np.take_along_axis(log, wanted[..., None], -1).mean()
            right = (logits.argmax(-1) == wanted).mean()
            np.testing.assert_allclose(metrics["patch_accuracy"][image], right, rtol=1e-6)
        np.testing.assert_allclose(found[image], expected, rtol=1e-5)


@pytest.mark.parametrize("target", ["color", "cells", "pixels"])
def test_pictures_differ_from_the_images_only_in_corrupted_patches(target):
    model, objective = make("masked_patch", target=target)
    batch = prepare(objective, {"image": random_images()}, keys(4))
    visible, predicted = (np.asarray(x) for x in pictures(objective, model, batch))
    hidden = np.zeros((4, 24), bool)
    np.put_along_axis(hidden, np.asarray(batch["corrupted"]), True, axis=1)
    hidden = hidden.reshape(4, 4, 6).repeat(4, 1).repeat(4, 2)
    assert (visible[hidden] == 127.5).all()
    np.testing.assert_array_equal(visible[~hidden], np.asarray(batch["image"])[~hidden])
    np.testing.assert_array_equal(predicted[~hidden], np.asarray(batch["image"])[~hidden])
    assert not (predicted[hidden] == 127.5).any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(mask_ratio=0.01), "mask_ratio = 0.01 corrupts 0 of 16 patches"),
        (dict(mask_ratio=0.99), "mask_ratio = 0.99 corrupts 16 of 16 patches"),
        (
            dict(model="ViT-Ti/14", image_size=28, target="cells"),
            "4 does not divide its 14 pixels; use",
        ),
        (
            dict(model="R50+ViT-Ti/16", image_size=32, options=dict(resnet_blocks=(1, 1))),
            "not a hybrid",
        ),
        (dict(options=dict(channels=1)), "needs 3 channels, not 1"),
        (dict(options=dict(pooling="map")), "trains nothing behind the encoder"),
        (dict(options=dict(pre_logits=True)), "trains nothing behind the encoder"),
    ],
)
def test_invalid_options_are_refused_before_parameters_are_allocated(arguments, words):
    with pytest.raises(UserError, match=words):
        refused("masked_patch", **arguments)


def test_cells_fit_no_patch_of_14_but_the_other_targets_do():
    for target in ("color", "pixels"):
        refused("masked_patch", model="ViT-Ti/14", image_size=28, target=target)
