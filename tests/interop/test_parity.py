"""Logits equal those of timm and Transformers, for models read from them and written for them."""

import numpy as np
import pytest
from helpers import logits_of, random_images, random_model, randomise, torch_logits, write

import vit_jax
from vit_jax.errors import UserError

TOLERANCE = 2e-5


# Cases with all twelve layers would show a wrong order of layers, and one case has the whole
# ResNet. For everything else, two layers are enough.
VITS = {
    "ViT-Ti/16": ("vit_tiny_patch16_224", dict(size=224)),
    "ViT-Ti/16 at 96": ("vit_tiny_patch16_224", dict(size=96, depth=2)),
    "ViT-S/32": ("vit_small_patch32_224", dict(size=224, depth=2)),
    "ViT-S/32 at 96": ("vit_small_patch32_224", dict(size=96, depth=2)),
    "ViT-B/16": ("vit_base_patch16_224", dict(size=224, depth=2)),
    "ViT-B/16 at 96": ("vit_base_patch16_224", dict(size=96, depth=2)),
    "DeiT-Ti distilled": ("deit_tiny_distilled_patch16_224", dict(size=224, depth=2)),
    "DeiT-Ti distilled at 96": ("deit_tiny_distilled_patch16_224", dict(size=96, depth=2)),
    "R26+ViT-S/32": ("vit_small_r26_s32_224", dict(size=224)),
    "R26+ViT-S/32 at 96": ("vit_small_r26_s32_224", dict(size=96, depth=2)),
    "R+ViT-Ti/16": ("vit_tiny_r_s16_p8_224", dict(size=224, depth=2)),
    "gap": (
        "vit_tiny_patch16_224",
        dict(size=160, depth=2, global_pool="avg", class_token=False, fc_norm=False),
    ),
    "class token and gap, fc_norm": (
        "vit_tiny_patch16_224",
        dict(size=96, depth=2, global_pool="avg"),
    ),
    "class token and gap": (
        "vit_tiny_patch16_224",
        dict(size=96, depth=2, global_pool="avg", fc_norm=False, reg_tokens=2),
    ),
    "class token and map": ("vit_tiny_patch16_224", dict(size=96, depth=2, global_pool="map")),
    "fc_norm and map": (
        "vit_tiny_patch16_224",
        dict(size=96, depth=2, global_pool="map", class_token=False, fc_norm=True),
    ),
    "fc_norm and class token": ("vit_tiny_patch16_224", dict(size=96, depth=2, fc_norm=True)),
    "map, QK-norm": (
        "vit_tiny_patch16_224",
        dict(size=160, depth=2, global_pool="map", class_token=False, qk_norm=True),
    ),
    "registers": (
        "vit_tiny_patch16_224",
        dict(size=160, depth=2, reg_tokens=3, no_embed_class=True),
    ),
    "LayerScale": ("vit_tiny_patch16_224", dict(size=160, depth=2, init_values=1e-5)),
    "tanh GELU, one channel": (
        "vit_tiny_patch16_224",
        dict(size=160, depth=2, act_layer="gelu_tanh", in_chans=1),
    ),
    "not square": ("vit_tiny_patch16_224", dict(size=(96, 288), depth=2)),
    # With the class token, the table has 5 x 5 rows, like that of a square grid.
    "not square, as if": ("vit_tiny_patch16_224", dict(size=(64, 96), depth=2)),
    "registers with positions": ("vit_tiny_patch16_224", dict(size=96, depth=2, reg_tokens=3)),
    "SwiGLU": ("vit_giant_patch14_dinov2", dict(size=70, embed_dim=192, depth=2, num_heads=3)),
}


