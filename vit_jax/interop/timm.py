"""timm's tensors and `config.json`: VisionTransformer, its hybrids, distilled DeiT, and BiT's ResNetV2.

A folder with both files is what `timm.create_model("local-dir:FOLDER", pretrained=True)` takes.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.layout import (
    BLOCK,
    CONV,
    LINEAR_CONV,
    LINEAR_OUT,
    SAME,
    UNIT,
    Rule,
    count_units,
    torch_dense,
    torch_norm,
)
from vit_jax.interop.positions import image_size_of
from vit_jax.interop.preprocessing import UNSAID, Preprocessing, of_timm, per_channel, to_timm
from vit_jax.interop.tensor_files import Tensor
from vit_jax.models.resnet import BiT, resnet_stride
from vit_jax.models.vit import SIZES, ViT


def _resnet(root: str, units: str) -> tuple[Rule, ...]:
    """Rules of a ResNet below `root`, whose stages are at `units`."""
    unit = units + "stages.{m[0]}.blocks.{m[1]}."
    return (
        Rule("resnet/root/kernel", root + "conv.weight", CONV),
        *torch_norm("resnet/root_norm", root + "norm"),
        Rule(UNIT + r"conv(\d)/kernel", unit + "conv{2}.weight", CONV),
        *torch_norm(UNIT + r"norm(\d)", unit + "norm{2}"),
        Rule(UNIT + "conv_proj/kernel", unit + "downsample.conv.weight", CONV),
        *torch_norm(UNIT + "norm_proj", unit + "downsample.norm"),
    )


_THEIRS = "blocks.{0}."
_VIT_RULES = (
    *torch_dense("patch_embedding", "patch_embed.proj", CONV, SAME),
    Rule("cls", "cls_token"),
    Rule("distillation_token", "dist_token"),
    Rule("register_tokens", "reg_token"),
    Rule("position_embedding/table", "pos_embed"),
    *torch_norm(BLOCK + r"norm(\d)", _THEIRS + "norm{1}"),
    *torch_dense(BLOCK + "attention/qkv", _THEIRS + "attn.qkv"),
    *torch_norm(BLOCK + "attention/query_norm", _THEIRS + "attn.q_norm"),
    *torch_norm(BLOCK + "attention/key_norm", _THEIRS + "attn.k_norm"),
    *torch_dense(BLOCK + "attention/out", _THEIRS + "attn.proj", LINEAR_OUT),
    Rule(BLOCK + r"scale(\d)", _THEIRS + "ls{1}.gamma"),
    *torch_dense(BLOCK + r"mlp/fc(\d)", _THEIRS + "mlp.fc{1}"),
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
_ROOT_RULES = _resnet("patch_embed.backbone.", "patch_embed.backbone.") + _VIT_RULES
_HYBRID_RULES = _resnet("patch_embed.backbone.stem.", "patch_embed.backbone.") + _VIT_RULES
_BIT_RULES = (
    *_resnet("stem.", ""),
    *torch_norm("norm", "norm"),
    *torch_dense("head", "head.fc", LINEAR_CONV),
)

# timm's names of architectures; the sizes are given as arguments beside them.
_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
_BITS = {
    ((3, 4, 6, 3), 1): "resnetv2_50x1_bit",
    ((3, 4, 6, 3), 3): "resnetv2_50x3_bit",
    ((3, 4, 23, 3), 1): "resnetv2_101x1_bit",
    ((3, 4, 23, 3), 3): "resnetv2_101x3_bit",
    ((3, 8, 36, 3), 2): "resnetv2_152x2_bit",
    ((3, 8, 36, 3), 4): "resnetv2_152x4_bit",
}


def rules(model: type, values: dict) -> tuple[Rule, ...]:
    """How a model's parameters are named."""
    if model is BiT:
        return _BIT_RULES
    return _ROOT_RULES if values["resnet_blocks"] == () else _HYBRID_RULES


