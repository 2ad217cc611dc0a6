"""DINOv3's ViT in Hugging Face Transformers."""

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.layout import (
    BLOCK,
    CONV,
    FLAT,
    LINEAR,
    LINEAR_OUT,
    SAME,
    Rule,
    torch_dense,
    torch_norm,
)
from vit_jax.interop.library import Arrays, Format, Tensors, require_defaults
from vit_jax.interop.transformers import transformers_config
from vit_jax.interop.transformers.transformers_config import (
    common_config,
    mask_format,
    projections,
    read_gelu,
    read_sizes,
    require_always,
    require_class,
    vit_type,
    write_sizes,
)
from vit_jax.models.position import ROPES
from vit_jax.models.vit import ViT

DEFAULTS = transformers_config.DEFAULTS | dict(
    hidden_size=384,
    intermediate_size=1536,
    num_attention_heads=6,
    layer_norm_eps=1e-5,
    rope_theta=float(ROPES["dinov3"].base),
    query_bias=True,
    key_bias=False,
    value_bias=True,
    proj_bias=True,
    mlp_bias=True,
    layerscale_value=1.0,
    use_gated_mlp=False,
    num_register_tokens=0,
    pos_embed_rescale=2.0,
)
_BIASES = {"all": (True, True, True), "qv": (True, False, True), "none": (False, False, False)}
_LAYER = "layer.{0}."
_QKV = tuple(f"{_LAYER}attention.{part}_proj" for part in "qkv")
_RULES = (
    *torch_dense("patch_embedding", "embeddings.patch_embeddings", CONV, SAME),
    Rule("cls", "embeddings.cls_token"),
    Rule("register_tokens", "embeddings.register_tokens"),
    *torch_norm(BLOCK + r"norm(\d)", _LAYER + "norm{1}"),
    *torch_dense(BLOCK + "attention/out", _LAYER + "attention.o_proj", LINEAR_OUT),
    Rule(BLOCK + r"scale(\d)", _LAYER + "layer_scale{1}.lambda1"),
    *torch_dense(BLOCK + "mlp/fc2", _LAYER + "mlp.down_proj"),
    *torch_norm("norm", "norm"),
)
_GATE = tuple(f"{_LAYER}mlp.{part}_proj" for part in ("gate", "up"))
_GATED = (
    Rule(BLOCK + "mlp/fc1/kernel", tuple(f"{part}.weight" for part in _GATE), LINEAR, axis=1),
    Rule(BLOCK + "mlp/fc1/bias", tuple(f"{part}.bias" for part in _GATE), FLAT, axis=0),
)


def _rules(values: dict) -> tuple[Rule, ...]:
    first = (
        _GATED
        if values["mlp"] == "swiglu"
        else torch_dense(BLOCK + "mlp/fc1", _LAYER + "mlp.up_proj")
    )
    return (*_RULES, *projections(_QKV, values["qkv_bias"]), *first)


def _rename(tensors: Tensors, config: dict) -> Tensors:
    """Removes empty tensors, such as the registers of a model without registers."""
    return {name: tensor for name, tensor in tensors.items() if 0 not in tensor.shape}


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[dict, str]:
    require_class(config, "DINOv3ViTModel", "DINOv3ViTBackbone")
    require_always(config, dict(rope_theta=DEFAULTS["rope_theta"]))
    config = DEFAULTS | config
    gated, bias = config["use_gated_mlp"], config["proj_bias"]
    require_always(config, dict(hidden_act="silu") if gated else {})
    require_always(config, dict(mlp_bias=bias))
    biases = tuple(config[f"{part}_bias"] for part in ("query", "key", "value"))
    if biases not in _BIASES.values():
        raise UserError(
            f"a Transformers model with biases of query, key, value {biases} is unsupported"
        )
    values = read_sizes(config) | dict(
        num_classes=0,
        registers=config["num_register_tokens"],
        position="none",
        rope="dinov3",
        rope_rescale=config["pos_embed_rescale"] or 1.0,
        mlp="swiglu" if gated else "gelu",
        gelu="erf" if gated else read_gelu(config),  # A gated MLP does not use a GELU.
        qkv_bias=next(kind for kind, parts in _BIASES.items() if parts == biases),
        bias=bias,
        layer_scale=config["layerscale_value"],
    )
    return values, ""


def _describe(values: dict) -> dict:
    title, stored = "Transformers' DINOv3", ("registers", "mlp", "gelu", "qkv_bias", "bias")
    require_defaults(title, ViT, values, *stored, num_classes=0, position="none", rope="dinov3")
    if values["layer_scale"] is None:
        raise UserError(f"{title} has no layer_scale=None")
    gated = values["mlp"] == "swiglu"
    parts = dict(
        zip(("query_bias", "key_bias", "value_bias"), _BIASES[values["qkv_bias"]], strict=True)
    )
    described = dict(
        architectures=["DINOv3ViTModel"],
        model_type="dinov3_vit",
        rope_theta=DEFAULTS["rope_theta"],
        pos_embed_rescale=float(values["rope_rescale"]) if values["rope_rescale"] != 1 else None,
        num_register_tokens=values["registers"],
        proj_bias=values["bias"],
        mlp_bias=values["bias"],
        layerscale_value=float(values["layer_scale"]),
        use_gated_mlp=gated,
    )
    activation = dict(hidden_act="silu") if gated else {}
    return described | parts | write_sizes(values) | activation | common_config(values)


def _finish(arrays: Arrays, values: dict) -> Arrays:
    """Adds the tensors that Transformers always requires: registers and a mask token."""
    dim = values["dim"]
    absent = (
        {}
        if values["registers"]
        else {"embeddings.register_tokens": np.zeros((1, 0, dim), np.float32)}
    )
    return arrays | absent | {"embeddings.mask_token": np.zeros((1, 1, dim), np.float32)}


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: config.get("model_type") == "dinov3_vit",
    arguments=_arguments,
    rules=_rules,
    describe=_describe,
    rename=_rename,
    finish=_finish,
    holds=lambda values: vit_type(values) == "dinov3_vit",
    objective=mask_format(lambda values: "", {}),  # Transformers has no DINOv3 with a classifier.
)
