"""Later options of plain ViTs equal timm's: BEiT, EVA, EVA-02, DINOv3, PE, CLIP, SigLIP, AIMv2."""

import json

import numpy as np
import pytest
from helpers import logits_of, random_images, randomise, torch_logits

import vit_jax
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import params_of

# One of each kind; others differ only in their sizes.
NAMES = [
    "beit_base_patch16_224",
    "eva_giant_patch14_224",
    "eva02_tiny_patch14_224",
    "eva02_base_patch14_224",
    "eva02_base_patch16_clip_224",
    "eva02_enormous_patch14_clip_224",
    "vit_mediumd_patch16_rope_reg1_gap_256",
    "vit_pe_core_tiny_patch16_384",
    "vit_pe_lang_large_patch14_448",
    "vit_pe_spatial_gigantic_patch14_448",
    "vit_small_patch16_rope_224",
    "vit_small_patch16_rope_mixed_ape_224",
    "vit_small_patch16_dinov3_qkvb",
    "vit_small_plus_patch16_dinov3",
    "vit_giant_patch16_lingbot",
    "vit_base_patch16_clip_quickgelu_224",
    "vit_so400m_patch16_siglip_256",
    "aimv2_large_patch14_224",
    "beit3_base_patch16_224",
    "vit_base_patch16_rpn_224",
    "vit_intern300m_patch14_448",
    "vit_so150m2_patch16_reg1_gap_256",
    "vit_base_patch16_radio_v3",
    "test_vit3",
]
ONE_TABLE = ("beit_base_patch16_224", dict(use_rel_pos_bias=False, use_shared_rel_pos_bias=True))


def small(torch, timm, name, **options):
    """Returns a random model of the architecture with two narrow layers, for images of 4x5 patches.

    It has the architecture's number of heads.
    """
    with torch.device("meta"):
        whole = timm.create_model(name)
    patch, heads = whole.patch_embed.patch_size[0], whole.blocks[0].attn.num_heads
    sizes = dict(depth=2, embed_dim=16 * heads, img_size=(4 * patch, 5 * patch), num_classes=7)
    return randomise(torch, timm.create_model(name, **(sizes | options)))


@pytest.mark.one_variant
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in NAMES), ONE_TABLE])
def test_logits_are_equal_after_reading_from_timm_and_writing_for_it(
    name, options, torch, timm, tmp_path
):
    theirs = small(torch, timm, name, **options)
    timm.models.save_for_hf(theirs, str(tmp_path / "theirs"), safe_serialization=True)
    ours = vit_jax.load_model(tmp_path / "theirs", log=str)
    images = random_images(ours, 1)
    pixels = np.float64(ours.normalize(images))
    expected = torch_logits(torch, theirs.double(), pixels)
    scale = np.abs(expected).max()
    assert np.abs(logits_of(ours, images) - expected).max() < 5e-6 * scale
    vit_jax.save_model(ours, tmp_path / "ours", library="timm")
    again = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True)
    assert np.abs(torch_logits(torch, again.double(), pixels) - expected).max() < 1e-7 * scale
    # The parameters are bit-exact.
    back, params = vit_jax.load_model(tmp_path / "ours", log=str), params_of(ours)
    assert {path: np.asarray(x).tobytes() for path, x in params_of(back).items()} == {
        path: np.asarray(x).tobytes() for path, x in params.items()
    }


def test_heads_and_grid_of_a_beit_are_derived_from_its_tensors(torch, timm, tmp_path):
    theirs = small(torch, timm, "beit_base_patch16_224", img_size=48)
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    (tmp_path / "config.json").unlink()
    ours = vit_jax.load_model(tmp_path / "model.safetensors", log=str)
    assert ours.image_size == (48, 48)
    images = random_images(ours, 1)
    expected = torch_logits(torch, theirs.double(), np.float64(images))
    np.testing.assert_allclose(logits_of(ours, images), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("vit_pe_core_gigantic_patch14_448", {}, "MLP of its attention pooling has another width"),
        (
            "vit_small_patch16_rope_224",
            dict(rope_temperature=50.0),
            "rope_temperature=50.0.* is unsupported",
        ),
        (
            "vit_small_patch16_dinov3",
            dict(rope_grid_indexing="xy"),
            "rope_grid_indexing='xy'.* is unsupported",
        ),
        (
            "beit_base_patch16_224",
            dict(use_shared_rel_pos_bias=True),
            "in each layer and one for all",
        ),
        ("beit_base_patch16_224", dict(use_abs_pos_emb=True), "not part of the model: pos_embed"),
    ],
)
def test_models_that_compute_differently_are_refused(name, options, words, torch, timm, tmp_path):
    timm.models.save_for_hf(
        small(torch, timm, name, **options), str(tmp_path), safe_serialization=True
    )
    with pytest.raises(UserError, match=words) as caught:
        vit_jax.load_model(tmp_path, log=str)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told", "words"),
    [
        ("vit_tiny_patch16_224", dict(act_layer="silu"), "act_layer='silu' is unsupported"),
        (
            "swin_tiny_patch4_window7_224",
            dict(act_layer="quick_gelu"),
            "act_layer='quick_gelu' is unsupported",
        ),
    ],
)
def test_unsupported_activations_in_a_config_are_refused(name, told, words, torch, timm, tmp_path):
    depth = dict(depths=(1, 1, 1, 1)) if name.startswith("swin") else dict(depth=1)
    theirs = timm.create_model(name, num_classes=7, **depth)
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True, model_args=depth | told)
    with pytest.raises(UserError, match=words):
        vit_jax.load_model(tmp_path, log=str)


def test_an_eva_without_its_pooling_is_refused(torch, timm, tmp_path):
    theirs = small(torch, timm, "vit_small_patch16_dinov3")
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["global_pool"]
    config.get("model_args", {}).pop("global_pool", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="lacks the pooling of timm's Eva"):
        vit_jax.load_model(tmp_path, log=str)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(rope="dinov3", norm="rms"), "timm's Eva has no norm='rms'"),
        (dict(rope="dinov3", norm_epsilon=1e-3), "Eva has no norm_epsilon=0.001"),
        (dict(norm="rms"), "timm's ViT has no norm='rms'"),
        (dict(position="bias", qkv_bias="qv", registers=2), "timm's Beit has no registers=2"),
        (dict(position="bias"), "timm's Beit has no qkv_bias='all'"),
        (dict(qkv_bias="qv", bias=False), "timm's Eva has no bias=False"),
    ],
)
def test_models_that_timm_lacks_are_refused(options, words, tmp_path):
    sizes = dict(dim=32, depth=1, mlp_dim=48, heads=2, image_size=64, num_classes=3, gelu="erf")
    model = vit_jax.create_model("ViT-Ti/16", **sizes, **options)
    with pytest.raises(UserError, match=words):
        vit_jax.save_model(model, tmp_path / "model", library="timm")
    assert not (tmp_path / "model").exists()
