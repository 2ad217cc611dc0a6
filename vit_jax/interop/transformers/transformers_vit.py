"""ViT and DeiT in Hugging Face Transformers."""

from vit_jax.errors import UserError
from vit_jax.interop.layout import BLOCK, CONV, FLAT, LINEAR, LINEAR_OUT, SAME, Rule, torch_dense, torch_norm
from vit_jax.interop.library import Format, refuse_unsaid
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.transformers.transformers_config import (
    below,
    common_config,
    count_classes,
    has_scaled_layers,
    require_always,
)
from vit_jax.models.vit import ViT

_QKV = ("query", "key", "value")
_GELUS = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


_THEIRS = "encoder.layer.{0}."
_ATTENTION = _THEIRS + "attention.attention."
_RULES = (
    *torch_dense("patch_embedding", "embeddings.patch_embeddings.projection", CONV, SAME),
    Rule("cls", "embeddings.cls_token"),
    Rule("distillation_token", "embeddings.distillation_token"),
    Rule("position_embedding/table", "embeddings.position_embeddings"),
    *torch_norm(BLOCK + "norm1", _THEIRS + "layernorm_before"),
    Rule(BLOCK + "attention/qkv/kernel", tuple(f"{_ATTENTION}{x}.weight" for x in _QKV), LINEAR, axis=1),
    Rule(BLOCK + "attention/qkv/bias", tuple(f"{_ATTENTION}{x}.bias" for x in _QKV), FLAT, axis=0),
    *torch_dense(BLOCK + "attention/out", _THEIRS + "attention.output.dense", LINEAR_OUT),
    *torch_norm(BLOCK + "norm2", _THEIRS + "layernorm_after"),
    *torch_dense(BLOCK + "mlp/fc1", _THEIRS + "intermediate.dense"),
    *torch_dense(BLOCK + "mlp/fc2", _THEIRS + "output.dense"),
    *torch_norm("norm", "layernorm"),
    *torch_dense("pre_logits", "pooler.dense"),
)


def _rules(values: dict) -> tuple[Rule, ...]:
    """The rules of a model; names lie below `vit.` or `deit.` where there is a classifier."""
    if not values["num_classes"]:
        return _RULES
    trunk = [rule for rule in _RULES if not rule.path.startswith("pre_logits")]
    if values["distillation"] == "heads":
        heads = (
            *torch_dense("head", "cls_classifier"),
            *torch_dense("distillation_head", "distillation_classifier"),
        )
    else:
        heads = torch_dense("head", "classifier")
    return (*below("vit" if values["distillation"] == "none" else "deit", trunk), *heads)


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    """The model that tensors and a `config.json` belong to."""
    kind = config["model_type"]
    num_classes = count_classes(tensors, config, dict(vit="ViT", deit="DeiT")[kind])
    try:
        if config["hidden_act"] not in _GELUS:
            raise UserError(
                f"the activation {config['hidden_act']!r} is not read; there are: {', '.join(_GELUS)}"
            )
        require_always(config, dict(qkv_bias=True, pooler_act="tanh"))
        size = config["image_size"]
        distillation = "none"
        if kind == "deit":
            distillation = "heads" if "distillation_classifier.bias" in tensors else "token"
        values = dict(
            image_size=(size, size) if isinstance(size, int) else tuple(size),
            num_classes=num_classes,
            patch_size=config["patch_size"],
            channels=config.get("num_channels", 3),
            dim=config["hidden_size"],
            depth=config["num_hidden_layers"],
            hidden=config["intermediate_size"],
            heads=config["num_attention_heads"],
            distillation=distillation,
            position_resize="bicubic",
            gelu=_GELUS[config["hidden_act"]],
            norm_epsilon=config["layer_norm_eps"],
            pre_logits="pooler.dense.weight" in tensors,
        )
        return values, ""
    except KeyError as error:
        raise UserError(f"config.json of a Transformers {kind} lacks {error}") from error


def _describe(values: dict) -> dict:
    """A model's `config.json` in Transformers.

    Raises:
      UserError: Transformers has no such model.
    """
    refuse_unsaid("Transformers' ViT", ViT, values, "distillation", "gelu", "pre_logits")
    if values["gelu"] not in _GELUS.values():
        raise UserError(f"Transformers' ViT has no gelu={values['gelu']!r}")
    kind, architecture = {
        "none": ("vit", "ViTForImageClassification"),
        "token": ("deit", "DeiTForImageClassification"),
        "heads": ("deit", "DeiTForImageClassificationWithTeacher"),
    }[values["distillation"]]
    height, width = values["image_size"]
    bare = dict(vit="ViTModel", deit="DeiTModel")[kind]
    return dict(
        architectures=[architecture if values["num_classes"] else bare],
        model_type=kind,
        hidden_size=values["dim"],
        num_hidden_layers=values["depth"],
        num_attention_heads=values["heads"],
        intermediate_size=values["hidden"],
        image_size=height if height == width else [height, width],
        patch_size=values["patch_size"],
        hidden_act="gelu_pytorch_tanh" if values["gelu"] == "tanh" else "gelu",
        layer_norm_eps=values["norm_epsilon"],
        qkv_bias=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pooler_act="tanh",
    ) | common_config(values)


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: config.get("model_type") in ("vit", "deit"),
    arguments=_arguments,
    rules=_rules,
    describe=_describe,
    holds=lambda values: not has_scaled_layers(values),
)
