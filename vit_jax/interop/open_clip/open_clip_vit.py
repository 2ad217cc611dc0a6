"""CLIP's image tower with the tensor names of open_clip's own ViT, which are OpenAI's names."""

from typing import Any

from vit_jax.errors import UserError
from vit_jax.interop.layout import (
    BLOCK,
    CONV,
    FLAT,
    LINEAR,
    LINEAR_OUT,
    TABLE,
    Rule,
    torch_dense,
    torch_norm,
)
from vit_jax.interop.library import Format, Tensors, Values, read_image_size, write_image_size
from vit_jax.models.vit import ViT

_THEIRS = "transformer.resblocks.{0}."
# Naming rules for the encoder layers of image towers and text towers.
LAYER_RULES = (
    *torch_norm(BLOCK + r"norm(\d)", _THEIRS + "ln_{1}"),
    Rule(BLOCK + "attention/qkv/kernel", _THEIRS + "attn.in_proj_weight", LINEAR),
    Rule(BLOCK + "attention/qkv/bias", _THEIRS + "attn.in_proj_bias", FLAT),
    *torch_dense(BLOCK + "attention/out", _THEIRS + "attn.out_proj", LINEAR_OUT),
    *torch_dense(BLOCK + "mlp/fc1", _THEIRS + "mlp.c_fc"),
    *torch_dense(BLOCK + "mlp/fc2", _THEIRS + "mlp.c_proj"),
)
_RULES = (
    Rule("patch_embedding/kernel", "conv1.weight", CONV),
    Rule("cls", "class_embedding", FLAT),
    Rule("position_embedding/table", "positional_embedding", TABLE),
    *torch_norm("stem_norm", "ln_pre"),
    *LAYER_RULES,
    Rule(BLOCK + r"scale(\d)", _THEIRS + "ls_{1}.gamma"),
    *torch_norm("norm", "ln_post"),
    Rule("head/kernel", "proj"),
    Rule("head/bias", "proj.bias"),
)
# Supported settings in `vision_cfg`. All other settings must have their default.
_SHOWN = {"layers", "width", "patch_size", "image_size", "head_width", "mlp_ratio", "ls_init_value"}
_SHOWN |= {"output_dim"}
_ALWAYS = dict(attentional_pool=False, no_ln_pre=False, pool_type="tok", pos_embed_type="learnable")


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[Values, str]:
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    model_cfg, tower = config["model_cfg"], config["model_cfg"]["vision_cfg"]
    for name, value in tower.items():
        droops = name.endswith("dropout")  # Ignored, because dropout is used in training only.
        if name not in _SHOWN and not droops and value not in (None, False, _ALWAYS.get(name)):
            raise UserError(f"an open_clip tower with {name}={value!r} is unsupported")
    dim, channels, patch, _ = shapes["conv1.weight"]
    head_width = tower.get("head_width", 64)
    if dim % head_width:
        raise UserError(
            f"open_clip_config.json has head_width={head_width}, which does not divide the "
            f"width {dim}"
        )
    values = dict(
        image_size=read_image_size(tower["image_size"]),
        patch_size=patch,
        channels=channels,
        dim=dim,
        depth=tower["layers"],
        mlp_dim=shapes["transformer.resblocks.0.mlp.c_fc.weight"][0],
        heads=dim // head_width,
        num_classes=shapes.get("proj", (0, 0))[1],
        stem_norm="tokens",
        gelu="quick" if model_cfg.get("quick_gelu") else "erf",
        layer_scale=1e-5 if "transformer.resblocks.0.ls_1.gamma" in shapes else None,
        norm_epsilon=1e-5,
        position_resize="bicubic_antialias",
    )
    return values, "the tower of images alone, of two, and its projection as the head"


def _describe(values: Values) -> dict[str, Any]:
    """Returns the `vision_cfg` of a model, from its arguments."""
    return dict(
        image_size=write_image_size(values),
        layers=values["depth"],
        width=values["dim"],
        head_width=values["dim"] // values["heads"],
        mlp_ratio=values["mlp_dim"] / values["dim"],
        patch_size=values["patch_size"],
        **({"ls_init_value": 1e-5} if values["layer_scale"] else {}),
    )


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: "conv1.weight" in tensors and "class_embedding" in tensors,
    arguments=_arguments,
    rules=lambda values: _RULES,
    describe=_describe,
)
