"""Hugging Face Transformers' tensors and `config.json`: ViT, DeiT and BiT.

A folder with both files is what `from_pretrained(FOLDER)` takes.
"""

import re
from collections.abc import Sequence

from vit_jax.errors import UserError
from vit_jax.interop.layout import (
    BLOCK,
    CONV,
    FLAT,
    LINEAR,
    LINEAR_OUT,
    SAME,
    UNIT,
    Rule,
    torch_dense,
    torch_norm,
)
from vit_jax.interop.preprocessing import UNSAID, Preprocessing, of_transformers, per_channel, to_transformers
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models.resnet import BiT
from vit_jax.models.vit import ViT

_QKV = ("query", "key", "value")
_BIT_ALWAYS = dict(
    layer_type="preactivation",
    hidden_act="relu",
    num_groups=32,
    output_stride=32,
    width_factor=1,
    global_padding=None,
    embedding_dynamic_padding=False,
)
_GELUS = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


_THEIRS = "encoder.layer.{0}."
_ATTENTION = _THEIRS + "attention.attention."
_VIT_RULES = (
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
_LAYER = "encoder.stages.{m[0]}.layers.{m[1]}."
_BIT_RULES = (
    Rule("resnet/root/kernel", "embedder.convolution.weight", CONV),
    Rule(UNIT + r"conv(\d)/kernel", _LAYER + "conv{2}.weight", CONV),
    *torch_norm(UNIT + r"norm(\d)", _LAYER + "norm{2}"),
    Rule(UNIT + "conv_proj/kernel", _LAYER + "downsample.conv.weight", CONV),
    *torch_norm("norm", "norm"),
)


def rules(model: type, values: dict) -> tuple[Rule, ...]:
    """How a model's parameters are named; below `vit.` and its like where there is a classifier."""
    if not values["num_classes"]:
        return _BIT_RULES if model is BiT else _VIT_RULES
    if model is BiT:
        below, heads = "bit", torch_dense("head", "classifier.1")
    elif values["distillation"] == "none":
        below, heads = "vit", torch_dense("head", "classifier")
    elif values["distillation"] == "token":
        below, heads = "deit", torch_dense("head", "classifier")
    else:
        below = "deit"
        heads = (
            *torch_dense("head", "cls_classifier"),
            *torch_dense("distillation_head", "distillation_classifier"),
        )
    trunk = _BIT_RULES if model is BiT else [r for r in _VIT_RULES if not r.path.startswith("pre_logits")]

    def lower(names):
        return f"{below}.{names}" if isinstance(names, str) else tuple(f"{below}.{name}" for name in names)

    return (*(rule._replace(names=lower(rule.names)) for rule in trunk), *heads)


def rename(tensors: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """The same tensors without the token that masks patches in pre-training only.

    Those of a model without classifier lose the `vit.` that some classes put before their names.
    """
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("embeddings.mask_token")}
    if any("classifier" in name for name in kept):
        return kept
    return {re.sub(r"^(vit|deit|bit)\.", "", name): tensor for name, tensor in kept.items()}


def arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[type, dict, str]:
    """The model that tensors and a `config.json` belong to; a BiT takes images of any size."""
    kind = config.get("model_type")
    if kind not in ("vit", "deit", "bit"):
        raise UserError(f"a Transformers model of type {kind!r} is not read; there are: bit, deit, vit")
    classes = [name for name in tensors if re.fullmatch(r"(cls_)?classifier(\.1)?\.bias", name)]
    num_classes = tensors[classes[0]].shape[0] if classes else 0
    _refuse_contradictions(config, kind, num_classes, "distillation_classifier.bias" in tensors)
    try:
        if kind == "bit":
            _require(config, _BIT_ALWAYS)
            widths = [4 * config["embedding_size"] * 2**stage for stage in range(len(config["depths"]))]
            _require(config, dict(hidden_sizes=widths))
            values = dict(
                image_size=image_size or 224,
                channels=config.get("num_channels", 3),
                num_classes=num_classes,
                resnet_blocks=tuple(config["depths"]),
                resnet_width=config["embedding_size"] // 64,
                resnet_epsilons="timm",
            )
            return BiT, values, ""
        if config["hidden_act"] not in _GELUS:
            raise UserError(
                f"the activation {config['hidden_act']!r} is not read; there are: {', '.join(_GELUS)}"
            )
        _require(config, dict(qkv_bias=True, pooler_act="tanh"))
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
            gelu=_GELUS[config["hidden_act"]],
            norm_epsilon=config["layer_norm_eps"],
            pre_logits="pooler.dense.weight" in tensors,
        )
        return ViT, values, ""
    except KeyError as error:
        raise UserError(f"config.json of a Transformers {kind} lacks {error}") from error


