"""ViTs in timm: timm's VisionTransformer, its hybrids, and distilled DeiT."""

import math
import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.layout import (
    BLOCK,
    CONV,
    FLAT,
    LINEAR,
    LINEAR_OUT,
    SAME,
    Rule,
    torch_dense,
    torch_norm,
)
from vit_jax.interop.library import Format, require_defaults
from vit_jax.interop.positions import image_size_of
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.timm.timm_bit import resnet_blocks, resnet_rules
from vit_jax.interop.timm.timm_config import (
    count_layers,
    first_in,
    given_arguments,
    implied_arguments,
    mlp_ratio,
    pretrained_config,
    refuse_contradictions,
    size_arguments,
    stated_size,
)
from vit_jax.models.position import FIXED
from vit_jax.models.resnet import resnet_stride
from vit_jax.models.vit import ViT
from vit_jax.models.vit_names import SIZES

_THEIRS = "blocks.{0}."
_MLP = _THEIRS + "mlp."
# Naming rules for models in which the gate and the gated values of an MLP are separate tensors.
APART = (
    Rule(BLOCK + "mlp/fc1/kernel", (_MLP + "fc1_g.weight", _MLP + "fc1_x.weight"), LINEAR, axis=1),
    Rule(BLOCK + "mlp/fc1/bias", (_MLP + "fc1_g.bias", _MLP + "fc1_x.bias"), FLAT, axis=0),
)
# Naming rule for models with separate biases of queries and values, and none of keys.
QV_BIAS = Rule(
    BLOCK + "attention/qkv/bias", (_THEIRS + "attn.q_bias", _THEIRS + "attn.v_bias"), FLAT, axis=0
)
VIT_RULES = (
    *torch_dense("patch_embedding", "patch_embed.proj", CONV, SAME),
    Rule("cls", "cls_token"),
    Rule("distillation_token", "dist_token"),
    Rule("register_tokens", "reg_token"),
    Rule("position_embedding/table", "pos_embed"),
    *torch_norm(BLOCK + r"norm(\d)", _THEIRS + "norm{1}"),
    *torch_dense(BLOCK + "attention/qkv", _THEIRS + "attn.qkv"),
    *torch_norm(BLOCK + "attention/query_norm", _THEIRS + "attn.q_norm"),
    *torch_norm(BLOCK + "attention/key_norm", _THEIRS + "attn.k_norm"),
    *torch_norm(BLOCK + "attention/norm", _THEIRS + "attn.norm"),
    *torch_norm(BLOCK + "mlp/norm", _THEIRS + "mlp.norm"),
    *torch_dense(BLOCK + "attention/out", _THEIRS + "attn.proj", LINEAR_OUT),
    Rule(BLOCK + r"scale(\d)", _THEIRS + "ls{1}.gamma"),
    *torch_dense(BLOCK + r"mlp/fc(\d)", _THEIRS + "mlp.fc{1}"),
    *torch_norm("patch_norm", "patch_embed.norm"),
    *torch_norm("stem_norm", "norm_pre"),
    *torch_norm("norm", "norm"),
    *torch_norm("fc_norm", "fc_norm"),
    Rule("attention_pooling/probe", "attn_pool.latent"),
    *torch_dense("attention_pooling/query", "attn_pool.q"),
    *torch_dense("attention_pooling/key_value", "attn_pool.kv"),
    *torch_dense("attention_pooling/out", "attn_pool.proj", LINEAR_OUT),
    *torch_norm("attention_pooling/norm", "attn_pool.norm"),
    *torch_dense(r"attention_pooling/mlp/fc(\d)", "attn_pool.mlp.fc{0}"),
    *torch_dense("head", "head"),
    *torch_dense("distillation_head", "head_dist"),
)
_ROOT_RULES = resnet_rules("patch_embed.backbone.", "patch_embed.backbone.") + VIT_RULES
_HYBRID_RULES = resnet_rules("patch_embed.backbone.stem.", "patch_embed.backbone.") + VIT_RULES
POOLINGS = {"cls": "token", "gap": "avg", "map": "map"}  # vit_jax's name -> timm's name.
# Maps the numbers of residual units in a hybrid's stages to a timm architecture. Arguments in
# `config.json` override the other sizes of this architecture, such as the width.
_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}


