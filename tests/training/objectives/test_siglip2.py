"""Tests of SigLIP 2's additional losses: captioning, and self-distillation at the end of a run."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vit_jax
from tests.training.objectives.small import noisy, prepare
from tests.training.objectives.test_contrastive import COLOURS, pairs, small_config
from vit_jax.config import run_options
from vit_jax.data.fields import TEXT
from vit_jax.errors import UserError
from vit_jax.models import create_model
from vit_jax.options.text import TextOptions
from vit_jax.training.objectives import make_objective
from vit_jax.training.objectives.captioning import CaptionDecoder
from vit_jax.training.objectives.objective import StepContext

VOCABULARY, LENGTH, DIM, PATCHES, END = 11, 16, 8, 5, 1


def decoder():
    text = TextOptions(
        vocabulary=VOCABULARY, length=LENGTH, dim=DIM, depth=2, heads=2, mlp_dim=12, output_dim=4
    )
    return noisy(CaptionDecoder(text, 2, 6, END, rngs=nnx.Rngs(0)))


def normalized(x, norm):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    x = x * np.asarray(norm.scale[...])
    return x if norm.bias is None else x + np.asarray(norm.bias[...])


def attended(queries, keys, values, allowed):
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(queries.shape[-1])
    scores = np.exp(np.where(allowed, scores, -np.inf))
    return np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), values)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def expected_losses(made, image, tokens, parallel):
    """Returns the losses of CapPa's decoder (arXiv 2306.07915, section 3), one text at a time."""
    result = []
    for patches, text, at_once in zip(image, tokens, parallel, strict=True):
        inputs = np.full(LENGTH, VOCABULARY) if at_once else np.concatenate([[0], text[:-1]])
        x = np.asarray(made.token_embedding.embedding[...], np.float64)[inputs]
        x = x + np.asarray(made.position_embedding.embedding[...])
        allowed = np.ones((LENGTH, LENGTH), bool) if at_once else np.tri(LENGTH, dtype=bool)
        for block in made.blocks.values():
            qkv = np.einsum(
                "tc,cshd->sthd",
                normalized(x, block.norm1),
                np.asarray(block.attention.qkv.kernel[...]),
            )
            out = attended(*qkv, allowed)
            x = x + np.einsum("qhd,hdc->qc", out, np.asarray(block.attention.out.kernel[...]))
            parts = (normalized(x, block.norm2), patches, patches)
            layers = (block.query, block.key, block.value)
            queries, keys, values = (
                np.einsum("tc,chd->thd", y, np.asarray(layer.kernel[...]))
                for y, layer in zip(parts, layers, strict=True)
            )
            out = attended(queries, keys, values, True)
            x = x + np.einsum("qhd,hdc->qc", out, np.asarray(block.out.kernel[...]))
            hidden = gelu(normalized(x, block.norm3) @ np.asarray(block.mlp.fc1.kernel[...]))
            x = x + hidden @ np.asarray(block.mlp.fc2.kernel[...])
        logits = normalized(x, made.norm) @ np.asarray(made.head.kernel[...])
        logits = logits + np.asarray(made.head.bias[...])
        each = np.log(np.exp(logits).sum(-1)) - logits[np.arange(LENGTH), text]
        ends = np.flatnonzero(text == END)
        result.append(each[: ends[0] + 1 if len(ends) else LENGTH].mean())
    return np.array(result)


def test_captions_are_predicted_as_in_the_paper():
    rng, made = np.random.default_rng(0), decoder()
    image = rng.normal(size=(4, PATCHES, 6)).astype(np.float32)
    tokens = rng.integers(2, VOCABULARY, (4, LENGTH))
    tokens[0, 3:], tokens[1, 9:], tokens[2, 5] = END, 0, END
    tokens[1, 8] = END
    parallel = np.array([False, True, True, False])
    found = jax.jit(lambda *x: made.losses(*x))(image, jnp.asarray(tokens), parallel)
    np.testing.assert_allclose(found, expected_losses(made, image, tokens, parallel), rtol=2e-5)


