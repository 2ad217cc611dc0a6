"""ViT and its hybrids in Google's npz files (google-research/vision_transformer).

vision_transformer numbers all sub-modules of a block consecutively: `LayerNorm_0`,
`MultiHeadDotProductAttention_1`, `LayerNorm_2`, `MlpBlock_3`. Group norms have the shape `[1, 1, 1,
channels]`.

big_vision's files are also supported. big_vision numbers the sub-modules of each kind separately:
the first MLP of a block is `MlpBlock_0`. Models that exist only in big_vision (with fixed position
embeddings or attention pooling) are written with big_vision's names.
"""

import functools
import math

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.layout import BLOCK, CHANNELS, UNIT, Entry, Rule, count_units, resnet_root
from vit_jax.interop.library import Format
from vit_jax.interop.positions import image_size_of
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models.vit import ViT

_THEIRS = "Transformer/encoderblock_{0}/"
_ATTENTION = _THEIRS + "MultiHeadDotProductAttention_1/"
_QKV = ("query", "key", "value")
POSITIONS = "Transformer/posembed_input/pos_embedding"
_NUMBERED_BY_KIND = {
    "LayerNorm_1": "LayerNorm_2",
    "MlpBlock_0": "MlpBlock_3",
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
}
_POOLING = "MAPHead_0/"
_POOLING_ATTENTION = _POOLING + "MultiHeadDotProductAttention_0/"
_POOLING_PARTS = ("probe", "LayerNorm_0", "MlpBlock_0", "MultiHeadDotProductAttention_0")

RULES = (
    Rule("patch_embedding/(kernel|bias)", "embedding/{0}"),
    Rule("cls", "cls"),
    Rule("position_embedding/table", POSITIONS),
    Rule(BLOCK + "norm1/(scale|bias)", _THEIRS + "LayerNorm_0/{1}"),
    Rule(
        BLOCK + "attention/qkv/kernel", tuple(f"{_ATTENTION}{part}/kernel" for part in _QKV), axis=1
    ),
    Rule(BLOCK + "attention/qkv/bias", tuple(f"{_ATTENTION}{part}/bias" for part in _QKV), axis=0),
    Rule(BLOCK + "attention/out/(kernel|bias)", _ATTENTION + "out/{1}"),
    Rule(BLOCK + "norm2/(scale|bias)", _THEIRS + "LayerNorm_2/{1}"),
    Rule(BLOCK + r"mlp/fc(\d)/(kernel|bias)", _THEIRS + "MlpBlock_3/Dense_{m[1]}/{2}"),
    Rule("norm/(scale|bias)", "Transformer/encoder_norm/{0}"),
    Rule("attention_pooling/probe", _POOLING + "probe"),
    Rule("attention_pooling/(query|out)/(kernel|bias)", _POOLING_ATTENTION + "{0}/{1}"),
    *(
        Rule(
            f"attention_pooling/key_value/{part}",
            tuple(f"{_POOLING_ATTENTION}{name}/{part}" for name in ("key", "value")),
            axis=axis,
        )
        for part, axis in (("kernel", 1), ("bias", 0))
    ),
    Rule("attention_pooling/norm/(scale|bias)", _POOLING + "LayerNorm_0/{0}"),
    Rule(r"attention_pooling/mlp/fc(\d)/(kernel|bias)", _POOLING + "MlpBlock_0/Dense_{m[0]}/{1}"),
    Rule("pre_logits/(kernel|bias)", "pre_logits/{0}"),
    Rule("head/(kernel|bias)", "head/{0}"),
    Rule("resnet/root/kernel", "conv_root/kernel"),
    Rule("resnet/root_norm/(scale|bias)", "gn_root/{0}", CHANNELS),
    Rule(UNIT + r"conv(\d|_proj)/kernel", "block{0}/unit{1}/conv{2}/kernel"),
    Rule(UNIT + r"norm(\d|_proj)/(scale|bias)", "block{0}/unit{1}/gn{2}/{3}", CHANNELS),
)


