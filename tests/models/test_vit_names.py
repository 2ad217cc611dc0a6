"""Tests of plain ViTs with other authors' names, against published sizes and timm's models."""

import pytest

import vit_jax
from vit_jax.interop.checkpoint import model_name
from vit_jax.models import abstract, count_parameters, model_factory, parse_name
from vit_jax.models.vit_names import FOLLOWERS
from vit_jax.options.model import ViTOptions, make_options

NAMES = [f"{follower.family}-{name}" for follower in FOLLOWERS for name in follower.models]


def count(name, image_size, num_classes):
    return count_parameters(
        abstract(model_factory(name, num_classes=num_classes, image_size=image_size))
    )


# Name, image size, classes, published number of parameters, and how many of these our model does
# not have: mask tokens (DINOv2 and v3), key biases, which are zero, or the local crops' norm
# (DINOv3), and projections (CLIP).
PUBLISHED = [
    ("DINOv2-S/14", 518, 0, 22_056_576, 384),
    ("DINOv2-B/14", 518, 0, 86_580_480, 768),
    ("DINOv2-L/14", 518, 0, 304_368_640, 1024),
    ("DINOv2-g/14", 518, 0, 1_136_480_768, 1536),
    ("DINOv2-g/14-reg4", 518, 0, 1_136_486_912, 1536),
    ("DINOv3-S/16", 224, 0, 21_601_152, 384 + 12 * 384),
    ("DINOv3-S+/16", 224, 0, 28_697_472, 384 + 12 * 384),
    ("DINOv3-B/16", 224, 0, 85_669_632, 768 + 12 * 768),
    ("DINOv3-L/16", 224, 0, 303_154_176, 1024 + 24 * 1024),
    ("DINOv3-H+/16", 224, 0, 840_633_600, 1280 + 32 * 1280),
    ("DINOv3-7B/16", 224, 0, 6_716_043_264, 4096 + 2 * 4096),
    ("BEiT-B/16", 224, 1000, 86_530_984, 0),
    ("BEiT-B/16", 384, 1000, 86_744_104, 0),
    ("BEiT-L/16", 512, 1000, 305_674_728, 0),
    ("EVA-g/14", 336, 1000, 1_013_005_672, 0),
    ("EVA02-Ti/14", 336, 1000, 5_756_584, 0),
    ("EVA02-S/14", 336, 1000, 22_129_000, 0),
    ("EVA02-B/14", 448, 1000, 87_117_544, 0),
    ("EVA02-L/14", 448, 1000, 305_080_232, 0),
    ("CLIP-B/32", 224, 0, 87_849_216, 768 * 512),
    ("CLIP-B/16", 224, 0, 86_192_640, 768 * 512),
    ("CLIP-L/14", 224, 0, 303_966_208, 1024 * 768),
    ("OpenCLIP-H/14", 224, 0, 632_076_800, 1280 * 1024),
]


@pytest.mark.one_variant
@pytest.mark.parametrize(("name", "image_size", "num_classes", "parameters", "fewer"), PUBLISHED)
def test_parameter_count_is_the_published(name, image_size, num_classes, parameters, fewer):
    assert count(name, image_size, num_classes) == parameters - fewer


