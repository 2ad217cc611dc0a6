"""Tests of FCMAE (arXiv 2301.00808) against NumPy on dense maps with zeros at masked positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.reference import activate, layer_norm, linear, pad_both, parameters, windows
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
from vit_jax.config import run_options
from vit_jax.errors import UserError
from vit_jax.models import abstract, count_parameters, model_factory
from vit_jax.models.convnext import ResponseNorm
from vit_jax.models.layers import capturing
from vit_jax.runs.loop import train
from vit_jax.training.objectives import make_objective

# Images have 3x4 patches of 8x8 pixels; 4 patches are visible. The stages' maps are 6x8 and 3x4.
STAGES = dict(blocks=(1, 2), widths=(8, 12))
SIZE, ROWS, COLUMNS, VISIBLE = (24, 32), 3, 4, 4


def made(options=None, model="ConvNeXtV2-T", **values):
    return make("fcmae", model=model, image_size=SIZE, options=STAGES | (options or {}), **values)


def drawn(objective, images=2):
    return objective.prepare({"image": random_images(images, *SIZE)}, keys(images))


def convolve(x, p, side):
    """Returns a convolution whose stride equals the side of its kernel."""
    seen = windows(x, side, side)
    return (
        seen.reshape(*seen.shape[:2], -1) @ p["kernel"].reshape(-1, p["kernel"].shape[-1])
        + p["bias"]
    )


def block(x, p, shown):
    """Applies a ConvNeXt block to a map in which masked positions are zero.

    They are zero before and after the depthwise convolution, and in the sums of GRN. `shown` is 1
    at visible positions and 0 elsewhere.
    """
    around = (windows(pad_both(x * shown, 3), 7, 1) * p["depthwise"]["kernel"][:, :, 0]).sum((2, 3))
    branch = activate(
        linear(layer_norm((around + p["depthwise"]["bias"]) * shown, p["norm"]), p["fc1"]), "erf"
    )
    if "response_norm" in p:
        strength = np.sqrt(np.square(branch * shown).sum((0, 1)))
        share = strength / (strength.mean() + 1e-6)
        branch = p["response_norm"]["scale"] * branch * share + p["response_norm"]["bias"] + branch
    branch = linear(branch, p["fc2"])
    return x + branch * p.get("scale1", 1)


def encoded(p, image, visible):
    """Returns the last stage's map of an image in [0, 255] with the given visible patches."""
    seen = np.zeros(ROWS * COLUMNS)
    seen[visible] = 1
    seen = seen.reshape(ROWS, COLUMNS, 1)

    def shown(x):
        return seen.repeat(len(x) // ROWS, 0).repeat(len(x) // ROWS, 1)

    x = layer_norm(
        convolve(np.asarray(image, np.float64) / 127.5 - 1, p["stem"]["0"], 4), p["stem_norm"]
    )
    for stage in p["stages"].values():
        if "downsample" in stage:
            x = convolve(layer_norm(x, stage["norm"]), stage["downsample"], 2)
        x = x * shown(x)
        for name in sorted(stage.keys() - {"norm", "downsample"}):
            x = block(x, stage[name], shown(x))
    return x * seen


def predicted(model, decoder, image, order):
    """Returns the predicted pixels of an image's masked patches, from parameters in float64."""
    visible, hidden = order[:VISIBLE], order[VISIBLE:]
    x = linear(encoded(model, image, visible), decoder["embedding"]).reshape(ROWS * COLUMNS, -1)
    x[hidden] = decoder["mask"]
    x = x.reshape(ROWS, COLUMNS, -1)
    for name in sorted(decoder["blocks"]):
        x = block(x, decoder["blocks"][name], np.ones((1, 1, 1)))
    return linear(x.reshape(ROWS * COLUMNS, -1)[hidden], decoder["prediction"])


def loss_of(model, decoder, image, order, normalized=True):
    errors = []
    for number, pixels in zip(
        order[VISIBLE:], predicted(model, decoder, image, order), strict=True
    ):
        row, column = divmod(int(number), COLUMNS)
        wanted = image[8 * row : 8 * row + 8, 8 * column : 8 * column + 8].ravel() / 127.5 - 1
        if normalized:
            wanted = (wanted - wanted.mean()) / np.sqrt(wanted.var(ddof=1) + 1e-6)
        errors.append(np.square(pixels - wanted).mean())
    return np.mean(errors)


CASES = {
    "V2": {},
    "V1": dict(model="ConvNeXt-T"),
    "recomputed": dict(options=dict(remat="full")),
    "two blocks": dict(decoder_blocks=2),
}


@pytest.mark.one_variant
@pytest.mark.parametrize("case", CASES)
def test_prediction_equals_dense_maps_with_zeros_at_masked_positions(case):
    model, objective = made(**CASES[case])
    batch = drawn(objective)
    found = predict(objective, model, batch)
    weights = parameters(model), parameters(objective)
    for image, order, one in zip(
        *map(np.asarray, (batch["image"], batch["order"], found)), strict=True
    ):
        expected = predicted(*weights, image, order)
        np.testing.assert_allclose(one, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.one_variant
@pytest.mark.parametrize("normalized", [True, False])
def test_loss_is_the_squared_error_of_hidden_pixels(normalized):
    model, objective = made(normalize_targets=normalized)
    batch = drawn(objective)
    found, *_ = losses(objective, model, batch)
    weights = parameters(model), parameters(objective)
    images, orders = (np.asarray(batch[name]) for name in ("image", "order"))
    expected = [
        loss_of(*weights, image, order, normalized)
        for image, order in zip(images, orders, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.one_variant
@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradient_equals_finite_differences_of_the_numpy_loss(remat):
    model, objective = made(dict(remat=remat))
    batch = drawn(objective, 1)
    graphdef, weights = nnx.split((model, objective))

    def loss(weights):
        model, objective = nnx.merge(graphdef, weights)
        return objective(model, batch).each[0]

    found = nnx.merge(graphdef, jax.jit(jax.grad(loss))(weights))
    gradients = [nnx.to_pure_dict(nnx.state(x)) for x in found]
    exact = [parameters(x) for x in (model, objective)]
    rng = np.random.default_rng(0)
    for moved in (0, 1):
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), exact[moved])

        def plain(step, moved=moved, direction=direction):
            weights = list(exact)
            weights[moved] = jax.tree.map(
                lambda x, along: x + step * along, exact[moved], direction
            )
            return loss_of(*weights, np.asarray(batch["image"][0]), np.asarray(batch["order"][0]))

        slope = (plain(1e-5) - plain(-1e-5)) / 2e-5
        parts = jax.tree.map(
            lambda x, along: (np.asarray(x, np.float64) * along).sum(), gradients[moved], direction
        )
        np.testing.assert_allclose(sum(jax.tree.leaves(parts)), slope, rtol=1e-3)


def test_prediction_depends_on_every_visible_patch_and_on_no_hidden_one():
    model, objective = made()
    image, own = random_images(1, *SIZE), keys(1)
    order = np.asarray(objective.prepare({}, own)["order"][0])
    rows, columns = np.divmod(order, COLUMNS)
    changed = image.repeat(12, axis=0).at[jnp.arange(12), 8 * rows + 3, 8 * columns + 5].add(100)
    batch = objective.prepare(
        {"image": jnp.concatenate([image, changed])}, jnp.broadcast_to(own, 13)
    )
    before, *after = np.asarray(predict(objective, model, batch))
    change = np.array([np.abs(one - before).max() for one in after]) / np.abs(before).max()
    # Equal images of a batch can differ in their last bits, because of the CPU's vector
    # instructions.
    assert (change[:VISIBLE] > 1e-4).all() and (change[VISIBLE:] < 1e-6).all(), change


def test_features_of_all_patches_are_those_of_the_whole_image():
    model, _ = made()
    images = random_images(2, *SIZE)
    order = jax.vmap(lambda key: jax.random.permutation(key, 12))(keys(2))
    found = jax.jit(lambda model, *inputs: model.features_of(*inputs))(model, images, order)
    whole = jax.jit(lambda model, images: model.features(images, dense=True)[-1])(model, images)
    expected = np.take_along_axis(
        np.asarray(whole).reshape(2, 12, -1), np.asarray(order)[..., None], 1
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_pointwise_layers_compute_only_visible_positions():
    model, objective = made()
    batch = drawn(objective)
    with capturing(("hidden_features",)) as found:
        jax.eval_shape(objective.predict, model, batch)
    places = [x.shape[1] * x.shape[2] for x in found["hidden_features"]]
    assert places == [4 * VISIBLE, VISIBLE, VISIBLE, ROWS * COLUMNS]


@pytest.mark.parametrize(("size", "visible", "patches"), [(224, 19, 49), (160, 10, 25), (64, 1, 4)])
def test_visible_patches_are_rounded_down(size, visible, patches):
    objective = full_size("ConvNeXtV2-Atto", size)[1]
    assert (objective.visible, objective.patches) == (visible, patches)


def full_size(name, size=224):
    config = config_of("fcmae", decoder_dim=512)
    model = abstract(model_factory(name, num_classes=0, image_size=size))
    return model, abstract(partial(make_objective, config, model))


# Number of parameters of the authors' decoder, without its first dense layer: mask token, block,
# last dense layer.
DECODER = 512 + (50 * 512 + 2 * 512 + 513 * 2048 + 2 * 2048 + 2049 * 512) + 513 * 3072


@pytest.mark.parametrize(
    ("name", "width", "least", "most"),
    [("ConvNeXtV2-Atto", 320, 0.69, 0.71), ("ConvNeXtV2-B", 1024, 0.4, 0.41)],
)
def test_decoder_is_the_authors_and_a_step_costs_a_fraction_of_the_supervised_one(
    name, width, least, most
):
    model, objective = full_size(name)
    assert count_parameters(objective) == (width + 1) * 512 + DECODER
    supervised = abstract(model_factory(name, num_classes=1000, image_size=224))
    whole = make_objective(config_of("classification"), supervised, rngs=None).multiply_adds(
        supervised
    )
    assert least < objective.multiply_adds(model) / whole < most


@pytest.mark.slow
def test_pretraining_continues_from_a_run_with_its_decoder(tmp_path, capsys):
    config = config_of("fcmae")
    config.model.update(dict(name="ConvNeXtV2-T", **STAGES))
    config.data.update(dict(source="digits", image_size=16, test_resize=16, workers=0))
    config.update(dict(batch_size=16, steps=2, evaluate_every=2))
    config.optimizer.warmup_steps = 0
    train(run_options(config), tmp_path / "first")
    config.finetune.checkpoint = str(tmp_path / "first")
    train(run_options(config), tmp_path / "second")
    assert "kept: fcmae's own parameters" in capsys.readouterr().out
    config.fcmae.decoder_blocks = 2
    with pytest.raises(UserError, match=r"fcmae\.decoder_blocks=1"):
        train(run_options(config), tmp_path / "third")


def test_pictures_show_visible_and_predicted_patches():
    model, objective = made()
    batch = drawn(objective)
    visible, filled = (np.asarray(x) for x in pictures(objective, model, batch))
    hidden = np.ones((2, 12), bool)
    np.put_along_axis(hidden, np.asarray(batch["order"])[:, :VISIBLE], False, axis=1)
    hidden = hidden.reshape(2, ROWS, COLUMNS).repeat(8, 1).repeat(8, 2)
    np.testing.assert_allclose(visible[hidden], 127.5, atol=1e-3)
    for picture in (visible, filled):
        np.testing.assert_allclose(picture[~hidden], np.asarray(batch["image"])[~hidden], atol=1e-3)
    row, column = divmod(int(batch["order"][0, VISIBLE]), COLUMNS)
    place = np.s_[0, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
    there = np.asarray(batch["image"], np.float64)[place] / 127.5 - 1
    expected = np.asarray(predict(objective, model, batch)[0, 0]).reshape(8, 8, 3)
    expected = expected * np.sqrt(there.var(ddof=1) + 1e-6) + there.mean()
    np.testing.assert_allclose(filled[place] / 127.5 - 1, expected, atol=1e-4)


def test_channel_that_is_zero_in_all_places_has_a_gradient():
    norm = ResponseNorm(2)
    norm.scale[...] = jnp.ones(2)
    x = jnp.zeros((1, 2, 2, 2)).at[..., 0].set(3.0)
    found = jax.grad(lambda x: norm(x).sum())(x)
    assert np.isfinite(found).all() and (found[..., 0] != 0).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(mask_ratio=0.9), "mask_ratio = 0.9 leaves 0 of 4 patches visible"),
        (dict(mask_ratio=0.0), "mask_ratio = 0.0 leaves 4 of 4 patches visible"),
        (dict(image_size=(64, 80)), "patches of 32x32 pixels, which do not divide images of 64x80"),
        (dict(options=dict(stem="overlapping")), "must be a ConvNeXt with model.stem='patches'"),
        (dict(model="ViT-Ti/4"), "must be a ConvNeXt"),
        (dict(model="BiT-R50x1", options=dict(resnet_blocks=(1, 1))), "must be a ConvNeXt"),
        (dict(model="Swin-T"), "must be a ConvNeXt"),
    ],
)
def test_invalid_options_are_refused_before_parameters_are_allocated(arguments, words):
    with pytest.raises(UserError, match=words):
        refused("fcmae", **dict(model="ConvNeXtV2-Atto", image_size=64) | arguments)


def test_a_layer_after_the_last_stage_is_refused():
    config = config_of("fcmae")
    config.model.head_hidden = 8
    model = abstract(model_factory("ConvNeXtV2-Atto", num_classes=0, image_size=64, head_hidden=8))
    with pytest.raises(UserError, match=r"needs model\.head_hidden=None"):
        abstract(partial(make_objective, config, model))