def _refuse_contradictions(config: dict, kind: str, num_classes: int, two_heads: bool) -> None:
    """Raises UserError where a config names another class, or other classes, than the tensors are of."""
    start = dict(vit="ViT", deit="DeiT", bit="Bit")[kind]
    classifier = f"{start}ForImageClassification"
    labels = config.get("id2label")
    if num_classes:
        known = [f"{classifier}WithTeacher" if two_heads else classifier]
    else:
        known = [f"{start}Model", f"{start}Backbone"] + ([classifier] if labels == {} else [])
    for name in config.get("architectures") or ():
        if name not in known:
            raise UserError(
                f"config.json contradicts the tensors: they are not of its architecture {name!r}, "
                f"but of {known[0]}"
            )
    if num_classes and labels is not None and len(labels) != num_classes:
        raise UserError(
            f"config.json contradicts the tensors: it names {len(labels):,} classes (id2label), but the "
            f"head has {num_classes:,}"
        )


def _require(config: dict, always: dict) -> None:
    """Raises UserError where a config departs from what models here always are."""
    for option, only in always.items():
        if config.get(option, only) != only:
            raise UserError(
                f"a Transformers model with {option}={config[option]!r} is not read, but {only!r}"
            )


def preprocessing(config: dict, said: dict, channels: int) -> tuple[dict, Preprocessing | None, str]:
    """Mean and deviation (and `image_size`), the rest, and what a folder without its file does not say."""
    if not said:
        return {}, None, "pixels in [-1, 1], as there is no preprocessor_config.json"
    return *of_transformers(said), ""


def class_names(config: dict) -> list:
    """Those of the classes, if they are named."""
    names = config.get("id2label") or {}
    return [names[key] for key in sorted(names, key=int)]


def files(model: type, values: dict, seen: Preprocessing | None, names: Sequence[str]) -> dict[str, dict]:
    """What lies beside the tensors: `config.json`, with the classes' names, and `preprocessor_config.json`.

    Raises:
      UserError: Transformers has no such model, or no such crop.
    """
    described, channels = config(model, values), values["channels"]
    if names:
        described |= dict(
            id2label={str(label): name for label, name in enumerate(names)},
            label2id={name: label for label, name in enumerate(names)},
        )
    processor = to_transformers(seen or UNSAID, values["image_size"]) | dict(
        image_mean=per_channel(values["mean"], channels), image_std=per_channel(values["deviation"], channels)
    )
    return {"config.json": described, "preprocessor_config.json": processor}


def config(model: type, values: dict) -> dict:
    """What Transformers' `config.json` says of a model.

    Raises:
      UserError: Transformers has no such model.
    """
    classes = values["num_classes"]
    labels = dict(
        id2label={str(i): f"LABEL_{i}" for i in range(classes)},
        label2id={f"LABEL_{i}": i for i in range(classes)},
    )
    common = dict(num_channels=values["channels"], dtype="float32") | (labels if classes else {})
    if model is BiT:
        width = values["resnet_width"]
        blocks = list(values["resnet_blocks"])
        return (
            dict(
                architectures=["BitForImageClassification" if classes else "BitModel"],
                model_type="bit",
                layer_type="preactivation",
                depths=blocks,
                hidden_sizes=[256 * width * 2**stage for stage in range(len(blocks))],
                embedding_size=64 * width,
                num_groups=32,
                hidden_act="relu",
                global_padding=None,
                embedding_dynamic_padding=False,
                width_factor=1,
            )
            | common
        )
    for option, only in dict(
        resnet_blocks=None, pooling="cls", position="1d", position_at="stem", mlp="gelu", rope=False
    ).items():
        if values[option] != only:
            raise UserError(f"Transformers' ViT has no {option}={values[option]!r}")
    kind, architecture = {
        "none": ("vit", "ViTForImageClassification"),
        "token": ("deit", "DeiTForImageClassification"),
        "heads": ("deit", "DeiTForImageClassificationWithTeacher"),
    }[values["distillation"]]
    height, width = values["image_size"]
    return (
        dict(
            architectures=[architecture if classes else dict(vit="ViTModel", deit="DeiTModel")[kind]],
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
        )
        | common
    )
