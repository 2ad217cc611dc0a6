"""Masked autoencoders as their authors save them: timm's names, and those of a decoder beside them.

timm itself has the encoder alone, so that such files are read and not written.
"""

from vit_jax.errors import UserError
from vit_jax.interop.layout import Rule, moved, torch_dense, torch_norm
from vit_jax.interop.library import Format, ObjectiveFormat, Tensors
from vit_jax.interop.positions import is_fixed
from vit_jax.interop.timm import timm_vit
from vit_jax.models.vit import ViT

HEADS = 16  # Of every decoder of theirs; its tensors do not say it.
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
    """The same tensors without a table of positions that is the fixed one."""
    if (table := tensors.get(_TABLE)) is not None and is_fixed(table):
        return {name: tensor for name, tensor in tensors.items() if name != _TABLE}
    return tensors


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[dict, str]:
    """The model that tensors (renamed) belong to; of fixed positions the decoder's table says the
    size.
    """
    given = tensors if _TABLE in tensors else tensors | {_TABLE: tensors[_DECODER_TABLE]}
    values, assumed = timm_vit.FORMAT.arguments(given, config, image_size)
    values["position"] = "1d" if _TABLE in tensors else _FIXED
    decoder = f"a decoder of {HEADS} heads, whose targets are not said"
    return values, " and ".join(part for part in (assumed, decoder) if part)


def _describe(values: dict) -> dict:
    raise UserError("timm has no masked autoencoder with its decoder")


def _decoder_values(tensors: Tensors, config: dict) -> dict:
    """The values of `config.objective` that tensors say."""
    depth = sum(
        name.startswith("decoder_blocks.") and name.endswith(".norm1.weight") for name in tensors
    )
    dim = tensors["decoder_embed.weight"].shape[0]
    return dict(decoder_dim=dim, decoder_depth=depth, decoder_heads=HEADS, decoder_position=_FIXED)


def _rename_decoder(tensors: Tensors, config: dict) -> Tensors:
    """The decoder's tensors without its table of positions.

    Raises:
      UserError: the table is not the fixed one.
    """
    tensors = dict(tensors)
    if not is_fixed(tensors.pop(_DECODER_TABLE)):
        raise UserError(
            f"{_DECODER_TABLE} is not the fixed table of masked autoencoders, and is not read"
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