@pytest.mark.parametrize("case", VITS)
def test_timm_vits_have_the_same_logits_here(case, torch, timm, tmp_path):
    name, options = VITS[case]
    options = dict(options)
    theirs = timm.create_model(name, num_classes=7, img_size=options.pop("size"), **options)
    randomise(torch, theirs)
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    ours = vit_jax.load_model(tmp_path, log=str)
    images = random_images(ours)
    np.testing.assert_allclose(
        logits_of(ours, images),
        torch_logits(torch, theirs, ours.normalize(images)),
        rtol=0,
        atol=TOLERANCE,
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_tiny_patch16_224", dict(act_layer="relu"), "act_layer='relu' is unsupported"),
        ("vit_tiny_patch16_224", dict(global_pool="max"), "global_pool='max'"),
        (
            "vit_tiny_patch16_224",
            dict(global_pool="max", class_token=False, fc_norm=False),
            "global_pool='max'",
        ),
        ("vit_pwee_patch16_reg1_gap_256", dict(depth=1), "is unsupported"),
        ("convnext_atto_rms", {}, r"differs from a ConvNeXt \(rms\)"),
        ("test_convnext3", {}, "has kernels of 7, 5, 5 and 3, and SiLU"),
    ],
)
def test_timm_model_that_computes_differently_is_refused(
    name, options, message, torch, timm, tmp_path
):
    theirs = timm.create_model(name, num_classes=7, **options)
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    with pytest.raises(UserError, match=message):
        vit_jax.load_model(tmp_path, log=str)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("ViT", dict(qkv_bias=False), "qkv_bias=False is unsupported"),
        ("ViT", dict(hidden_act="relu"), "'relu' is unsupported"),
        ("Bit", dict(num_groups=16), "num_groups=16 is unsupported"),
        ("Bit", dict(layer_type="bottleneck"), "layer_type='bottleneck' is unsupported"),
        ("Bit", dict(output_stride=16), "output_stride=16 is unsupported"),
    ],
)
def test_transformers_model_that_computes_differently_is_refused(
    kind, options, message, torch, transformers, tmp_path
):
    sizes = dict(hidden_size=48, num_hidden_layers=1, num_attention_heads=3, intermediate_size=64)
    sizes = sizes if kind == "ViT" else dict(depths=[1, 1], hidden_sizes=[256, 512])
    config = getattr(transformers, f"{kind}Config")(**sizes, **options)
    getattr(transformers, f"{kind}ForImageClassification")(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        vit_jax.load_model(tmp_path, log=str)


@pytest.mark.parametrize("size", [224, 160])
def test_timm_bit_has_the_same_logits_here(size, torch, timm, tmp_path):
    torch.manual_seed(0)
    theirs = timm.create_model("resnetv2_50x1_bit", num_classes=7)
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    ours = vit_jax.load_model(tmp_path, log=str, image_size=size)
    images = random_images(ours)
    np.testing.assert_allclose(
        logits_of(ours, images),
        torch_logits(torch, theirs, ours.normalize(images)),
        rtol=0,
        atol=TOLERANCE,
    )


def test_timm_bit_in_double_precision_has_the_same_logits_here(torch, timm, tmp_path):
    # With random parameters, PyTorch's float32 differs by 4e-5 from its float64. Ours does not.
    theirs = randomise(torch, timm.create_model("resnetv2_50x1_bit", num_classes=7))
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    ours = vit_jax.load_model(tmp_path, log=str)
    images = random_images(ours)
    exact = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    np.testing.assert_allclose(logits_of(ours, images), exact, rtol=0, atol=TOLERANCE)


TRANSFORMERS = {
    "ViT": ("ViTForImageClassification", "ViTConfig", {}),
    "ViT, tanh GELU, 160": (
        "ViTForImageClassification",
        "ViTConfig",
        dict(hidden_act="gelu_new", image_size=160, num_hidden_layers=2),
    ),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", dict(num_hidden_layers=2)),
    "DeiT distilled": (
        "DeiTForImageClassificationWithTeacher",
        "DeiTConfig",
        dict(num_hidden_layers=2),
    ),
    "DeiT distilled, 160": (
        "DeiTForImageClassificationWithTeacher",
        "DeiTConfig",
        dict(image_size=160, num_hidden_layers=2),
    ),
}


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_transformers_vits_have_the_same_logits_here(case, torch, transformers, tmp_path):
    kind, config, options = TRANSFORMERS[case]
    options = (
        dict(hidden_size=192, num_attention_heads=3, intermediate_size=768, num_labels=7) | options
    )
    theirs = randomise(torch, getattr(transformers, kind)(getattr(transformers, config)(**options)))
    theirs.save_pretrained(tmp_path)
    ours = vit_jax.load_model(tmp_path, log=str)
    images = random_images(ours)
    np.testing.assert_allclose(
        logits_of(ours, images),
        torch_logits(torch, theirs, ours.normalize(images)),
        rtol=0,
        atol=TOLERANCE,
    )


DINOV2 = {
    "plain": ("Dinov2", dict(image_size=70)),
    "gated": ("Dinov2", dict(image_size=70, use_swiglu_ffn=True)),
    "registers": ("Dinov2WithRegisters", dict(image_size=56)),
}


@pytest.mark.parametrize("size", [56, 42, (56, 98), 70, 154], ids=str)
@pytest.mark.parametrize("case", DINOV2)
def test_dinov2_has_transformers_features_and_logits_at_any_size(
    case, size, torch, transformers, tmp_path
):
    """Position embeddings are resized by the rule of each class in Transformers."""
    kind, options = DINOV2[case]
    sizes = dict(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, patch_size=14, num_labels=7
    )
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    for what in ("ForImageClassification", "Model"):
        theirs = randomise(torch, getattr(transformers, kind + what)(config))
        theirs.save_pretrained(tmp_path / what)
        ours = vit_jax.load_model(tmp_path / what, log=str, image_size=size)
        images = random_images(ours)
        with torch.no_grad():
            seen = torch.from_numpy(np.float64(ours.normalize(images)).transpose(0, 3, 1, 2).copy())
            out = theirs.double()(seen)
        wanted = (out.logits if what == "ForImageClassification" else out.pooler_output).numpy()
        np.testing.assert_allclose(
            logits_of(ours, images), wanted, atol=2e-6 * np.abs(wanted).max()
        )


@pytest.mark.parametrize("size", [(48, 80), 160], ids=str)
def test_timms_positions_are_resized_as_timm_does(size, torch, timm, tmp_path):
    theirs = randomise(
        torch, timm.create_model("vit_tiny_patch16_224", depth=2, img_size=96, num_classes=7)
    )
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    ours = vit_jax.load_model(tmp_path, log=str, image_size=size)
    theirs.set_input_size(size)
    images = random_images(ours)
    wanted = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    np.testing.assert_allclose(logits_of(ours, images), wanted, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("size", [32, 80, (32, 96)], ids=str)
def test_transformers_positions_are_resized_as_transformers_does(
    size, torch, transformers, tmp_path
):
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, image_size=64, num_labels=7
    )
    theirs = randomise(torch, transformers.ViTForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    ours = vit_jax.load_model(tmp_path, log=str, image_size=size)
    images = random_images(ours)
    with torch.no_grad():
        seen = torch.from_numpy(np.float64(ours.normalize(images)).transpose(0, 3, 1, 2).copy())
        wanted = theirs.double()(seen, interpolate_pos_encoding=True).logits.numpy()
    np.testing.assert_allclose(logits_of(ours, images), wanted, atol=2e-6 * np.abs(wanted).max())


def test_transformers_bit_has_the_same_logits_here(torch, transformers, tmp_path):
    torch.manual_seed(0)
    theirs = transformers.BitForImageClassification(transformers.BitConfig(num_labels=7))
    theirs.save_pretrained(tmp_path)
    ours = vit_jax.load_model(tmp_path, log=str)
    images = random_images(ours)
    exact = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    np.testing.assert_allclose(logits_of(ours, images), exact, rtol=0, atol=TOLERANCE)


def test_transformers_pooler_is_the_pre_logits_layer(torch, transformers, tmp_path):
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, image_size=64
    )
    theirs = randomise(torch, transformers.ViTModel(config))
    theirs.save_pretrained(tmp_path)
    ours = vit_jax.load_model(tmp_path, log=str)
    images = random_images(ours)
    with torch.no_grad():
        pooled = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).pooler_output.numpy()
    np.testing.assert_allclose(logits_of(ours, images), pooled, rtol=0, atol=TOLERANCE)


