"""Models that are written and read again are bit-exact, in every format."""

import dataclasses
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import described, params_of, random_images, random_model, write

import vit_jax
from vit_jax.errors import UserError
from vit_jax.interop.writing import save
from vit_jax.models import parse_name
from vit_jax.save import library_of

FEW = dict(num_classes=3)
VIT = FEW | dict(dim=64, depth=2, mlp_dim=96, heads=2)


def small(name: str) -> dict:
    """Returns arguments that make a named model small but keep its structure."""
    if name.startswith("Swin"):
        _, values = parse_name(name)
        former = dict(pretrained_windows=(6, 3)) if values.get("pretrained_windows") else {}
        window = values["window"]
        each = {} if isinstance(window, int) else dict(window=window[-2:])
        size = 8 * (window if isinstance(window, int) else window[0])
        return (
            FEW | former | each | dict(dim=32, blocks=(2, 1), stage_heads=(2, 4), image_size=size)
        )
    patch = int(name.rsplit("/")[-1]) if "/" in name else 32
    if name.startswith("BiT"):
        return FEW | dict(resnet_blocks=(1, 2, 1, 1), resnet_width=1, image_size=64)
    blocks = (
        dict(resnet_blocks=(1, 2, 1, 1)[: 4 if patch == 32 else 3])
        if name.startswith("R50")
        else {}
    )
    return VIT | blocks | dict(image_size=4 * patch)


GOOGLE = [name for name in vit_jax.MODELS if re.match("(R.*)?ViT|BiT", name)]
DINO = dict(dim=64, depth=1, mlp_dim=256, heads=2, layer_scale=1.0, gelu="erf", pooling="cls_gap")
CONVNEXT = FEW | dict(image_size=32, blocks=(1, 1, 2, 1), widths=(16, 24, 32, 40))
SWIN = [name for name in vit_jax.MODELS if name.startswith("Swin")]
TIMM = [name for name in GOOGLE if name.startswith("ViT")] + ["R+ViT-Ti/16", "R26+ViT-S/32", *SWIN]
TRANSFORMERS = [name for name in GOOGLE if name.startswith(("ViT", "BiT"))]
TRANSFORMERS += [name for name in SWIN if "S3" not in name]
DINOV3 = dict(num_classes=0, position="none", rope="dinov3", layer_scale=1.0, gelu="erf")
BEIT = dict(qkv_bias="qv", position="bias", layer_scale=0.1, gelu="erf", norm_epsilon=1e-12)
CLIP = dict(stem_norm="tokens", gelu="quick", norm_epsilon=1e-5)
LATER = [  # Model types that only Transformers has.
    DINOV3 | dict(registers=4, qkv_bias="qv", norm_epsilon=1e-5, image_size=(64, 32)),
    DINOV3 | dict(mlp="swiglu", qkv_bias="none", bias=False, rope_rescale=2.0),
    BEIT | dict(num_classes=3, pooling="gap", cls_token=True, fc_norm=True),
    BEIT | dict(num_classes=0, position_at="shared"),
    BEIT | dict(num_classes=0, position="none", layer_scale=None, image_size=(64, 32)),
    CLIP | dict(num_classes=0, channels=4),
    dict(pooling="map", num_classes=0),
    dict(position="sincos2d_mae", num_classes=0, image_size=(64, 32)),
    CLIP | dict(pooling="gap", cls_token=True, final_norm=False),
]
OPTIONS = {
    "google": [
        dict(pre_logits=True),
        dict(pooling="gap"),
        dict(num_classes=0),
        dict(position="none"),
        dict(channels=1),
    ],
    "timm": [
        dict(gelu="erf"),
        dict(pooling="gap"),
        dict(pooling="gap", cls_token=True),
        dict(pooling="gap", fc_norm=True),
        dict(fc_norm=True),
        dict(pooling="map", gelu="erf", cls_token=True, fc_norm=True),
        dict(pooling="map", gelu="erf"),
        dict(distillation="heads"),
        dict(registers=3, layer_scale=1e-5),
        dict(qk_norm=True),
        dict(mlp="swiglu"),
        dict(num_classes=0),
        dict(position="none"),
        dict(channels=5),
        dict(image_size=(64, 128)),
    ],
    "transformers": [
        dict(gelu="erf", norm_epsilon=1e-12),
        dict(gelu="quick"),
        dict(distillation="token"),
        dict(distillation="heads"),
        dict(num_classes=0, pre_logits=True),
        dict(num_classes=0),
        dict(channels=5),
        dict(image_size=(64, 128)),
    ],
}
CASES = [
    *(
        pytest.param(library, name, small(name), marks=pytest.mark.slow if number else ())
        for library, names in (("google", GOOGLE), ("timm", TIMM), ("transformers", TRANSFORMERS))
        for number, name in enumerate(names)
    ),
    ("google", "BiT-R26x1/4", FEW | dict(image_size=16, resnet_stem="small")),
    ("google", "BiT-R14x1/8", FEW | dict(image_size=64)),
    (
        "transformers",
        "BiT-R14x3",
        FEW | dict(image_size=32, resnet_blocks=(1,), resnet_width=3 / 2),
    ),
    (
        "timm",
        "Swin-T",
        small("Swin-T") | dict(num_classes=0, channels=1, patch_size=2, image_size=(30, 50)),
    ),
    ("timm", "SwinV2-T/w8", small("SwinV2-T/w8") | dict(num_classes=0, image_size=(40, 52))),
    ("transformers", "Swin-T", small("Swin-T") | dict(num_classes=0, position="1d")),
    ("transformers", "SwinV2-T/w8", small("SwinV2-T/w8") | dict(num_classes=0, channels=5)),
    *(
        (library, name, CONVNEXT | options)
        for library in ("timm", "transformers")
        for name in ("ConvNeXt-T", "ConvNeXtV2-T")
        for options in ({}, dict(num_classes=0), dict(channels=5))
    ),
    *(
        ("timm", "ConvNeXt-T", CONVNEXT | options)
        for options in (
            dict(stem="overlapping", gelu="tanh"),
            dict(stem="tiered", norm_first=True, norm_epsilon=1e-5),
            dict(head_hidden=24),
            dict(stem="activated", centred_norm=False),
        )
    ),
    ("timm", "ConvNeXtV2-Atto", FEW | dict(image_size=32)),
    ("transformers", "ConvNeXt-T", CONVNEXT | dict(head_epsilon=1e-12)),
    *(
        (
            "transformers",
            "ViT-Ti/14",
            VIT | dict(image_size=56, gelu="erf", layer_scale=1.0) | options,
        )
        for options in (
            dict(pooling="cls_gap", mlp_dim=128),
            dict(pooling="cls_gap", mlp_dim=128, registers=4),
            dict(num_classes=0, mlp_dim=256),
            dict(num_classes=0, mlp="swiglu", mlp_dim=176),
        )
    ),
    *(("transformers", "ViT-Ti/16", VIT | dict(image_size=64) | options) for options in LATER),
    *(
        (library, "ViT-Ti/16", VIT | dict(image_size=64) | o)
        for library, all_ in OPTIONS.items()
        for o in all_
    ),
]


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_model_with_two_heads_is_read_and_written_without_them(library, tmp_path):
    arguments = VIT | dict(image_size=32, distillation="heads", gelu="erf")
    model = random_model("ViT-Ti/16", **arguments)
    folder = write(model, tmp_path / "heads", library, "ViT-Ti/16", **arguments)
    bare = vit_jax.load_model(folder, num_classes=0, log=str)
    images = random_images(bare)
    np.testing.assert_array_equal(bare(images), model.features(images))
    again = vit_jax.load_model(vit_jax.save_model(bare, tmp_path / "bare", log=str), log=str)
    np.testing.assert_array_equal(again(images), bare(images))
    with pytest.raises(UserError, match="mean of two tokens.*--to=transformers"):
        vit_jax.save_model(bare, tmp_path / "timm", library="timm")


