"""Swin and Swin V2 have the logits of timm and Transformers in float64, in both directions."""

import json

import numpy as np
import pytest
from helpers import (
    described,
    distance,
    params_of,
    random_model,
    randomise,
    write,
)

import vit_jax
from vit_jax.errors import UserError
from vit_jax.interop.writing import save

TOLERANCE = 5e-5  # Relative to the largest logit.
SMALL = dict(embed_dim=32, depths=(2, 2), num_heads=(2, 4))
TWO = SMALL | dict(pretrained_window_sizes=(0, 0))

TIMM = {
    "Swin-T": ("swin_tiny_patch4_window7_224", {}),
    "small": ("swin_tiny_patch4_window7_224", SMALL | dict(img_size=112)),
    "padded, odd maps": ("swin_tiny_patch4_window7_224", SMALL | dict(img_size=100, window_size=4)),
    "window larger than the last map": ("swin_tiny_patch4_window7_224", SMALL | dict(img_size=40)),
    "not square": ("swin_tiny_patch4_window7_224", SMALL | dict(img_size=(24, 88))),
    "patches of 2, one channel": (
        "swin_tiny_patch4_window7_224",
        SMALL | dict(img_size=32, patch_size=2, window_size=4, in_chans=1),
    ),
    "other windows in each stage": (
        "swin_s3_tiny_224",
        SMALL | dict(img_size=80, window_size=((4, 4), (5, 5))),
    ),
    "V2": ("swinv2_tiny_window8_256", TWO | dict(img_size=128)),
    "V2, padded, odd maps": ("swinv2_tiny_window8_256", TWO | dict(img_size=100, window_size=4)),
    "V2, window larger than the last map": ("swinv2_tiny_window8_256", TWO | dict(img_size=40)),
    "V2, other windows before": (
        "swinv2_base_window12to16_192to256",
        SMALL | dict(img_size=64, window_size=8, pretrained_window_sizes=(6, 3)),
    ),
}


@pytest.mark.parametrize("case", TIMM)
def test_timm_swin_has_the_same_logits_here(case, torch, timm, tmp_path):
    name, options = TIMM[case]
    theirs = randomise(torch, timm.create_model(name, num_classes=7, **options))
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True, model_args=options)
    ours = vit_jax.load_model(tmp_path, log=str)
    assert distance(torch, ours, theirs) < TOLERANCE


TRANSFORMERS = {
    "Swin": ("Swin", dict(image_size=56, window_size=7)),
    "Swin with positions": (
        "Swin",
        dict(image_size=32, window_size=4, use_absolute_embeddings=True),
    ),
    "Swin V2": ("Swinv2", dict(image_size=64, window_size=4, pretrained_window_sizes=[0, 0])),
    "Swin V2, other windows before": (
        "Swinv2",
        dict(image_size=32, window_size=8, pretrained_window_sizes=[6, 3]),
    ),
}
THEIR_SMALL = dict(embed_dim=32, depths=[2, 2], num_heads=[2, 4], num_labels=7)


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_transformers_swin_has_the_same_logits_here(case, torch, transformers, tmp_path):
    kind, options = TRANSFORMERS[case]
    config = getattr(transformers, f"{kind}Config")(**THEIR_SMALL, **options)
    theirs = randomise(torch, getattr(transformers, f"{kind}ForImageClassification")(config))
    theirs.save_pretrained(tmp_path)
    assert distance(torch, vit_jax.load_model(tmp_path, log=str), theirs) < TOLERANCE


OURS = dict(dim=32, blocks=(2, 2), stage_heads=(2, 4), num_classes=7)


@pytest.mark.parametrize(
    ("library", "name", "options"),
    [
        ("timm", "Swin-T", dict(image_size=112)),
        ("timm", "Swin-T", dict(image_size=112, window=(14, 7))),
        ("timm", "SwinV2-T/w8", dict(image_size=96, pretrained_windows=(6, 3))),
        ("transformers", "Swin-T", dict(image_size=56)),
        ("transformers", "SwinV2-T/w8", dict(image_size=64)),
    ],
)
def test_our_swin_has_the_same_logits_in_the_library(
    library, name, options, torch, request, tmp_path
):
    there, arguments = request.getfixturevalue(library), OURS | options
    ours = random_model(name, **arguments)
    folder = write(ours, tmp_path / "converted", library, name, **arguments)
    if library == "timm":
        theirs = there.create_model(f"local-dir:{folder}", pretrained=True)
    else:
        kind = "SwinForImageClassification" if name == "Swin-T" else "Swinv2ForImageClassification"
        theirs, info = getattr(there, kind).from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
    assert distance(torch, ours, theirs) < TOLERANCE


