"""Converts authors' tensor names (DINOv3, EVA, BEiT, DeiT III, ConvNeXt, Swin) to timm's names.

Sources: the published code of facebookresearch/dinov3 (layers, models/convnext.py), baaivision/EVA
(EVA-01, EVA-02), microsoft/unilm (beit, beit2), facebookresearch/deit (models_v2.py),
facebookresearch/ConvNeXt and ConvNeXt-V2, and microsoft/Swin-Transformer.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.preprocessing import CLIP, IMAGENET

# Mean and std of pixels by name; DINOv3's models that were trained on SAT-493M use `satellite`.
PIXELS = {
    "imagenet": IMAGENET,
    "clip": CLIP,
    "half": {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
    "satellite": {"mean": (0.430, 0.411, 0.296), "std": (0.213, 0.156, 0.143)},
}
_NAMES = {
    "storage_tokens": "reg_token",
    r"\.mlp\.w1\.": ".mlp.fc1_g.",
    r"\.mlp\.w2\.": ".mlp.fc1_x.",
    r"\.mlp\.ffn_ln\.": ".mlp.norm.",
    r"\.attn\.inner_attn_ln\.": ".attn.norm.",
}
# Names of tensors that are skipped, because they can be computed from the model's arguments:
# angles of rotary positions, and DINOv3's mask of the qkv bias.
_FOLLOWS = re.compile(r"(^|.*\.)(rope\.freqs_(cos|sin)|rope_embed\.periods|bias_mask)$")
_TABLE = "relative_position_bias_table"
_CONVNEXT = {
    r"\.(ln|linear)\.(weight|bias)$": r".\2",  # Names of sparse layers in FCMAE.
    r"^downsample_layers\.0\.": "stem.",
    r"^downsample_layers\.(\d+)\.": r"stages.\1.downsample.",
    r"^stages\.(\d+)\.(\d+)\.": r"stages.\1.blocks.\2.",
    r"\.dwconv\.": ".conv_dw.",
    r"\.pwconv(\d)\.": r".mlp.fc\1.",
    r"\.grn\.gamma$": ".mlp.grn.weight",
    r"\.grn\.beta$": ".mlp.grn.bias",
    r"^norm\.": "head.norm.",
    r"^head\.(weight|bias)$": r"head.fc.\1",
}
# Names of tensors that depend only on a Swin's window and image sizes. The sizes are derived from
# these tensors, which are then skipped.
_OF_WINDOWS = re.compile(r".*\.(attn_mask|relative_coords_table)$")


class _Converted(NamedTuple):
    """A model that was converted to timm's names.

    Attributes:
      tensors: tensors by timm's names.
      config: content of timm's `config.json`, without the preprocessing.
      side: height of images in pixels; 0: unknown, because no tensor depends on the image size.
      pixels: the possible normalizations of pixels. Maps keys of `PIXELS` to descriptions of the
        models that use this normalization.
      squeezed: images are resized to a square, regardless of their aspect ratio.
      notes: notes for the user about parameters that the file does not contain.
    """

    tensors: dict[str, np.ndarray]
    config: dict = {}
    side: int = 0
    pixels: dict[str, str] = {"imagenet": "all"}
    squeezed: bool = False
    notes: list[str] = []


def as_timm(
    tensors: Mapping[str, np.ndarray], pixels: str | None
) -> tuple[dict[str, np.ndarray], dict, list[str]]:
    """Converts tensors to timm's names; returns the tensors, timm's `config.json`, and notes.

    Args:
      tensors: tensors by the authors' names, without prefixes of wrappers such as `module.`.
      pixels: normalization of pixels, a key of `PIXELS`. None: the normalization that the authors
        use for models of this kind.

    Raises:
      UserError: rotary positions differ from those of the published models; the authors use several
        normalizations for models of this kind and `pixels` is None; or the number of heads is
        unknown.
    """
    model = _convert(tensors)
    if pixels is None and len(model.pixels) > 1:
        ways = ", ".join(f"--pixels={name} ({which})" for name, which in model.pixels.items())
        raise UserError(f"files of this kind contain no mean and std of pixels; give one of {ways}")
    normalization = PIXELS[pixels or next(iter(model.pixels))]
    preprocessing = {
        "mean": normalization["mean"],
        "std": normalization["std"],
        "interpolation": "bicubic",
        "crop_pct": 1.0 if model.side >= 384 else 0.875,  # The authors evaluate in this way.
    }
    if model.squeezed:
        preprocessing["crop_mode"] = "squash"
    return model.tensors, model.config | {"pretrained_cfg": preprocessing}, model.notes


def _convert(tensors: Mapping[str, np.ndarray]) -> _Converted:
    """Identifies the authors' model by its tensor names, and converts it."""
    named = {
        renamed(name, _NAMES): array for name, array in tensors.items() if not _FOLLOWS.match(name)
    }
    if "downsample_layers.0.0.weight" in named:
        return _convnext(named)
    dim, patch = _width_and_patch(named)
    if "layers.0.blocks.0.attn.qkv.weight" in named:
        return _swin(named, patch)
    if "rope_embed.periods" in tensors:
        return _dinov3(named, tensors["rope_embed.periods"], dim, patch)
    if tables := [array for name, array in named.items() if name.endswith(_TABLE)]:
        side = (math.isqrt(len(tables[0]) - 3) + 1) * patch // 2
        return _Converted(named, side=side, pixels={"half": "BEiT", "imagenet": "BEiT v2"})
    if "blocks.0.attn.q_bias" in named and "pos_embed" in named:
        return _eva01_or_02(named, tensors, dim, patch)
    # DeiT III is tested last. Its LayerScale tensors `gamma_1` also exist in some of the models
    # above.
    if "blocks.0.gamma_1" in named:
        return _deit3(named, patch)
    return _Converted(named)


