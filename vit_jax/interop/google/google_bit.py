"""BiT in Google's npz files, as written by big_transfer."""

from vit_jax.interop.layout import DENSE_CONV, UNIT, Rule, count_units, resnet_root
from vit_jax.interop.library import Format
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models.resnet import BiT

_ROOT = "resnet/root_block/standardized_conv2d/kernel"

_UNIT = "resnet/block{0}/unit{1:02d}/"
_RULES = (
    Rule("resnet/root/kernel", _ROOT),
    Rule(UNIT + "conv_proj/kernel", _UNIT + "a/proj/standardized_conv2d/kernel"),
    *(
        rule
        for number, letter in enumerate("abc", start=1)
        for rule in (
            Rule(f"{UNIT}conv{number}/kernel", f"{_UNIT}{letter}/standardized_conv2d/kernel"),
            Rule(f"{UNIT}norm{number}/scale", f"{_UNIT}{letter}/group_norm/gamma"),
            Rule(f"{UNIT}norm{number}/bias", f"{_UNIT}{letter}/group_norm/beta"),
        )
    ),
    Rule("norm/scale", "resnet/group_norm/gamma"),
    Rule("norm/bias", "resnet/group_norm/beta"),
    Rule("head/kernel", "resnet/head/conv2d/kernel", DENSE_CONV),
    Rule("head/bias", "resnet/head/conv2d/bias"),
)


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    root = tensors[_ROOT].shape
    head = tensors.get("resnet/head/conv2d/bias")
    values = dict(
        image_size=image_size or 224,
        channels=root[2],
        num_classes=head.shape[0] if head else 0,
        resnet_blocks=count_units(tensors, r"resnet/block(\d+)/unit(\d+)/", first=1),
        **resnet_root(root[0], root[3]),
    )
    return values, "groups of two channels" if values["resnet_width"] < 1 else ""


FORMAT = Format(
    model=BiT,
    claims=lambda config, tensors: _ROOT in tensors,
    arguments=_arguments,
    rules=lambda values: _RULES,
    describe=lambda values: {},
)
