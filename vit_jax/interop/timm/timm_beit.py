"""BEiT and BEiT v2 in timm.

Each layer has its own table of relative position biases, or all layers share one table.
"""

import math
import re

from vit_jax.errors import UserError
from vit_jax.interop.layout import BLOCK, Rule
from vit_jax.interop.library import Format, Tensors, Values, require_defaults, require_one_of
from vit_jax.interop.timm.timm_config import (
    count_layers,
    given_arguments,
    implied_arguments,
    pretrained_config,
    refuse_contradictions,
    size_arguments,
    stated_size,
)
from vit_jax.interop.timm.timm_vit import POOLINGS, QV_BIAS, VIT_RULES
from vit_jax.models.vit import ViT

_RULES = (
    QV_BIAS,
    Rule(BLOCK + "attention/bias_table", "blocks.{0}.attn.relative_position_bias_table"),
    Rule("bias_table", "rel_pos_bias.relative_position_bias_table"),
    Rule(BLOCK + r"scale(\d)", "blocks.{0}.gamma_{1}"),
    *VIT_RULES,
)
# Maps values of the argument `position_at` to the name of a tensor with relative position biases.
# With `stem`, each layer has its own tensor; the name is that of the first layer. With `shared`,
# there is one tensor for all layers.
_TABLES = {
    "stem": "blocks.0.attn.relative_position_bias_table",
    "shared": "rel_pos_bias.relative_position_bias_table",
}
_UNCHECKED = ("use_abs_pos_emb", "use_rel_pos_bias", "use_shared_rel_pos_bias", "use_fc_norm")
_UNCHECKED += ("head_init_scale",)


def named(architecture: str) -> dict | None:
    """Parses a BEiT architecture's name to timm's arguments; None for other architectures."""
    match = re.fullmatch(r"beit(?:v2)?_(base|large)_patch(\d+)_\d+", architecture)
    return dict(patch_size=int(match[2])) if match else None


def _rename(tensors: Tensors, config: dict) -> Tensors:
    """Removes the tensors `relative_position_index`, which vit_jax computes."""
    return {name: x for name, x in tensors.items() if not name.endswith("relative_position_index")}


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[Values, str]:
    """Returns the model's arguments; images are assumed to be square without a `config.json`."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    model_args = given_arguments(config, *_UNCHECKED)
    dim, inputs, patch, _ = shapes["patch_embed.proj.weight"]
    refuse_contradictions(config, implied_arguments(config, named), dict(patch_size=patch))
    places = [place for place, name in _TABLES.items() if name in shapes]
    if len(places) > 1:
        raise UserError(
            "timm's Beit with a table of biases in each layer and one for all is unsupported"
        )
    rows, heads = shapes[_TABLES[places[0]]]
    side = patch * (math.isqrt(rows - 3) + 1) // 2
    pooled = _pooling(config, model_args, shapes)
    pooling = "cls" if pooled == "token" else "gap"
    values = dict(
        image_size=stated_size(config) or (side, side),
        patch_size=patch,
        channels=inputs,
        dim=dim,
        depth=count_layers(shapes),
        mlp_dim=shapes["blocks.0.mlp.fc2.weight"][1],
        heads=heads,
        num_classes=shapes.get("head.bias", (0,))[0],
        pooling=pooling,
        cls_token=pooling != "cls",
        fc_norm="fc_norm.weight" in shapes,
        gelu="erf",
        qkv_bias="qv" if "blocks.0.attn.q_bias" in shapes else "none",
        layer_scale=1e-5 if "blocks.0.gamma_1" in shapes else None,
        position="bias",
        position_at=places[0],
    )
    return values, "" if config else f"{pooled} pooling, as there is no config.json"


def _pooling(config: dict, model_args: dict, shapes: dict) -> str:
    """Returns `global_pool` in `config.json` or, if it is missing, timm's default."""
    default = "avg" if "fc_norm.weight" in shapes else "token"
    return model_args.get("global_pool") or config.get("global_pool") or default


def _describe(values: Values) -> dict:
    title = "timm's Beit"
    stored = ("fc_norm", "pooling", "cls_token", "qkv_bias", "position_at")
    require_defaults(title, ViT, values, *stored, gelu="erf", position="bias")
    require_one_of(
        title, values, pooling=("cls", "gap"), qkv_bias=("qv", "none"), norm_epsilon=(1e-6,)
    )
    if values["pooling"] == "gap" and not values["cls_token"]:
        raise UserError(f"{title} has a class token in all models (cls_token=True)")
    chosen = size_arguments(values) | dict(
        qkv_bias=values["qkv_bias"] == "qv",
        init_values=values["layer_scale"] or 0.0,
        use_abs_pos_emb=False,
        use_rel_pos_bias=values["position_at"] == "stem",
        use_shared_rel_pos_bias=values["position_at"] == "shared",
        use_fc_norm=values["fc_norm"],
        global_pool=POOLINGS[values["pooling"]],
    )
    described = dict(
        architecture="beit_base_patch16_224", model_args=chosen, num_features=values["dim"]
    )
    return described | pretrained_config(values, fixed_input_size=True)


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: (
        "patch_embed.proj.weight" in tensors and any(name in tensors for name in _TABLES.values())
    ),
    arguments=_arguments,
    rules=lambda values: _RULES,
    describe=_describe,
    rename=_rename,
    holds=lambda values: values["position"] == "bias",
)
