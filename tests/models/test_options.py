"""Tests of model options of later papers: outputs against NumPy, sizes, invalid combinations."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference import (
    TINY,
    assert_vit_equals_reference,
    assert_vit_gradients_equal_differences,
    count,
    forward,
    fresh_model,
    random_images,
    random_model,
)

import vit_jax
from vit_jax.errors import UserError
from vit_jax.models.attention import attend
from vit_jax.models.vit import ViT
from vit_jax.options.option import options_of

ALL = dict(
    position="2d",
    position_at="every",
    rope="eva02",
    registers=2,
    mlp="swiglu",
    gelu="erf",
    qk_norm=True,
    layer_scale=0.1,
    pre_logits=True,
    norm_epsilon=0.1,
)


@pytest.mark.one_variant
@pytest.mark.parametrize(
    "overrides",
    [
        dict(registers=3),
        dict(layer_scale=1e-5),
        dict(qk_norm=True),
        dict(mlp="swiglu"),
        dict(pooling="map", gelu="erf"),
        dict(pooling="map", registers=2, pre_logits=True),
        dict(pooling="cls_gap"),
        dict(pooling="cls_gap", position="sincos2d", registers=2),
        dict(pooling="gap", cls_token=True, fc_norm=True),
        dict(pooling="gap", cls_token=True, position="sincos2d", registers=2),
        dict(pooling="map", cls_token=True, fc_norm=True, norm_epsilon=0.1),
        dict(pooling="cls", fc_norm=True),
        dict(distillation="token"),
        dict(distillation="heads", registers=2, pre_logits=True),
        dict(norm_epsilon=0.1, qk_norm=True, pooling="map"),
        dict(ALL, distillation="heads"),
        dict(gelu="quick"),
        dict(qkv_bias="qv"),
        dict(qkv_bias="none", bias=False, mlp="swiglu"),
        dict(bias=False, pooling="map"),
        dict(norm="rms", qk_norm=True, norm_epsilon=0.1),
        dict(norm_at="after"),
        dict(sub_norm="mlp", mlp="swiglu"),
        dict(sub_norm="both", norm_epsilon=0.1),
        dict(stem_norm="tokens", registers=1),
        dict(stem_norm="patches", norm="rms"),
        dict(final_norm=False, pooling="gap"),
        dict(pooling="gap", pool_all=True, registers=2, cls_token=True),
        dict(pooling="map", pool_all=True, registers=2, pool_heads=2),
        dict(channels=1),
        dict(channels=5),
    ],
    ids=lambda overrides: "-".join(f"{key}={value}" for key, value in overrides.items()),
)
def test_options_equal_a_plain_forward_pass(overrides):
    assert_vit_equals_reference(**overrides)


@pytest.mark.one_variant
@pytest.mark.parametrize(
    "overrides",
    [
        dict(
            position="bias",
            qkv_bias="qv",
            layer_scale=0.1,
            pooling="gap",
            cls_token=True,
            fc_norm=True,
        ),
        dict(rope="eva02", heads=2, rope_grid=(5, 4), mlp="swiglu", sub_norm="both", qkv_bias="qv"),
        dict(rope="dinov3", heads=2, position="none", registers=2, qkv_bias="none", norm="rms"),
        dict(rope="mixed", heads=2, norm_at="after", stem_norm="tokens", gelu="quick", bias=False),
        dict(rope="pe", heads=2, pooling="map", pool_all=True, pool_heads=4, stem_norm="patches"),
    ],
    ids=["BEiT", "EVA-02", "DINOv3", "mixed", "PE"],
)
def test_gradients_are_the_slopes_of_a_plain_forward_pass(overrides):
    assert_vit_gradients_equal_differences(depth=1, image_size=(8, 8), **overrides)


def test_layer_scale_starts_at_its_value():
    block = fresh_model(**(TINY | dict(depth=1)), layer_scale=1e-5).blocks["00"]
    for scale in (block.scale1, block.scale2):
        np.testing.assert_array_equal(scale[...], np.full(16, 1e-5, np.float32))


def test_two_new_heads_output_exactly_their_bias():
    model = fresh_model(**(TINY | dict(depth=1)), distillation="heads", head_bias=-10.0)
    logits = forward(model, random_images(2, 8, 12))
    np.testing.assert_array_equal(logits, np.full((2, 5), -10.0, np.float32))


@pytest.mark.parametrize("position", ["1d", "2d", "relative", "sincos2d", "none"])
def test_no_token_is_zero_before_the_first_layer_norm(position):
    model = fresh_model(**(TINY | dict(depth=1)), position=position, distillation="token")
    tokens = np.asarray(model.assemble(model.patches(random_images(2, 8, 12))))[:, :2]
    # The gradient of a norm is proportional to 1 / std. The initial std of positions and tokens is
    # 0.02.
    deviations = tokens.std(axis=-1)
    assert (deviations > 0.008).all() and (deviations < 0.04).all()


# Stochastic depth.


def silence(linear: nnx.Module) -> None:
    """Sets the last layer of a branch to zero, so that the branch adds nothing."""
    linear.kernel[...] *= 0
    linear.bias[...] *= 0


def random_tokens(count: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(count, tokens, 16)).astype(np.float32)


def skipping_layer(layer: int, rate: float, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the additions of a layer's attention to its input, in evaluation and in training.

    The input has 2,000 images of 3 tokens.
    """
    block = random_model(**(TINY | dict(depth=depth)), stochastic_depth=rate).blocks[f"{layer:02d}"]
    silence(block.mlp.fc2)
    x = random_tokens(2_000, 3)
    return forward(block, x) - x, forward(block, x, seed=0) - x


