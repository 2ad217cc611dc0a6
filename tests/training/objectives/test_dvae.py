"""Tests of the discrete VAE: its loss against NumPy, its schedules, and the usage of its codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.reference import pad_both, windows
from tests.training.objectives.small import config_of, noisy, random_images, refused
from vit_jax.errors import UserError
from vit_jax.models import create_model
from vit_jax.training.objectives import codes as code_use
from vit_jax.training.objectives import make_objective, objective_of
from vit_jax.training.objectives.dvae import logit_laplace
from vit_jax.training.objectives.objective import EVALUATION, StepContext

SMALL = dict(blocks=(1, 1, 1), widths=(8, 8, 16), image_size=(16, 24))
CODES = 11


def made(average=0.0, **values):
    """Returns a small encoder and the objective, with noise added to all parameters."""
    model = create_model("DVAE", num_classes=CODES, **SMALL)
    config = config_of("dvae", codes=CODES, **values)
    config.optimizer.average = average
    objective = make_objective(config, model, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    return noisy(model, rng, 0.2), noisy(objective, rng, 0.2)


losses = jax.jit(lambda objective, model, batch, context: objective(model, batch, context))
pictures = jax.jit(
    lambda objective, model, batch, context: objective.pictures(model, batch, context)
)
code_scores = jax.jit(lambda model, images: model.code_scores(images))


def convolve(x, p):
    side = p["kernel"].shape[0]
    seen = windows(pad_both(x, side // 2), side, 1)
    return (
        seen.reshape(*seen.shape[:2], -1) @ p["kernel"].reshape(-1, p["kernel"].shape[-1])
        + p["bias"]
    )


def decode(p, shares):
    """Returns the decoder's output for code probabilities `[rows, columns, codes]`, in float64."""
    x = shares @ p["codes"]["kernel"] + p["codes"]["bias"]
    for stage, blocks in p["stages"].items():
        if stage != "1":
            x = np.kron(x, np.ones((2, 2, 1)))
        branch = x
        for number in range(1, 5):
            branch = convolve(np.maximum(branch, 0), blocks["01"][f"conv{number}"])
        x = (
            convolve(x, blocks["01"]["shortcut"]) if "shortcut" in blocks["01"] else x
        ) + branch / 9
    return convolve(np.maximum(x, 0), p["output"])


def expected(objective, scores, shares, images, weight):
    """Returns the loss of each image; `shares` are the code probabilities that the decoder gets."""
    p = jax.tree.map(
        lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(objective.decoder))
    )
    found = []
    for score, share, image in zip(scores, shares, images, strict=True):
        centre, scale = np.split(decode(p, share), 2, axis=-1)
        x = 0.1 + 0.8 * image / 255
        density = np.exp(-np.abs(np.log(x / (1 - x)) - centre) / np.exp(scale))
        density /= 2 * np.exp(scale) * x * (1 - x)
        chances = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
        divergence = (chances * np.log(chances * CODES)).sum(-1)
        found.append(-np.log(density).mean() + weight / (4 * 4 * 3) * divergence.mean())
    return np.array(found)


def test_in_evaluation_the_decoder_gets_the_likeliest_codes():
    model, objective = made()
    images = random_images(2, 16, 24)
    scores = np.asarray(code_scores(model, images), np.float64)
    shares = np.eye(CODES)[scores.argmax(-1)]
    found = losses(objective, model, {"image": images}, StepContext(update=5000))
    np.testing.assert_allclose(
        found.each, expected(objective, scores, shares, np.asarray(images), 6.6), rtol=1e-4
    )
    again = losses(objective, model, {"image": images}, StepContext(update=5000))
    np.testing.assert_array_equal(found.each, again.each)


def test_in_training_codes_are_drawn_and_relaxed():
    model, objective = made(temperature=0.8, temperature_end=0.2, temperature_steps=4)
    images, update = random_images(2, 16, 24), 2
    scores = np.asarray(code_scores(model, images), np.float64)
    noise = jax.random.gumbel(nnx.Rngs(dropout=jax.random.key(3)).dropout(), scores.shape)
    # At update 2 of 4, the temperature is halfway between 0.8 and 0.2.
    heated = np.exp((scores + np.asarray(noise)) / 0.5)
    shares = heated / heated.sum(-1, keepdims=True)
    weight = 6.6 * (1 - np.cos(np.pi * update / 5000)) / 2
    context = StepContext(
        nnx.Rngs(dropout=jax.random.key(3)), objective.initial_state({}), jnp.int32(update)
    )
    found = losses(objective, model, {"image": images}, context)
    np.testing.assert_allclose(
        found.each, expected(objective, scores, shares, np.asarray(images), weight), rtol=2e-3
    )


def test_schedules_are_half_cosines_of_the_update():
    _, objective = made()
    at = [StepContext(update=update) for update in (0, 2500, 5000, 75_000, 150_000, 10**6)]
    weights = [float(objective.divergence_weight(context)) for context in at]
    np.testing.assert_allclose(weights, [0, 3.3, 6.6, 6.6, 6.6, 6.6], atol=1e-6)
    heats = [float(objective.heat(context)) for context in at]
    np.testing.assert_allclose(
        np.array(heats)[[0, 3, 4, 5]], [1, 17 / 32, 1 / 16, 1 / 16], rtol=1e-6
    )
    _, constant = made(temperature_steps=0, kl_steps=0)
    assert (constant.heat(EVALUATION), constant.divergence_weight(EVALUATION)) == pytest.approx(
        (1 / 16, 6.6)
    )


