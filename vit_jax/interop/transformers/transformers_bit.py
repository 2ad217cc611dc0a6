"""BiT in Hugging Face Transformers."""

from vit_jax.errors import UserError
from vit_jax.interop.layout import CONV, UNIT, Rule, resnet_width, torch_dense, torch_norm
from vit_jax.interop.library import Format, require_one_of
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.transformers.transformers_config import (
    class_name,
    common_config,
    count_classes,
    require_always,
    with_classifier,
)
from vit_jax.models.resnet import BiT

_ALWAYS = dict(
    layer_type="preactivation",
    hidden_act="relu",
    num_groups=32,
    output_stride=32,
    width_factor=1,
    global_padding=None,
    embedding_dynamic_padding=False,
)
_LAYER = "encoder.stages.{m[0]}.layers.{m[1]}."
_RULES = (
    Rule("resnet/root/kernel", "embedder.convolution.weight", CONV),
    Rule(UNIT + r"conv(\d)/kernel", _LAYER + "conv{2}.weight", CONV),
    *torch_norm(UNIT + r"norm(\d)", _LAYER + "norm{2}"),
    Rule(UNIT + "conv_proj/kernel", _LAYER + "downsample.conv.weight", CONV),
    *torch_norm("norm", "norm"),
)
_HEAD = torch_dense("head", "classifier.1")


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    classes = count_classes(tensors, config, "Bit")
    try:
        require_always(config, _ALWAYS)
        widths = [4 * config["embedding_size"] * 2**stage for stage in range(len(config["depths"]))]
        require_always(config, dict(hidden_sizes=widths))
        values = dict(
            image_size=image_size or 224,
            channels=config.get("num_channels", 3),
            num_classes=classes,
            resnet_blocks=tuple(config["depths"]),
            resnet_width=resnet_width(config["embedding_size"]),
            resnet_epsilons="timm",
        )
        _check_groups(values)
    except KeyError as error:
        raise UserError(f"config.json of a Transformers bit lacks {error}") from error
    return values, ""


def _check_groups(values: dict) -> None:
    """Raises UserError if the model is so narrow that its group norms have fewer than 32 groups.

    Transformers' BiT always has 32 groups.
    """
    if (width := values["resnet_width"]) < 1:
        raise UserError(
            f"Transformers' BiT has norms of 32 groups, and none of resnet_width={width:g}"
        )


def _describe(values: dict) -> dict:
    _check_groups(values)
    require_one_of("Transformers' BiT", values, resnet_stem=("large",))
    channels, blocks = round(64 * values["resnet_width"]), list(values["resnet_blocks"])
    return dict(
        architectures=[class_name("Bit", values)],
        model_type="bit",
        layer_type="preactivation",
        depths=blocks,
        hidden_sizes=[4 * channels * 2**stage for stage in range(len(blocks))],
        embedding_size=channels,
        num_groups=32,
        hidden_act="relu",
        global_padding=None,
        embedding_dynamic_padding=False,
        width_factor=1,
    ) | common_config(values)


FORMAT = Format(
    model=BiT,
    claims=lambda config, tensors: config.get("model_type") == "bit",
    arguments=_arguments,
    rules=lambda values: with_classifier("bit", _RULES, values, _HEAD),
    describe=_describe,
)
