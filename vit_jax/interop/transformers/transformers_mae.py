"""Masked autoencoders' encoder in Hugging Face Transformers.

For images of another size fixed positions are computed anew; with `position="1d"` they are interpolated, as
Transformers does it.
"""

import numpy as np

from vit_jax.interop.library import Arrays, Format, Tensors, refuse_unsaid
from vit_jax.interop.transformers.transformers_config import (
    common_config,
    read_gelu,
    read_sizes,
    require_always,
    require_class,
    vit_type,
    write_sizes,
)
from vit_jax.interop.transformers.transformers_vit import RULES
from vit_jax.models.position import sincos2d
from vit_jax.models.vit import ViT

# What a config does not say.
DEFAULTS = dict(
    image_size=224,
    patch_size=16,
    hidden_size=768,
    num_hidden_layers=12,
    intermediate_size=3072,
    num_attention_heads=12,
    hidden_act="gelu",
    layer_norm_eps=1e-12,
    qkv_bias=True,
)
_TABLE = "embeddings.position_embeddings"
_FIXED = "sincos2d_mae"
_RULES = tuple(rule for rule in RULES if not rule.path.startswith("pre_logits"))


def _fixed_table(values: dict) -> np.ndarray:
    """The positions that are not learned, `[1, 1 + patches, dim]`: zeros of the class token."""
    height, width = (length // values["patch_size"] for length in values["image_size"])
    return np.pad(sincos2d((height, width), values["dim"], _FIXED), ((1, 0), (0, 0)))[None]


def _rename(tensors: Tensors, config: dict) -> Tensors:
    """The encoder's tensors, without a table of positions that is the fixed one."""
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("decoder.")}
    values = read_sizes(DEFAULTS | config)
    if (table := tensors.get(_TABLE)) is not None and values["dim"] % 4 == 0:
        fixed = _fixed_table(values)
        if table.shape == fixed.shape and np.allclose(table.read(), fixed, rtol=0, atol=1e-6):
            del tensors[_TABLE]
    return tensors


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[dict, str]:
    """The model that tensors (renamed) and a `config.json` belong to."""
    require_class(config, "ViTMAEModel", "ViTMAEForPreTraining")
    require_always(config, dict(qkv_bias=True))
    decodes = "ViTMAEForPreTraining" in (config.get("architectures") or ())
    config = DEFAULTS | config
    values = read_sizes(config) | dict(
        num_classes=0,
        position="1d" if _TABLE in tensors else _FIXED,
        position_resize="bicubic",
        gelu=read_gelu(config),
    )
    return values, "the encoder alone, without its decoder" if decodes else ""


def _describe(values: dict) -> dict:
    """A model's `config.json` in Transformers.

    Raises:
      UserError: Transformers has no such encoder.
    """
    title = "Transformers' ViTMAE"
    refuse_unsaid(title, ViT, values, "gelu", num_classes=0, position=_FIXED, layer_scale=None)
    described = dict(
        architectures=["ViTMAEModel"],
        model_type="vit_mae",
        qkv_bias=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        mask_ratio=0.0,  # It would mask when it is not trained, too.
    )
    return described | write_sizes(values) | common_config(values)


def _finish(arrays: Arrays, values: dict) -> Arrays:
    """Tensors to write, with the table of fixed positions."""
    return arrays | {_TABLE: _fixed_table(values)}


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: config.get("model_type") == "vit_mae",
    arguments=_arguments,
    rules=lambda values: _RULES,
    describe=_describe,
    rename=_rename,
    finish=_finish,
    holds=lambda values: vit_type(values) == "vit_mae",
)
