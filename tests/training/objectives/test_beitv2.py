"""Tests of BEiT v2: codes of a learned tokeniser, and aggregation of patches in the class token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.training.objectives.small import (
    SMALL,
    batch_of,
    config_of,
    losses,
    noisy,
    with_frozen,
)
from vit_jax.errors import UserError
from vit_jax.interop.objective_files import write_objective_files
from vit_jax.models import count_multiply_adds, create_model
from vit_jax.runs.frozen_model import open_frozen
from vit_jax.training.objectives import make_objective

SIZE, PATCHES, MASKED, CODES, DIM = 16, 16, 6, 7, 5
DEPTH = 4
STUDENT = SMALL | dict(
    depth=DEPTH,
    position="bias",
    position_at="shared",
    qkv_bias="qv",
    layer_scale=0.1,
    cls_token=True,
)
WIDE = 24  # Width of the tokeniser's encoder.


def write_tokeniser(folder, patch=4, width=WIDE, size=SIZE) -> str:
    """Writes a tokeniser's folder in the format in which `convert` writes it from a run of vqkd."""
    rng = np.random.default_rng(0)
    encoder = create_model(
        f"ViT-Ti/{patch}", num_classes=0, image_size=size, dim=WIDE, depth=1, mlp_dim=32, heads=2
    )
    vit_jax.save_model(noisy(encoder, 2), folder, library="timm", log=str)
    own = {
        "projection/hidden/kernel": rng.normal(0, 0.3, (width, width)),
        "projection/hidden/bias": rng.normal(size=width),
        "projection/out/kernel": rng.normal(size=(width, DIM)),
        "projection/out/bias": rng.normal(0, 0.1, DIM),
        "decoder/cls": np.zeros((1, 1, 8)),
    }
    codebook = rng.normal(size=(CODES, DIM))
    codebook /= np.linalg.norm(codebook, axis=1, keepdims=True)
    memory = {"codebook": codebook, "usage": np.ones(CODES)}
    own, memory = ({key: np.float32(x) for key, x in arrays.items()} for arrays in (own, memory))
    write_objective_files(folder, "vqkd", dict(codes=CODES, code_dim=DIM), own, memory)
    return str(folder)


@pytest.fixture(scope="module")
def tokeniser(tmp_path_factory) -> str:
    return write_tokeniser(tmp_path_factory.mktemp("tokeniser") / "model")


def made(tokeniser: str, options=None, **values):
    """Returns a small ViT with BEiT's architecture, and the objective with its tokeniser."""
    config = config_of("beitv2", teacher=tokeniser, **values)
    config.data.image_size = SIZE
    arguments = STUDENT | dict(pooling="gap") | (options or {})
    vit = noisy(create_model("ViT-Ti/4", num_classes=0, image_size=SIZE, **arguments))
    return vit, with_frozen(config, vit)


@pytest.fixture(scope="module")
def pair(tokeniser):
    return made(tokeniser)


tokens_of = jax.jit(lambda objective, batch: objective.tokens(batch))


def cross_entropies(objective, model, tokens, codes, masked):
    """Returns the mean cross-entropy of each image's masked patches, in float64."""
    tokens = np.float64(model.norm(jnp.asarray(tokens)))[:, 1:]
    scores = tokens @ np.float64(objective.head.kernel[...]) + np.float64(objective.head.bias[...])
    chances = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    rows = zip(chances, codes, masked, strict=True)
    return np.array([-np.log(chance[which, code[which]]).mean() for chance, code, which in rows])


def test_codes_are_the_nearest_to_the_projected_patches(pair, tokeniser):
    _, objective = pair
    batch = batch_of(objective)
    encoder = vit_jax.load_model(tokeniser, log=str)
    tokens = np.float64(encoder.features(batch["image"], dense=True)).reshape(3, PATCHES, WIDE)
    heads = objective.frozen.heads
    for layer, then in ((heads.projection.hidden, np.tanh), (heads.projection.out, lambda x: x)):
        tokens = then(tokens @ np.float64(layer.kernel[...]) + np.float64(layer.bias[...]))
    tokens /= np.linalg.norm(tokens, axis=-1, keepdims=True)
    expected = np.linalg.norm(tokens[:, :, None] - np.float64(heads.codebook[...]), axis=-1).argmin(
        -1
    )
    assert len(np.unique(expected)) > 2
    np.testing.assert_array_equal(tokens_of(objective, batch), expected)


def test_loss_is_the_sum_over_the_last_layer_and_the_aggregation(pair):
    model, objective = pair
    batch = batch_of(objective)
    masked, codes = np.asarray(batch["masked"]), np.asarray(tokens_of(objective, batch))
    assert masked.sum(1).tolist() == [MASKED] * 3

    @jax.jit
    def encode(images, masked):
        x = jnp.where(masked[..., None], objective.mask[...], model.patches(images))
        with model.capturing(["tokens"]) as found:
            last = model.encode(model.assemble(x))
        # `tokens[0]` is the input of the first layer. By default, aggregation uses the patches of
        # the layer that is the third before the last, here the first of 4.
        early = found["tokens"][1]
        mixed = jnp.concatenate([last[:, :1], early[:, 1:]], axis=1)
        bias = model.layout.spread(model.bias_table[...])
        for layer in objective.layers.values():
            mixed = layer(mixed, bias=bias)
        return last, mixed

    last, mixed = encode(batch["image"], masked)
    found = losses(objective, model, batch)
    second = cross_entropies(objective, model, mixed, codes, masked)
    expected = cross_entropies(objective, model, last, codes, masked) + second
    np.testing.assert_allclose(found.each, expected, rtol=1e-4)
    np.testing.assert_allclose(found.metrics["aggregated_loss"], second, rtol=1e-4)