def _width_and_patch(named: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """Returns embedding dimension and patch size; zeros for a model without a patch embedding."""
    kernel = named.get("patch_embed.proj.weight")
    return kernel.shape[::3] if kernel is not None and kernel.ndim == 4 else (0, 0)


def _dinov3(
    named: Mapping[str, np.ndarray], periods: np.ndarray, dim: int, patch: int
) -> _Converted:
    _check("periods", periods, 100 ** (2 * np.arange(len(periods)) / (2 * len(periods))))
    config = _eva("vit_base_patch16_dinov3", dim // (4 * len(periods)), patch, "token")
    tensors = _with_biases_apart(named)
    if dim not in (1024, 4096):
        return _Converted(tensors, config)
    return _Converted(tensors, config, pixels={"imagenet": "LVD-1689M", "satellite": "SAT-493M"})


def _eva01_or_02(
    named: dict[str, np.ndarray], tensors: Mapping[str, np.ndarray], dim: int, patch: int
) -> _Converted:
    cosines = next((x for name, x in tensors.items() if name.endswith("rope.freqs_cos")), None)
    if cosines is not None:  # EVA-02.
        # In older files, `cosines` is [rows, columns, dim]. In newer files, it is [patches, dim].
        cosines = cosines.reshape(-1, cosines.shape[-1])
        _check("rope.freqs_cos", cosines, _angles(*cosines.shape))
        config = _eva("eva02_base_patch14_224", dim // cosines.shape[1], patch, "avg")
        pixels = {"clip": "all"}
    elif dim == 1408:
        config = _eva("eva_giant_patch14_224", 16, patch, "avg")
        pixels = {"clip": "EVA from CLIP alone", "imagenet": "EVA by way of 30 million images"}
    else:
        raise UserError(f"unknown number of heads: an EVA of width {dim} without rotary positions")
    side = math.isqrt(named["pos_embed"].shape[1] - 1) * patch
    return _Converted(named, config, side, pixels)


def _deit3(named: Mapping[str, np.ndarray], patch: int) -> _Converted:
    side = math.isqrt(named["pos_embed"].shape[1]) * patch if "pos_embed" in named else 0
    tensors = {re.sub(r"\.gamma_(\d)$", r".ls\1.gamma", name): x for name, x in named.items()}
    return _Converted(tensors, side=side)


def _convnext(named: Mapping[str, np.ndarray]) -> _Converted:
    """Converts a ConvNeXt or ConvNeXt V2.

    The sparse layers of FCMAE are converted to dense layers. The kernel of a sparse layer is
    `[offsets, in, out]`, or `[offsets, out]` in a depthwise layer. The offsets, the positions in
    the kernel, are in column-major order.
    """
    tensors = {}
    for name, array in named.items():
        # DINOv3 stores the last norm twice, under two names.
        if name.startswith("norms."):
            continue
        if name.endswith(".kernel"):
            side = math.isqrt(len(array))
            array = array.reshape(side, side, -1, array.shape[-1]).transpose(3, 2, 1, 0)
            name = f"{name.removesuffix('kernel')}weight"
        elif name.endswith((".bias", ".gamma", ".beta")):
            array = array.reshape(-1)
        tensors[renamed(name, _CONVNEXT)] = np.ascontiguousarray(array)
    if "head.norm.weight" in tensors:
        return _Converted(tensors)
    width = tensors[max(name for name in tensors if name.endswith("conv_dw.bias"))].shape
    tensors |= {
        "head.norm.weight": np.ones(width, np.float32),
        "head.norm.bias": np.zeros(width, np.float32),
    }
    note = "new: the last norm, ones and zeros, which this pre-training lacks"
    return _Converted(tensors, notes=[note])


def _swin(named: Mapping[str, np.ndarray], patch: int) -> _Converted:
    """Converts a Swin; the returned config contains the window size and the image size.

    Raises:
      UserError: the window size is unknown.
    """
    first, arguments = "layers.0.blocks.0.attn.", {}
    if f"{first}{_TABLE}" in named:
        window = (math.isqrt(len(named[f"{first}{_TABLE}"])) + 1) // 2
    elif f"{first}relative_coords_table" in named:
        window = (named[f"{first}relative_coords_table"].shape[1] + 1) // 2
        arguments["pretrained_window_sizes"] = _former_windows(named)
    else:
        raise UserError("unknown window sizes: a Swin V2 without its relative_coords_table")
    side = 32 * window
    # The second block has shifted windows, and its attention mask is [windows, ...]. The number of
    # windows determines the image size.
    if (mask := named.get("layers.0.blocks.1.attn_mask")) is not None:
        side = patch * window * math.isqrt(len(mask))
    # In the authors' code the patch merging is at the end of a stage. In timm it is at the start of
    # the next stage.
    early = "layers.0.downsample.reduction.weight" in named
    tensors = {}
    for name, array in named.items():
        if early:
            name = re.sub(
                r"^layers\.(\d+)\.downsample", lambda x: f"layers.{int(x[1]) + 1}.downsample", name
            )
        if not _OF_WINDOWS.match(name):
            tensors[re.sub(r"^head\.(weight|bias)$", r"head.fc.\1", name)] = array
    config = {"model_args": {"window_size": window, "img_size": side} | arguments}
    return _Converted(tensors, config, side=side, squeezed=side >= 384)


def _former_windows(named: Mapping[str, np.ndarray]) -> list[int]:
    """Returns the window sizes with which a Swin V2 was pre-trained.

    The model may have been fine-tuned with larger windows. The side of the windows in pre-training
    is derived from the stage's table of relative coordinates: for two patches that are x rows (or
    columns) apart, the table contains log2(1 + 8 x / (side - 1)) / 3.

    Returns:
      For each stage the side of a window in pre-training, in patches; 0 if this model's windows
      have the same side.
    """
    sides = []
    while (
        found := named.get(f"layers.{len(sides)}.blocks.0.attn.relative_coords_table")
    ) is not None:
        offsets = np.arange((found.shape[1] + 1) // 2)
        window = former = len(offsets)
        if window > 1:  # In a window of one position the only offset is 0.
            if (reach := 2 ** (3 * float(found.max())) - 1) > 0:
                former = max(2, round(1 + 8 * offsets[-1] / reach))
            line = np.log2(1 + 8 * offsets / (former - 1)) / 3
            _check("relative_coords_table", found[0, :, 0, 0], np.concatenate([-line[:0:-1], line]))
        sides.append(0 if former == window else former)
    return sides


def renamed(name: str, patterns: Mapping[str, str]) -> str:
    """Replaces each pattern (a regular expression) in a tensor name, one after the other."""
    for pattern, other in patterns.items():
        name = re.sub(pattern, other, name)
    return name


def _eva(architecture: str, heads: int, patch: int, pooled: str) -> dict:
    """Returns a `config.json` for timm's class Eva: values that the tensors do not determine."""
    model_args = {"num_heads": heads, "patch_size": patch}
    return {"architecture": architecture, "global_pool": pooled, "model_args": model_args}


def _with_biases_apart(named: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames DINOv3's tensors for timm's class Eva, with separate biases of queries and values.

    The bias of the keys is dropped, because the authors' code masks it.
    """
    tensors = {}
    for name, array in named.items():
        if name.endswith("attn.qkv.bias"):
            start, (query, _, value) = name.removesuffix("qkv.bias"), np.split(array, 3)
            tensors |= {f"{start}q_bias": query, f"{start}v_bias": value}
        else:
            tensors[re.sub(r"\.ls(\d)\.gamma$", r".gamma_\1", name)] = array
    return tensors


def _angles(rows: int, dim: int) -> np.ndarray:
    """Returns the cosines of the rotation angles in EVA-02's rotary embeddings, `[rows, dim]`.

    The patches form a square grid. Their coordinates are scaled to a 16 x 16 grid. `rows` is the
    number of patches, and `dim` the width of an attention head.
    """
    side = math.isqrt(rows)
    turns = (
        np.arange(side)[:, None] / side * 16 / 10_000 ** (np.arange(0, dim // 2, 2) / (dim // 2))
    )
    turns = np.repeat(turns, 2, axis=1)
    down, across = np.broadcast_arrays(turns[:, None], turns[None])
    return np.cos(np.concatenate([down, across], axis=-1)).reshape(-1, dim)


def _check(name: str, stored: np.ndarray, expected: np.ndarray) -> None:
    """Raises UserError if positions in a file differ from those of the published models.

    vit_jax does not read such a tensor: it computes the values from the model's arguments.
    """
    # The tolerance allows for the rounding errors of bfloat16.
    if stored.shape != expected.shape or np.abs(stored - expected).max() > 0.01 * expected.max():
        raise UserError(f"its positions ({name}) are not those of the published models")
