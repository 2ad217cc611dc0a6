"""DINOv2, with registers or without, in Hugging Face Transformers."""

from collections.abc import Sequence

from vit_jax.errors import UserError
from vit_jax.interop.layout import (
    BLOCK,
    CONV,
    LINEAR_OUT,
    MATRIX,
    SAME,
    Rule,
    torch_dense,
    torch_norm,
)
from vit_jax.interop.library import (
    Format,
    read_image_size,
    require_defaults,
    require_one_of,
    write_image_size,
)
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.transformers.transformers_config import (
    class_name,
    common_config,
    count_classes,
    mask_format,
    projections,
    require_always,
    vit_type,
    with_classifier,
)
from vit_jax.models.vit import ViT

# Maps Transformers' model type to the start of its class names, such as Dinov2Model.
_START = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
_LAYER = "encoder.layer.{0}."
_QKV = tuple(f"{_LAYER}attention.attention.{part}" for part in ("query", "key", "value"))
_RULES = (
    *torch_dense("patch_embedding", "embeddings.patch_embeddings.projection", CONV, SAME),
    Rule("cls", "embeddings.cls_token"),
    Rule("register_tokens", "embeddings.register_tokens"),
    Rule("position_embedding/table", "embeddings.position_embeddings"),
    *torch_norm(BLOCK + "norm1", _LAYER + "norm1"),
    *projections(_QKV),
    *torch_dense(BLOCK + "attention/out", _LAYER + "attention.output.dense", LINEAR_OUT),
    Rule(BLOCK + "scale1", _LAYER + "layer_scale1.lambda1"),
    *torch_norm(BLOCK + "norm2", _LAYER + "norm2"),
    Rule(BLOCK + "scale2", _LAYER + "layer_scale2.lambda1"),
    *torch_norm("norm", "layernorm"),
)
_PLAIN = torch_dense(BLOCK + r"mlp/fc(\d)", _LAYER + "mlp.fc{1}")
_GATED = (
    # Transformers stores the gate and the gated values of an MLP in one tensor, `weights_in`.
    *torch_dense(BLOCK + "mlp/fc1", _LAYER + "mlp.weights_in"),
    *torch_dense(BLOCK + "mlp/fc2", _LAYER + "mlp.weights_out"),
)


def _rules(values: dict) -> Sequence[Rule]:
    rules = _RULES + (_GATED if values["mlp"] == "swiglu" else _PLAIN)
    return with_classifier(_model_type(values), rules, values)


def _model_type(values: dict) -> str:
    return "dinov2_with_registers" if values["registers"] else "dinov2"


def _gated_width(dim: int) -> int:
    """Returns the width of gated MLPs: 8/3 of the model's width, rounded up to a multiple of 8."""
    return (int(4 * dim * 2 / 3) + 7) // 8 * 8


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    kind = config["model_type"]
    classes = count_classes(tensors, config, _START[kind])
    require_always(config, dict(hidden_act="gelu", qkv_bias=True))
    try:
        size, dim = read_image_size(config["image_size"]), config["hidden_size"]
        gated = config.get("use_swiglu_ffn", False)
        values = dict(
            image_size=size,
            num_classes=classes,
            patch_size=config["patch_size"],
            channels=config.get("num_channels", 3),
            dim=dim,
            depth=config["num_hidden_layers"],
            mlp_dim=_gated_width(dim) if gated else int(dim * config.get("mlp_ratio", 4)),
            heads=config["num_attention_heads"],
            registers=config.get("num_register_tokens", 4)
            if kind == "dinov2_with_registers"
            else 0,
            # Transformers' classifier reads the class token's output and the mean of the patches'
            # outputs. Without a classifier, the features are the class token's output alone.
            pooling="cls_gap" if classes else "cls",
            mlp="swiglu" if gated else "gelu",
            gelu="erf",
            layer_scale=config.get("layerscale_value", 1.0),
            position_resize="bicubic_antialias" if kind == "dinov2_with_registers" else "bicubic",
            norm_epsilon=config.get("layer_norm_eps", 1e-6),
        )
    except KeyError as error:
        raise UserError(f"config.json of a Transformers {kind} lacks {error}") from error
    return values, ""


def _describe(values: dict) -> dict:
    gated, dim, mlp_dim = values["mlp"] == "swiglu", values["dim"], values["mlp_dim"]
    pooling = "cls_gap" if values["num_classes"] else "cls"
    require_defaults(
        "Transformers' DINOv2", ViT, values, "registers", "mlp", "gelu", pooling=pooling
    )
    if mlp_dim != _gated_width(dim) if gated else mlp_dim % dim:
        raise UserError(f"Transformers' DINOv2 of width {dim} has no MLP of {mlp_dim}")
    if not gated:
        require_one_of("Transformers' DINOv2", values, gelu=("erf",))
    kind = _model_type(values)
    described = dict(
        architectures=[class_name(_START[kind], values)],
        model_type=kind,
        hidden_size=dim,
        num_hidden_layers=values["depth"],
        num_attention_heads=values["heads"],
        mlp_ratio=4 if gated else mlp_dim // dim,
        hidden_act="gelu",
        layer_norm_eps=values["norm_epsilon"],
        image_size=write_image_size(values),
        patch_size=values["patch_size"],
        qkv_bias=True,
        layerscale_value=values["layer_scale"],
        use_swiglu_ffn=gated,
        use_mask_token=False,
    )
    registers = {"num_register_tokens": values["registers"]} if values["registers"] else {}
    return described | registers | common_config(values)


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: config.get("model_type") in _START,
    arguments=_arguments,
    rules=_rules,
    describe=_describe,
    holds=lambda values: vit_type(values) == "dinov2",
    objective=mask_format(_model_type, dict(use_mask_token=True), MATRIX),
)
