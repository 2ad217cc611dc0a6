"""Writes the files in `golden/`: small checkpoints of timm and Transformers, and their logits.

Tests read these files where PyTorch is not installed. To write them again:

    python -m tests.interop.make_golden
"""

import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.conftest import name_missing_operators
from tests.interop.helpers import randomise, torch_logits

FOLDER = Path(__file__).parent / "golden"
SIZE = dict(
    img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2.0, num_classes=5
)
IMAGES = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)


def google_arrays(model) -> dict[str, np.ndarray]:
    """Returns the parameters of timm's ViT under Google's names, written out by hand."""
    p = {name: value.detach().numpy() for name, value in model.named_parameters()}
    heads, width, dim = 2, 8, 16
    arrays = {
        "cls": p["cls_token"],
        "embedding/kernel": p["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": p["patch_embed.proj.bias"],
        "Transformer/posembed_input/pos_embedding": p["pos_embed"],
        "Transformer/encoder_norm/scale": p["norm.weight"],
        "Transformer/encoder_norm/bias": p["norm.bias"],
        "head/kernel": p["head.weight"].T,
        "head/bias": p["head.bias"],
    }
    for n in range(2):
        here, there = f"Transformer/encoderblock_{n}", f"blocks.{n}"
        kernels = p[f"{there}.attn.qkv.weight"].reshape(3, heads, width, dim)
        biases = p[f"{there}.attn.qkv.bias"].reshape(3, heads, width)
        attention = f"{here}/MultiHeadDotProductAttention_1"
        for part, kernel, bias in zip(("query", "key", "value"), kernels, biases, strict=True):
            arrays[f"{attention}/{part}/kernel"] = kernel.transpose(2, 0, 1)
            arrays[f"{attention}/{part}/bias"] = bias
        arrays[f"{attention}/out/kernel"] = p[f"{there}.attn.proj.weight"].T.reshape(
            heads, width, dim
        )
        arrays[f"{attention}/out/bias"] = p[f"{there}.attn.proj.bias"]
        for ours, theirs in (("LayerNorm_0", "norm1"), ("LayerNorm_2", "norm2")):
            arrays[f"{here}/{ours}/scale"] = p[f"{there}.{theirs}.weight"]
            arrays[f"{here}/{ours}/bias"] = p[f"{there}.{theirs}.bias"]
        for ours, theirs in (("Dense_0", "fc1"), ("Dense_1", "fc2")):
            arrays[f"{here}/MlpBlock_3/{ours}/kernel"] = p[f"{there}.mlp.{theirs}.weight"].T
            arrays[f"{here}/MlpBlock_3/{ours}/bias"] = p[f"{there}.mlp.{theirs}.bias"]
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def big_vision_arrays(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the parameters under big_vision's names.

    In big_vision, the class token includes its position embedding.
    """
    changed = {}
    for name, array in arrays.items():
        for old, new in {
            "LayerNorm_2": "LayerNorm_1",
            "MlpBlock_3": "MlpBlock_0",
            "MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0",
            "Transformer/posembed_input/pos_embedding": "pos_embedding",
        }.items():
            name = name.replace(old, new)
        changed[f"params/{name}"] = array
    table = changed["params/pos_embedding"]
    changed["params/cls"] = changed["params/cls"] + table[:, :1]
    changed["params/pos_embedding"] = table[:, 1:]
    return changed


def main():
    name_missing_operators(torch)
    import timm

    def folder(name):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        (FOLDER / name).mkdir(parents=True)
        return FOLDER / name

    for name, architecture in (
        ("timm_vit", "vit_base_patch16_224"),
        ("timm_deit", "deit_base_distilled_patch16_224"),
    ):
        model = randomise(torch, timm.create_model(architecture, **SIZE))
        timm.models.save_for_hf(model, str(folder(name)), safe_serialization=True)
        np.save(FOLDER / name / "logits.npy", torch_logits(torch, model, IMAGES))

    model = randomise(
        torch, timm.create_model("vit_base_patch16_224", act_layer="gelu_tanh", **SIZE)
    )
    arrays = google_arrays(model)
    for name, renamed in (("google_vit", arrays), ("big_vision_vit", big_vision_arrays(arrays))):
        np.savez(folder(name) / "model.npz", **renamed)
        np.save(FOLDER / name / "logits.npy", torch_logits(torch, model, IMAGES))

    size = dict(
        image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    size |= dict(intermediate_size=32, num_labels=5)
    for name, kind, config in (
        ("transformers_vit", "ViTForImageClassification", "ViTConfig"),
        ("transformers_deit", "DeiTForImageClassificationWithTeacher", "DeiTConfig"),
    ):
        model = randomise(torch, getattr(transformers, kind)(getattr(transformers, config)(**size)))
        model.save_pretrained(folder(name))
        np.save(FOLDER / name / "logits.npy", torch_logits(torch, model, IMAGES))
    np.save(FOLDER / "images.npy", IMAGES)


if __name__ == "__main__":
    main()
