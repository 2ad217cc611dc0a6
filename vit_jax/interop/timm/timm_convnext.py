"""ConvNeXt and ConvNeXt V2 in timm."""

import re

from vit_jax.errors import UserError
from vit_jax.interop.layout import CONV, STAGED, Rule, count_units, torch_dense, torch_norm
from vit_jax.interop.library import Format, require_one_of
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.timm.timm_config import (
    given_arguments,
    implied_arguments,
    pretrained_config,
    refuse_contradictions,
    stated_size,
)
from vit_jax.models.convnext import KERNEL, SIZES, ConvNeXt

_STEMS = {
    "patches": "patch",
    "overlapping": "overlap",
    "tiered": "overlap_tiered",
    "activated": "overlap_act",
}
_GELUS = {"gelu": "erf", "gelu_tanh": "tanh"}

# Maps vit_jax's names of ConvNeXt's sizes, such as "T", to words in timm's architecture names.
_WORDS = dict(Atto="atto", Femto="femto", Pico="pico", Nano="nano", T="tiny", S="small", B="base")
_WORDS |= dict(L="large", XL="xlarge", XXL="xxlarge", H="huge", Zepto="zepto")
# Sizes of timm's architectures that exist only as ConvNeXt or only as ConvNeXt V2.
_ONLY = {"convnext": ("xlarge", "xxlarge", "zepto"), "convnextv2": ("huge",)}
_TESTS = {
    "test_convnext": dict(depths=(1, 2, 4, 2), dims=(24, 32, 48, 64)),
    "test_convnext2": dict(depths=(1, 1, 1, 1), dims=(32, 64, 96, 128)),
}
_UNCHECKED = (
    *("depths", "dims", "use_grn", "ls_init_value", "stem_type", "head_hidden_size"),
    *("head_norm_first", "conv_mlp", "norm_eps", "kernel_sizes", "patch_size"),
    *("head_init_scale", "norm_layer", "act_layer"),
)
_SIMPLE = "simplenorm"


def named(architecture: str) -> dict | None:
    """Parses a ConvNeXt architecture's name to timm's arguments; None for other architectures."""
    if architecture == "test_convnext3":
        raise UserError(
            f"timm's {architecture} is unsupported: it has kernels of 7, 5, 5 and 3, and SiLU"
        )
    if architecture in _TESTS:
        return _with_defaults(_TESTS[architecture]) | dict(norm_eps=1e-5, act_layer="gelu_tanh")
    family, _, rest = architecture.partition("_")
    word, _, more = rest.partition("_")
    sizes = {word: SIZES[size] for size, word in _WORDS.items()}
    if family not in _ONLY or word not in sizes:
        return None
    simple = word == "zepto"  # Only zepto models are published with the variants rms and rms_ols.
    if more not in (("rms", "rms_ols") if simple else ("", "ols", "hnf", "mlp")):
        raise UserError(
            f"timm's {architecture} is unsupported: it differs from a ConvNeXt ({more})"
        )
    model_args = _with_defaults(dict(depths=sizes[word]["blocks"], dims=sizes[word]["widths"]))
    model_args |= dict(
        use_grn=family == "convnextv2", norm_eps=sizes[word].get("norm_epsilon", 1e-6)
    )
    if more.endswith("ols"):
        model_args["stem_type"] = dict(nano="overlap", zepto="overlap_act").get(
            word, "overlap_tiered"
        )
    if simple:
        model_args["norm_layer"] = _SIMPLE
    if more == "mlp":
        model_args["head_hidden_size"] = model_args["dims"][-1]
    return model_args | dict(head_norm_first=more == "hnf")


def _with_defaults(shape: dict) -> dict:
    """Adds the defaults of timm's arguments that an architecture's name does not contain."""
    usual = dict(use_grn=False, stem_type="patch", head_hidden_size=None, head_norm_first=False)
    return usual | dict(norm_layer=None) | shape


def _rules(values: dict) -> list[Rule]:
    block = "stages.{0}.blocks.{1}."
    # `places` contains the indices of the convolutions in timm's stem, such as 0 for `stem.0`. The
    # norm has the index after the last convolution.
    places = dict(patches=(0,), activated=(0, 2)).get(values["stem"], (0, 1))
    stem = (torch_dense(f"stem/{ours}", f"stem.{place}", CONV) for ours, place in enumerate(places))
    return [
        *(rule for rules in stem for rule in rules),
        *torch_norm("stem_norm", f"stem.{places[-1] + 1}"),
        *torch_norm(r"stages/(\d+)/norm", "stages.{0}.downsample.0"),
        *torch_dense(r"stages/(\d+)/downsample", "stages.{0}.downsample.1", CONV),
        *torch_dense(STAGED + "depthwise", block + "conv_dw", CONV),
        *torch_norm(STAGED + "norm", block + "norm"),
        *torch_dense(STAGED + r"fc(\d)", block + "mlp.fc{2}"),
        *torch_norm(STAGED + "response_norm", block + "mlp.grn"),
        Rule(STAGED + "scale1", block + "gamma"),
        *torch_norm("norm", "norm_pre" if values["norm_first"] else "head.norm"),
        *torch_dense("pre_logits", "head.pre_logits.fc"),
        *torch_dense("head", "head.fc"),
    ]


