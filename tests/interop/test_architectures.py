"""A selection of timm's architectures has timm's logits, or is refused in a one-line error.

`python -m tests.interop.coverage_page` compares all architectures. These tests check that its page
is correct.
"""

import json
import re

import pytest
from coverage_page import BAR, PAGE, look, timm_cases, transformers_cases
from helpers import distance, randomise

import vit_jax
from vit_jax.errors import UserError


def saved(torch, timm, folder, name, **options):
    theirs = randomise(torch, timm.create_model(name, num_classes=7, **options))
    timm.models.save_for_hf(theirs, str(folder), safe_serialization=True)
    return theirs


# The heads of these models are not 64 wide. If the number of layers or the width is changed, only
# the architecture's name determines the number of heads.
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
def test_model_has_timms_logits(name, options, torch, timm, tmp_path):
    theirs = saved(torch, timm, tmp_path, name, **options)
    assert distance(torch, vit_jax.load_model(tmp_path, log=str), theirs) < 2e-5


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("test_vit4", {}, "is unsupported"),
        ("vit_base_patch16_xp_224", dict(embed_dim=48, depth=1), r"differs from a ViT \(xp\)"),
        (
            "vit_small_patch16_18x2_224",
            dict(embed_dim=48, depth=1),
            "x2_224 is unsupported: its layers are parallel",
        ),
    ],
)
def test_model_that_computes_differently_is_refused(name, options, words, torch, timm, tmp_path):
    saved(torch, timm, tmp_path, name, **options)
    with pytest.raises(UserError, match=words):
        vit_jax.load_model(tmp_path, log=str)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("vit_small_patch16_224", "'vit_small_patch16_224' has embed_dim 384, they have 64"),
        ("test_vit2", "'test_vit2' has reg_tokens 1, they have 0"),
        ("deit_tiny_distilled_patch16_224", "contradicts the tensors"),
        ("vit_base_r50_s16_224", r"has layers \(3, 4, 9\), they have None"),
        ("resnetv2_50x1_bit", r"has embed_dim None, they have 64"),
        ("resnet50", "resnet50 is unsupported; supported: ViTs"),
        ("my_vit", "my_vit is unsupported; supported: ViTs"),
    ],
)
def test_false_architecture_is_refused(architecture, words, torch, timm, tmp_path):
    saved(torch, timm, tmp_path, "test_vit")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(architecture=architecture)))
    with pytest.raises(UserError, match=words):
        vit_jax.load_model(tmp_path, log=str)


# One architecture of each kind, with and without classes if both are published.
SLICE = ("vit_tiny_patch16_224", "vit_small_patch8_224", "deit_tiny_distilled_patch16_224")
SLICE += ("vit_tiny_r_s16_p8_224", "resnetv2_50x3_bit", "swin_tiny_patch4_window7_224")
SLICE += (
    "swinv2_base_window12to16_192to256",
    "convnext_pico_ols",
    "convnext_large_mlp",
    "convnextv2_atto",
)
SLICE += (
    "DeiTForImageClassificationWithTeacher",
    "BitModel",
    "ConvNextV2Model",
    "Swinv2ForImageClassification",
)


@pytest.mark.parametrize("name", SLICE)
def test_published_architecture_has_its_librarys_outputs(name, timm, transformers):
    (case,) = (case for case in timm_cases() + transformers_cases() if case.name == name)
    found = look(case)
    assert found.outcome == "equal", found.reason
    assert 0 < found.apart < BAR


def test_page_names_every_architecture_of_its_version_of_timm(timm):
    text = PAGE.read_text() if PAGE.exists() else ""
    if f"timm {timm.__version__} " not in text:
        pytest.skip("the page is of another version of timm")
    named = {*re.findall(r"\b\w+\b", text)}
    assert not [case.name for case in timm_cases() + transformers_cases() if case.name not in named]


TRANSFORMERS_SMALL = {
    "ViT": dict(
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=64,
        image_size=32,
    ),
    "Bit": dict(depths=[1, 1], hidden_sizes=[256, 512]),
    "ConvNext": dict(depths=[1, 2], hidden_sizes=[16, 24], num_stages=2, image_size=32),
}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (
            "ViT",
            dict(architectures=["ViTModel"]),
            "not of its architecture 'ViTModel', but of ViTForImage",
        ),
        (
            "ViT",
            dict(architectures=["DeiTForImageClassification"]),
            "not of its architecture 'DeiT",
        ),
        ("ViT", dict(model_type="deit"), "not of its architecture 'ViTForImageClassification'"),
        ("ViT", dict(model_type="deit", architectures=None), "lacks deit.embeddings"),
        (
            "ViT",
            dict(model_type="bit", architectures=None),
            "with hidden_act='gelu' is unsupported",
        ),
        ("ViT", dict(id2label={"0": "cat"}), r"it has 1 classes \(id2label\), but the head has 7"),
        ("ViT", dict(hidden_size=-48), "dim is -48 and must be"),
        ("ViT", dict(hidden_size="48"), "dim is '48' and must be"),
        ("ViT", dict(num_hidden_layers=10**12), "depth is 1000000000000 and must be"),
        ("ViT", dict(num_attention_heads=0), "heads is 0 and must be"),
        ("ViT", dict(num_attention_heads=[3]), r"heads is \[3\] and must be"),
        (
            "ViT",
            dict(layer_norm_eps="1e-12"),
            "norm_epsilon is '1e-12' and must be a finite number",
        ),
        (
            "ViT",
            dict(layer_norm_eps=float("nan")),
            "norm_epsilon is nan and must be a finite number",
        ),
        ("ViT", dict(layer_norm_eps=-1e-6), "norm_epsilon is -1e-06 and must be a finite number"),
        ("ViT", dict(image_size=[32, 32, 32]), "image_size is"),
        (
            "ConvNext",
            dict(architectures=["ConvNextModel"]),
            "not of its architecture 'ConvNextModel'",
        ),
        ("ConvNext", dict(hidden_act="relu"), "hidden_act='relu' is unsupported"),
        ("ConvNext", dict(num_stages=3), "has num_stages 3 and 2 depths"),
        ("ConvNext", dict(hidden_sizes=[16, 25]), r"widths|\[25|24"),
        ("ConvNext", dict(depths=[1, 3]), "lacks convnext.encoder.stages.1.layers.2"),
        ("ConvNext", dict(layer_norm_eps="x"), "head_epsilon is 'x' and must be"),
        ("Bit", dict(architectures=["BitModel"]), "not of its architecture 'BitModel'"),
        ("Bit", dict(hidden_sizes=[64, 128]), r"hidden_sizes=\[64, 128\] is unsupported"),
        ("Bit", dict(depths="34"), "resnet_blocks is|unsupported|config.json"),
        ("Bit", dict(depths=[1] * 40), "resnet_blocks is|unsupported"),
    ],
)
def test_false_config_json_is_refused(kind, changes, words, torch, transformers, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**TRANSFORMERS_SMALL[kind], num_labels=7)
    getattr(transformers, f"{kind}ForImageClassification")(config).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match=words) as caught:
        vit_jax.load_model(tmp_path, log=str)
    assert "\n" not in str(caught.value)
