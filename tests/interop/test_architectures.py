"""Every ViT, hybrid, BiT, ConvNeXt and Swin of timm gives its own logits here, or is refused in one line."""

import json

import numpy as np
import pytest
from helpers import logits_of, random_images
from test_parity import randomise, torch_logits

import vit_jax
from vit_jax.errors import UserError

MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "resnetv2", "convnext")
MODULES += ("swin_transformer", "swin_transformer_v2")
MOST = 30e6  # Parameters; larger: a ViT of two layers, others of four blocks; no ResNet.


def differs(torch, theirs, folder) -> float:
    """How far our logits are from theirs, to the largest of theirs; NaN if the model is refused."""
    try:
        ours = vit_jax.load_model(folder, say=str)
    except UserError as error:
        assert "\n" not in str(error)
        return np.nan
    images = random_images(ours, 1)
    expected = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    return np.abs(logits_of(ours, images) - expected).max() / np.abs(expected).max()


def saved(torch, timm, folder, name, **options):
    theirs = randomise(torch, timm.create_model(name, num_classes=7, **options))
    timm.models.save_for_hf(theirs, str(folder), safe_serialization=True)
    return theirs


# Their heads are not 64 wide, which only the name says where layers or widths are others than its own.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_vit", {}),
        ("test_vit2", {}),
        ("vit_huge_patch14_224", dict(embed_dim=64, depth=1, img_size=28)),
        ("vit_so400m_patch14_reg1_tipsv2", dict(embed_dim=64, depth=1, img_size=28)),
        ("vit_base_patch16_gap_224", dict(embed_dim=64, depth=1, img_size=32)),
        ("deit3_huge_patch14_224", dict(embed_dim=64, depth=1, img_size=28)),
    ],
)
def test_model_gives_its_own_logits(name, options, torch, timm, tmp_path):
    theirs = saved(torch, timm, tmp_path, name, **options)
    assert differs(torch, theirs, tmp_path) < 2e-5


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("test_vit4", {}, "none of the models"),
        ("vit_base_patch16_xp_224", dict(embed_dim=48, depth=1), r"differs from a ViT \(xp\)"),
    ],
)
def test_model_that_computes_otherwise_is_refused(name, options, words, torch, timm, tmp_path):
    saved(torch, timm, tmp_path, name, **options)
    with pytest.raises(UserError, match=words):
        vit_jax.load_model(tmp_path, say=str)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("vit_small_patch16_224", "'vit_small_patch16_224' has embed_dim 384, they have 64"),
        ("test_vit2", "'test_vit2' has reg_tokens 1, they have 0"),
        ("deit_tiny_distilled_patch16_224", "contradicts the tensors"),
        ("vit_base_r50_s16_224", r"has layers \(3, 4, 9\), they have None"),
        ("resnetv2_50x1_bit", r"has layers \(3, 4, 6, 3\), they have None"),
        ("resnet50", "resnet50 is none of the models that are read"),
        ("my_vit", "my_vit is none of the models that are read"),
    ],
)
def test_false_architecture_is_refused(architecture, words, torch, timm, tmp_path):
    saved(torch, timm, tmp_path, "test_vit")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(architecture=architecture)))
    with pytest.raises(UserError, match=words):
        vit_jax.load_model(tmp_path, say=str)