def rename(tensors: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """The same tensors, the position table with rows for class and distillation token and no others.

    What positions a table has for registers is added to these, which comes to the same.
    """
    table = tensors.get("pos_embed")
    if table is None or len(table.shape) != 3 or "patch_embed.proj.weight" not in tensors:
        return tensors
    special = ("cls_token" in tensors) + ("dist_token" in tensors)
    registers = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    _, rows, dim = table.shape
    if _patches_alone(tensors, config, rows, special + registers):
        padded = Tensor((1, rows + special, dim), table.dtype, lambda: _padded(table, special))
        return tensors | {"pos_embed": padded}
    if not registers:
        return tensors
    token, own = tensors["reg_token"], np.s_[special : special + registers]
    return tensors | {
        "pos_embed": Tensor(
            (1, rows - registers, dim), table.dtype, lambda: np.delete(table.read(), own, axis=1)
        ),
        "reg_token": Tensor(token.shape, token.dtype, lambda: token.read() + table.read()[:, own]),
    }


def _patches_alone(tensors: dict[str, Tensor], config: dict, rows: int, others: int) -> bool:
    """Whether a position table has rows for patches only: by what is said, else by what is square."""
    said = (config.get("model_args") or {}).get("no_embed_class")
    if said is not None:
        return bool(said)
    if size := _stated_size(config):
        stride = tensors["patch_embed.proj.weight"].shape[-1] * _trunk_stride(tensors)
        patches = (size[0] // stride) * (size[1] // stride)
        if patches in (rows, rows - others):
            return patches == rows
    return math.isqrt(rows) ** 2 == rows and math.isqrt(rows - others) ** 2 != rows - others


def _trunk_stride(tensors: dict) -> int:
    trunk = any(name.startswith("patch_embed.backbone.") for name in tensors)
    return resnet_stride(_blocks(tensors) if trunk else None)


def _stated_size(config: dict) -> tuple[int, int] | None:
    """Size of the images in a `config.json`."""
    size = (config.get("model_args") or {}).get("img_size")
    if size is None:
        size = ((config.get("pretrained_cfg") or {}).get("input_size") or [None])[1:] or None
    return (size, size) if isinstance(size, int) else size and tuple(size)


def _padded(table: Tensor, special: int) -> np.ndarray:
    """A table of patches alone, with zeros for the special tokens."""
    return np.pad(table.read(), ((0, 0), (special, 0), (0, 0)))


def with_registers(tensors: dict[str, np.ndarray], values: dict) -> dict[str, np.ndarray]:
    """Tensors to write: zeros in the position table for the registers, as timm has rows for them."""
    if not values.get("registers") or "pos_embed" not in tensors:
        return tensors
    special = "cls_token" in tensors
    zeros = np.zeros((1, values["registers"], values["dim"]), np.float32)
    table = tensors["pos_embed"]
    table = np.concatenate([table[:, :special], zeros, table[:, special:]], axis=1)
    return tensors | {"pos_embed": table}


def arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[type, dict, str]:
    """The model that tensors (renamed) and a `config.json` (or {}) belong to; see `image_size_of`.

    What neither says is timm's default: exact GELU, layer norms with 1e-6.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    given = config.get("model_args") or {}
    _refuse_unread(config, given, shapes)
    named = _named(config.get("architecture"))
    _refuse_contradictions(config, given, named, shapes)
    stated = _stated_size(config)
    blocks = _blocks(shapes)
    try:
        if root := shapes.get("stem.conv.weight"):
            values = dict(
                image_size=stated or image_size or 224,
                channels=root[1],
                num_classes=shapes.get("head.fc.bias", (0,))[0],
                resnet_blocks=blocks,
                resnet_width=root[0] // 64,
                resnet_epsilons="timm",
            )
            return BiT, values, ""
        dim, inputs, patch, _ = shapes["patch_embed.proj.weight"]
        root = shapes.get("patch_embed.backbone.stem.conv.weight") or shapes.get(
            "patch_embed.backbone.conv.weight"
        )
        depth = sum(bool(re.fullmatch(r"blocks\.\d+\.norm1\.weight", name)) for name in shapes)
        hidden = shapes["blocks.0.mlp.fc2.weight"][1]
        pooling = _pooling(config, given, shapes)
        distillation = "none"
        if "dist_token" in shapes:
            distillation = "heads" if "head_dist.bias" in shapes else "token"
        values = dict(
            patch_size=patch,
            channels=root[1] if root else inputs,
            resnet_blocks=blocks if root else None,
            resnet_width=root[0] // 64 if root else 1,
            resnet_epsilons="timm" if root else "google",
            dim=dim,
            depth=depth,
            hidden=hidden,
            heads=_heads(given, named, shapes, dim, depth),
            num_classes=shapes.get("head.bias", (0,))[0],
            pooling=pooling,
            cls_token="cls_token" in shapes and pooling != "cls",
            fc_norm="fc_norm.weight" in shapes,
            distillation=distillation,
            registers=shapes["reg_token"][1] if "reg_token" in shapes else 0,
            mlp="swiglu" if shapes["blocks.0.mlp.fc1.weight"][0] == 2 * hidden else "gelu",
            gelu="tanh" if given.get("act_layer") == "gelu_tanh" else "erf",  # Unused in a gated layer.
            qk_norm="blocks.0.attn.q_norm.weight" in shapes,
            layer_scale=1e-5 if "blocks.0.ls1.gamma" in shapes else None,
            position="1d" if "pos_embed" in shapes else "none",
        )
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"these are not the tensors of a ViT or BiT of timm's: {error} is missing or of an unknown "
            f"shape among {len(shapes)} tensors such as {min(shapes, default='none')!r}"
        ) from error
    rows = shapes["pos_embed"][1] if "pos_embed" in shapes else None
    gelu = dict(erf="exact GELU", tanh="tanh GELU")[values["gelu"]]
    missing = "architecture in its config.json" if config else "config.json"
    assumed = "" if named.dim else f"{values['heads']} heads and {gelu}, as there is no {missing}"
    return ViT, values | dict(image_size=image_size_of(values, rows, stated, image_size)), assumed


# Arguments that change the model in ways which its tensors do not show, and what they may be.
_ONLY = {
    "act_layer": (None, "gelu", "gelu_tanh"),
    "global_pool": (None, "token", "avg", "map"),
    "fc_norm": (None, False, True),
    "final_norm": (True,),
    "norm_layer": (None,),
    "embed_norm_layer": (None,),
    "pos_embed": ("learn", "none", ""),
}
_SHOWN = (
    *("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "in_chans", "num_classes"),
    *("class_token", "init_values", "qkv_bias", "qk_norm", "reg_tokens", "no_embed_class", "proj_bias"),
    *("weight_init", "fix_init", "dynamic_img_size", "strict_img_size", "layers", "width_factor"),
)


def _refuse_unread(config: dict, given: dict, shapes: dict) -> None:
    """Raises UserError for what differs from a ViT or BiT but would load."""
    for name, value in given.items():
        harmless = name in _SHOWN or name.endswith("_rate")
        if not harmless and value not in _ONLY.get(name, (None, False, "")):
            raise UserError(f"a timm model with {name}={value!r} is not read")
    pooling = given.get("global_pool") or config.get("global_pool")
    if pooling not in _ONLY["global_pool"]:
        raise UserError(f"a timm model with global_pool={pooling!r} is not read")
    if "stem.conv.weight" in shapes and pooling not in (None, "avg"):
        raise UserError(f"a timm BiT with global_pool={pooling!r} is not read")


def _pooling(config: dict, given: dict, shapes: dict) -> str:
    """Ours: by the tensors, and where they leave it open by what is said; a file alone may be either."""
    if "attn_pool.latent" in shapes:
        return "map"
    said = given.get("global_pool") or config.get("global_pool")
    # timm has an fc_norm where it averages, unless it is told otherwise.
    averaged = said == "avg" or (said is None and "fc_norm.weight" in shapes)
    return "gap" if averaged or "cls_token" not in shapes else "cls"


def _blocks(names: Iterable[str]) -> tuple[int, ...]:
    return count_units(names, r"(?:patch_embed\.backbone\.)?stages\.(\d+)\.blocks\.(\d+)\.", first=0)


# Width and heads by the word for a size in timm's names of architectures.
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
    "gigantic": (1664, 16),
}
# Words that may follow; of others (clip, siglip, xp, ...) is what computes otherwise.
_PLAIN = re.compile(
    r"patch\d+|reg\d+|gap|map|dinov2|tipsv2|plus|distilled|36x1|r|r26|r50|s\d+|p\d+|\d+|in21k"
)
_TRUNKS = {("", "16"): (), ("26", "32"): (2, 2, 2, 2), ("50", "16"): (3, 4, 9), ("50", "32"): (3, 4, 6, 3)}
_TESTS = {"test_vit": 0, "test_vit2": 1}  # Registers.


class _Named(NamedTuple):
    """What the name of an architecture says of a model; None where it says nothing."""

    dim: int | None = None
    heads: int | None = None
    patch: int | None = None
    registers: int = 0
    distilled: bool = False
    blocks: tuple[int, ...] | None = None  # Units in the stages of a ResNet.
    width: int = 1  # Factor on its channels.


def _named(architecture: str | None) -> _Named:
    """What a name says, nothing if there is none.

    Raises:
      UserError: models of this name compute something else than a ViT, hybrid or BiT.
    """
    if architecture is None:
        return _Named()
    for (blocks, width), name in _BITS.items():
        if name == architecture:
            return _Named(blocks=blocks, width=width)
    if architecture in _TESTS:
        return _Named(64, 2, 16, _TESTS[architecture])
    family, *words = architecture.split("_")
    if family not in ("vit", "deit", "deit3", "flexivit") or not words or words[0] not in _WIDTHS:
        raise UserError(f"timm's {architecture} is none of the ViTs, hybrids and BiTs that are read")
    for word in words[1:]:
        if not _PLAIN.fullmatch(word):
            raise UserError(f"timm's {architecture} is not read: it differs from a ViT ({word})")
    text = "_".join(words)
    (dim, heads), trunk = _WIDTHS[words[0]], re.search(r"_r(\d*)(?=_)", text)
    if words[0] == "giant" and words[-1] in ("dinov2", "tipsv2"):
        dim, heads = 1536, 24
    elif "plus" in words:
        dim, heads = 896, 14
    elif text.startswith("base_patch16_gap"):
        heads = 16
    patch, registers = (re.search(pattern, text) for pattern in (r"_p(?:atch)?(\d+)", r"_reg(\d+)"))
    stride = re.search(r"_s(\d+)", text)
    blocks = _TRUNKS.get((trunk[1], stride and stride[1])) if trunk else None
    if bool(trunk) != (blocks is not None):
        raise UserError(f"timm's {architecture} is none of the ViTs, hybrids and BiTs that are read")
    default = 16 if family == "flexivit" else 1 if trunk else None
    return _Named(
        dim,
        heads,
        int(patch[1]) if patch else default,
        int(registers[1]) if registers else 0,
        "distilled" in words,
        blocks,
    )


def _refuse_contradictions(config: dict, given: dict, named: _Named, shapes: dict) -> None:
    """Raises UserError where the tensors cannot be those of the architecture, with the arguments given."""
    if config.get("architecture") is None:
        return
    bit, trunk = "stem.conv.weight" in shapes, any(x.startswith("patch_embed.backbone.") for x in shapes)
    # By the names of timm's arguments, which may change what an architecture is by default.
    pairs = {"layers": (named.blocks, _blocks(shapes) if bit or trunk else None)}
    if bit:
        pairs["width_factor"] = (named.width, shapes["stem.conv.weight"][0] // 64)
    elif kernel := shapes.get("patch_embed.proj.weight"):
        registers = shapes["reg_token"][1] if "reg_token" in shapes else 0
        pairs["embed_dim"] = (named.dim, kernel[0])
        pairs["patch_size"] = (named.patch, kernel[-1])
        pairs["reg_tokens"] = (named.registers, registers)
        pairs["dist_token"] = (named.distilled, "dist_token" in shapes)
    for name, (said, found) in pairs.items():
        said = said if given.get(name) is None else given[name]
        said = tuple(said) if isinstance(said, list) else said
        if said != found:
            raise UserError(
                f"config.json contradicts the tensors: {config['architecture']!r} has {name} {said!r}, "
                f"they have {found!r}"
            )


def _heads(given: dict, named: _Named, shapes: dict, dim: int, depth: int) -> int:
    """As is said, as queries' norms are wide, as the size of that width has, or 64 wide where none says."""
    if given.get("num_heads") is not None:
        return given["num_heads"]
    if named.heads:
        return named.heads
    if norm := shapes.get("blocks.0.attn.q_norm.weight"):
        return dim // norm[0]
    for size in SIZES.values():
        if (size["dim"], size["depth"]) == (dim, depth) and size["heads"] != 12:
            return size["heads"]
    return dim // 64


def preprocessing(config: dict, said: dict, channels: int) -> tuple[dict, Preprocessing | None, str]:
    """Mean and deviation, the rest, and what a file without `config.json` does not say."""
    if not config:
        return {}, None, "pixels in [-1, 1]"
    return *of_timm(config, channels), ""


def class_names(config: dict) -> list:
    """Those of the classes, if they are named."""
    names = config.get("label_names") or (config.get("pretrained_cfg") or {}).get("label_names")
    return list(names or [])


def files(model: type, values: dict, seen: Preprocessing | None, names: Sequence[str]) -> dict[str, dict]:
    """What lies beside the tensors: `config.json`, with the preprocessing and the classes' names.

    Raises:
      UserError: timm has no such model, or no such crop.
    """
    described = config(model, values)
    channels = values["channels"]
    described["pretrained_cfg"] |= dict(
        mean=per_channel(values["mean"], channels), std=per_channel(values["deviation"], channels)
    ) | to_timm(seen or UNSAID, values["image_size"])
    return {"config.json": described | (dict(label_names=list(names)) if names else {})}


def config(model: type, values: dict) -> dict:
    """What timm's `config.json` says of a model.

    Raises:
      UserError: timm has no such model.
    """
    height, width = values["image_size"]
    pretrained = dict(
        input_size=[values["channels"], height, width],
        num_classes=values["num_classes"],
        fixed_input_size=model is ViT,
    )
    common = dict(num_classes=values["num_classes"], pretrained_cfg=pretrained)
    if model is BiT:
        key = (values["resnet_blocks"], values["resnet_width"])
        if key not in _BITS:
            raise UserError(f"timm has no BiT with {list(key[0])} units and width {key[1]}")
        return dict(architecture=_BITS[key], model_args=dict(in_chans=values["channels"])) | common
    for option, only in dict(norm_epsilon=1e-6, position_at="stem", rope=False, resnet_width=1).items():
        if values[option] != only:
            raise UserError(f"timm's ViT has no {option}={values[option]!r}")
    if values["distillation"] == "token":
        raise UserError("timm's distilled ViT has two heads; this model has one (distillation='token')")
    blocks = values["resnet_blocks"]
    if blocks is not None and blocks not in _HYBRIDS:
        raise UserError(f"timm has no hybrid with {list(blocks)} units")
    pooling = values["pooling"]
    dim, hidden = values["dim"], values["hidden"]
    gated = values["mlp"] == "swiglu"
    wide = 2 * hidden if gated else hidden
    ratio = wide / dim if int(dim * (wide / dim)) == wide else (wide + 0.5) / dim
    chosen = dict(
        img_size=list(values["image_size"]),
        embed_dim=dim,
        depth=values["depth"],
        num_heads=values["heads"],
        mlp_ratio=ratio,
        in_chans=values["channels"],
        init_values=values["layer_scale"],
        no_embed_class=False,
        global_pool=dict(cls="token", gap="avg", map="map")[pooling],
        fc_norm=values["fc_norm"],
    )
    if not gated:
        chosen["act_layer"] = "gelu_tanh" if values["gelu"] == "tanh" else "gelu"
    if pooling != "cls":
        chosen["class_token"] = values["cls_token"]
    if blocks is None:
        chosen["patch_size"] = values["patch_size"]
    for ours, theirs in dict(qk_norm="qk_norm", registers="reg_tokens").items():
        if values[ours]:
            chosen[theirs] = values[ours]
    if values["position"] == "none":
        chosen["pos_embed"] = "none"
    architecture = "vit_base_patch16_224" if blocks is None else _HYBRIDS[blocks]
    if gated:
        architecture = "vit_giant_patch14_dinov2"  # What brings the gated layers, which no argument can name.
    elif values["distillation"] == "heads":
        architecture = "deit_base_distilled_patch16_224"
    return dict(architecture=architecture, model_args=chosen, num_features=dim) | common