# timm's architectures. Those with `qkvb` in their names have biases of queries and values.
TIMM = {
    "DINOv2-S/14": "vit_small_patch14_dinov2",
    "DINOv2-B/14": "vit_base_patch14_dinov2",
    "DINOv2-L/14": "vit_large_patch14_dinov2",
    "DINOv2-g/14": "vit_giant_patch14_dinov2",
    "DINOv2-S/14-reg4": "vit_small_patch14_reg4_dinov2",
    "DINOv2-B/14-reg4": "vit_base_patch14_reg4_dinov2",
    "DINOv2-L/14-reg4": "vit_large_patch14_reg4_dinov2",
    "DINOv2-g/14-reg4": "vit_giant_patch14_reg4_dinov2",
    "DINOv3-S/16": "vit_small_patch16_dinov3_qkvb",
    "DINOv3-S+/16": "vit_small_plus_patch16_dinov3_qkvb",
    "DINOv3-B/16": "vit_base_patch16_dinov3_qkvb",
    "DINOv3-L/16": "vit_large_patch16_dinov3_qkvb",
    "DINOv3-H+/16": "vit_huge_plus_patch16_dinov3_qkvb",
    "DINOv3-7B/16": "vit_7b_patch16_dinov3",
    "BEiT-B/16": "beit_base_patch16_224",
    "BEiT-L/16": "beit_large_patch16_224",
    "BEiTv2-B/16": "beitv2_base_patch16_224",
    "BEiTv2-L/16": "beitv2_large_patch16_224",
    "EVA-g/14": "eva_giant_patch14_224",
    "EVA02-Ti/14": "eva02_tiny_patch14_336",
    "EVA02-S/14": "eva02_small_patch14_336",
    "EVA02-B/14": "eva02_base_patch14_448",
    "EVA02-L/14": "eva02_large_patch14_448",
    "CLIP-B/32": "vit_base_patch32_clip_quickgelu_224",
    "CLIP-B/16": "vit_base_patch16_clip_quickgelu_224",
    "CLIP-L/14": "vit_large_patch14_clip_quickgelu_224",
    "OpenCLIP-B/32": "vit_base_patch32_clip_224",
    "OpenCLIP-B/16": "vit_base_patch16_clip_224",
    "OpenCLIP-L/14": "vit_large_patch14_clip_224",
    "OpenCLIP-H/14": "vit_huge_patch14_clip_224",
    "OpenCLIP-g/14": "vit_giant_patch14_clip_224",
    "OpenCLIP-G/14": "vit_gigantic_patch14_clip_224",
    "SigLIP-B/32": "vit_base_patch32_siglip_256",
    "SigLIP-B/16": "vit_base_patch16_siglip_224",
    "SigLIP-L/16": "vit_large_patch16_siglip_256",
    "SigLIP-So400m/16": "vit_so400m_patch16_siglip_256",
    "SigLIP-So400m/14": "vit_so400m_patch14_siglip_224",
    "SigLIP-g-opt/16": "vit_giantopt_patch16_siglip_256",
    "AIMv2-L/14": "aimv2_large_patch14_224",
    "AIMv2-H/14": "aimv2_huge_patch14_224",
    "AIMv2-1B/14": "aimv2_1b_patch14_224",
    "AIMv2-3B/14": "aimv2_3b_patch14_224",
    "PE-core-T/16": "vit_pe_core_tiny_patch16_384",
    "PE-core-S/16": "vit_pe_core_small_patch16_384",
    "PE-core-B/16": "vit_pe_core_base_patch16_224",
    "PE-core-L/14": "vit_pe_core_large_patch14_336",
}


@pytest.mark.parametrize("name", NAMES)
def test_parameter_count_is_of_timms_model(name, torch, timm):
    with torch.device("meta"):
        model = timm.create_model(TIMM[name], num_classes=0)
    # In timm, a class token next to registers has no position embedding.
    fewer = model.embed_dim if "reg4" in name else 0
    assert (
        count(name, model.patch_embed.img_size, 0)
        == sum(x.numel() for x in model.parameters()) + fewer
    )


@pytest.mark.one_variant
@pytest.mark.parametrize(
    ("name", "image_size", "gmac"),
    [
        ("EVA-g/14", 336, 620.6),
        ("EVA02-B/14", 448, 107.1),
        ("EVA02-L/14", 448, 362.3),
    ],
)
def test_multiply_adds_are_the_model_cards(name, image_size, gmac):
    card = vit_jax.model_card(name, num_classes=1000, image_size=image_size)
    assert card.multiply_adds / 1e9 == pytest.approx(
        gmac, rel=3e-3
    )  # The model cards also count rotations and norms.


def spelled(name, **changes):
    values = parse_name(name)[1] | dict(image_size=64, num_classes=3) | changes
    return model_name(make_options(ViTOptions, values))


@pytest.mark.parametrize("name", NAMES)
def test_fine_tuning_keeps_the_name(name):
    changes = dict(num_classes=7, mean=(0.4, 0.5, 0.6), std=0.3, stochastic_depth=0.1)
    assert spelled(name, **changes) == name.replace("BEiTv2", "BEiT")


@pytest.mark.parametrize(
    ("name", "changes", "described"),
    [
        ("DINOv3-B/16", dict(pooling="cls_gap"), "DINOv3-B/16"),
        ("PE-core-L/14", dict(pooling="gap", pool_heads=None, pool_all=False), "PE-core-L/14"),
        ("DINOv3-B/16", dict(qkv_bias="none"), "DINOv3-B/16"),
        ("DINOv3-B/16", dict(registers=0), "ViT-B/16"),
        ("DINOv2-S/14", dict(layer_scale=None), "ViT-S/14"),
        ("DINOv2-S/14", dict(registers=4), "DINOv2-S/14-reg4"),
        ("DINOv2-S/14", dict(patch_size=16), "ViT-S/16"),
        ("DINOv2-S/14", dict(depth=11), "ViT-384x11 (MLP 1536, 6 heads)/14"),
        ("CLIP-L/14", dict(gelu="erf"), "OpenCLIP-L/14"),
        ("BEiT-B/16", dict(position="1d"), "ViT-B/16"),
        ("EVA02-S/14", dict(rope="axial", rope_grid=None), "ViT-384x12 (MLP 1024, 6 heads)/14"),
        # SigLIP's ViT differs from the paper's only in its pooling.
        ("SigLIP-B/16", dict(pooling="gap"), "ViT-B/16"),
        ("ViT-B/16", dict(pooling="map"), "SigLIP-B/16"),
    ],
)
def test_changed_models_are_named_by_their_size(name, changes, described):
    assert spelled(name, **changes) == described
