"""Image towers in open_clip's files have the outputs of timm, which can also read these files."""

import json

import numpy as np
import pytest
from helpers import logits_of, random_images, randomise, torch_logits
from safetensors.numpy import save_file

import vit_jax
from vit_jax.errors import UserError

SIZES = dict(layers=2, width=128, patch_size=8, image_size=[32, 40])
SEEN = dict(
    mean=[0.48, 0.46, 0.41], std=[0.27, 0.26, 0.28], interpolation="bicubic", resize_mode="shortest"
)


def write(folder, tensors, vision, **said):
    tensors = {name: np.float32(x) for name, x in tensors.items()} | dict(
        logit_scale=np.ones(1, np.float32)
    )
    tensors |= {"text_projection": np.ones((64, 8), np.float32)}
    save_file(tensors, folder / "open_clip_model.safetensors")
    config = dict(
        model_cfg=dict(embed_dim=7, vision_cfg=vision, text_cfg={}) | said, preprocess_cfg=SEEN
    )
    (folder / "open_clip_config.json").write_text(json.dumps(config))


def own_tower():
    """Returns random tensors of open_clip's own image tower."""
    rng, dim, hidden = np.random.default_rng(0), 128, 512
    shapes = {
        "conv1.weight": (dim, 3, 8, 8),
        "class_embedding": (dim,),
        "positional_embedding": (21, dim),
    }
    shapes |= {
        f"{norm}.{part}": (dim,) for norm in ("ln_pre", "ln_post") for part in ("weight", "bias")
    }
    shapes["proj"] = (dim, 7)
    for layer in range(2):
        start = f"transformer.resblocks.{layer}."
        shapes |= {f"{start}ln_{n}.{part}": (dim,) for n in (1, 2) for part in ("weight", "bias")}
        shapes |= {
            f"{start}attn.in_proj_weight": (3 * dim, dim),
            f"{start}attn.in_proj_bias": (3 * dim,),
        }
        for name, outputs, inputs in (
            ("attn.out_proj", dim, dim),
            ("mlp.c_fc", hidden, dim),
            ("mlp.c_proj", dim, hidden),
        ):
            shapes |= {
                f"{start}{name}.weight": (outputs, inputs),
                f"{start}{name}.bias": (outputs,),
            }
    return {f"visual.{name}": rng.normal(0, 0.1, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("quick", [True, False])
def test_a_tower_has_the_embeddings_of_timm(quick, torch, timm, tmp_path):
    from timm.models.vision_transformer import checkpoint_filter_fn

    tensors = own_tower()
    write(tmp_path, tensors, SIZES, quick_gelu=quick)
    said = []
    ours = vit_jax.load_model(tmp_path, log=said.append)
    assert "the tower of images alone, of two" in said[0]
    name = f"vit_base_patch16_clip{'_quickgelu' if quick else ''}_224"
    sizes = dict(
        depth=2, embed_dim=128, num_heads=2, patch_size=8, img_size=(32, 40), num_classes=7
    )
    theirs = timm.create_model(name, **sizes)
    state = {name: torch.tensor(np.float32(x)) for name, x in tensors.items()}
    theirs.load_state_dict(checkpoint_filter_fn(state, theirs))
    images = random_images(ours, 1)
    expected = torch_logits(torch, theirs.eval().double(), np.float64(ours.normalize(images)))
    assert np.abs(logits_of(ours, images) - expected).max() < 5e-6 * np.abs(expected).max()
    np.testing.assert_allclose(ours.mean, SEEN["mean"])
    np.testing.assert_array_equal(ours.head.bias[...], 0)


def test_a_tower_that_is_a_timm_model_is_read_as_one(torch, timm, tmp_path):
    theirs = randomise(torch, timm.create_model("test_vit3", num_classes=0))
    tensors = {f"visual.trunk.{name}": x.numpy() for name, x in theirs.state_dict().items()}
    write(
        tmp_path,
        tensors,
        dict(timm_model_name="test_vit3", timm_pool="map", timm_proj="none", image_size=160),
    )
    ours = vit_jax.load_model(tmp_path / "open_clip_model.safetensors", log=str)
    images = random_images(ours, 1)
    expected = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    assert np.abs(logits_of(ours, images) - expected).max() < 5e-6 * np.abs(expected).max()


def test_the_tower_of_an_eva02_clip_is_read_with_its_arguments(torch, timm, tmp_path):
    """`timm_model_kwargs` are arguments of timm's model, whose head is the projection."""
    name, sizes = "eva02_base_patch16_clip_224", dict(depth=2, embed_dim=48, num_heads=3)
    theirs = randomise(torch, timm.create_model(name, num_classes=7, img_size=32, **sizes))
    tensors = {f"visual.trunk.{name}": x.numpy() for name, x in theirs.state_dict().items()}
    vision = dict(timm_model_name=name, timm_pool="token", timm_proj=None, image_size=32)
    write(tmp_path, tensors, vision | dict(timm_model_kwargs=sizes | dict(img_size=32)))
    ours = vit_jax.load_model(tmp_path, log=str)
    images = random_images(ours, 1)
    expected = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    assert np.abs(logits_of(ours, images) - expected).max() < 5e-6 * np.abs(expected).max()


def test_default_preprocessing_is_open_clips(tmp_path):
    write(tmp_path, own_tower(), SIZES)
    config = json.loads((tmp_path / "open_clip_config.json").read_text())
    config["preprocess_cfg"] = dict(mean=None)
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    ours = vit_jax.load_model(tmp_path, log=str)
    np.testing.assert_allclose(ours.mean, (0.48145466, 0.4578275, 0.40821073))
    np.testing.assert_allclose(ours.std, (0.26862954, 0.26130258, 0.27577711))


@pytest.mark.parametrize(
    ("vision", "words"),
    [
        (dict(attentional_pool=True), "attentional_pool=True is unsupported"),
        (dict(pool_type="avg"), "pool_type='avg' is unsupported"),
        (dict(head_width=48), "head_width=48, which does not divide the width 128"),
    ],
)
def test_a_tower_of_another_kind_is_refused(vision, words, tmp_path):
    write(tmp_path, own_tower(), SIZES | vision)
    with pytest.raises(UserError, match=words):
        vit_jax.load_model(tmp_path, log=str)


def test_a_tower_without_its_config_is_refused_and_none_is_written(tmp_path):
    write(tmp_path, own_tower(), SIZES)
    model = vit_jax.load_model(tmp_path, log=str)
    with pytest.raises(
        UserError, match="library='open_clip'. Supported: google, transformers, openai, timm"
    ):
        vit_jax.save_model(model, tmp_path / "written", library="open_clip")
    (tmp_path / "open_clip_config.json").unlink()
    with pytest.raises(UserError, match="needs its open_clip_config.json next to it"):
        vit_jax.load_model(tmp_path, log=str)