def test_stochastic_depth_is_off_without_a_key():
    images = random_images(2, 8, 12)
    with_rate, without = (random_model(**TINY, stochastic_depth=rate) for rate in (0.9, 0.0))
    np.testing.assert_array_equal(forward(with_rate, images), forward(without, images))


def test_uniform_stochastic_depth_has_the_last_layers_rate_everywhere():
    model = random_model(**(TINY | dict(depth=3)), stochastic_depth=0.6, uniform_depth=True)
    assert [model.layer_rate(layer) for layer in range(3)] == [0.6] * 3


def test_attention_dropout_has_its_rate_and_keeps_the_mean():
    tokens, rate = 64, 0.3
    same, ones = jnp.ones((50, tokens, 1, tokens)), jnp.eye(tokens)[None, :, None]
    # With one-hot values, the output equals the attention weights.
    value = jnp.broadcast_to(ones, same.shape)
    weights = np.asarray(attend(same, same, value, dropout=rate, rngs=nnx.Rngs(dropout=0)))
    fallen = (weights == 0).mean()
    assert fallen == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / weights.size))
    np.testing.assert_allclose(weights[weights > 0], 1 / tokens / (1 - rate), rtol=1e-5)
    np.testing.assert_allclose(attend(same, same, value, dropout=rate), 1 / tokens, rtol=1e-5)


