"""Google's npz files: ViT and hybrids (google-research/vision_transformer), BiT (big_transfer).

On disk the sub-modules of a block are numbered through, `LayerNorm_0`, `MultiHeadDotProductAttention_1`,
`LayerNorm_2`, `MlpBlock_3`; group norms have shape `[1, 1, 1, channels]`. Read are also the files of
big_vision, whose names start with `params/` and are numbered by kind, and whose position table may
lack the class token's row.
"""

import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.files import Tensor
from vit_jax.interop.layout import BLOCK, CHANNELS, DENSE_CONV, UNIT, Rule, count_units
from vit_jax.interop.positions import image_size_of
from vit_jax.models import BiT, ViT

_THEIRS = "Transformer/encoderblock_{0}/"
_ATTENTION = _THEIRS + "MultiHeadDotProductAttention_1/"
_QKV = ("query", "key", "value")
_POSITIONS = "Transformer/posembed_input/pos_embedding"
_NUMBERED_BY_KIND = {
    "LayerNorm_1": "LayerNorm_2",
    "MlpBlock_0": "MlpBlock_3",
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
}

VIT_RULES = (
    Rule("patch_embedding/(kernel|bias)", "embedding/{0}"),
    Rule("cls", "cls"),
    Rule("position_embedding/table", _POSITIONS),
    Rule(BLOCK + "norm1/(scale|bias)", _THEIRS + "LayerNorm_0/{1}"),
    Rule(BLOCK + "attention/qkv/kernel", tuple(f"{_ATTENTION}{part}/kernel" for part in _QKV), axis=1),
    Rule(BLOCK + "attention/qkv/bias", tuple(f"{_ATTENTION}{part}/bias" for part in _QKV), axis=0),
    Rule(BLOCK + "attention/out/(kernel|bias)", _ATTENTION + "out/{1}"),
    Rule(BLOCK + "norm2/(scale|bias)", _THEIRS + "LayerNorm_2/{1}"),
    Rule(BLOCK + r"mlp/fc(\d)/(kernel|bias)", _THEIRS + "MlpBlock_3/Dense_{m[1]}/{2}"),
    Rule("norm/(scale|bias)", "Transformer/encoder_norm/{0}"),
    Rule("pre_logits/(kernel|bias)", "pre_logits/{0}"),
    Rule("head/(kernel|bias)", "head/{0}"),
    Rule("resnet/root/kernel", "conv_root/kernel"),
    Rule("resnet/root_norm/(scale|bias)", "gn_root/{0}", CHANNELS),
    Rule(UNIT + r"conv(\d|_proj)/kernel", "block{0}/unit{1}/conv{2}/kernel"),
    Rule(UNIT + r"norm(\d|_proj)/(scale|bias)", "block{0}/unit{1}/gn{2}/{3}", CHANNELS),
)

BIT_RULES = (
    Rule("resnet/root/kernel", "resnet/root_block/standardized_conv2d/kernel"),
    Rule(UNIT + "conv_proj/kernel", "resnet/block{0}/unit{1:02d}/a/proj/standardized_conv2d/kernel"),
    *(
        rule
        for number, letter in enumerate("abc", start=1)
        for rule in (
            Rule(
                f"{UNIT}conv{number}/kernel",
                f"resnet/block{{0}}/unit{{1:02d}}/{letter}/standardized_conv2d/kernel",
            ),
            Rule(f"{UNIT}norm{number}/scale", f"resnet/block{{0}}/unit{{1:02d}}/{letter}/group_norm/gamma"),
            Rule(f"{UNIT}norm{number}/bias", f"resnet/block{{0}}/unit{{1:02d}}/{letter}/group_norm/beta"),
        )
    ),
    Rule("norm/scale", "resnet/group_norm/gamma"),
    Rule("norm/bias", "resnet/group_norm/beta"),
    Rule("head/kernel", "resnet/head/conv2d/kernel", DENSE_CONV),
    Rule("head/bias", "resnet/head/conv2d/bias"),
)


def rules(model: type, values: dict) -> tuple[Rule, ...]:
    """How a model's parameters are named."""
    return BIT_RULES if model is BiT else VIT_RULES


def rename(tensors: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """The same tensors under the names that the first files had, whatever code wrote them."""
    renamed = {}
    for name, tensor in tensors.items():
        name = re.sub("^(opt/target|params)/", "", name)
        for new, old in _NUMBERED_BY_KIND.items():
            name = name.replace(f"/{new}/", f"/{old}/")
        renamed[_POSITIONS if name == "pos_embedding" else name] = tensor
    table = renamed.get(_POSITIONS)
    if "cls" in renamed and table is tensors.get("params/pos_embedding", 0):
        # Added before the class token, which so has none.
        shape = (1, table.shape[1] + 1, table.shape[2])
        renamed[_POSITIONS] = Tensor(
            shape, table.dtype, lambda: np.pad(table.read(), ((0, 0), (1, 0), (0, 0)))
        )
    return renamed


def arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[type, dict, str]:
    """The model that tensors (renamed) belong to, with the size of its images; see `image_size_of`."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    blocks = count_units(shapes, r"(?:resnet/)?block(\d+)/unit(\d+)/", first=1)
    try:
        if root := shapes.get("resnet/root_block/standardized_conv2d/kernel"):
            values = dict(
                image_size=image_size or 224,
                channels=root[2],
                num_classes=shapes.get("resnet/head/conv2d/bias", (0,))[0],
                resnet_blocks=blocks,
                resnet_width=root[3] // 64,
            )
            return BiT, values, ""
        patch, _, inputs, dim = shapes["embedding/kernel"]
        root = shapes.get("conv_root/kernel")
        query = shapes[_ATTENTION.format(0) + "query/kernel"]
        depth = sum(name.endswith("MlpBlock_3/Dense_0/bias") for name in shapes)
        values = dict(
            patch_size=patch,
            channels=root[2] if root else inputs,
            resnet_blocks=blocks if root else None,
            resnet_width=root[3] // 64 if root else 1,
            dim=dim,
            depth=depth,
            hidden=shapes[_THEIRS.format(0) + "MlpBlock_3/Dense_0/bias"][0],
            heads=query[1],
            num_classes=shapes.get("head/bias", (0,))[0],
            pooling="cls" if "cls" in shapes else "gap",
            pre_logits="pre_logits/kernel" in shapes,
            position="1d" if _POSITIONS in shapes else "none",
        )
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"these are not the arrays of a ViT, hybrid or BiT of Google's: {error} is missing or of an "
            f"unknown shape among {len(shapes)} arrays such as {min(shapes, default='none')!r}"
        ) from error
    rows = shapes[_POSITIONS][1] if _POSITIONS in shapes else None
    return ViT, values | dict(image_size=image_size_of(values, rows, None, image_size)), ""


def config(model: type, values: dict) -> None:
    """An npz file says no more than its arrays.

    Raises:
      UserError: the arrays would be taken for those of another model.
    """
    if values.get("mlp") == "swiglu":
        raise UserError("Google's npz has no mlp='swiglu'")
