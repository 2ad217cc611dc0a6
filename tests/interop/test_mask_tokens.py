"""Mask tokens are kept when models are converted from and to Transformers and other formats."""

import json
import shutil

import numpy as np
import pytest
from helpers import random_model, write
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax.interop.open import open_checkpoint

SIZES = dict(dim=32, depth=1, mlp_dim=64, heads=1, patch_size=8, image_size=32)
DINO = SIZES | dict(layer_scale=1.0, gelu="erf", pooling="cls_gap", num_classes=3)
DINOV3 = SIZES | dict(num_classes=0, position="none", rope="dinov3", registers=4, qkv_bias="qv")
DINOV3 |= dict(layer_scale=1.0, gelu="erf", norm_epsilon=1e-5)
BEIT = SIZES | dict(qkv_bias="qv", position="bias", layer_scale=0.1, gelu="erf", norm_epsilon=1e-12)
SWIN = dict(dim=32, blocks=(1, 1), stage_heads=(1, 2), window=2, image_size=32, num_classes=0)
# Name, arguments, the mask token's name and shape in Transformers, and whether the class that is
# written has a mask token.
CASES = {
    "DINOv2": ("ViT-S/16", DINO, "dinov2.embeddings.mask_token", (1, 32), True),
    "DINOv2 without classes": (
        "ViT-S/16",
        DINO | dict(num_classes=0, pooling="cls", registers=4),
        "embeddings.mask_token",
        (1, 32),
        True,
    ),
    "DINOv3": ("ViT-S/16", DINOV3, "embeddings.mask_token", (1, 1, 32), True),
    "BEiT": (
        "ViT-S/16",
        BEIT | dict(num_classes=3, pooling="gap", cls_token=True, fc_norm=True),
        "beit.embeddings.mask_token",
        (1, 1, 32),
        True,
    ),
    "ViT": (
        "ViT-S/16",
        SIZES | dict(num_classes=3),
        "vit.embeddings.mask_token",
        (1, 1, 32),
        False,
    ),
    "Swin": ("Swin-T", SWIN, "embeddings.mask_token", (1, 1, 32), False),
}


@pytest.fixture
def folder(case, tmp_path):
    """Writes a folder of Transformers with a mask token; returns the folder and the token."""
    name, arguments, key, shape, _ = CASES[case]
    made = write(
        random_model(name, **arguments), tmp_path / "theirs", "transformers", name, **arguments
    )
    token = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    tensors = load_file(made / "model.safetensors") | {key: token}
    save_file(tensors, made / "model.safetensors")
    return made, token.reshape(1, 1, -1)


def token_of(place) -> np.ndarray:
    """Returns the mask token that a training run would read from a folder."""
    found = open_checkpoint(place).objective
    return found.sources(found.shapes())["mask"]()


@pytest.mark.parametrize("case", CASES)
def test_conversion_of_a_mask_token_is_bit_exact(case, folder, tmp_path):
    *_, key, shape, among = CASES[case]
    theirs, token = folder
    np.testing.assert_array_equal(token_of(theirs), token)
    ways = [["transformers"]] if case == "DINOv2" else [["transformers"], ["timm", "transformers"]]
    for way in ways:  # timm has no DINOv2 with classes.
        place, lines = theirs, []
        for number, library in enumerate(way):
            changes = dict(norm_epsilon=1e-6) if library == "timm" and case == "BEiT" else {}
            source, place = place, tmp_path / f"{len(way)}_{number}"
            vit_jax.save_model(source, place, library=library, log=lines.append, **changes)
            np.testing.assert_array_equal(token_of(place), token)
        written, config = (
            load_file(place / "model.safetensors"),
            json.loads((place / "config.json").read_text()),
        )
        assert (key in written) == among == (not (place / "objective.json").exists())
        if among:
            assert written[key].shape == shape and config.get("use_mask_token", True)
        assert not any("skipped" in line for line in lines)


@pytest.mark.parametrize("case", ["ViT"])
def test_formats_without_a_mask_token_log_that_it_is_not_saved(case, folder, tmp_path):
    theirs, _ = folder
    lines = []
    model = vit_jax.load_model(theirs, log=lines.append)
    assert lines[0].endswith("; with the token of masked patches")
    vit_jax.save_model(model, tmp_path / "loaded", library="timm", log=lines.append)
    assert lines[1].startswith("not saved: the token of masked patches; save_model(CHECKPOINT")
    changes = dict(gelu="tanh", norm_epsilon=1e-6)
    vit_jax.save_model(theirs, tmp_path / "ours.npz", log=lines.append, **changes)
    assert "not saved, as the format cannot store them: the token of masked patches" in lines


@pytest.mark.parametrize("case", ["DINOv3"])
def test_a_mask_token_of_zeros_is_ignored(case, folder, tmp_path):
    shutil.rmtree(folder[0])
    name, arguments, key, *_ = CASES[case]
    write(random_model(name, **arguments), folder[0], "transformers", name, **arguments)
    assert not load_file(folder[0] / "model.safetensors")[key].any()
    assert open_checkpoint(folder[0]).objective is None


@pytest.mark.parametrize("case", [case for case, (*_, among) in CASES.items() if among])
def test_transformers_loads_the_written_mask_token(case, folder, torch, transformers, tmp_path):
    written = vit_jax.save_model(folder[0], tmp_path / "ours", library="transformers", log=str)
    (kind,) = json.loads((written / "config.json").read_text())["architectures"]
    theirs, info = getattr(transformers, kind).from_pretrained(written, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    (token,) = (
        x for name, x in theirs.named_parameters() if name.endswith("embeddings.mask_token")
    )
    np.testing.assert_array_equal(token.detach().numpy().reshape(1, 1, -1), folder[1])