@pytest.mark.parametrize(("library", "name", "arguments"), CASES)
def test_read_after_write_is_bit_identical(library, name, arguments, tmp_path):
    if library != "google" and name.startswith(("BiT", "R")):
        arguments = arguments | dict(resnet_epsilons="timm")
    if name == "R26+ViT-S/32" and library == "timm":
        arguments = arguments | dict(resnet_blocks=(2, 2, 2, 2))
    model = random_model(name, **arguments)
    destination = tmp_path / ("model.npz" if library == "google" else "model")
    write(model, destination, library, name, **arguments)
    read = params_of(vit_jax.load_model(destination, log=str))
    written = params_of(model)
    assert read.keys() == written.keys()
    for path in written:
        np.testing.assert_array_equal(read[path], written[path], strict=True)


@pytest.mark.parametrize(
    ("library", "name", "arguments", "words"),
    [
        ("timm", "BiT-R26x1/4", {}, "no BiT with .* units, width 0.25"),
        ("timm", "BiT-R50x1", dict(resnet_stem="small"), "and a small stem"),
        ("timm", "R26+ViT-S/32", dict(resnet_stem="small"), "no resnet_stem='small'"),
        ("transformers", "ViT-Ti/16", DINO | dict(pooling="gap"), "DINOv2 has no pooling='gap'"),
        ("transformers", "ViT-Ti/16", DINO | dict(gelu="tanh"), "DINOv2 has no gelu='tanh'"),
        (
            "transformers",
            "ViT-Ti/16",
            DINO | dict(mlp_dim=100),
            "DINOv2 of width 64 has no MLP of 100",
        ),
        ("transformers", "ViT-Ti/16", DINOV3 | dict(num_classes=3), "DINOv3 has no num_classes=3"),
        ("transformers", "ViT-Ti/16", DINOV3 | dict(pooling="gap"), "DINOv3 has no pooling='gap'"),
        ("transformers", "ViT-Ti/16", BEIT | dict(pooling="gap"), "BEiT has no cls_token=False"),
        ("transformers", "ViT-Ti/16", BEIT | dict(qkv_bias="all"), "BEiT has no qkv_bias='all'"),
        ("transformers", "ViT-Ti/16", BEIT | dict(position="2d"), "BEiT has no position='2d'"),
        (
            "transformers",
            "ViT-Ti/16",
            BEIT | dict(position="1d", position_at="every"),
            "no position_at='every'",
        ),
        (
            "transformers",
            "ViT-Ti/16",
            BEIT | dict(image_size=(32, 64)),
            "square images, not for 32x64",
        ),
        ("transformers", "ViT-Ti/16", CLIP | dict(layer_scale=0.1), "CLIP has no layer_scale=0.1"),
        (
            "transformers",
            "ViT-Ti/16",
            CLIP | dict(image_size=(32, 64)),
            "square images, not for 32x64",
        ),
        ("transformers", "ViT-Ti/16", CLIP | dict(pooling="gap"), "CLIP has no cls_token=False"),
        ("transformers", "ViT-Ti/16", dict(position="sincos2d_mae"), "ViTMAE has no num_classes=3"),
        ("transformers", "ViT-Ti/16", dict(pooling="map"), "SigLIP has no num_classes=3"),
        (
            "transformers",
            "ViT-Ti/16",
            DINOV3 | dict(layer_scale=None),
            "DINOv3 has no layer_scale=None",
        ),
        ("transformers", "ConvNeXt-T", dict(stem="tiered"), "ConvNeXt has no stem='tiered'"),
        ("timm", "ConvNeXt-T", dict(head_epsilon=1e-12), "ConvNeXt has no head_epsilon=1e-12"),
        ("transformers", "BiT-R26x1/2", {}, "norms of 32 groups, and none of resnet_width=0.5"),
        ("transformers", "BiT-R50x1", dict(resnet_stem="small"), "no resnet_stem='small'"),
    ],
)
def test_models_that_a_library_lacks_are_refused(library, name, arguments, words, tmp_path):
    other = {} if name.startswith("ConvNeXt") else dict(resnet_epsilons="timm")
    arguments = FEW | dict(image_size=32) | other | arguments
    with pytest.raises(UserError, match=words):
        # It is refused before any parameter is read.
        save(tmp_path / "model", library, described(name, **arguments), dict().get)


