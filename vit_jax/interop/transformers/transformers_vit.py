"""ViT and DeiT in Hugging Face Transformers."""

from collections.abc import Sequence

from vit_jax.errors import UserError
from vit_jax.interop.layout import BLOCK, CONV, LINEAR_OUT, SAME, Rule, torch_dense, torch_norm
from vit_jax.interop.library import Format, require_defaults
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.transformers.transformers_config import (
    class_name,
    common_config,
    count_classes,
    mask_format,
    projections,
    read_gelu,
    read_sizes,
    require_always,
    vit_type,
    with_classifier,
    write_sizes,
)
from vit_jax.models.vit import ViT

# Maps Transformers' model type to the start of its class names, such as ViTModel.
_START = {"vit": "ViT", "deit": "DeiT"}
_THEIRS = "encoder.layer.{0}."
QKV = tuple(f"{_THEIRS}attention.attention.{part}" for part in ("query", "key", "value"))
# Naming rules for ViT and DeiT. BEiT and masked autoencoders use the same rules.
RULES = (
    *torch_dense("patch_embedding", "embeddings.patch_embeddings.projection", CONV, SAME),
    Rule("cls", "embeddings.cls_token"),
    Rule("distillation_token", "embeddings.distillation_token"),
    Rule("position_embedding/table", "embeddings.position_embeddings"),
    *torch_norm(BLOCK + "norm1", _THEIRS + "layernorm_before"),
    *projections(QKV),
    *torch_dense(BLOCK + "attention/out", _THEIRS + "attention.output.dense", LINEAR_OUT),
    *torch_norm(BLOCK + "norm2", _THEIRS + "layernorm_after"),
    *torch_dense(BLOCK + "mlp/fc1", _THEIRS + "intermediate.dense"),
    *torch_dense(BLOCK + "mlp/fc2", _THEIRS + "output.dense"),
    *torch_norm("norm", "layernorm"),
)
_TWO_HEADS = (
    *torch_dense("head", "cls_classifier"),
    *torch_dense("distillation_head", "distillation_classifier"),
)


def _rules(values: dict) -> Sequence[Rule]:
    if not values["num_classes"]:
        return (*RULES, *torch_dense("pre_logits", "pooler.dense"))
    heads = dict(heads=_TWO_HEADS) if values["distillation"] == "heads" else {}
    return with_classifier(_model_type(values), RULES, values, **heads)


def _model_type(values: dict) -> str:
    return "vit" if values["distillation"] == "none" else "deit"


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    kind = config["model_type"]
    num_classes = count_classes(tensors, config, _START[kind])
    try:
        gelu = read_gelu(config)
        require_always(config, dict(qkv_bias=True, pooler_act="tanh"))
        distillation = "none"
        if kind == "deit":
            distillation = "heads" if "distillation_classifier.bias" in tensors else "token"
        values = read_sizes(config) | dict(
            num_classes=num_classes,
            distillation=distillation,
            position_resize="bicubic",
            gelu=gelu,
            pre_logits="pooler.dense.weight" in tensors,
        )
        return values, ""
    except KeyError as error:
        raise UserError(f"config.json of a Transformers {kind} lacks {error}") from error


def _describe(values: dict) -> dict:
    require_defaults("Transformers' ViT", ViT, values, "distillation", "gelu", "pre_logits")
    kind = _model_type(values)
    teacher = "WithTeacher" if values["distillation"] == "heads" and values["num_classes"] else ""
    described = dict(
        architectures=[class_name(_START[kind], values) + teacher],
        model_type=kind,
        qkv_bias=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pooler_act="tanh",
    )
    return described | write_sizes(values) | common_config(values)


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: config.get("model_type") in _START,
    arguments=_arguments,
    rules=_rules,
    describe=_describe,
    holds=lambda values: vit_type(values) == "vit",
    objective=mask_format(_model_type, None),
)