def test_stochastic_depth_follows_its_key():
    model, images = random_model(**TINY, stochastic_depth=0.5), random_images(8, 8, 12)
    first, again, other = (forward(model, images, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


@pytest.mark.parametrize(("layer", "rate"), [(0, 0.0), (1, 0.3), (2, 0.6)])
def test_stochastic_depth_rises_linearly_to_its_rate(layer, rate):
    _, training = skipping_layer(layer, rate=0.6, depth=3)
    skipped = (training == 0).all(axis=(1, 2)).mean()
    assert skipped == pytest.approx(rate, abs=0.045)  # The tolerance is four standard deviations.


def test_the_only_layer_of_a_model_is_never_skipped():
    evaluation, training = skipping_layer(0, rate=0.6, depth=1)
    np.testing.assert_array_equal(training, evaluation)


def test_stochastic_depth_skips_whole_images_and_keeps_the_mean():
    evaluation, training = skipping_layer(1, rate=0.6, depth=2)
    kept = (training != 0).any(axis=(1, 2))
    assert 0 < kept.sum() < len(kept)
    np.testing.assert_allclose(training[kept], evaluation[kept] / (1 - 0.6), atol=1e-5)


def test_stochastic_depth_skips_the_mlp_independently_of_the_attention():
    block = random_model(**TINY, stochastic_depth=0.5).blocks["01"]
    x = random_tokens(200, 3)
    both = forward(block, x, seed=0)
    silence(block.attention.out)
    mlp_alone = forward(block, x, seed=0)
    any_kept, mlp_kept = ((y != x).any(axis=(1, 2)).tolist() for y in (both, mlp_alone))
    assert {*zip(any_kept, mlp_kept, strict=True)} == {(True, True), (True, False), (False, False)}


def test_stochastic_depth_skips_whole_images_of_an_axial_layer():
    model = random_model(**TINY, attention="axial", pooling="gap", stochastic_depth=0.5)
    block = model.blocks["01"]
    for layer in (block.row.mlp.fc2, block.column.mlp.fc2, block.column.attention.out):
        silence(layer)
    x = random_tokens(200, 6)
    # Number of unchanged tokens in each image.
    skipped = (forward(block, x, seed=0) == x).all(axis=2).sum(axis=1)
    assert {*skipped.tolist()} == {0, 6}


# Models without a head.


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("ViT-Ti/4", TINY),
        ("ViT-Ti/4", dict(TINY, pooling="map")),
        ("ViT-Ti/4", dict(TINY, pre_logits=True)),
        ("BiT-R50x1", dict(num_classes=5, image_size=(16, 32), resnet_blocks=(1,))),
    ],
    ids=["cls", "map", "pre_logits", "BiT"],
)
def test_without_a_head_a_model_returns_the_heads_input(name, overrides):
    model = random_model(name, **overrides)
    headless = random_model(name, **(overrides | dict(num_classes=0)))
    body = nnx.state(model)
    head = body.pop("head")
    nnx.update(headless, body)
    images = random_images(2, *overrides["image_size"])
    logits = forward(headless, images) @ head["kernel"][...] + head["bias"][...]
    np.testing.assert_allclose(logits, forward(model, images), atol=2e-5)


# Numbers of parameters and tokens.


@pytest.mark.parametrize(
    ("name", "image_size", "parameters"),
    [
        ("ViT-Ti/16", 224, 5_910_800),
        ("ViT-S/16", 224, 22_436_432),
        ("ViT-B/16", 224, 87_338_192),
        ("ViT-B/16", 384, 87_630_032),
    ],
)
def test_distilled_parameter_count_is_deits(name, image_size, parameters):
    assert count(name, image_size=image_size, distillation="heads") == parameters


@pytest.mark.parametrize(
    ("name", "parameters", "overrides"),
    [
        ("ViT-S/14", 22_056_576, dict(dim=384)),
        ("ViT-B/14", 86_580_480, dict(dim=768)),
        ("ViT-L/14", 304_368_640, dict(dim=1024)),
        (
            "ViT-g/14",
            1_136_486_912,
            dict(dim=1536, mlp_dim=4096, heads=24, mlp="swiglu", registers=4),
        ),
    ],
)
def test_layer_scale_parameter_count_is_dinov2s(name, parameters, overrides):
    mask_token = overrides["dim"]  # Only the authors' model has a mask token.
    assert count(name, 0, 518, layer_scale=1e-5, **overrides) == parameters - mask_token


@pytest.mark.parametrize(
    ("name", "parameters"), [("ViT-g/14", 1_036_448_384), ("ViT-G/14", 1_881_132_416)]
)
def test_parameter_count_with_attention_pooling_is_scaling_vits(name, parameters):
    assert count(name, 0, pooling="map") == parameters


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        (dict(), 1 + 6),
        (dict(pooling="gap"), 6),
        (dict(pooling="gap", cls_token=True), 1 + 6),
        (dict(pooling="map", registers=4), 6 + 4),
        (dict(distillation="token"), 2 + 6),
        (dict(distillation="heads", registers=1), 2 + 6 + 1),
    ],
    ids=str,
)
def test_tokens_are_counted(overrides, tokens):
    assert vit_jax.model_card("ViT-Ti/4", **(TINY | overrides)).tokens == tokens