@pytest.mark.study
def test_every_architecture_gives_its_own_logits_or_is_refused(torch, timm, tmp_path):
    """Prints each model with how far it is off, or nan if it is refused; -s shows it. Half an hour."""
    wrong, equal, refused = {}, [], []
    for name in [name for module in MODULES for name in timm.list_models(module=module)]:
        with torch.device("meta"):
            whole = timm.create_model(name)
        resnet = not hasattr(whole, "blocks") or hasattr(whole.patch_embed, "backbone")
        options = {}
        if sum(p.numel() for p in whole.parameters()) > MOST:
            if name.startswith(("convnext", "swin")):
                options = dict(depths=(1, 1, 1, 1))
            elif not hasattr(whole, "blocks"):
                print(f"{name}: left out")
                continue
            else:
                options = dict(depth=2)
        folder = tmp_path / name
        off = differs(torch, saved(torch, timm, folder, name, **options), folder)
        (folder / "model.safetensors").unlink()
        print(f"{name}: {off:.1e}", flush=True)
        if np.isnan(off):
            refused.append(name)
        elif off < (5e-5 if resnet else 2e-5):  # A ResNet's own rounding is 2e-5.
            equal.append(name)
        else:
            wrong[name] = off
    print(f"{len(equal)} give their logits, {len(refused)} are refused")
    assert not wrong
    assert len(equal) > 110


TRANSFORMERS_SMALL = {
    "ViT": dict(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=3, intermediate_size=64, image_size=32
    ),
    "Bit": dict(depths=[1, 1], hidden_sizes=[256, 512]),
    "ConvNext": dict(depths=[1, 2], hidden_sizes=[16, 24], num_stages=2, image_size=32),
}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("ViT", dict(architectures=["ViTModel"]), "not of its architecture 'ViTModel', but of ViTForImage"),
        ("ViT", dict(architectures=["DeiTForImageClassification"]), "not of its architecture 'DeiT"),
        ("ViT", dict(model_type="deit"), "not of its architecture 'ViTForImageClassification'"),
        ("ViT", dict(model_type="deit", architectures=None), "lacks deit.embeddings"),
        ("ViT", dict(model_type="bit", architectures=None), "with hidden_act='gelu' is not read"),
        ("ViT", dict(id2label={"0": "cat"}), r"names 1 classes \(id2label\), but the head has 7"),
        ("ViT", dict(hidden_size=-48), "dim is -48 and must be"),
        ("ViT", dict(hidden_size="48"), "dim is '48' and must be"),
        ("ViT", dict(num_hidden_layers=10**12), "depth is 1000000000000 and must be"),
        ("ViT", dict(num_attention_heads=0), "heads is 0 and must be"),
        ("ViT", dict(num_attention_heads=[3]), r"heads is \(3,\) and must be"),
        ("ViT", dict(layer_norm_eps="1e-12"), "norm_epsilon is '1e-12' and must be a finite number"),
        ("ViT", dict(layer_norm_eps=float("nan")), "norm_epsilon is nan and must be a finite number"),
        ("ViT", dict(layer_norm_eps=-1e-6), "norm_epsilon is -1e-06 and must be a finite number"),
        ("ViT", dict(image_size=[32, 32, 32]), "image_size is"),
        ("ConvNext", dict(architectures=["ConvNextModel"]), "not of its architecture 'ConvNextModel'"),
        ("ConvNext", dict(hidden_act="relu"), "hidden_act='relu' is not read"),
        ("ConvNext", dict(num_stages=3), "has num_stages 3 and 2 depths"),
        ("ConvNext", dict(hidden_sizes=[16, 25]), r"widths|\[25|24"),
        ("ConvNext", dict(depths=[1, 3]), "lacks convnext.encoder.stages.1.layers.2"),
        ("ConvNext", dict(layer_norm_eps="x"), "head_epsilon is 'x' and must be"),
        ("Bit", dict(architectures=["BitModel"]), "not of its architecture 'BitModel'"),
        ("Bit", dict(hidden_sizes=[64, 128]), r"hidden_sizes=\[64, 128\] is not read"),
        ("Bit", dict(depths="34"), "resnet_blocks is|not read|config.json"),
        ("Bit", dict(depths=[1] * 40), "resnet_blocks is|not read"),
    ],
)
def test_config_json_that_is_false_is_refused(kind, changes, words, torch, transformers, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**TRANSFORMERS_SMALL[kind], num_labels=7)
    getattr(transformers, f"{kind}ForImageClassification")(config).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match=words) as caught:
        vit_jax.load_model(tmp_path, say=str)
    assert "\n" not in str(caught.value)
