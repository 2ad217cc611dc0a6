"""The encoder of DALL-E's discrete autoencoder, with the tensor names of OpenAI's code."""

from vit_jax.errors import UserError
from vit_jax.interop.layout import CONV, FLAT, LINEAR_CONV, STAGED, Layout, Rule, count_units
from vit_jax.interop.library import Format, Tensors, Values
from vit_jax.interop.timm.timm_config import pretrained_config, stated_size
from vit_jax.models.dall_e import DVAE

FIRST = "blocks.input.w"  # Files with a tensor of this name have this format.
PIXELS = 256  # Side of the training images in pixels.


def _conv(ours: str, theirs: str, kernel: Layout = CONV) -> tuple[Rule, Rule]:
    """Returns the rules for the tensor names of a convolution's kernel and bias."""
    return Rule(f"{ours}/kernel", f"{theirs}.w", kernel), Rule(f"{ours}/bias", f"{theirs}.b", FLAT)


_THEIRS = "blocks.group_{0}.block_{1}."
_RULES = (
    *_conv("stem", "blocks.input"),
    *_conv(STAGED + r"conv(\d)", _THEIRS + "res_path.conv_{2}"),
    *_conv(STAGED + "shortcut", _THEIRS + "id_path"),
    *_conv("head", "blocks.output.conv", LINEAR_CONV),
)


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[Values, str]:
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    blocks = count_units(shapes, r"blocks\.group_(\d+)\.block_(\d+)\.", first=1)
    try:
        stages = range(1, len(blocks) + 1)
        if not blocks:
            raise KeyError("blocks.group_1.block_1.res_path.conv_4.w")
        widths = tuple(
            shapes[f"blocks.group_{stage}.block_1.res_path.conv_4.w"][0] for stage in stages
        )
        channels = shapes[FIRST][1]
    except (KeyError, IndexError) as error:
        raise UserError(
            f"these are not the tensors of DALL-E's encoder: {error} is missing or of an unknown "
            f"shape among {len(shapes)} tensors such as {min(shapes)!r}"
        ) from error
    values = dict(
        image_size=image_size or stated_size(config) or PIXELS,
        channels=channels,
        num_classes=shapes.get("blocks.output.conv.w", (0,))[0],
        blocks=blocks,
        widths=widths,
    )
    return values, ""


FORMAT = Format(
    model=DVAE,
    claims=lambda config, tensors: FIRST in tensors,
    arguments=_arguments,
    rules=lambda values: _RULES,
    describe=lambda values: (
        dict(architecture="dall_e_encoder") | pretrained_config(values, fixed_input_size=False)
    ),
)
