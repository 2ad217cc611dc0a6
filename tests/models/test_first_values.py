"""Tokens, positions, masks and prototypes have the initial distributions of the authors' code."""

import jax
import numpy as np
import pytest
from flax import nnx
from scipy import stats

import vit_jax
from vit_jax.models import abstract, initializers, model_factory
from vit_jax.training.objectives.beit import BEiT
from vit_jax.training.objectives.eva import EVA
from vit_jax.training.objectives.prototypes import PrototypeHead


def cut_normal(std):
    """Returns the distribution of `trunc_normal_(x, std=s, a=-s, b=s)`, which BEiT and EVA use."""
    return stats.truncnorm(-1, 1, scale=std)


# Distributions of the class token and of the positions, and where the authors define them.
AUTHORS = {
    # vision_transformer.py:161-162 of DINO. timm's `trunc_normal_` truncates at -2 and 2, which is
    # 100 standard deviations away.
    "deit": (stats.norm(scale=0.02), stats.norm(scale=0.02)),
    "dinov2": (stats.norm(scale=1e-6), stats.norm(scale=0.02)),  # vision_transformer.py:174-175
    "beit": (cut_normal(0.02), cut_normal(0.02)),  # modeling_pretrain.py:71-72
    "eva": (cut_normal(0.015), cut_normal(0.015)),  # modeling_pretrain.py:75-76 and 172
    "eva02": (cut_normal(0.02), cut_normal(0.02)),  # modeling_pretrain.py:115-117
    "vqkd": (
        stats.norm(scale=0.02),
        stats.norm(scale=0.02),
    ),  # modeling_finetune.py:307-308 of BEiT v2
}


def assert_drawn_from(values, distribution):
    values = np.asarray(values).ravel()
    assert values.std() == pytest.approx(distribution.std(), rel=0.1)
    assert stats.kstest(values, distribution.cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", AUTHORS)
def test_class_token_and_positions_start_as_the_authors(name):
    token, positions = AUTHORS[name]
    shape = dict(dim=512, depth=1, mlp_dim=8, heads=1, registers=1)
    model = vit_jax.create_model(
        "ViT-S/16", num_classes=0, image_size=64, initialization=name, **shape
    )
    assert_drawn_from(model.cls[...], token)
    assert_drawn_from(model.position_embedding.table[...], positions)
    assert_drawn_from(model.register_tokens[...], token)


@pytest.mark.parametrize("name", ["flax", "mae", "deit3"])
def test_class_tokens_start_at_zero_next_to_random_positions(name):
    shape = dict(dim=16, depth=1, mlp_dim=8, heads=1)
    model = vit_jax.create_model(
        "ViT-S/16", num_classes=0, image_size=32, initialization=name, **shape
    )
    assert not np.any(model.cls[...]) and np.any(model.position_embedding.table[...])


def test_eva_g_starts_with_three_quarters_of_beits_std():
    wide, narrow = (initializers.SCHEMES[name].of_layer(4, 40, False) for name in ("beit", "eva"))
    for part in ("patches", "qkv", "dense", "gated", "out"):
        draws = [getattr(scheme, part)(jax.random.key(0), (64, 64)) for scheme in (wide, narrow)]
        np.testing.assert_allclose(draws[1], 0.75 * draws[0], rtol=1e-6)
    assert_drawn_from(narrow.out(jax.random.key(0), (64, 64)), cut_normal(0.015 / np.sqrt(2 * 5)))


@pytest.mark.parametrize("name", ["beit", "eva", "eva02"])
def test_mask_tokens_have_the_models_initial_distribution(name):
    shape = dict(dim=512, depth=1, mlp_dim=8, heads=1, pooling="gap", cls_token=True)
    values = dict(num_classes=0, image_size=64, initialization=name, **shape)
    model = abstract(model_factory("ViT-S/16", **values))
    token = AUTHORS[name][0]
    scheme = model.stack.scheme
    made = dict(of_head=True, gradient=1.0, rngs=nnx.Rngs(0), head_init=scheme.dense)
    assert_drawn_from(EVA(model, 64, 0.5, **made).mask[...], token)
    beit = BEiT(model, 64, 0.5, rngs=nnx.Rngs(0))
    assert_drawn_from(beit.mask[...], token)


@pytest.mark.parametrize("lengths", ["one", "learned", "free"])
def test_prototypes_start_as_pytorchs_layer_or_as_dinov3s(lengths):
    # DINO and DINOv2 create the last layer after initializing the others; DINOv3 initializes all of
    # them together.
    limit = 256**-0.5
    authors = stats.norm(scale=0.02) if lengths == "free" else stats.uniform(-limit, 2 * limit)
    head = PrototypeHead(16, 16, 256, 128, lengths, rngs=nnx.Rngs(0))
    assert_drawn_from(head.prototypes[...], authors)


def test_prototypes_are_distributed_as_a_layer_of_pytorch(torch):
    torch.manual_seed(0)
    theirs = torch.nn.Linear(256, 128, bias=False).weight.detach().numpy().ravel()
    ours = np.asarray(
        PrototypeHead(16, 16, 256, 128, "one", rngs=nnx.Rngs(0)).prototypes[...]
    ).ravel()
    assert stats.ks_2samp(ours, theirs).pvalue > 1e-3