def _rules(values: dict) -> tuple[Rule, ...]:
    """Returns the rules for the tensor names of a model.

    If the ResNet of a hybrid has no stages, only a first convolution, the names of this convolution
    differ from those in other hybrids. In AIMv2, the gate and the gated values of an MLP are
    separate tensors.
    """
    rules = _ROOT_RULES if values["resnet_blocks"] == () else _HYBRID_RULES
    return APART + rules if values["mlp"] == "swiglu" and values["norm"] == "rms" else rules


def rename_positions(tensors: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """Converts position embeddings to the order class token, distillation token, patches.

    If timm's table contains embeddings of patches only, zeros are added for the other tokens. The
    position embeddings of registers are removed from the table, and added to the register tokens.
    This does not change the outputs.
    """
    table = tensors.get("pos_embed")
    if table is None or len(table.shape) != 3 or "patch_embed.proj.weight" not in tensors:
        return tensors
    prefix = ("cls_token" in tensors) + ("dist_token" in tensors)
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    _, rows, dim = table.shape
    if _patches_alone(tensors, config, rows, prefix + registers):
        padded = Tensor((1, rows + prefix, dim), table.dtype, lambda: _padded(table, prefix))
        return tensors | {"pos_embed": padded}
    if not registers:
        return tensors
    token, register_rows = tensors["reg_token"], np.s_[prefix : prefix + registers]
    return tensors | {
        "pos_embed": Tensor(
            (1, rows - registers, dim),
            table.dtype,
            lambda: np.delete(table.read(), register_rows, axis=1),
        ),
        "reg_token": Tensor(
            token.shape, token.dtype, lambda: token.read() + table.read()[:, register_rows]
        ),
    }


def _patches_alone(tensors: dict[str, Tensor], config: dict, rows: int, others: int) -> bool:
    """Returns True if a model has position embeddings of patches only, not of other tokens.

    The result is taken from `no_embed_class` in `config.json`, or derived from the image size. If
    both are missing, the grid of patches is assumed to be square. For example, 196 embeddings are
    those of 14 x 14 patches, without other tokens.

    Args:
      rows: number of position embeddings.
      others: number of tokens that are not patches.
    """
    no_embed_class = (config.get("model_args") or {}).get("no_embed_class")
    if no_embed_class is not None:
        return bool(no_embed_class)
    if size := stated_size(config):
        stride = tensors["patch_embed.proj.weight"].shape[-1] * _trunk_stride(tensors)
        patches = (size[0] // stride) * (size[1] // stride)
        if patches in (rows, rows - others):
            return patches == rows
    return math.isqrt(rows) ** 2 == rows and math.isqrt(rows - others) ** 2 != rows - others


def _trunk_stride(tensors: dict) -> int:
    trunk = any(name.startswith("patch_embed.backbone.") for name in tensors)
    return resnet_stride(resnet_blocks(tensors) if trunk else None, "large")


def _padded(table: Tensor, prefix: int) -> np.ndarray:
    """Adds zeros for `prefix` other tokens before the position embeddings of the patches."""
    return np.pad(table.read(), ((0, 0), (prefix, 0), (0, 0)))


def with_registers(tensors: dict[str, np.ndarray], values: dict) -> dict[str, np.ndarray]:
    """Adds zeros for the registers to the position embeddings, as timm requires."""
    if not values.get("registers") or "pos_embed" not in tensors:
        return tensors
    places = [int("cls_token" in tensors)] * values["registers"]
    return tensors | {"pos_embed": np.insert(tensors["pos_embed"], places, 0, axis=1)}


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    """Returns the model's arguments, and a text that lists the assumptions.

    Settings that no file determines have timm's defaults: exact GELU, norms with epsilon 1e-6.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    model_args, defaults = given_arguments(config, "act_layer"), implied_arguments(config, named)
    activation = model_args.get("act_layer") or defaults.get("act_layer", "gelu")
    if activation not in _GELUS:
        raise UserError(
            f"a timm model with act_layer={activation!r} is unsupported; supported: "
            f"{', '.join(_GELUS)}"
        )
    refuse_contradictions(config, defaults, _timm_arguments(shapes))
    try:
        values = dict(
            **_sizes(shapes, model_args, defaults),
            **_pooling_values(config, model_args, defaults, shapes),
            **layer_values(shapes),
            gelu=_GELUS[activation],  # A gated MLP does not use a GELU.
            distillation=_distillation(shapes),
            norm_at=defaults.get("norm_at", "before"),
            norm_epsilon=defaults.get("eps", 1e-6),
            position="1d" if "pos_embed" in shapes else "none",
            position_resize="bicubic_antialias",
        )
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"these are not the tensors of a ViT or BiT of timm's: {error} is missing or of an "
            f"unknown shape among {len(shapes)} tensors such as {min(shapes, default='none')!r}"
        ) from error
    rows = shapes["pos_embed"][1] if "pos_embed" in shapes else None
    size = image_size_of(values, rows, stated_size(config), image_size)
    return values | dict(image_size=size), _assumptions(values, config, defaults)


def _timm_arguments(shapes: dict) -> dict:
    """Returns the values of timm's arguments that the shapes of tensors determine."""
    kernel = shapes["patch_embed.proj.weight"]
    is_hybrid = any(name.startswith("patch_embed.backbone.") for name in shapes)
    return dict(
        layers=resnet_blocks(shapes) if is_hybrid else None,
        embed_dim=kernel[0],
        patch_size=kernel[-1],
        reg_tokens=shapes.get("reg_token", (0, 0))[1],
        dist_token="dist_token" in shapes,
    )


def _sizes(shapes: dict, model_args: dict, defaults: dict) -> dict:
    """Returns the model's arguments for sizes, such as `dim`, and those of a hybrid's ResNet.

    `model_args` are timm's arguments in `config.json`. `defaults` are those that the architecture's
    name implies.
    """
    dim, channels, patch, _ = shapes["patch_embed.proj.weight"]
    depth = count_layers(shapes)
    sizes = dict(
        patch_size=patch,
        channels=channels,
        resnet_blocks=None,
        resnet_width=1,
        resnet_epsilons="google",
        dim=dim,
        depth=depth,
        mlp_dim=shapes["blocks.0.mlp.fc2.weight"][1],
        heads=_heads(model_args, defaults.get("heads"), shapes, dim, depth),
        num_classes=shapes.get("head.bias", (0,))[0],
        registers=shapes.get("reg_token", (0, 0))[1],
    )
    root = shapes.get("patch_embed.backbone.stem.conv.weight") or shapes.get(
        "patch_embed.backbone.conv.weight"
    )
    if root:
        sizes |= dict(
            channels=root[1],
            resnet_blocks=resnet_blocks(shapes),
            resnet_width=root[0] // 64,
            resnet_epsilons="timm",
        )
    return sizes


def _pooling_values(config: dict, model_args: dict, defaults: dict, shapes: dict) -> dict:
    """Returns the model's arguments for pooling.

    `model_args` and `defaults` are as in `_sizes`.
    """
    pooling = _pooling(config, model_args, shapes)
    with_prefix = model_args.get("pool_include_prefix", defaults.get("pool_include_prefix"))
    return dict(
        pooling=pooling,
        cls_token="cls_token" in shapes and pooling != "cls",
        pool_all=pooling in ("gap", "map") and bool(with_prefix),
    )


def layer_values(shapes: dict) -> dict:
    """Returns the model's arguments for norms, biases and the kind of MLP, from tensor shapes."""
    is_gated = (
        "blocks.0.mlp.fc1_g.weight" in shapes
        or shapes["blocks.0.mlp.fc1.weight"][0] == 2 * shapes["blocks.0.mlp.fc2.weight"][1]
    )
    return dict(
        mlp="swiglu" if is_gated else "gelu",
        fc_norm="fc_norm.weight" in shapes,
        stem_norm=first_in(
            shapes, {"patch_embed.norm.weight": "patches", "norm_pre.weight": "tokens"}
        ),
        final_norm="norm.weight" in shapes or "fc_norm.weight" in shapes,
        norm="layer" if "blocks.0.norm1.bias" in shapes else "rms",
        sub_norm=first_in(
            shapes, {"blocks.0.attn.norm.weight": "both", "blocks.0.mlp.norm.weight": "mlp"}
        ),
        qk_norm="blocks.0.attn.q_norm.weight" in shapes,
        qkv_bias="all" if "blocks.0.attn.qkv.bias" in shapes else "none",
        bias="blocks.0.attn.proj.bias" in shapes,
        layer_scale=1e-5 if "blocks.0.ls1.gamma" in shapes else None,
    )


def _distillation(shapes: dict) -> str:
    if "dist_token" not in shapes:
        return "none"
    return "heads" if "head_dist.bias" in shapes else "token"


def _assumptions(values: dict, config: dict, defaults: dict) -> str:
    """Returns a text with the assumptions about settings that no file contains."""
    assumptions = []
    if "embed_dim" not in defaults:
        missing = "architecture in its config.json" if config else "config.json"
        assumptions.append(f"{values['heads']} heads and exact GELU, as there is no {missing}")
    if values["distillation"] == "token":
        assumptions.append(
            "features of the class token alone, where timm's are its mean with the distillation "
            "token"
        )
    return " and ".join(assumptions)


def _pooling(config: dict, model_args: dict, shapes: dict) -> str:
    """Returns the argument `pooling`, from the tensors and the settings in `config.json`.

    By default, a model with a class token has the pooling `cls`, and other models have `gap`.
    """
    if "attn_pool.latent" in shapes:
        return "map"
    global_pool = model_args.get("global_pool") or config.get("global_pool")
    # A model with `fc_norm` has average pooling, unless `config.json` contains another pooling.
    averaged = global_pool == "avg" or (global_pool is None and "fc_norm.weight" in shapes)
    return "gap" if averaged or "cls_token" not in shapes else "cls"


# Width and number of heads for the size words in timm's architecture names.
_WIDTHS = {
    "tiny": (192, 3),
    "xsmall": (256, 4),
    "wee": (256, 4),
    "little": (320, 5),
    "small": (384, 6),
    "medium": (512, 8),
    "mediumd": (512, 8),
    "betwixt": (640, 10),
    "base": (768, 12),
    "so150m": (896, 14),
    "large": (1024, 16),
    "so400m": (1152, 16),
    "huge": (1280, 16),
    "giant": (1408, 16),
    "giantopt": (1536, 16),
    "intern300m": (1024, 16),
    "so150m2": (832, 13),
    "gigantic": (1664, 16),
}
# Pattern of supported architecture names. Other words in names, such as xp, stand for models that
# compute something different.
_PLAIN = re.compile(
    r"patch\d+|reg\d+|gap|map|dinov2|tipsv2|plus|distilled|36x1|r|r26|r50|s\d+|p\d+|\d+|in21k"
    r"|clip|quickgelu|siglip|rpn|miil|radio|v\d"
)
# Prefixes of the SigLIP architectures with the tanh approximation of GELU. Other SigLIP
# architectures have the exact GELU.
_TANH = ("vit_base_patch32_siglip", "vit_so400m_patch16_siglip", "vit_giantopt_patch16_siglip")
_TANH += ("vit_large_patch16_siglip_512", "vit_large_patch16_siglip_gap_512")
_RADIO = {"v3": 7, "v4": 9}  # Number of registers, by the last word of a RADIO architecture's name.
_FAMILIES = ("vit", "deit", "deit3", "flexivit", "beit3", "eva")
_AIMV2 = {"large": (1024, 8), "huge": (1536, 12), "1b": (2048, 16), "3b": (3072, 24)}
_GELUS = {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick"}
_TRUNKS = {
    ("", "16"): (),
    ("26", "32"): (2, 2, 2, 2),
    ("50", "16"): (3, 4, 9),
    ("50", "32"): (3, 4, 6, 3),
}
_TESTS = {
    "test_vit": dict(embed_dim=64, heads=2, reg_tokens=0),
    "test_vit2": dict(embed_dim=64, heads=2, reg_tokens=1),
    "test_vit3": dict(embed_dim=96, heads=3, reg_tokens=1, pool_include_prefix=True),
}


def named(architecture: str) -> dict | None:
    """Parses a ViT architecture's name to timm's arguments and `heads`; None for other names.

    Raises:
      UserError: the architecture is a variant of a ViT or hybrid that is unsupported.
    """
    if architecture in _TESTS:
        return dict(patch_size=16, dist_token=False) | _TESTS[architecture]
    family, *words = architecture.split("_")
    if family == "aimv2":
        return _named_aimv2(*words[:2])
    if family not in _FAMILIES or not words or words[0] not in _WIDTHS:
        return None
    for word in words[1:]:
        if not _PLAIN.fullmatch(word):
            raise UserError(f"timm's {architecture} is unsupported: it differs from a ViT ({word})")
    text = "_".join(words)
    is_hybrid, blocks = re.search(r"_r(\d*)(?=_)", text) is not None, _named_blocks(text)
    if is_hybrid != (blocks is not None):
        return None
    dim, heads = _width_and_heads(words)
    registers = re.search(r"_reg(\d+)", text)
    return _named_layers(architecture) | dict(
        layers=blocks,
        embed_dim=dim,
        heads=heads,
        patch_size=_named_patch_size(text, family, is_hybrid),
        reg_tokens=int(registers[1]) if registers else _RADIO.get(words[-1], 0),
        dist_token="distilled" in words,
    )


def _named_aimv2(size: str, patch: str) -> dict:
    dim, heads = _AIMV2[size]
    return dict(
        embed_dim=dim,
        heads=heads,
        patch_size=int(patch.removeprefix("patch")),
        reg_tokens=0,
        dist_token=False,
        eps=1e-5,
    )


def _named_blocks(text: str) -> tuple[int, ...] | None:
    """Returns the number of residual units in each stage of a hybrid's ResNet; None: no ResNet."""
    trunk, stride = re.search(r"_r(\d*)(?=_)", text), re.search(r"_s(\d+)", text)
    if trunk is None or stride is None:
        return None
    return _TRUNKS.get((trunk[1], stride[1]))


def _named_patch_size(text: str, family: str, is_hybrid: bool) -> int | None:
    if patch := re.search(r"_p(?:atch)?(\d+)", text):
        return int(patch[1])
    if family == "flexivit":
        return 16
    return 1 if is_hybrid else None


def _width_and_heads(words: list[str]) -> tuple[int, int]:
    """Returns a ViT's width and number of heads from the words in its architecture's name."""
    if words[0] == "giant" and {"dinov2", "tipsv2", "radio"} & set(words):
        return 1536, 24
    if "plus" in words:
        return 896, 14
    if words[:3] == ["base", "patch16", "gap"]:
        return _WIDTHS["base"][0], 16
    return _WIDTHS[words[0]]


def _named_layers(architecture: str) -> dict:
    """Returns timm's arguments for norms and activations from an architecture's name."""
    family, *words = architecture.split("_")
    arguments = {}
    if "clip" in words or family == "beit3":
        arguments["eps"] = 1e-5
    if "quickgelu" in words:
        arguments["act_layer"] = "quick_gelu"
    elif architecture.startswith(_TANH):
        arguments["act_layer"] = "gelu_tanh"
    if "rpn" in words:
        arguments["norm_at"] = "after"
    return arguments


def _heads(model_args: dict, named: int | None, shapes: dict, dim: int, depth: int) -> int:
    """Returns the number of attention heads.

    The first of these sources that determines the number is used:

    1. `num_heads` in `config.json`.
    2. The architecture's name.
    3. The width of the norm of queries, which is the width of a head.
    4. The known size, such as Ti or S, with the same width and depth.
    5. Heads of width 64.
    """
    if model_args.get("num_heads") is not None:
        return model_args["num_heads"]
    if named:
        return named
    if norm := shapes.get("blocks.0.attn.q_norm.weight"):
        return dim // norm[0]
    for size in SIZES.values():
        if (size["dim"], size["depth"]) == (dim, depth) and size["heads"] != 12:
            return size["heads"]
    return dim // 64


# Names of timm's architectures by the settings for which timm has no argument: norm, norm_at,
# norm_epsilon, mlp.
_VARIANTS = {
    ("layer", "before", 1e-6, "gelu"): "vit_base_patch16_224",
    ("layer", "before", 1e-6, "swiglu"): "vit_giant_patch14_dinov2",
    ("layer", "before", 1e-5, "gelu"): "vit_base_patch16_clip_224",
    ("layer", "after", 1e-6, "gelu"): "vit_base_patch16_rpn_224",
    ("rms", "before", 1e-5, "swiglu"): "aimv2_large_patch14_224",
}


_TITLE = "timm's ViT"
_ACTIVATIONS = {"tanh": "gelu_tanh", "erf": "gelu", "quick": "quick_gelu"}  # Keys: our names.
# vit_jax's arguments that a `config.json` stores or an architecture's name implies.
_DESCRIBED = ("resnet_blocks", "registers", "mlp", "gelu", "qk_norm", "qkv_bias", "bias", "norm")
_DESCRIBED += ("norm_at", "sub_norm", "stem_norm", "final_norm", "fc_norm", "pooling", "cls_token")
_DESCRIBED += ("pool_all", "position", "distillation", "pre_logits")


def _describe(values: dict) -> dict:
    require_defaults(_TITLE, ViT, values, *_DESCRIBED)
    _refuse_options(values)
    pooling, position = values["pooling"], values["position"]
    dim, gated = values["dim"], values["mlp"] == "swiglu"
    arguments = size_arguments(values) | dict(
        init_values=values["layer_scale"],
        no_embed_class=False,
        global_pool=POOLINGS[pooling],
        fc_norm=values["fc_norm"],
        final_norm=values["final_norm"],
        pre_norm=values["stem_norm"] == "tokens",
        qkv_bias=values["qkv_bias"] == "all",
        proj_bias=values["bias"],
        scale_attn_norm=values["sub_norm"] == "both",
        scale_mlp_norm=values["sub_norm"] != "none",
        pool_include_prefix=values["pool_all"],
    )
    if gated and values["norm"] == "layer":  # timm counts the gate and the gated values.
        arguments["mlp_ratio"] = mlp_ratio(2 * values["mlp_dim"], dim)
    if not gated:
        arguments["act_layer"] = _ACTIVATIONS[values["gelu"]]
    if pooling != "cls":
        arguments["class_token"] = values["cls_token"]
    if values["resnet_blocks"] is not None:
        del arguments["patch_size"]
    for ours, theirs in dict(qk_norm="qk_norm", registers="reg_tokens").items():
        if values[ours]:
            arguments[theirs] = values[ours]
    if position == "none":
        arguments["pos_embed"] = "none"
    architecture = _architecture(values)
    return dict(
        architecture=architecture, model_args=arguments, num_features=dim
    ) | pretrained_config(values, fixed_input_size=True)


def _refuse_options(values: dict) -> None:
    """Raises UserError for values of arguments, or combinations of values, that timm lacks."""
    for option, there in dict(
        position=("1d", "none"), qkv_bias=("all", "none"), pooling=POOLINGS
    ).items():
        if values[option] not in there:
            remedy = "; --position=1d writes them as a table" if values[option] in FIXED else ""
            raise UserError(f"{_TITLE} has no {option}={values[option]!r}{remedy}")
    if values["distillation"] == "token":
        heads = (
            "one"
            if values["num_classes"]
            else "none, and there features are the mean of two tokens"
        )
        raise UserError(
            f"timm's distilled ViT has two heads; this model has {heads} (distillation='token'); "
            "--to=transformers has such a model"
        )
    if (values["norm"] == "rms") != (values["stem_norm"] == "patches"):
        raise UserError(
            f"{_TITLE} has no norm={values['norm']!r} with stem_norm={values['stem_norm']!r}"
        )


def _architecture(values: dict) -> str:
    """Returns the name of a timm architecture; `model_args` in the config override its sizes.

    Raises:
      UserError: no architecture has this ResNet, or this norm and MLP.
    """
    blocks = values["resnet_blocks"]
    if blocks is not None and blocks not in _HYBRIDS:
        raise UserError(f"timm has no hybrid with {list(blocks)} units")
    if values["distillation"] == "heads":
        return "deit_base_distilled_patch16_224"
    options = ("norm", "norm_at", "norm_epsilon", "mlp")
    variant = tuple(values[option] for option in options)
    if blocks is None and variant in _VARIANTS:
        return _VARIANTS[variant]
    if variant != ("layer", "before", 1e-6, "gelu"):
        words = ", ".join(f"{option}={values[option]!r}" for option in options)
        raise UserError(f"{_TITLE} has no {words}")
    return _HYBRIDS[blocks]


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: "patch_embed.proj.weight" in tensors,
    arguments=_arguments,
    rules=_rules,
    describe=_describe,
    rename=rename_positions,
    finish=with_registers,
)