@pytest.mark.parametrize("case", ["vit_b16", "r50_vit_b16"])
def test_names_in_npz_are_those_of_the_published_files(case):
    """Names and shapes equal those of `imagenet21k/{ViT-B_16,R50+ViT-B_16}.npz`."""
    from vit_jax.interop import google
    from vit_jax.interop.checkpoint import sketch
    from vit_jax.interop.layout import entries
    from vit_jax.models import family_of
    from vit_jax.models.model_card import parameter_shapes

    published = json.loads((Path(__file__).parent / "golden" / f"{case}_names.json").read_text())
    name = dict(vit_b16="ViT-B/16", r50_vit_b16="R50+ViT-B/16")[case]
    options = described(name, num_classes=21_843, pre_logits=True)
    values = dataclasses.asdict(options)
    written = {}
    for entry in entries(
        google.LIBRARY.format_of(family_of(options).model, values).rules(values),
        parameter_shapes(sketch(options)),
        "Google's npz",
    ):
        written |= entry.their_shapes()
    assert {key: list(shape) for key, shape in written.items()} == published


@pytest.mark.parametrize(
    ("name", "arguments", "library"),
    [
        ("ViT-Ti/16", {}, "transformers"),
        ("ViT-Ti/16", dict(pooling="gap"), "timm"),
        ("ViT-Ti/16", dict(registers=4), "timm"),
        ("ViT-Ti/16", DINO | dict(pooling="cls_gap"), "transformers"),
        ("ViT-Ti/16", DINO | dict(pooling="gap"), "timm"),
        ("R26+ViT-S/32", dict(layer_scale=1e-5), "timm"),
        ("ConvNeXt-T", {}, "transformers"),
        ("ConvNeXt-T", dict(stem="overlapping"), "timm"),
        ("BiT-R50x1", {}, "transformers"),
        ("Swin-T", dict(image_size=224), "transformers"),
        ("Swin-T", dict(image_size=256), "timm"),
    ],
)
def test_the_default_library_of_a_folder_has_the_model(name, arguments, library):
    options = described(name, **FEW | dict(image_size=32) | arguments)
    assert library_of(Path("folder"), options) == library


def test_a_hybrid_is_refused_as_a_vit(tmp_path):
    with pytest.raises(UserError, match="^Transformers' ViT has no resnet_blocks="):
        save(tmp_path / "out", "transformers", described("R26+ViT-S/32", image_size=64), dict().get)


@pytest.mark.parametrize("library", ["google", "timm", "transformers"])
def test_written_files_have_the_mode_of_new_files(tmp_path, library):
    """The mode is not that of temporary files, which only their owner can read."""
    model = vit_jax.create_model("ViT-B/16", **VIT | dict(image_size=32))
    place = tmp_path / ("m.npz" if library == "google" else "m")
    before = os.umask(0o027)
    try:
        vit_jax.save_model(model, place, library=library, log=str)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in [place, *place.glob("*")] if path.is_file()}
    assert modes == {0o640} and (library == "google" or place.stat().st_mode & 0o777 == 0o750)
