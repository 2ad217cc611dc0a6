"""Masked autoencoders in Hugging Face Transformers: the encoder and its pre-training decoder.

The position embeddings of these models are fixed. If a model is loaded for another image size,
vit_jax computes the embeddings for the new size, but Transformers interpolates them. The outputs of
the two libraries then differ slightly. With the override `position="1d"` vit_jax interpolates the
embeddings, too.
"""

import re

from vit_jax.errors import UserError
from vit_jax.interop.layout import Rule, moved, torch_dense, torch_norm
from vit_jax.interop.library import Arrays, Format, ObjectiveFormat, Tensors, require_defaults
from vit_jax.interop.positions import fixed_table, is_fixed
from vit_jax.interop.transformers import transformers_config
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
from vit_jax.models.vit import ViT

DEFAULTS = transformers_config.DEFAULTS | dict(
    qkv_bias=True,
    decoder_hidden_size=512,
    decoder_num_hidden_layers=8,
    decoder_num_attention_heads=16,
)
_TABLE = "embeddings.position_embeddings"
_FIXED = "sincos2d_mae"


def _grid(values: dict) -> tuple[int, int]:
    """Returns the number of rows and the number of columns of patches."""
    height, width = (length // values["patch_size"] for length in values["image_size"])
    return height, width


def _rename(tensors: Tensors, config: dict) -> Tensors:
    """Removes the encoder's position embeddings if they are fixed: vit_jax computes them."""
    table = tensors.get(_TABLE)
    if table is not None and is_fixed(table, _grid(read_sizes(DEFAULTS | config))):
        return {name: tensor for name, tensor in tensors.items() if name != _TABLE}
    return tensors


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[dict, str]:
    require_class(config, "ViTMAEModel", "ViTMAEForPreTraining")
    require_always(config, dict(qkv_bias=True))
    config = DEFAULTS | config
    values = read_sizes(config) | dict(
        num_classes=0,
        position="1d" if _TABLE in tensors else _FIXED,
        position_resize="bicubic",
        gelu=read_gelu(config),
    )
    return values, ""


def _describe(values: dict) -> dict:
    title = "Transformers' ViTMAE"
    require_defaults(title, ViT, values, "gelu", num_classes=0, position=_FIXED, layer_scale=None)
    described = dict(
        architectures=["ViTMAEModel"],
        model_type="vit_mae",
        qkv_bias=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        mask_ratio=0.0,  # With another value Transformers' model masks patches in evaluation, too.
    )
    return described | write_sizes(values) | common_config(values)


def _finish(arrays: Arrays, values: dict) -> Arrays:
    """Adds the encoder's fixed position embeddings to the tensors to write."""
    return arrays | {_TABLE: fixed_table(_grid(values), values["dim"])}


_OF_TRAINING = dict(mask_ratio="mask_ratio", normalize_targets="norm_pix_loss")
_DECODER_TABLE = "decoder.decoder_pos_embed"
_DECODER_RULES = (
    *torch_dense("embedding", "decoder.decoder_embed"),
    Rule("mask", "decoder.mask_token"),
    *moved(RULES, "encoder.layer.", "decoder.decoder_layers."),
    *torch_norm("norm", "decoder.decoder_norm"),
    *torch_dense("prediction", "decoder.decoder_pred"),
)


def _decoder_values(tensors: Tensors, config: dict) -> dict:
    """Returns the values of `config.objective` that a `config.json` contains.

    The training settings (normalization of targets, share of masked patches) are returned only if
    the `config.json` contains them.
    """
    of_training = {
        ours: config[theirs] for ours, theirs in _OF_TRAINING.items() if theirs in config
    }
    config = DEFAULTS | config
    return of_training | dict(
        decoder_dim=config["decoder_hidden_size"],
        decoder_depth=config["decoder_num_hidden_layers"],
        decoder_heads=config["decoder_num_attention_heads"],
        decoder_position=_FIXED,
    )


def _rename_decoder(tensors: Tensors, config: dict) -> Tensors:
    """Renames layers, and removes the decoder's position embeddings, which vit_jax computes.

    Transformers 5 writes other names of layers than those in published files. They are converted to
    the names in published files.

    Raises:
      UserError: the position embeddings differ from the computed ones, or the decoder has another
        GELU than vit_jax's decoder.
    """
    config = DEFAULTS | config
    if read_gelu(config) != "erf":
        raise UserError(
            f"a masked autoencoder's decoder with {config['hidden_act']!r} is unsupported"
        )
    tensors = {
        re.sub(r"^decoder\.decoder_encoder\.layer\.", "decoder.decoder_layers.", name): tensor
        for name, tensor in tensors.items()
    }
    table = tensors.pop(_DECODER_TABLE, None)
    if table is not None and not is_fixed(table, _grid(read_sizes(config))):
        raise UserError(
            f"{_DECODER_TABLE} is not the fixed table of masked autoencoders: it is unsupported"
        )
    return tensors


def _describe_decoder(values: dict, objective_values: dict) -> dict:
    """Returns the entries of a `config.json` that describe the decoder."""
    for name, value, only in (
        ("model.gelu", values["gelu"], "erf"),
        ("mae.decoder_position", objective_values["decoder_position"], _FIXED),
    ):
        if value != only:
            raise UserError(f"Transformers' ViTMAE decodes with {name}={only!r} alone")
    described = dict(
        architectures=["ViTMAEForPreTraining"],
        decoder_hidden_size=objective_values["decoder_dim"],
        decoder_intermediate_size=4 * objective_values["decoder_dim"],
        decoder_num_hidden_layers=objective_values["decoder_depth"],
        decoder_num_attention_heads=objective_values["decoder_heads"],
        mask_ratio=0.75,
    )
    return described | {
        theirs: objective_values[ours]
        for ours, theirs in _OF_TRAINING.items()
        if ours in objective_values
    }


def _finish_decoder(values: dict, objective_values: dict) -> Arrays:
    """Returns the decoder's fixed position embeddings."""
    return {_DECODER_TABLE: fixed_table(_grid(values), objective_values["decoder_dim"])}


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: config.get("model_type") == "vit_mae",
    arguments=_arguments,
    rules=lambda values: RULES,
    describe=_describe,
    rename=_rename,
    finish=_finish,
    holds=lambda values: vit_type(values) == "vit_mae",
    objective=ObjectiveFormat(
        name="mae",
        owns=r"decoder\.",
        values=_decoder_values,
        rename=_rename_decoder,
        rules=lambda values: _DECODER_RULES,
        describe=_describe_decoder,
        finish=_finish_decoder,
        prefix="vit.",
    ),
)