def test_a_token_is_predicted_from_earlier_tokens_only_unless_in_parallel():
    rng, made = np.random.default_rng(1), decoder()
    image = jnp.asarray(rng.normal(size=(2, PATCHES, 6)), jnp.float32)
    tokens = rng.integers(2, VOCABULARY, (2, LENGTH))
    changed = tokens.copy()
    changed[:, 7] = 1 + (changed[:, 7] + 1) % (VOCABULARY - 1)
    call = jax.jit(lambda tokens, parallel: made(image, tokens, parallel))
    flags = np.array([False, True])
    before, after = call(tokens, flags), call(changed, flags)
    np.testing.assert_array_equal(before[0, :8], after[0, :8])
    assert (before[0, 8:] != after[0, 8:]).any(axis=-1).all()
    np.testing.assert_array_equal(before[1], after[1])


DINO = dict(
    **dict(global_crops=1, local_crops=2, local_size=8, prototypes=32, head_hidden=16),
    **dict(bottleneck=8, teacher_momentum=0.5, teacher_momentum_end=0.5),
)


def siglip2_config(**values):
    config = small_config("sigmoid")
    config.contrastive.update(dict(self_distillation=0.5, self_distillation_from=0.5) | values)
    if config.contrastive.self_distillation:
        config.dino.update(DINO)
        config.dino.update(
            dict(patch_weight=0.25, patch_prototypes=16, patch_mask_ratios=(0.5, 0.5))
        )
    return config


def made_of(config):
    """Returns the model and the objective of a config, and a batch."""
    model = noisy(
        create_model("ViT-32x1/8", heads=2, pooling="map", image_size=16, num_classes=0), 1
    )
    options = run_options(config)
    objective = noisy(make_objective(config, model, steps=10, rngs=nnx.Rngs(0)), 2)
    rng = np.random.default_rng(3)
    batch = {"image": rng.integers(256, size=(4, 16, 16, 3)).astype(np.uint8)}
    for view in type(objective).views(options)[1:]:
        shape = (4, *view.shape(16))
        batch[view.name] = rng.integers(256, size=shape).astype(np.uint8)
    batch[TEXT] = rng.integers(2, 200, (4, 24)).astype(np.int32)
    batch[TEXT][:, 20:] = 1
    keys = jax.random.split(jax.random.key(0), 4)
    return model, objective, prepare(objective, batch, keys)


@jax.jit
def losses_at(model, objective, batch, state, update):
    return objective(model, batch, StepContext(nnx.Rngs(dropout=0), state, update))


def test_self_distillation_loss_is_that_of_local_crops_and_masked_patches():
    model, objective, batch = made_of(siglip2_config())
    state = objective.initial_state(nnx.to_pure_dict(nnx.state(model)))
    state = dict(state, teacher=jax.tree.map(lambda x: 1.1 * x, state["teacher"]))
    before, after = (losses_at(model, objective, batch, state, update) for update in (5, 6))
    assert not np.any(before.metrics["distillation_loss"])
    assert (batch["masked"][:, 0].sum(1) == 2).all()

    @jax.jit
    def distillation_loss(batch):
        own = objective.distillation
        teacher = nnx.merge(nnx.graphdef(model), state["teacher"])
        targets = jax.nn.softmax(own.head(teacher.features(batch["global"][:, 0])) / 0.04)
        small = model.resized(8)
        of_crops = [
            -(targets * jax.nn.log_softmax(own.head(small.features(batch["local"][:, crop])) / 0.1))
            for crop in range(2)
        ]
        masked = batch["masked"][:, 0]
        x = model.patches(batch["global"][:, 0])
        x = jnp.where(masked[..., None], own.mask[...], x)
        seen = model.norm(model.encode(model.assemble(x)))
        taught = teacher.encoded(batch["global"][:, 0], whole=True)
        of_patches = jax.nn.softmax(own.patch_head(taught) / 0.04)
        of_patches = -(of_patches * jax.nn.log_softmax(own.patch_head(seen) / 0.1)).sum(-1)
        return sum(of_crops).sum(-1) / 2 + 0.25 * (of_patches * masked).sum(1) / 2

    expected = distillation_loss(batch)
    np.testing.assert_allclose(after.metrics["distillation_loss"], expected, rtol=2e-5)
    np.testing.assert_allclose(after.each, before.each + 0.5 * expected, rtol=2e-5)


