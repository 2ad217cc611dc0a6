"""CLIP's image tower in Transformers: alone, from a complete CLIP, or with a classifier."""

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.layout import (
    BLOCK,
    CONV,
    FLAT,
    LINEAR_OUT,
    SAME,
    TABLE,
    Rule,
    torch_dense,
    torch_norm,
)
from vit_jax.interop.library import Arrays, Format, Tensors, require_defaults
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.transformers import transformers_config
from vit_jax.interop.transformers.transformers_config import (
    common_config,
    projections,
    read_gelu,
    read_sizes,
    require_class,
    require_square,
    vit_type,
    write_sizes,
)
from vit_jax.models.vit import ViT

DEFAULTS = transformers_config.DEFAULTS | dict(
    patch_size=32, hidden_act="quick_gelu", layer_norm_eps=1e-5
)
_TITLE = "Transformers' CLIP"
_TOWER = "vision_model."
_PROJECTION, _CLASSIFIER = "visual_projection", "classifier"
_OTHERS = ("text_model.", "text_projection.", "logit_")  # Tensors outside of the image tower.
_TYPES = ("clip", "clip_vision_model")
IMAGES_ALONE = "the model of images alone, of two"


def layer_rules(tower: str) -> tuple[Rule, ...]:
    """Returns the rules for the encoder layers of a tower, such as `vision_model.`."""
    layer = tower + "encoder.layers.{0}."
    return (
        *torch_norm(BLOCK + r"norm(\d)", layer + "layer_norm{1}"),
        *projections([f"{layer}self_attn.{part}_proj" for part in "qkv"]),
        *torch_dense(BLOCK + "attention/out", layer + "self_attn.out_proj", LINEAR_OUT),
        *torch_dense(BLOCK + r"mlp/fc(\d)", layer + "mlp.fc{1}"),
    )


# Naming rules for CLIP's image tower. SigLIP's image tower uses the same rules.
RULES = (
    *torch_dense("patch_embedding", _TOWER + "embeddings.patch_embedding", CONV, SAME),
    Rule("position_embedding/table", _TOWER + "embeddings.position_embedding.weight", TABLE),
    *layer_rules(_TOWER),
    *torch_norm("norm", _TOWER + "post_layernorm"),
)


def image_tower(tensors: Tensors) -> Tensors:
    """Returns the tensors of the image tower, always with the prefix `vision_model.`."""
    outside = (_TOWER, _PROJECTION, _CLASSIFIER)
    return {
        name if name.startswith(outside) else _TOWER + name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(_OTHERS) and not name.endswith("position_ids")
    }


def whole_or_tower(config: dict, defaults: dict) -> tuple[dict, str]:
    """Returns the config of the image tower, and a text about skipped parts of the model.

    Args:
      config: content of `config.json`, of a complete model or of the image tower alone.
      defaults: Transformers' defaults of the image tower's entries.
    """
    if config["model_type"].endswith("_vision_model"):
        return defaults | config, ""
    return defaults | (config.get("vision_config") or {}), IMAGES_ALONE


def _rules(values: dict) -> tuple[Rule, ...]:
    return (
        *RULES,
        Rule("cls", _TOWER + "embeddings.class_embedding", FLAT),
        *torch_norm("stem_norm", _TOWER + "pre_layrnorm"),
        *torch_dense("head", _PROJECTION if values["pooling"] == "cls" else _CLASSIFIER),
    )


def _rename(tensors: Tensors, config: dict) -> Tensors:
    """Returns the image tower's tensors, with a zero bias added for the projection.

    The last norm is removed if there is a classifier, which does not use it.
    """
    tensors = image_tower(tensors)
    if f"{_CLASSIFIER}.weight" in tensors:
        return {
            name: x
            for name, x in tensors.items()
            if not name.startswith(_TOWER + "post_layernorm.")
        }
    if (kernel := tensors.get(f"{_PROJECTION}.weight")) is None:
        return tensors
    classes = kernel.shape[0]
    zeros = Tensor((classes,), "float32", lambda: np.zeros(classes, np.float32))
    return tensors | {f"{_PROJECTION}.bias": zeros}


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[dict, str]:
    """Returns the model's arguments, and a note about a part that is not loaded."""
    classifies = f"{_CLASSIFIER}.weight" in tensors
    towers = ("CLIPModel", "CLIPVisionModel", "CLIPVisionModelWithProjection")
    require_class(config, *(("CLIPForImageClassification",) if classifies else towers))
    tower, left_out = whole_or_tower(config, DEFAULTS)
    head = tensors.get(f"{_CLASSIFIER if classifies else _PROJECTION}.bias")
    values = read_sizes(tower) | dict(
        num_classes=head.shape[0] if head else 0,
        pooling="gap" if classifies else "cls",
        cls_token=classifies,
        final_norm=not classifies,
        stem_norm="tokens",
        position_resize="bicubic",
        gelu=read_gelu(tower),
    )
    require_square(_TITLE, values)
    return values, "" if classifies else left_out


def _describe(values: dict) -> dict:
    classifies = values["pooling"] == "gap" and values["num_classes"] > 0
    pooling = (
        dict(pooling="gap", cls_token=True, final_norm=False) if classifies else dict(pooling="cls")
    )
    require_defaults(_TITLE, ViT, values, "gelu", stem_norm="tokens", layer_scale=None, **pooling)
    require_square(_TITLE, values)
    tower = dict(model_type="clip_vision_model", num_channels=values["channels"]) | write_sizes(
        values
    )
    if classifies:
        named = dict(architectures=["CLIPForImageClassification"], model_type="clip")
        return named | common_config(values) | dict(vision_config=tower)
    projected = dict(projection_dim=values["num_classes"]) if values["num_classes"] else {}
    name = "CLIPVisionModelWithProjection" if projected else "CLIPVisionModel"
    return dict(architectures=[name], dtype="float32") | tower | projected


def _finish(arrays: Arrays, values: dict) -> Arrays:
    """Changes the arrays to those that Transformers' CLIP stores.

    A model with a classifier gets a last norm, which Transformers stores but does not use. In other
    models, the bias of the projection is removed, because Transformers has no such bias.

    Raises:
      UserError: the bias of the projection is not zero.
    """
    if values["pooling"] == "gap":
        ones = np.ones(values["dim"], np.float32)
        norm = {f"{_TOWER}post_layernorm.weight": ones, f"{_TOWER}post_layernorm.bias": 0 * ones}
        return arrays | norm
    if np.any(arrays.get(f"{_PROJECTION}.bias", 0)):
        raise UserError(
            f"{_TITLE} projects without biases, and head/bias is not zero; --to=timm keeps it"
        )
    return {name: array for name, array in arrays.items() if name != f"{_PROJECTION}.bias"}


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: config.get("model_type") in _TYPES,
    arguments=_arguments,
    rules=_rules,
    describe=_describe,
    rename=_rename,
    finish=_finish,
    holds=lambda values: vit_type(values) == "clip",
)