def rename(tensors: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """Converts the tensors of any supported file to vision_transformer's names and shapes.

    Raises:
      UserError: two tensors would have the same name.
    """
    renamed = {}
    for name, tensor in _one_by_one(tensors).items():
        first = name.split("/")[0]
        # Files from the development of ViT-G have other names for the attention pooling.
        if first in _POOLING_PARTS:
            name = _POOLING + name
        elif first == "Transformer":
            for new, old in _NUMBERED_BY_KIND.items():
                name = name.replace(f"/{new}/", f"/{old}/")
        if name in ("pos_embedding", "Transformer/pos_embedding"):
            name, tensor = POSITIONS, _with_class_token(tensor) if "cls" in tensors else tensor
        if name in renamed:
            raise UserError(f"two arrays are {name} under different names")
        renamed[name] = tensor
    return renamed


def _one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Splits big_vision's stacked tensors, `[blocks, ...]`, into a tensor for each block."""
    found = {}
    for name, tensor in tensors.items():
        start, stacked, rest = name.partition("Transformer/encoderblock/")
        if start or not stacked:
            found[name] = tensor
            continue
        read = functools.cache(tensor.read)
        for layer in range(tensor.shape[0] if tensor.shape else 0):
            one = functools.partial(lambda read, layer: read()[layer], read, layer)
            found[f"{_THEIRS.format(layer)}{rest}"] = Tensor(tensor.shape[1:], tensor.dtype, one)
    return found


def _with_class_token(table: Tensor) -> Tensor:
    """Returns a table of position embeddings with an embedding for the class token.

    If the table has n * n + 1 embeddings, the first one is the class token's, and the others are
    those of n * n patches. Any other table contains embeddings of patches only, and zeros are added
    for the class token. big_vision uses the same criterion.
    """
    batch, rows, dim = table.shape
    if rows and math.isqrt(rows - 1) ** 2 == rows - 1:
        return table
    return Tensor(
        (batch, rows + 1, dim), table.dtype, lambda: np.pad(table.read(), ((0, 0), (1, 0), (0, 0)))
    )


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    try:
        values = _values(shapes, config["by_kind"])
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"these are not the arrays of a ViT, hybrid or BiT of Google's: {error} is missing or "
            f"of an unknown shape among {len(shapes)} arrays such as "
            f"{min(shapes, default='none')!r}"
        ) from error
    rows = shapes[POSITIONS][1] if POSITIONS in shapes else None
    assumed = ["groups of two channels"] if values.get("resnet_width", 1) < 1 else []
    if rows is None:
        assumed.append(f"position={values['position']}, as there is no table of positions")
    if config["prefix"].endswith("img/"):
        assumed.append("the model of images alone, of two")
    values["image_size"] = image_size_of(values, rows, None, image_size)
    return values, ", ".join(assumed)


def _values(shapes: dict, by_kind: bool) -> dict:
    """Returns the model arguments that the arrays' shapes determine.

    `by_kind` is True if the arrays have big_vision's names in the file.
    """
    patch, _, channels, dim = shapes["embedding/kernel"]
    values = dict(
        patch_size=patch,
        channels=channels,
        resnet_blocks=None,
        dim=dim,
        depth=sum(name.endswith("/MlpBlock_3/Dense_0/bias") for name in shapes),
        mlp_dim=shapes[_THEIRS.format(0) + "MlpBlock_3/Dense_0/bias"][0],
        heads=shapes[_ATTENTION.format(0) + "query/kernel"][1],
        num_classes=shapes.get("head/bias", (0,))[0],
        pooling="cls" if "cls" in shapes else "gap",
        pre_logits="pre_logits/kernel" in shapes,
        # Without a table of position embeddings, a big_vision model has fixed sine-cosine
        # embeddings, and a vision_transformer model has none.
        position="1d" if POSITIONS in shapes else "sincos2d" if by_kind else "none",
    )
    if _POOLING + "probe" in shapes:
        values["pooling"] = "map"
    if root := shapes.get("conv_root/kernel"):
        blocks = count_units(shapes, r"(?:resnet/)?block(\d+)/unit(\d+)/", first=1)
        values |= dict(channels=root[2], resnet_blocks=blocks, **resnet_root(root[0], root[3]))
    return values


def _describe(values: dict) -> dict:
    """Rejects unsupported models; returns {}, because npz files have no `config.json`.

    Raises:
      UserError: npz files cannot represent the model.
    """
    if values.get("mlp") == "swiglu":
        raise UserError("Google's npz has no mlp='swiglu'")
    if _by_kind(values) and values["resnet_blocks"] is not None:
        raise UserError("Google's npz has no hybrid with position='sincos2d' or pooling='map'")
    return {}


def _number(mapped: list[Entry], values: dict) -> list[Entry]:
    """Replaces the tensor names by big_vision's names if the model exists only in big_vision."""
    return with_big_vision_names(mapped) if _by_kind(values) else mapped


def with_big_vision_names(mapped: list[Entry]) -> list[Entry]:
    """Replaces the tensor names of vision_transformer by those of big_vision."""
    return [entry._replace(names=tuple(map(big_vision_name, entry.names))) for entry in mapped]


def big_vision_name(name: str) -> str:
    """Converts a tensor name from vision_transformer's form to big_vision's form."""
    if name.startswith("Transformer/encoderblock"):
        for new, old in _NUMBERED_BY_KIND.items():
            name = name.replace(f"/{old}/", f"/{new}/")
    return "pos_embedding" if name == POSITIONS else name


def _by_kind(values: dict) -> bool:
    return values.get("position") == "sincos2d" or values.get("pooling") == "map"


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: any(
        name.startswith(("embedding/", "Transformer/")) for name in tensors
    ),
    arguments=_arguments,
    rules=lambda values: RULES,
    describe=_describe,
    rename=rename,
    number=_number,
)
