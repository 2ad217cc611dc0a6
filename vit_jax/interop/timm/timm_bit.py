"""BiT in timm (class ResNetV2). The ResNet of a hybrid ViT has similar tensor names."""

from collections.abc import Iterable

from vit_jax.errors import UserError
from vit_jax.interop.layout import (
    CONV,
    LINEAR_CONV,
    UNIT,
    Rule,
    count_units,
    torch_dense,
    torch_norm,
)
from vit_jax.interop.library import Format
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.timm.timm_config import (
    given_arguments,
    implied_arguments,
    pretrained_config,
    refuse_contradictions,
    stated_size,
)
from vit_jax.models.resnet import BiT


def resnet_rules(root: str, units: str) -> tuple[Rule, ...]:
    """Returns the rules for the tensor names of a ResNet, in BiT or in a hybrid ViT.

    Args:
      root: prefix of the names in timm's stem.
      units: prefix of the names in timm's stages.
    """
    unit = units + "stages.{m[0]}.blocks.{m[1]}."
    return (
        Rule("resnet/root/kernel", root + "conv.weight", CONV),
        *torch_norm("resnet/root_norm", root + "norm"),
        Rule(UNIT + r"conv(\d)/kernel", unit + "conv{2}.weight", CONV),
        *torch_norm(UNIT + r"norm(\d)", unit + "norm{2}"),
        Rule(UNIT + "conv_proj/kernel", unit + "downsample.conv.weight", CONV),
        *torch_norm(UNIT + "norm_proj", unit + "downsample.norm"),
    )


def resnet_blocks(names: Iterable[str]) -> tuple[int, ...]:
    """Returns the number of residual units in each stage of a ResNet, from its tensor names."""
    return count_units(
        names, r"(?:patch_embed\.backbone\.)?stages\.(\d+)\.blocks\.(\d+)\.", first=0
    )


_RULES = (
    *resnet_rules("stem.", ""),
    *torch_norm("norm", "norm"),
    *torch_dense("head", "head.fc", LINEAR_CONV),
)

# Maps (number of residual units in each stage, width factor) to the name of timm's architecture.
_ARCHITECTURES = {
    ((3, 4, 6, 3), 1): "resnetv2_50x1_bit",
    ((3, 4, 6, 3), 3): "resnetv2_50x3_bit",
    ((3, 4, 23, 3), 1): "resnetv2_101x1_bit",
    ((3, 4, 23, 3), 3): "resnetv2_101x3_bit",
    ((3, 8, 36, 3), 2): "resnetv2_152x2_bit",
    ((3, 8, 36, 3), 4): "resnetv2_152x4_bit",
}


def named(architecture: str) -> dict | None:
    """Parses a BiT architecture's name to timm's arguments; None for other architectures."""
    for (blocks, width), name in _ARCHITECTURES.items():
        if name == architecture:
            return dict(layers=blocks, width_factor=width)
    return None


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    pooling = given_arguments(config).get("global_pool") or config.get("global_pool")
    if pooling not in (None, "avg"):
        raise UserError(f"a timm BiT with global_pool={pooling!r} is unsupported; supported: 'avg'")
    root, blocks = tensors["stem.conv.weight"].shape, resnet_blocks(tensors)
    refuse_contradictions(
        config, implied_arguments(config, named), dict(layers=blocks, width_factor=root[0] // 64)
    )
    values = dict(
        image_size=stated_size(config) or image_size or 224,
        channels=root[1],
        num_classes=tensors["head.fc.bias"].shape[0] if "head.fc.bias" in tensors else 0,
        resnet_blocks=blocks,
        resnet_width=root[0] // 64,
        resnet_epsilons="timm",
    )
    return values, ""


def _describe(values: dict) -> dict:
    key = (values["resnet_blocks"], values["resnet_width"])
    if key not in _ARCHITECTURES or values["resnet_stem"] != "large":
        stem = values["resnet_stem"]
        raise UserError(
            f"timm has no BiT with {list(key[0])} units, width {key[1]:g} and a {stem} stem"
        )
    return dict(
        architecture=_ARCHITECTURES[key], model_args=dict(in_chans=values["channels"])
    ) | pretrained_config(values, fixed_input_size=False)


FORMAT = Format(
    model=BiT,
    claims=lambda config, tensors: "stem.conv.weight" in tensors,
    arguments=_arguments,
    rules=lambda values: _RULES,
    describe=_describe,
)
