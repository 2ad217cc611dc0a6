"""Reads and writes the entries of timm's `config.json` that all families of models share."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vit_jax.errors import UserError

# Supported values of timm's arguments that change the outputs, but not the tensors.
ONLY = {
    "global_pool": (None, "token", "avg", "map"),
    "fc_norm": (None, False, True),
    "final_norm": (True, False),
    "norm_layer": (None,),
    "embed_norm_layer": (None,),
    "pos_embed": ("learn", "none", ""),
}
# timm's arguments that need no check. The tensors determine their values, the module of the model's
# family reads them, or they do not change the outputs.
UNCHECKED = (
    *("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "in_chans"),
    *("num_classes", "class_token", "init_values", "qkv_bias", "qk_norm", "reg_tokens"),
    *("no_embed_class", "proj_bias", "pre_norm", "scale_attn_norm", "scale_mlp_norm"),
    *("pool_include_prefix", "weight_init", "fix_init", "dynamic_img_size", "strict_img_size"),
    *("layers", "width_factor"),
)


def given_arguments(config: dict, *unchecked: str) -> dict[str, Any]:
    """Returns `model_args` of a `config.json`: timm's arguments other than the architecture's name.

    Args:
      unchecked: names of further arguments that need no check, in addition to `UNCHECKED`.

    Raises:
      UserError: the value of an argument is unsupported.
    """
    model_args = config.get("model_args") or {}
    for name, value in model_args.items():
        harmless = name in (*UNCHECKED, *unchecked) or name.endswith("_rate")
        if not harmless and value not in ONLY.get(name, (None, False, "")):
            raise UserError(f"a timm model with {name}={value!r} is unsupported")
    pooling = model_args.get("global_pool") or config.get("global_pool")
    if pooling not in ONLY["global_pool"]:
        raise UserError(f"a timm model with global_pool={pooling!r} is unsupported")
    return model_args


def stated_size(config: dict) -> tuple[int, int] | None:
    """Returns the image size that a `config.json` contains; None: it contains no image size."""
    size = (config.get("model_args") or {}).get("img_size")
    if size is None:
        size = ((config.get("pretrained_cfg") or {}).get("input_size") or [None])[1:] or None
    return (size, size) if isinstance(size, int) else size and tuple(size)


def implied_arguments(config: dict, named: Callable[[str], dict | None]) -> dict[str, Any]:
    """Returns timm's arguments that the architecture's name implies; {} if the name is missing.

    `named` is the model family's function that parses the name.
    """
    architecture = config.get("architecture")
    return {} if architecture is None else named(architecture) or {}


def refuse_contradictions(config: dict, implied: dict[str, Any], shown: dict[str, Any]) -> None:
    """Raises UserError if the tensors contradict the architecture's name or `model_args`.

    Args:
      implied: timm's arguments that the architecture's name implies.
      shown: timm's arguments that the tensors determine.
    """
    if config.get("architecture") is None:
        return
    model_args = config.get("model_args") or {}
    for name, value in shown.items():
        stated = implied.get(name) if model_args.get(name) is None else model_args[name]
        stated = tuple(stated) if isinstance(stated, list) else stated
        if stated != value:
            raise UserError(
                f"config.json contradicts the tensors: {config['architecture']!r} has {name} "
                f"{stated!r}, they have {value!r}"
            )


def count_layers(names: Iterable[str]) -> int:
    """Returns the number of a ViT's layers, from its tensor names."""
    return sum(bool(re.fullmatch(r"blocks\.\d+\.norm1\.weight", name)) for name in names)


def first_in(shapes: Mapping, values: dict[str, str]) -> str:
    """Returns the value of the first tensor name in `values` that exists; else `none`."""
    return next((value for name, value in values.items() if name in shapes), "none")


def size_arguments(values: dict) -> dict[str, Any]:
    """Returns timm's arguments for the sizes of a ViT."""
    return dict(
        img_size=list(values["image_size"]),
        patch_size=values["patch_size"],
        in_chans=values["channels"],
        embed_dim=values["dim"],
        depth=values["depth"],
        num_heads=values["heads"],
        mlp_ratio=mlp_ratio(values["mlp_dim"], values["dim"]),
    )


def mlp_ratio(mlp_dim: int, dim: int) -> float:
    """Returns timm's `mlp_ratio` for an MLP's width: `int(ratio * dim) == mlp_dim`."""
    return mlp_dim / dim if int(dim * (mlp_dim / dim)) == mlp_dim else (mlp_dim + 0.5) / dim


def pretrained_config(values: dict, fixed_input_size: bool) -> dict:
    """Returns the entries of a `config.json` that describe images and classes."""
    height, width = values["image_size"]
    pretrained = dict(
        input_size=[values["channels"], height, width],
        num_classes=values["num_classes"],
        fixed_input_size=fixed_input_size,
    )
    return dict(num_classes=values["num_classes"], pretrained_cfg=pretrained)
