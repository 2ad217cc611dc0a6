"""ViT and DeiT in Hugging Face Transformers."""

from vit_jax.errors import UserError
from vit_jax.interop.layout import BLOCK, CONV, LINEAR_OUT, SAME, Rule, torch_dense, torch_norm
from vit_jax.interop.library import Format, require_defaults
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.transformers.transformers_config import (
    below,
    common_config,
    count_classes,
    mask_format,
    projections,
    read_gelu,
    read_sizes,
    require_always,
    vit_type,
    write_sizes,
)
from vit_jax.models.vit import ViT

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
    *torch_dense("pre_logits", "pooler.dense"),
)


def _rules(values: dict) -> tuple[Rule, ...]:
    """Returns the rules for tensor names.

    If the model has a classifier, the names of its other tensors start with `vit.` or `deit.`.
    """
    if not values["num_classes"]:
        return RULES
    trunk = [rule for rule in RULES if not rule.path.startswith("pre_logits")]
    if values["distillation"] == "heads":
        heads = (
            *torch_dense("head", "cls_classifier"),
            *torch_dense("distillation_head", "distillation_classifier"),
        )
    else:
        heads = torch_dense("head", "classifier")
    return (*below(_model_type(values), trunk), *heads)


def _model_type(values: dict) -> str:
    return "vit" if values["distillation"] == "none" else "deit"


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    """Returns the model's arguments, and an empty text in place of assumptions.

    Tensors and `config.json` determine all arguments, so no argument is assumed.
    """
    kind = config["model_type"]
    num_classes = count_classes(tensors, config, dict(vit="ViT", deit="DeiT")[kind])
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
    """Returns the content of Transformers' `config.json` for a model.

    Raises:
      UserError: Transformers has no model with these arguments.
    """
    require_defaults("Transformers' ViT", ViT, values, "distillation", "gelu", "pre_logits")
    kind, architecture = {
        "none": ("vit", "ViTForImageClassification"),
        "token": ("deit", "DeiTForImageClassification"),
        "heads": ("deit", "DeiTForImageClassificationWithTeacher"),
    }[values["distillation"]]
    bare = dict(vit="ViTModel", deit="DeiTModel")[kind]
    described = dict(
        architectures=[architecture if values["num_classes"] else bare],
        model_type=kind,
        qkv_bias=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pooler_act="tanh",
    )
    return described | write_sizes(values) | common_config(values)


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: config.get("model_type") in ("vit", "deit"),
    arguments=_arguments,
    rules=_rules,
    describe=_describe,
    holds=lambda values: vit_type(values) == "vit",
    objective=mask_format(_model_type, None),
)