def test_without_aggregation_the_loss_is_beits(tokeniser, pair):
    model, objective = made(tokeniser, aggregate_layers=0)
    batch = batch_of(objective)
    found = losses(objective, model, batch)
    last = jax.jit(lambda batch: model.encode(objective.embed(model, batch)))(batch)
    codes, masked = np.asarray(tokens_of(objective, batch)), np.asarray(batch["masked"])
    expected = cross_entropies(objective, model, last, codes, masked)
    np.testing.assert_allclose(found.each, expected, rtol=1e-4)
    assert objective.layers is None and "aggregated_loss" not in found.metrics


def test_gradients_of_the_aggregation_reach_the_class_token_and_nothing_of_the_tokeniser(pair):
    model, objective = pair
    batch = batch_of(objective)

    @jax.jit
    def gradients(model, objective):
        return nnx.grad(
            lambda model, objective: objective(model, batch).metrics["aggregated_loss"].mean(),
            argnums=(0, 1),
        )(model, objective)

    of_model, own = gradients(model, objective)
    assert np.abs(np.asarray(of_model["blocks"]["03"]["mlp"]["fc2"]["kernel"][...])).max() > 0
    assert np.abs(np.asarray(own["head"]["kernel"][...])).max() > 0
    assert max(np.abs(np.asarray(x)).max() for x in jax.tree.leaves(own["frozen"])) == 0


def test_layers_of_the_aggregation_are_initialized_as_later_layers(tokeniser):
    config = config_of("beitv2", teacher=tokeniser, aggregate_from=2)
    config.data.image_size, config.model.initialization = SIZE, "beit"
    values = STUDENT | dict(dim=64, initialization="beit", stochastic_depth=0.3, pooling="gap")
    vit = create_model("ViT-Ti/4", num_classes=0, image_size=SIZE, **values)
    objective = make_objective(config, vit, rngs=nnx.Rngs(0), frozen=open_frozen(config).model)
    assert list(objective.layers) == ["02", "03"]
    for number, layer in enumerate(objective.layers.values(), 3):
        # PyTorch's dense layers start with a std of sqrt(1 / (3 * inputs)). BEiT divides the last
        # kernel of each branch by sqrt(2 * the layer's number).
        last = np.sqrt(2 * number)
        attention, mlp = layer.attention, layer.mlp
        kernels = [(attention.qkv.kernel, 64), (attention.out.kernel, 64 * last**2)]
        kernels += [(mlp.fc1.kernel, 64), (mlp.fc2.kernel, 32 * last**2)]
        for kernel, inputs in kernels:
            assert np.std(kernel[...]) == pytest.approx(np.sqrt(1 / 3 / inputs), rel=0.1)
        assert layer.stochastic_depth == pytest.approx(0.3 * (number - 1) / 3)
        assert layer.attention.qkv.bias.shape[0] == 2 and np.all(
            layer.scale1[...] == np.float32(0.1)
        )


def test_multiply_adds_include_both_losses_and_a_third_of_the_tokenisers(pair, tokeniser):
    model, objective = pair
    model, objective = made(tokeniser, dict(pooling="gap"))
    head = MASKED * SMALL["dim"] * CODES
    layers = (
        count_multiply_adds(model) - model.patches(np.zeros((1, SIZE, SIZE, 3), np.uint8)).size * 48
    )
    tokens = PATCHES * (WIDE * WIDE + WIDE * DIM + DIM * CODES)
    taught = count_multiply_adds(vit_jax.load_model(tokeniser, log=str)) + tokens
    expected = count_multiply_adds(model) + layers * 2 / DEPTH + 2 * head + taught / 3
    assert objective.multiply_adds(model) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("options", "values", "words"),
    [
        ({"cls_token": False}, {}, "through the class token: model.cls_token=True"),
        ({}, {"aggregate_from": 4}, "aggregate_from = 4 must be below the model's 4 layers"),
        ({"pooling": "map"}, {}, "trains nothing behind the encoder"),
    ],
)
def test_models_and_layers_without_aggregation_are_refused(tokeniser, options, values, words):
    with pytest.raises(UserError, match=words):
        made(tokeniser, options, **values)


def test_unsuitable_tokenisers_are_refused(tmp_path):
    with pytest.raises(UserError, match="has 2x2 codes of 16x16 pixels, and the model 4x4: .*=32"):
        made(write_tokeniser(tmp_path / "larger", patch=8))
    with pytest.raises(UserError, match="a tokenizer of other patches than its model's"):
        made(write_tokeniser(tmp_path / "wider", width=32))
    bare = create_model("ViT-Ti/4", num_classes=0, image_size=SIZE, **SMALL)
    vit_jax.save_model(bare, tmp_path / "none", library="timm", log=str)
    with pytest.raises(UserError, match="has no heads of vqkd: use a workdir of such a run"):
        made(str(tmp_path / "none"))
