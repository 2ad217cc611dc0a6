"""Tests of MAE (arXiv 2111.06377) against a plain decoder over all patches in raster order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training.objectives.small import (
    config_of,
    keys,
    losses,
    make,
    pictures,
    predict,
    random_images,
    refused,
)
from vit_jax.errors import UserError
from vit_jax.models import abstract, count_parameters, model_factory
from vit_jax.models.layers import capturing
from vit_jax.training.objectives import make_objective

FIXED = dict(position="sincos2d_mae")


def made(options=None, **values):
    return make("mae", options=FIXED | (options or {}), **values)


# Published numbers of trainable parameters of the encoder and the decoder.
PARAMETERS = {
    "ViT-B/16": (85_647_360, 26_008_320),
    "ViT-L/16": (303_099_904, 26_139_392),
    "ViT-H/14": (630_435_840, 26_178_124),
}


def full_size(name: str, **values):
    config = config_of("mae", **dict(decoder_dim=512, decoder_depth=8, decoder_heads=16) | values)
    model = abstract(model_factory(name, num_classes=0, image_size=224, **FIXED))
    return model, abstract(partial(make_objective, config, model))


@pytest.mark.parametrize("name", PARAMETERS)
def test_encoder_and_decoder_have_the_published_parameters(name):
    assert tuple(map(count_parameters, full_size(name))) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "decoder_depth", "most"),
    [("ViT-B/16", 8, 0.55), ("ViT-B/16", 4, 0.4), ("ViT-L/16", 8, 0.34)],
)
def test_step_costs_a_fraction_of_the_supervised_one(name, decoder_depth, most):
    model, objective = full_size(name, decoder_depth=decoder_depth)
    supervised = abstract(model_factory(name, num_classes=1000, image_size=224))
    whole = make_objective(config_of("classification"), supervised, rngs=None).multiply_adds(
        supervised
    )
    assert 0.25 < objective.multiply_adds(model) / whole < most


@pytest.mark.parametrize(("ratio", "visible"), [(0.75, 6), (0.6, 9), (0.9, 2)])
def test_visible_patches_are_rounded_down_and_all_as_likely(ratio, visible):
    _, objective = make("mae", mask_ratio=ratio, options=FIXED)
    assert objective.visible == visible
    order = np.asarray(jax.jit(objective.prepare)({}, keys(3000))["order"])
    assert (np.sort(order, axis=1) == np.arange(24)).all()
    share = visible / 24
    counts = np.bincount(order[:, :visible].ravel(), minlength=24)
    assert np.abs(counts - 3000 * share).max() < 5 * np.sqrt(3000 * share * (1 - share))


def test_nine_tenths_of_ten_patches_leave_one():
    _, objective = make("mae", image_size=(8, 20), mask_ratio=0.9, options=FIXED)
    assert (objective.patches, objective.visible) == (10, 1)


def test_encoder_processes_only_visible_patches():
    model, objective = made()
    batch = objective.prepare({"image": random_images()}, keys(4))
    with capturing(("tokens",)) as found:
        jax.eval_shape(objective.predict, model, batch)
    encoder = [x.shape[1] for x in found["tokens"] if x.shape[2] == 16][: model.depth + 1]
    assert encoder == [1 + 6] * 3


def test_prediction_depends_on_every_visible_patch_and_on_no_hidden_one():
    model, objective = made()
    image, own = random_images(1), keys(1)
    order = np.asarray(objective.prepare({}, own)["order"][0])
    rows, columns = np.divmod(order, 6)
    changed = image.repeat(24, axis=0).at[jnp.arange(24), 4 * rows + 1, 4 * columns + 2].add(100)
    batch = objective.prepare(
        {"image": jnp.concatenate([image, changed])}, jnp.broadcast_to(own, 25)
    )
    before, *after = np.asarray(predict(objective, model, batch))
    assert [not np.allclose(before, one, rtol=0, atol=1e-5) for one in after] == [True] * 6 + [
        False
    ] * 18


def plain(model, objective, images, order) -> np.ndarray:
    """Returns predictions for masked patches, with a decoder over all patches in raster order."""
    special, seen = model.prefix, np.sort(order[:6])
    kept = [*range(special), *(special + seen)]
    x = np.asarray(model.assemble(model.patches(images)))
    x = x[:, [*kept, *range(special + 24, x.shape[1])]]
    x = jax.jit(lambda objective, model, x: objective.embedding(model.norm(model.encode(x))))(
        objective, model, x
    )
    rows = np.zeros((1, special + 24, 16), np.float32)
    rows[:] = objective.mask[...]
    rows[:, kept] = x[:, : special + 6]
    rows[:, special:] += published_positions(4, 6, 16)
    return np.asarray(decode(objective, rows))[0, special:][order[6:]]


def published_positions(rows: int, columns: int, dim: int) -> np.ndarray:
    """Returns the authors' position embeddings, with frequencies 10,000 ** (-i / (dim / 4))."""
    rates = [10_000 ** (-i / (dim / 4)) for i in range(dim // 4)]
    return np.array(
        [
            [wave(at * rate) for at in (column, row) for wave in (np.sin, np.cos) for rate in rates]
            for row in range(rows)
            for column in range(columns)
        ]
    )


@jax.jit
def decode(objective, x):
    for block in objective.blocks.values():
        x = block(x)
    return objective.prediction(objective.norm(x))


@pytest.mark.one_variant
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(scan=True, remat="full"),
        dict(position="1d"),
        dict(pooling="gap"),
        dict(registers=2, distillation="token"),
    ],
)
def test_prediction_equals_a_decoder_over_patches_in_raster_order(options):
    model, objective = made(options)
    images = random_images(1)
    batch = objective.prepare({"image": images}, keys(1))
    expected = plain(model, objective, images, np.asarray(batch["order"][0]))
    np.testing.assert_allclose(predict(objective, model, batch)[0], expected, rtol=2e-4, atol=2e-4)


