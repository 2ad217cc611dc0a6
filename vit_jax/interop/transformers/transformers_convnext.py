"""ConvNeXt and ConvNeXt V2 in Hugging Face Transformers."""

from vit_jax.errors import UserError
from vit_jax.interop.layout import CHANNELS, CONV, STAGED, Rule, torch_dense, torch_norm
from vit_jax.interop.library import Format, require_one_of
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.transformers.transformers_config import (
    class_name,
    common_config,
    count_classes,
    require_always,
    with_classifier,
)
from vit_jax.models.convnext import ConvNeXt

_LAYER = "encoder.stages.{0}.layers.{1}."
_RULES = (
    *torch_dense("stem/0", "embeddings.patch_embeddings", CONV),
    *torch_norm("stem_norm", "embeddings.layernorm"),
    *torch_norm(r"stages/(\d+)/norm", "encoder.stages.{0}.downsampling_layer.0"),
    *torch_dense(r"stages/(\d+)/downsample", "encoder.stages.{0}.downsampling_layer.1", CONV),
    *torch_dense(STAGED + "depthwise", _LAYER + "dwconv", CONV),
    *torch_norm(STAGED + "norm", _LAYER + "layernorm"),
    *torch_dense(STAGED + "fc1", _LAYER + "pwconv1"),
    Rule(STAGED + "response_norm/scale", _LAYER + "grn.weight", CHANNELS),
    Rule(STAGED + "response_norm/bias", _LAYER + "grn.bias", CHANNELS),
    *torch_dense(STAGED + "fc2", _LAYER + "pwconv2"),
    Rule(STAGED + "scale1", _LAYER + "layer_scale_parameter"),
    *torch_norm("norm", "layernorm"),
)
NORM_EPSILON = 1e-6  # Epsilon of all norms but the last norm.
# Maps Transformers' model type to the start of its class names, such as ConvNextModel.
_START = {"convnext": "ConvNext", "convnextv2": "ConvNextV2"}


def _model_type(values: dict) -> str:
    return "convnextv2" if values["grn"] else "convnext"


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    kind = config["model_type"]
    classes = count_classes(tensors, config, _START[kind])
    require_always(config, dict(hidden_act="gelu", patch_size=4))
    scaled = any(name.endswith("layer_scale_parameter") for name in tensors)
    depths, widths = (
        config.get("depths", (3, 3, 9, 3)),
        config.get("hidden_sizes", (96, 192, 384, 768)),
    )
    if config.get("num_stages", len(depths)) != len(depths):
        raise UserError(
            f"config.json has num_stages {config['num_stages']!r} and {len(depths)} depths"
        )
    epsilon = config.get("layer_norm_eps", 1e-12)  # Epsilon of the last norm only.
    values = dict(
        image_size=image_size or config.get("image_size", 224),
        channels=config.get("num_channels", 3),
        num_classes=classes,
        blocks=tuple(depths),
        widths=tuple(widths),
        grn=kind == "convnextv2",
        layer_scale=config.get("layer_scale_init_value", 1e-6) if scaled else None,
        head_epsilon=None if epsilon == NORM_EPSILON else epsilon,
    )
    return values, ""


def _describe(values: dict) -> dict:
    kind = _model_type(values)
    require_one_of(
        "Transformers' ConvNeXt",
        values,
        stem=("patches",),
        norm_first=(False,),
        head_hidden=(None,),
        norm_epsilon=(NORM_EPSILON,),
        centred_norm=(True,),
    )
    if values["grn"] == (values["layer_scale"] is not None):
        raise UserError("Transformers' ConvNeXt has either GRN or LayerScale")
    described = dict(
        architectures=[class_name(_START[kind], values)],
        model_type=kind,
        depths=list(values["blocks"]),
        hidden_sizes=list(values["widths"]),
        num_stages=len(values["blocks"]),
        hidden_act="gelu" if values["gelu"] == "erf" else "gelu_pytorch_tanh",
        layer_norm_eps=values["head_epsilon"] or values["norm_epsilon"],
        patch_size=4,
        image_size=values["image_size"][0],
    )
    scale = {} if values["grn"] else dict(layer_scale_init_value=values["layer_scale"])
    return described | scale | common_config(values)


FORMAT = Format(
    model=ConvNeXt,
    claims=lambda config, tensors: config.get("model_type") in _START,
    arguments=_arguments,
    rules=lambda values: with_classifier(_model_type(values), _RULES, values),
    describe=_describe,
)