OURS = {
    "timm": {
        "ViT-Ti/16": {},
        "ViT-Ti/16 at 160": dict(depth=2, image_size=160, gelu="erf"),
        "ViT-S/32 not square": dict(depth=2, image_size=(64, 160), channels=4),
        "ViT-B/16": dict(depth=2),
        "ViT-Ti/16 distilled": dict(depth=2, distillation="heads", image_size=64),
        "ViT-Ti/16 gap": dict(depth=2, pooling="gap", image_size=64),
        "ViT-Ti/16 MAE": dict(depth=2, pooling="gap", cls_token=True, fc_norm=True, image_size=64),
        "ViT-Ti/16 map": dict(depth=2, pooling="map", image_size=64, gelu="erf", qk_norm=True),
        "ViT-Ti/16 registers": dict(depth=2, registers=4, layer_scale=0.1, image_size=64),
        "ViT-Ti/16 swiglu": dict(mlp="swiglu", mlp_dim=200, image_size=64, depth=2),
        "R26+ViT-S/32": dict(resnet_epsilons="timm"),
        "R+ViT-Ti/16": dict(depth=2, resnet_epsilons="timm", image_size=160),
    },
    "transformers": {
        "ViT-Ti/16": {},
        "ViT-S/32 not square": dict(depth=2, image_size=(64, 160), gelu="erf", norm_epsilon=1e-12),
        "ViT-B/16": dict(depth=2),
        "ViT-Ti/16 DeiT": dict(depth=2, distillation="token", image_size=64),
        "ViT-Ti/16 distilled": dict(depth=2, distillation="heads", image_size=64),
    },
}