def test_tables_are_resized_as_pytorch_interpolates(torch, tmp_path):
    arguments = OURS | dict(image_size=112)
    model = random_model("Swin-T", **arguments)
    folder = write(model, tmp_path / "model", "timm", "Swin-T", **arguments)
    wider = params_of(vit_jax.load_model(folder, log=str, image_size=192, window=12))
    for path, table in params_of(model).items():
        if path.endswith("bias_table"):
            theirs = torch.nn.functional.interpolate(
                torch.from_numpy(np.array(table)).permute(2, 0, 1)[None],
                size=(23, 23),
                mode="bicubic",
            )
            np.testing.assert_allclose(wider[path], theirs[0].permute(1, 2, 0), atol=1e-6)
        else:
            np.testing.assert_array_equal(wider[path], table)


def test_positions_of_patches_are_resized_as_pytorch_interpolates(torch, tmp_path):
    arguments = OURS | dict(image_size=56, position="1d")
    model = random_model("Swin-T", **arguments)
    folder = write(model, tmp_path / "model", "transformers", "Swin-T", **arguments)
    found = params_of(vit_jax.load_model(folder, log=str, image_size=112))[
        "position_embedding/table"
    ]
    table = np.array(params_of(model)["position_embedding/table"]).reshape(1, 14, 14, -1)
    theirs = torch.nn.functional.interpolate(
        torch.from_numpy(table).permute(0, 3, 1, 2), size=(28, 28), mode="bicubic"
    )
    np.testing.assert_allclose(found.reshape(1, 28, 28, -1), theirs.permute(0, 2, 3, 1), atol=1e-6)


def test_swin_of_another_kind_is_refused_by_name(torch, timm, tmp_path):
    name = "swinv2_cr_tiny_ns_224"
    theirs = timm.create_model(name, num_classes=7)
    timm.models.save_for_hf(theirs, str(tmp_path), safe_serialization=True)
    with pytest.raises(UserError, match=f"timm's {name} is unsupported"):
        vit_jax.load_model(tmp_path, log=str)


@pytest.mark.parametrize(
    ("library", "options", "words"),
    [
        ("timm", dict(position="1d"), "timm's Swin has no position='1d'"),
        (
            "transformers",
            dict(image_size=100),
            "otherwise on a map of 25x25 places, stage 1's, with windows of 7",
        ),
        ("transformers", dict(window=(7, 14)), "one window for all stages"),
        ("transformers", dict(image_size=28), "otherwise on a map of 4x4 places, stage 2's"),
        (
            "transformers",
            dict(image_size=(28, 56), blocks=(2,), stage_heads=(2,)),
            "on a map of 7x14",
        ),
        (
            "transformers",
            dict(version=2, position="1d", image_size=56),
            "Swin V2 has no position='1d'",
        ),
    ],
)
def test_swin_that_a_library_lacks_is_refused(library, options, words, tmp_path):
    arguments = OURS | dict(image_size=112) | options
    with pytest.raises(UserError, match=words):
        save(tmp_path / "model", library, described("Swin-T", **arguments), dict().get)


def test_windows_of_swin_v2_cannot_be_derived_from_tensors(tmp_path):
    arguments = OURS | dict(image_size=64)
    model = random_model("SwinV2-T/w8", **arguments)
    folder = write(model, tmp_path / "model", "timm", "SwinV2-T/w8", **arguments)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="do not contain its window sizes"):
        vit_jax.load_model(folder, log=str)


def test_windows_of_swin_v1_are_derived_from_tensors(tmp_path):
    arguments = OURS | dict(image_size=224)
    model = random_model("Swin-T", **arguments)
    folder = write(model, tmp_path / "model", "timm", "Swin-T", **arguments)
    (folder / "config.json").unlink()
    assert vit_jax.load_model(folder, log=str).options.window == 7


def test_config_that_contradicts_a_swins_tensors_is_refused(tmp_path):
    arguments = OURS | dict(image_size=112)
    model = random_model("Swin-T", **arguments)
    folder = write(model, tmp_path / "model", "timm", "Swin-T", **arguments)
    config = json.loads((folder / "config.json").read_text())
    config["model_args"]["depths"] = [2, 2, 2]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="contradicts the tensors.*depths"):
        vit_jax.load_model(folder, log=str)