def _rename(tensors: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """Converts the 1x1 convolutions of small models to dense layers."""
    return {
        name: tensor.reshaped(tensor.shape[:2])
        if re.search(r"\.mlp\.fc\d\.weight$", name) and tensor.shape[2:] == (1, 1)
        else tensor
        for name, tensor in tensors.items()
    }


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    """Returns the model's arguments; by default GELU is exact and norms have epsilon 1e-6."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    model_args = given_arguments(config, *_UNCHECKED)
    defaults = implied_arguments(config, named)
    try:
        values = _values(shapes)
        if not values["centred_norm"] and _SIMPLE not in (
            model_args.get("norm_layer"),
            defaults.get("norm_layer"),
        ):
            raise UserError(
                f"a timm ConvNeXt with norms without bias is unsupported, except {_SIMPLE}"
            )
        refuse_contradictions(config, defaults, _timm_arguments(values))
        _refuse_kernels(shapes, len(values["blocks"]))
        values |= dict(
            image_size=stated_size(config) or image_size or 224,
            gelu=_GELUS[model_args.get("act_layer") or defaults.get("act_layer", "gelu")],
            norm_epsilon=model_args.get("norm_eps") or defaults.get("norm_eps", 1e-6),
        )
    except (KeyError, IndexError) as error:
        raise UserError(
            f"these are not the tensors of a ConvNeXt of timm's: {error} is missing"
        ) from error
    return values, ""


def _values(shapes: dict) -> dict:
    """Returns the model's arguments that the shapes of its tensors determine."""
    blocks = count_units(shapes, r"stages\.(\d+)\.blocks\.(\d+)\.", first=0)
    widths = tuple(
        shapes[f"stages.{stage}.blocks.0.conv_dw.weight"][0] for stage in range(len(blocks))
    )
    return dict(
        channels=shapes["stem.0.weight"][1],
        num_classes=shapes.get("head.fc.bias", (0,))[0],
        blocks=blocks,
        widths=widths,
        grn="stages.0.blocks.0.mlp.grn.weight" in shapes,
        layer_scale=1e-6 if "stages.0.blocks.0.gamma" in shapes else None,
        stem=_stem(shapes, widths[0]),
        norm_first="norm_pre.weight" in shapes,
        head_hidden=shapes.get("head.pre_logits.fc.bias", (None,))[0],
        centred_norm="stages.0.blocks.0.norm.bias" in shapes,
    )


def _stem(shapes: dict, width: int) -> str:
    """Returns the value of the model argument `stem`, such as `patches`.

    `width` is the number of channels of the first stage.
    """
    # Only the stem `activated` has a convolution at index 2. A convolution's kernel has 4 axes.
    if len(shapes.get("stem.2.weight", ())) == 4:
        return "activated"
    kernel = shapes["stem.0.weight"]
    if kernel[-1] == 4:
        return "patches"
    return "overlapping" if kernel[0] == width else "tiered"


def _timm_arguments(values: dict) -> dict:
    """Converts arguments from `_values`, which the tensors determine, to timm's arguments."""
    return dict(
        depths=values["blocks"],
        dims=values["widths"],
        use_grn=values["grn"],
        stem_type=_STEMS[values["stem"]],
        head_norm_first=values["norm_first"],
        head_hidden_size=values["head_hidden"],
        norm_layer=None if values["centred_norm"] else _SIMPLE,
    )


def _refuse_kernels(shapes: dict, stages: int) -> None:
    """Raises UserError if a depthwise kernel does not have the size KERNEL x KERNEL."""
    sides = {shapes[f"stages.{stage}.blocks.0.conv_dw.weight"][-1] for stage in range(stages)}
    if sides != {KERNEL}:
        raise UserError(
            f"a timm ConvNeXt with kernels of {sorted(sides)} is unsupported; supported: {KERNEL}"
        )


def _describe(values: dict) -> dict:
    require_one_of("timm's ConvNeXt", values, head_epsilon=(None, values["norm_epsilon"]))
    if values["grn"]:
        require_one_of("timm's ConvNeXt V2", values, centred_norm=(True,))
    return dict(
        architecture=_architecture(values),
        model_args=dict(
            depths=list(values["blocks"]),
            dims=list(values["widths"]),
            in_chans=values["channels"],
            use_grn=values["grn"],
            ls_init_value=values["layer_scale"],
            stem_type=_STEMS[values["stem"]],
            head_norm_first=values["norm_first"],
            head_hidden_size=values["head_hidden"],
            conv_mlp=False,
            act_layer="gelu_tanh" if values["gelu"] == "tanh" else "gelu",
            norm_eps=values["norm_epsilon"],
        ),
        num_features=values["widths"][-1],
    ) | pretrained_config(values, fixed_input_size=False)


def _architecture(values: dict) -> str:
    """Returns the name of timm's ConvNeXt architecture with the model's sizes.

    If timm has no such architecture, the result is the architecture `tiny`, whose sizes
    `model_args` override.
    """
    family, other = ("convnextv2", "convnext") if values["grn"] else ("convnext", "convnextv2")
    if not values["centred_norm"]:
        return f"{family}_zepto_rms"
    shape = dict(blocks=values["blocks"], widths=values["widths"])
    for size, word in _WORDS.items():
        if SIZES[size] | shape == SIZES[size] and word not in (*_ONLY[other], "zepto"):
            return f"{family}_{word}"
    return f"{family}_tiny"


FORMAT = Format(
    model=ConvNeXt,
    claims=lambda config, tensors: "stages.0.blocks.0.conv_dw.weight" in tensors,
    arguments=_arguments,
    rules=_rules,
    describe=_describe,
    rename=_rename,
)