@pytest.mark.parametrize(
    ("library", "case"), [(lib, case) for lib, cases in OURS.items() for case in cases]
)
def test_our_vits_have_the_same_logits_in_the_library(library, case, torch, request, tmp_path):
    there = request.getfixturevalue(library)
    name, arguments = case.split()[0], OURS[library][case]
    ours = random_model(name, num_classes=7, **arguments)
    folder = write(ours, tmp_path / "converted", library, name, num_classes=7, **arguments)
    if library == "timm":
        theirs = there.create_model(f"local-dir:{folder}", pretrained=True)
    else:
        kind = dict(
            token="DeiTForImageClassification", heads="DeiTForImageClassificationWithTeacher"
        )
        kind = kind.get(arguments.get("distillation"), "ViTForImageClassification")
        theirs, info = getattr(there, kind).from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
    images = random_images(ours)
    np.testing.assert_allclose(
        logits_of(ours, images),
        torch_logits(torch, theirs, ours.normalize(images)),
        rtol=0,
        atol=TOLERANCE,
    )


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_our_bit_has_the_same_logits_in_the_library(library, torch, request, tmp_path):
    there = request.getfixturevalue(library)
    arguments = dict(num_classes=7, resnet_epsilons="timm")
    ours = random_model("BiT-R50x1", **arguments)
    folder = write(ours, tmp_path / "converted", library, "BiT-R50x1", **arguments)
    if library == "timm":
        theirs = there.create_model(f"local-dir:{folder}", pretrained=True)
    else:
        theirs = there.BitForImageClassification.from_pretrained(folder)
    images = random_images(ours)
    exact = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    np.testing.assert_allclose(logits_of(ours, images), exact, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["ViT-Ti/16", "R26+ViT-S/32", "R+ViT-Ti/16", "BiT-R50x1"])
def test_timm_reads_our_npz_as_googles(name, torch, timm, tmp_path):
    there = {
        "ViT-Ti/16": ("vit_tiny_patch16_224", dict(act_layer="gelu_tanh")),
        "R26+ViT-S/32": ("vit_small_r26_s32_224", dict(act_layer="gelu_tanh")),
        "R+ViT-Ti/16": ("vit_tiny_r_s16_p8_224", dict(act_layer="gelu_tanh")),
        "BiT-R50x1": ("resnetv2_50x1_bit", {}),
    }
    ours = random_model(name, num_classes=7)
    file = write(ours, tmp_path / "model.npz", "google", name, num_classes=7)
    architecture, options = there[name]
    theirs = timm.create_model(architecture, num_classes=7, **options)
    theirs.load_pretrained(str(file))
    images = random_images(ours)
    exact = torch_logits(torch, theirs.double(), np.float64(ours.normalize(images)))
    # timm's epsilons differ from Google's, which has an effect after the ResNet's 50 layers.
    tolerance = TOLERANCE if name == "ViT-Ti/16" else 5e-4
    np.testing.assert_allclose(logits_of(ours, images), exact, rtol=0, atol=tolerance)
