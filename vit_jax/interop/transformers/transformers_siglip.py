"""The image tower of SigLIP and SigLIP 2 in Hugging Face Transformers.

Three kinds of files are supported: the image tower alone, a complete SigLIP, and an image tower
with a classifier that reads the mean of the patches.
"""

import numpy as np

from vit_jax.interop.layout import LINEAR_OUT, Rule, torch_dense, torch_norm
from vit_jax.interop.library import Arrays, Format, Tensors, Values, require_defaults
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.transformers import transformers_config
from vit_jax.interop.transformers.transformers_clip import RULES, image_tower, whole_or_tower
from vit_jax.interop.transformers.transformers_config import (
    read_gelu,
    read_sizes,
    require_always,
    require_class,
    require_square,
    vit_type,
    write_sizes,
)
from vit_jax.models.vit import ViT

DEFAULTS = transformers_config.DEFAULTS | dict(
    hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6, vision_use_head=True
)
_TITLE = "Transformers' SigLIP"
_HEAD = "vision_model.head."
_ATTENTION = _HEAD + "attention."
_RULES = (
    *RULES,
    Rule("attention_pooling/probe", _HEAD + "probe"),
    *torch_dense("attention_pooling/query", _ATTENTION + "query"),
    *torch_dense("attention_pooling/key_value", _ATTENTION + "key_value"),
    *torch_dense("attention_pooling/out", _ATTENTION + "out_proj", LINEAR_OUT),
    *torch_norm("attention_pooling/norm", _HEAD + "layernorm"),
    *torch_dense(r"attention_pooling/mlp/fc(\d)", _HEAD + "mlp.fc{0}"),
)
_CLASSIFIER = (*RULES, *torch_dense("head", "classifier"))
_TYPES = ("siglip", "siglip_vision_model")


def _rename(tensors: Tensors, config: dict) -> Tensors:
    """Returns the image tower's tensors; splits q, k and v of the attention pooling."""
    tensors = image_tower(tensors)
    # Transformers' classifier for SigLIP does not use the attention pooling.
    if "classifier.weight" in tensors:
        return {name: x for name, x in tensors.items() if not name.startswith(_HEAD)}
    for kind in ("weight", "bias"):
        if (packed := tensors.pop(f"{_ATTENTION}in_proj_{kind}", None)) is not None:
            rows = packed.shape[0] // 3
            tensors[f"{_ATTENTION}query.{kind}"] = _rows(packed, 0, rows)
            tensors[f"{_ATTENTION}key_value.{kind}"] = _rows(packed, rows, packed.shape[0])
    return tensors


def _rows(tensor: Tensor, first: int, end: int) -> Tensor:
    return tensor._replace(
        shape=(end - first, *tensor.shape[1:]), read=lambda: tensor.read()[first:end]
    )


def _finish(arrays: Arrays, values: dict) -> Arrays:
    """Concatenates queries, keys and values of the attention pooling to one tensor."""
    arrays = dict(arrays)
    for kind in ("weight", "bias"):
        parts = [arrays.pop(f"{_ATTENTION}{part}.{kind}") for part in ("query", "key_value")]
        arrays[f"{_ATTENTION}in_proj_{kind}"] = np.concatenate(parts)
    return arrays


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[dict, str]:
    """Returns the model's arguments, and notes about parts and pixels that are not used.

    The image size is rounded down to whole patches.
    """
    head = tensors.get("classifier.bias")
    require_class(
        config,
        *(("SiglipForImageClassification",) if head else ("SiglipModel", "SiglipVisionModel")),
    )
    tower, words = whole_or_tower(config, DEFAULTS)
    values: Values = read_sizes(tower) | dict(position_resize="bicubic", gelu=read_gelu(tower))
    if head:
        values |= dict(num_classes=head.shape[0], pooling="gap")
        words = ""
    else:
        require_always(tower, dict(vision_use_head=True))
        values |= dict(num_classes=0, pooling="map")
    require_square(_TITLE, values)
    full, patch = values["image_size"][0], values["patch_size"]
    side = full // patch * patch
    if side != full:
        values["image_size"] = (side, side)
        cut = f"images of {side}x{side} pixels, as patches of {patch} do not divide {full}x{full}"
        words = f"{words} and {cut}" if words else cut
    return values, words


def _describe(values: dict) -> dict:
    require_defaults(_TITLE, ViT, values, "gelu", num_classes=0, pooling="map", layer_scale=None)
    require_square(_TITLE, values)
    described = dict(
        architectures=["SiglipVisionModel"],
        model_type="siglip_vision_model",
        num_channels=values["channels"],
        vision_use_head=True,
        dtype="float32",
    )
    return described | write_sizes(values)


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: config.get("model_type") in _TYPES,
    arguments=_arguments,
    rules=lambda values: _RULES if values["pooling"] == "map" else _CLASSIFIER,
    describe=_describe,
    rename=_rename,
    finish=_finish,
    holds=lambda values: vit_type(values) == "siglip",
)
