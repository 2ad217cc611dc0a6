"""BEiT in Hugging Face Transformers.

A masked image modelling checkpoint has an encoder and a prediction head. Only the encoder is read.
The norm before the prediction head becomes the last norm of the encoder.

If the image size changes, the relative position biases are resized with cubic splines, as in the
code of BEiT's authors. Transformers interpolates them linearly.
"""

from vit_jax.errors import UserError
from vit_jax.interop.layout import BLOCK, Rule, torch_norm
from vit_jax.interop.library import Format, Tensors, require_defaults, require_one_of
from vit_jax.interop.transformers import transformers_config
from vit_jax.interop.transformers.transformers_config import (
    class_name,
    common_config,
    count_classes,
    mask_format,
    projections,
    read_gelu,
    read_sizes,
    require_square,
    vit_type,
    with_classifier,
    write_sizes,
)
from vit_jax.interop.transformers.transformers_vit import QKV, RULES
from vit_jax.models.vit import ViT

DEFAULTS = transformers_config.DEFAULTS | dict(
    use_absolute_position_embeddings=False,
    use_relative_position_bias=False,
    use_shared_relative_position_bias=False,
    layer_scale_init_value=0.1,
    use_mean_pooling=True,
)
_TITLE = "Transformers' BEiT"
_THEIRS = "encoder.layer.{0}."
_TABLE = "relative_position_bias.relative_position_bias_table"
_RULES = (
    *projections(QKV, "qv"),  # These come before RULES, because the first matching rule is used.
    *RULES,
    Rule(BLOCK + "attention/bias_table", _THEIRS + "attention.attention." + _TABLE),
    Rule("bias_table", "encoder." + _TABLE),
    Rule(BLOCK + r"scale(\d)", _THEIRS + "lambda_{1}"),
    *torch_norm("fc_norm", "pooler.layernorm"),
)
# _POSITION_FLAGS contains the entries of `config.json` for the kind of position embeddings or
# biases. _POSITIONS maps the model's arguments (`position`, `position_at`) to the values of these
# entries.
_POSITION_FLAGS = (
    "use_absolute_position_embeddings",
    "use_relative_position_bias",
    "use_shared_relative_position_bias",
)
_POSITIONS = {
    ("none", "stem"): (False, False, False),
    ("1d", "stem"): (True, False, False),
    ("bias", "stem"): (False, True, False),
    ("bias", "shared"): (False, False, True),
}


def _models_masks(config: dict) -> bool:
    """Returns True for the `config.json` of a model with a masked image modelling head."""
    return "BeitForMaskedImageModeling" in (config.get("architectures") or ())


def _rename(tensors: Tensors, config: dict) -> Tensors:
    """Removes the tensors `relative_position_index`, and the masked image modelling head.

    The indices of relative positions can be computed from the grid of patches.
    """
    model_tensors = {
        name: x for name, x in tensors.items() if not name.endswith("relative_position_index")
    }
    if not _models_masks(config):
        return model_tensors
    return {
        name.removeprefix("beit."): x
        for name, x in model_tensors.items()
        if not name.startswith("lm_head.")
    }


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[dict, str]:
    """Returns the model's arguments, and a note about a part that is not loaded."""
    assumed = ""
    if _models_masks(config):
        if not (DEFAULTS | config)["use_mean_pooling"]:
            raise UserError(
                f"{_TITLE} of masked images that normalizes twice is unsupported: "
                "use_mean_pooling=False"
            )
        config = config | dict(architectures=["BeitModel"], use_mean_pooling=False)
        assumed = "the encoder alone, without its prediction of patches"
    classes = count_classes(tensors, config, "Beit")
    config = DEFAULTS | config
    flags = tuple(config[name] for name in _POSITION_FLAGS)
    if flags not in _POSITIONS.values():
        together = " and ".join(name for name in _POSITION_FLAGS if config[name])
        raise UserError(f"{_TITLE} with {together} together is unsupported")
    position, position_at = next(
        ours for ours, position_flags in _POSITIONS.items() if position_flags == flags
    )
    mean, scale = config["use_mean_pooling"], config["layer_scale_init_value"]
    values = read_sizes(config) | dict(
        num_classes=classes,
        pooling="gap" if mean else "cls",
        cls_token=mean,
        fc_norm=mean,
        position=position,
        position_at=position_at,
        position_resize="bicubic",
        qkv_bias="qv",
        gelu=read_gelu(config),
        layer_scale=scale if scale > 0 else None,
    )
    _check_positions(values)
    return values, assumed


def _check_positions(values: dict) -> None:
    """Checks that Transformers' BEiT computes the same position embeddings or biases as the model.

    If the model has position embeddings or biases, its images must be square. For other images,
    Transformers confuses the rows and columns of relative position biases.
    """
    require_one_of(_TITLE, values, position=[position for position, _ in _POSITIONS])
    if (values["position"], values["position_at"]) not in _POSITIONS:
        raise UserError(f"{_TITLE} has no position_at={values['position_at']!r}")
    if values["position"] != "none":
        require_square(_TITLE, values)


def _describe(values: dict) -> dict:
    mean = values["pooling"] == "gap"
    pooling = dict(pooling="gap", cls_token=True, fc_norm=True) if mean else {}
    require_defaults(
        _TITLE, ViT, values, "position", "position_at", "gelu", qkv_bias="qv", **pooling
    )
    _check_positions(values)
    described = dict(
        architectures=[class_name("Beit", values)],
        model_type="beit",
        use_mask_token=False,
        use_mean_pooling=mean,
        layer_scale_init_value=float(values["layer_scale"] or 0),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    described |= zip(
        _POSITION_FLAGS, _POSITIONS[values["position"], values["position_at"]], strict=True
    )
    return described | write_sizes(values) | common_config(values)


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: config.get("model_type") == "beit",
    arguments=_arguments,
    rules=lambda values: with_classifier("beit", _RULES, values),
    describe=_describe,
    rename=_rename,
    holds=lambda values: vit_type(values) == "beit",
    objective=mask_format(lambda values: "beit", dict(use_mask_token=True)),
)