# Invalid combinations and values.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(attention="axial"), "axial.*needs model.pooling='gap' or 'map'"),
        (dict(attention="axial", pooling="gap", registers=1), "axial.*no registers"),
        (dict(attention="axial", pooling="gap", rope="eva02"), "axial.*without rope"),
        (
            dict(attention="axial", pooling="gap", position="none"),
            "axial.*'1d', '2d' or 'sincos2d'",
        ),
        (
            dict(attention="axial", pooling="gap", position="relative"),
            "axial.*'1d', '2d' or 'sincos2d'",
        ),
        (dict(attention="axial", pooling="gap", cls_token=True), "axial.*no class token"),
        (dict(attention="axial", pooling="cls_gap"), "axial.*no class token"),
        (dict(pooling="cls_gap", cls_token=True), "'cls_gap' has one anyway"),
        (dict(pooling="cls_gap", fc_norm=True), "pooling='cls_gap' reads two vectors"),
        (dict(pooling="cls_gap", distillation="token"), "distillation needs the class token"),
        (
            dict(cls_token=True),
            "cls_token is for model.pooling='gap' and 'map'; 'cls' has one anyway",
        ),
        (dict(fc_norm=True, distillation="heads"), "fc_norm normalizes one vector"),
        (
            dict(distillation="token", pooling="gap"),
            "distillation needs the class token.*pooling='cls'",
        ),
        (
            dict(distillation="heads", pooling="map"),
            "distillation needs the class token.*pooling='cls'",
        ),
        *(
            (dict(position=position, position_at=at), f"position_at='{at}' is for .*'1d', '2d'")
            for position in ("none", "relative", "sincos2d")
            for at in ("every", "shared")
        ),
        (
            dict(position="2d", dim=18, heads=2),
            "position='2d' needs a width divisible by 4, not 18",
        ),
        (
            dict(position="sincos2d", dim=18, heads=2),
            "'sincos2d' needs a width divisible by 4, not 18",
        ),
        (
            dict(attention="axial", pooling="gap", position="bias"),
            "axial.*'1d', '2d' or 'sincos2d'",
        ),
        (dict(rope="dinov3", rope_grid=(2, 3)), "rope_grid is for model.rope='eva02' and 'pe'"),
        (dict(rope="mixed", rope_rescale=2.0), "rope_rescale is for model.rope=eva02.*not 'mixed'"),
        (dict(fc_norm=True, final_norm=False), "fc_norm moves the final norm"),
        (dict(norm_at="after", layer_scale=0.1), "layer_scale is for model.norm_at='before'"),
        (dict(pool_all=True), "pool_all is for model.pooling='gap' and 'map', not 'cls'"),
        (dict(pooling="map", pool_heads=3), "pool_heads .* must divide the width 16"),
        (dict(rope="eva02", heads=8), "rope needs heads of a width divisible by 4, not 2"),
    ],
    ids=str,
)
def test_errors_about_invalid_combinations_name_the_options(overrides, message):
    with pytest.raises(UserError, match=message):
        vit_jax.create_model("ViT-Ti/4", **(TINY | overrides))


RULES = {name: declared.rule for name, declared in options_of(ViT.options_type).items()}
CHOICES = {name: rule.words.split(" or ") for name, rule in RULES.items() if rule.kind is str}


@pytest.mark.parametrize("option", CHOICES)
def test_errors_about_unknown_values_list_the_known_ones(option):
    with pytest.raises(UserError, match=f"{option} is 'sideways' and must be ") as error:
        vit_jax.create_model("ViT-Ti/4", **TINY, **{option: "sideways"})
    assert f"model.{option}" in str(error.value)
    assert all(choice in str(error.value) for choice in CHOICES[option])


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("BiT-R50x1", dict(pooling="gap"), "a BiT has no argument 'pooling'.*model.pooling"),
        ("ViT-B/16", dict(axial=True), "a ViT has no argument 'axial'.*model.axial"),
        (
            "ViT-B/16",
            dict(register=4),
            "a ViT has no argument 'register'.*did you mean 'registers'",
        ),
        ("ViT-B/16", dict(rngs=None), "a ViT has no argument 'rngs'"),
    ],
    ids=str,
)
def test_errors_about_missing_arguments_name_them(name, overrides, message):
    with pytest.raises(UserError, match=message):
        vit_jax.create_model(name, **overrides)
