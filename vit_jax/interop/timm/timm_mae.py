"""Files of the MAE authors: an encoder with timm's tensor names, and a decoder.

These files are read, but not written, because timm has no decoder.
"""

from vit_jax.errors import UserError
from vit_jax.interop.layout import Rule, moved, torch_dense, torch_norm
from vit_jax.interop.library import Format, ObjectiveFormat, Tensors
from vit_jax.interop.positions import is_fixed
from vit_jax.interop.timm import timm_vit
from vit_jax.models.vit import ViT

HEADS = 16  # Number of heads in all published decoders, which the tensors do not determine.
_FIXED = "sincos2d_mae"
_TABLE, _DECODER_TABLE = "pos_embed", "decoder_pos_embed"
_DECODER_RULES = (
    *torch_dense("embedding", "decoder_embed"),
    Rule("mask", "mask_token"),
    *moved(timm_vit.VIT_RULES, "blocks.", "decoder_blocks."),
    *torch_norm("norm", "decoder_norm"),
    *torch_dense("prediction", "decoder_pred"),
)


def _rename(tensors: Tensors, config: dict) -> Tensors:
    """Removes the encoder's position embeddings if they are fixed: vit_jax computes them."""
    if (table := tensors.get(_TABLE)) is not None and is_fixed(table):
        return {name: tensor for name, tensor in tensors.items() if name != _TABLE}
    return tensors


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[dict, str]:
    """Returns the model's arguments, and a text that lists the assumptions.

    If `_rename` removed the encoder's position embeddings, the image size is derived from the
    number of position embeddings in the decoder.
    """
    with_table = tensors if _TABLE in tensors else tensors | {_TABLE: tensors[_DECODER_TABLE]}
    values, assumed = timm_vit.FORMAT.arguments(with_table, config, image_size)
    values["position"] = "1d" if _TABLE in tensors else _FIXED
    decoder = f"a decoder of {HEADS} heads, whose targets are unknown"
    return values, " and ".join(part for part in (assumed, decoder) if part)


def _describe(values: dict) -> dict:
    raise UserError("timm has no masked autoencoder with its decoder")


def _decoder_values(tensors: Tensors, config: dict) -> dict:
    """Returns the values of `config.objective` that the tensors determine."""
    depth = sum(
        name.startswith("decoder_blocks.") and name.endswith(".norm1.weight") for name in tensors
    )
    dim = tensors["decoder_embed.weight"].shape[0]
    return dict(decoder_dim=dim, decoder_depth=depth, decoder_heads=HEADS, decoder_position=_FIXED)


def _rename_decoder(tensors: Tensors, config: dict) -> Tensors:
    """Removes the decoder's position embeddings, which vit_jax computes.

    Raises:
      UserError: the position embeddings differ from the computed ones.
    """
    tensors = dict(tensors)
    if not is_fixed(tensors.pop(_DECODER_TABLE)):
        raise UserError(
            f"{_DECODER_TABLE} is not the fixed table of masked autoencoders: it is unsupported"
        )
    return tensors


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: (
        {"decoder_embed.weight", _DECODER_TABLE, "patch_embed.proj.weight"} <= tensors.keys()
    ),
    arguments=_arguments,
    rules=lambda values: timm_vit.VIT_RULES,
    describe=_describe,
    rename=_rename,
    holds=lambda values: False,
    objective=ObjectiveFormat(
        name="mae",
        owns=r"(decoder_|mask_token$)",
        values=_decoder_values,
        rename=_rename_decoder,
        rules=lambda values: _DECODER_RULES,
    ),
)