def test_the_density_of_pixels_sums_to_one():
    pixels = np.linspace(0, 1, 200_002)[1:-1]
    prediction = np.broadcast_to(np.array([0.4, -0.7]), (len(pixels), 2))
    density = np.exp(-np.asarray(logit_laplace(prediction, pixels[:, None])))
    np.testing.assert_allclose(density.mean(), 1, rtol=1e-3)


def test_pictures_are_decoded_from_the_likeliest_codes():
    model, objective = made()
    images = random_images(2, 16, 24)
    original, drawn = pictures(objective, model, {"image": images}, EVALUATION)
    p = jax.tree.map(
        lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(objective.decoder))
    )
    shares = np.eye(CODES)[np.asarray(model.codes(images)).reshape(2, 4, 6)]
    centre = np.stack([decode(p, share)[..., :3] for share in shares])
    expected = 255 * np.clip((1 / (1 + np.exp(-centre)) - 0.1) / 0.8, 0, 1)
    np.testing.assert_array_equal(original, images)
    np.testing.assert_allclose(drawn, expected, atol=0.05)
    error = losses(objective, model, {"image": images}, EVALUATION).metrics["error"]
    np.testing.assert_allclose(
        error, np.abs(expected - np.asarray(images)).mean((1, 2, 3)), rtol=1e-3
    )


def test_the_use_of_codes_is_a_mean_over_the_last_updates():
    model, objective = made()
    rng, memory, seen = np.random.default_rng(0), objective.initial_state({}), []
    for update in range(1, 4):
        codes = rng.integers(3, size=(5, 24))
        shares = code_use.frequencies(jnp.asarray(codes), CODES)
        seen.append(np.bincount(codes.reshape(-1), minlength=CODES) / codes.size)
        memory = objective.update_state(memory, {}, {"usage": shares}, jnp.int32(update))
    weights = 0.99 ** np.arange(3)[::-1]
    usage = np.average(seen, axis=0, weights=weights)
    np.testing.assert_allclose(memory["usage"], usage, rtol=1e-5)
    metrics = losses(
        objective, model, {"image": random_images(2, 16, 24)}, StepContext(state=memory)
    ).metrics
    entropy = -sum(x * np.log(x) for x in usage if x)
    np.testing.assert_allclose(metrics["perplexity"], [np.exp(entropy)] * 2, rtol=1e-5)
    np.testing.assert_allclose(metrics["codes_used"], [3 / CODES] * 2, rtol=1e-6)


def test_evaluation_uses_averages_of_the_encoder_and_the_decoder():
    (_, objective), (model, averaged) = made(), made(average=0.75)
    config = config_of("dvae")
    config.optimizer.average = 0.75
    assert (averaged.eval_params(config), averaged.own_eval_params(config)) == (
        "average",
        "own_average",
    )

    rng, encoders, decoders = np.random.default_rng(0), [], []
    first = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    memory = averaged.initial_state(first)
    for update in range(1, 4):
        noisy(model, rng), noisy(averaged, rng)
        encoders.append(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        decoders.append(averaged.own_weights())
        seen = {"usage": np.zeros((5, CODES), np.float32)}
        memory = averaged.update_state(memory, encoders[-1], seen, jnp.int32(update))
    shares = 0.75 ** np.arange(3)[::-1]
    for name, weights in (("average", encoders), ("own_average", decoders)):
        mean = jax.tree.map(lambda *x: np.average(x, axis=0, weights=shares), *weights)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), memory[name], mean
        )

    images, context = {"image": random_images(2, 16, 24)}, StepContext(state=memory)
    nnx.update(objective, memory["own_average"])
    found, expected = (
        losses(averaged, model, images, context),
        losses(objective, model, images, EVALUATION),
    )
    np.testing.assert_allclose(found.each, expected.each, rtol=1e-5)
    drawn, expected = (
        pictures(averaged, model, images, context)[1],
        pictures(objective, model, images, EVALUATION)[1],
    )
    np.testing.assert_allclose(drawn, expected, atol=1e-2)
    far = losses(averaged, model, images, EVALUATION).each
    assert np.abs(far - found.each).max() > 0.01


def test_unused_codes_log_a_warning():
    _, objective = made(temperature_steps=6000)
    dead, alive = ({"codes_used": share, "perplexity": 3.0} for share in (0.01, 0.5))
    assert "1.00% are in use (perplexity 3); lower config.dvae.kl_weight" in objective.warning(
        dead, 600
    )
    assert objective.warning(dead, 599) is objective.warning(alive, 600) is None


def test_the_models_head_has_the_configured_number_of_codes():
    config = config_of("dvae", codes=77)
    assert objective_of(config.objective.name).outputs(config) == 77
    with pytest.raises(UserError, match=r"dvae.codes=77, and the model's head has 11"):
        made_of = create_model("DVAE", num_classes=CODES, **SMALL)
        make_objective(config, made_of, rngs=nnx.Rngs(0))


def test_a_new_head_with_a_restored_decoder_is_refused():
    config = config_of("dvae", codes=CODES)
    config.finetune.checkpoint = "somewhere"
    with pytest.raises(
        UserError, match="config.finetune.head='kept', or config.finetune.objective='new'"
    ):
        make_objective(config, create_model("DVAE", num_classes=CODES, **SMALL), rngs=nnx.Rngs(0))


def test_a_model_without_codes_is_refused():
    with pytest.raises(UserError, match="config.model.name must be 'DVAE', not a ViT"):
        refused("dvae")