def test_the_teacher_starts_as_the_student_and_is_its_average():
    model, objective, batch = made_of(siglip2_config())
    params = nnx.to_pure_dict(nnx.state(model))
    state = objective.initial_state(params)
    student = jax.tree.map(lambda x: x + 1, params)
    for update, share in ((5, 1.0), (6, 0.5)):
        aux = losses_at(model, objective, batch, state, update).aux
        moved = objective.update_state(state, student, aux, jnp.int32(update))
        expected = jax.tree.map(
            lambda x, y, share=share: x + share * (y - x), state["teacher"], student
        )
        jax.tree.map(np.testing.assert_allclose, moved["teacher"], expected)
    assert moved["centre"].any()
    assert objective.frozen_prefixes()["distillation"] == 5


def test_dropped_patches_are_not_read():
    model, objective, batch = made_of(siglip2_config(self_distillation=0.0, patch_dropout=0.5))
    other = copy.copy(batch)
    other["image"] = batch["image"].at[:, :8, :8].add(40)  # Changes one patch of four.
    found = [losses_at(model, objective, one, {}, 1).each for one in (batch, other)]
    read = losses_at(model, objective, {**batch, "valid": jnp.ones(4, bool)}, {}, 1)
    assert np.isfinite(read.each).all()
    embed = jax.jit(lambda batch: objective._embed(model, batch, None)[0])
    images = [embed(one) for one in (batch, other)]
    unchanged = (np.asarray(images[0]) == np.asarray(images[1])).all(axis=1)
    assert 0 < unchanged.sum() < 4
    assert not np.array_equal(*found)


@pytest.mark.slow
def test_a_run_with_all_losses_learns_captions_and_classifies(tmp_path, capsys):
    config = siglip2_config(captioning=1.0, patch_dropout=0.25)
    found = vit_jax.train(config, tmp_path / "run", train=pairs(96, 0), test=pairs(48, 1))
    assert found["recall@1_image_to_text"] > 0.9
    assert found["caption_loss"] < 3.5  # Uniform predictions of 258 tokens have a loss of 5.6.
    assert "distillation_loss" not in found
    model = vit_jax.load_image_text(tmp_path / "run", log=str)
    images, texts = pairs(30, 2)
    predictions = vit_jax.zero_shot(model, list(images), [*COLOURS], ["a {} square"])
    right = [p.classes[0] in text[0] for p, text in zip(predictions, texts, strict=True)]
    assert np.mean(right) > 0.9


@pytest.mark.parametrize(
    ("values", "model", "words"),
    [
        (dict(captioning=1.0), "ConvNeXt-T", "captioning needs a model with tokens"),
        (dict(patch_dropout=0.5), "DINOv3-S/16", "patch_dropout leaves patches out"),
    ],
)
def test_models_without_suitable_patches_are_rejected(values, model, words, tmp_path):
    config = small_config("sigmoid")
    config.contrastive.update(values)
    config.model.update(dict(name=model, pooling=None, heads=None))
    config.data.image_size = config.data.test_resize = 32
    with pytest.raises(UserError, match=words):
        vit_jax.train(config, tmp_path / "run", train=pairs(16, 0), test=pairs(16, 1))


def test_gram_anchoring_is_rejected(tmp_path):
    config = siglip2_config()
    config.dino.update(dict(gram=1.0, gram_size=16))
    with pytest.raises(UserError, match=r"dino\.gram.* must be 0 with .*contrastive"):
        vit_jax.train(config, tmp_path / "run", train=pairs(16, 0), test=pairs(16, 1))


def test_options_of_unused_losses_are_rejected(tmp_path):
    config = small_config("sigmoid")
    config.dino.prototypes = 32
    with pytest.raises(UserError, match=r"dino\.prototypes"):
        vit_jax.train(config, tmp_path / "run", train=pairs(16, 0), test=pairs(16, 1))