STATISTICS = {
    "[-1, 1]": {},
    "ImageNet's": dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
}


def normalized_pixels(images, statistics) -> np.ndarray:
    mean, std = statistics.get("mean", 0.5), statistics.get("std", 0.5)
    return (np.asarray(images, np.float64) / 255 - mean) / std


@pytest.mark.one_variant
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("normalized", [True, False])
def test_loss_is_the_squared_error_of_masked_normalized_pixels(normalized, statistics):
    model, objective = made(STATISTICS[statistics], normalize_targets=normalized)
    images = random_images()
    batch = objective.prepare({"image": images}, keys(4))
    found, *_ = losses(objective, model, batch)
    predicted = np.asarray(predict(objective, model, batch), np.float64)
    pixels = normalized_pixels(images, STATISTICS[statistics])
    for image, order in enumerate(np.asarray(batch["order"])):
        errors = []
        for number, values in zip(order[6:], predicted[image], strict=True):
            row, column = divmod(int(number), 6)
            wanted = pixels[image, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].ravel()
            if normalized:
                wanted = (wanted - wanted.mean()) / np.sqrt(wanted.var(ddof=1) + 1e-6)
            errors.append(np.square(values - wanted).mean())
        np.testing.assert_allclose(found[image], np.mean(errors), rtol=1e-5)


@pytest.mark.one_variant
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("normalized", [True, False])
def test_pictures_show_visible_and_predicted_patches(normalized, statistics):
    statistics = STATISTICS[statistics]
    model, objective = made(statistics, normalize_targets=normalized)
    images = random_images()
    batch = objective.prepare({"image": images}, keys(4))
    visible, predicted = (np.asarray(x) for x in pictures(objective, model, batch))
    hidden = np.ones((4, 24), bool)
    np.put_along_axis(hidden, np.asarray(batch["order"])[:, :6], False, axis=1)
    hidden = hidden.reshape(4, 4, 6).repeat(4, 1).repeat(4, 2)
    np.testing.assert_allclose(visible[hidden], 127.5, atol=1e-3)
    for picture in (visible, predicted):
        np.testing.assert_allclose(picture[~hidden], np.asarray(images)[~hidden], atol=1e-3)
    row, column = divmod(int(batch["order"][0, 6]), 6)
    place = np.s_[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
    shown = normalized_pixels(predicted[place], statistics)
    expected = np.asarray(predict(objective, model, batch)[0, 0]).reshape(4, 4, 3)
    if normalized:
        there = normalized_pixels(images[place], statistics)
        expected = expected * np.sqrt(there.var(ddof=1) + 1e-6) + there.mean()
    np.testing.assert_allclose(shown, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(mask_ratio=0.97), "mask_ratio = 0.97 leaves 0 of 16 patches visible"),
        (dict(mask_ratio=0.0), "mask_ratio = 0.0 leaves 16 of 16 patches visible"),
        (dict(decoder_heads=3), "decoder_dim = 16 must be divisible by 4 and by decoder_heads = 3"),
        (dict(options=dict(rope="eva02")), "leaves patches out"),
        (dict(options=dict(position="relative")), "leaves patches out"),
        (dict(options=dict(position_at="every")), "leaves patches out"),
        (dict(options=dict(position="none")), "leaves patches out"),
        (dict(model="Axial-ViT-Ti/4"), "leaves patches out"),
        (dict(model="R+ViT-Ti/16", image_size=64), "not a hybrid"),
    ],
)
def test_invalid_options_are_refused_before_parameters_are_allocated(arguments, words):
    with pytest.raises(UserError, match=words):
        refused("mae", **arguments)
