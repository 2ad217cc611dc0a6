"""Names of ViTs, of hybrids, and of plain ViTs from later publications, such as DINOv2.

`ViT-B/16` is size B with patches of 16 pixels. Any size can be combined with any patch size.
`FOLLOWERS` lists the ViTs from later publications by their authors' names.
"""

import re
from typing import NamedTuple

from vit_jax.models.resnet import WIDTH, parse_width, resnet_stride, spell_width

# B, L and H are from table 1 of the ViT paper. b (figure 4) is B with all widths halved. Ti and S
# are from "How to train your ViT?" (Steiner et al., 2022). The other sizes are from "Scaling Vision
# Transformers" (Zhai et al., 2022) and "Getting ViT in Shape" (Alabdulmohsin et al., 2023), with
# big_vision's names.
SIZES = {
    "mu": dict(dim=32, depth=1, mlp_dim=128, heads=2),
    "Ti": dict(dim=192, depth=12, mlp_dim=768, heads=3),
    "S": dict(dim=384, depth=12, mlp_dim=1536, heads=6),
    "b": dict(dim=384, depth=12, mlp_dim=1536, heads=12),
    "M": dict(dim=512, depth=12, mlp_dim=2048, heads=8),
    "B": dict(dim=768, depth=12, mlp_dim=3072, heads=12),
    "L": dict(dim=1024, depth=24, mlp_dim=4096, heads=16),
    "So400m": dict(dim=1152, depth=27, mlp_dim=4304, heads=16),
    "H": dict(dim=1280, depth=32, mlp_dim=5120, heads=16),
    "g": dict(dim=1408, depth=40, mlp_dim=6144, heads=16),
    "G": dict(dim=1664, depth=48, mlp_dim=8192, heads=16),
    "e": dict(dim=1792, depth=56, mlp_dim=15360, heads=16),
}

# Width of a head in models whose size is given by numbers: ViT-64x4 has 4 layers of width 64, each
# with 2 heads.
HEAD_WIDTH = 32

# The ResNet of a hybrid. The key is the ResNet's name and the number after the slash, such as
# ("R50", 16) for R50+ViT-B/16. The number is the total stride in pixels. Only R+ViT-Ti/16 has a
# different stride, 32: a patch is 8 positions of the ResNet's feature map wide. Hybrids with the
# numbers 4 and 8 are for images of about 32 pixels. R50 with 16, R14 with 4 and R26 with 4 have no
# stage 4; the residual units of stage 4 are in stage 3.
HYBRIDS = {
    ("R50", 32): dict(resnet_blocks=(3, 4, 6, 3), patch_size=1),
    ("R50", 16): dict(resnet_blocks=(3, 4, 9), patch_size=1),
    ("R26", 32): dict(resnet_blocks=(2, 2, 2, 2), patch_size=1),
    ("R26", 8): dict(resnet_blocks=(2, 2, 2, 2), resnet_stem="small", patch_size=1),
    ("R26", 4): dict(resnet_blocks=(2, 2, 4), resnet_stem="small", patch_size=1),
    ("R14", 8): dict(resnet_blocks=(1, 1, 1, 1), resnet_stem="small", patch_size=1),
    ("R14", 4): dict(resnet_blocks=(1, 1, 2), resnet_stem="small", patch_size=1),
    ("R", 16): dict(resnet_blocks=(), patch_size=8),
}


class Follower(NamedTuple):
    """Plain ViTs of one publication.

    Attributes:
      family: the first part of the models' names, such as `DINOv2`.
      source: the publication.
      fixed: arguments that all these models share.
      models: the size, patch size and further arguments of each model, by the second part of the
        model's name, such as `B/14`.
    """

    family: str
    source: str
    fixed: dict
    models: dict[str, dict]


def _sized(*names: str, **others) -> dict[str, dict]:
    """Returns the arguments of models such as `B/16`, as a dictionary by model name."""
    sizes = ((name, *name.split("/")) for name in names)
    return {name: SIZES[size] | dict(patch_size=int(patch)) | others for name, size, patch in sizes}


def _gated(patch: int, dim: int, depth: int, mlp_dim: int, heads: int, **others) -> dict:
    """Returns the arguments of a model with gated MLPs."""
    size = dict(patch_size=patch, dim=dim, depth=depth, mlp_dim=mlp_dim, heads=heads)
    return size | dict(mlp="swiglu") | others


_DINOV2 = _sized("S/14", "B/14", "L/14") | {"g/14": _gated(14, 1536, 40, 4096, 24)}
# In the fine-tuned classifiers of BEiT, BEiT v2, EVA and EVA-02, the head reads the normalized mean
# of the patches.
_AVERAGED = dict(pooling="gap", cls_token=True, fc_norm=True)
_BEIT = dict(position="bias", qkv_bias="qv", gelu="erf") | _AVERAGED
_BEITS = _sized("B/16", layer_scale=0.1) | _sized("L/16", layer_scale=1e-5)
_PE = dict(stem_norm="tokens", rope="pe", gelu="erf", norm_epsilon=1e-5)
_PE |= dict(pooling="map", pool_heads=8, pool_all=True, cls_token=True)

FOLLOWERS = (
    Follower("DINOv2", "Oquab et al., 2024 (DINOv2)", dict(layer_scale=1e-5, gelu="erf"), _DINOV2),
    Follower(
        "DINOv2",
        "Darcet et al., 2024 (registers)",
        dict(layer_scale=1e-5, gelu="erf", registers=4),
        {f"{name}-reg4": size for name, size in _DINOV2.items()},
    ),
    Follower(
        "DINOv3",
        "Simeoni et al., 2025 (DINOv3)",
        dict(position="none", rope="dinov3", rope_rescale=2.0, registers=4, layer_scale=1e-5)
        | dict(qkv_bias="qv", gelu="erf", norm_epsilon=1e-5),
        _sized("S/16")
        | {"S+/16": _gated(16, 384, 12, 1536, 6)}
        | _sized("B/16", "L/16")
        | {
            "H+/16": _gated(16, 1280, 32, 5120, 20),
            "7B/16": _gated(16, 4096, 40, 8192, 32, qkv_bias="none"),
        },
    ),
    Follower("BEiT", "Bao et al., 2022 (BEiT)", _BEIT, _BEITS),
    # BEiT v2's models have the same arguments as BEiT's. For these arguments `spell` returns BEiT's
    # name.
    Follower("BEiTv2", "Peng et al., 2022 (BEiT v2)", _BEIT, _BEITS),
    Follower(
        "EVA",
        "Fang et al., 2023 (EVA)",
        dict(qkv_bias="qv", gelu="erf") | _AVERAGED,
        _sized("g/14"),
    ),
    Follower(
        "EVA02",
        "Fang et al., 2024 (EVA-02)",
        dict(rope="eva02", rope_grid=(16, 16), qkv_bias="qv") | _AVERAGED,
        {
            "Ti/14": _gated(14, 192, 12, 512, 3),
            "S/14": _gated(14, 384, 12, 1024, 6),
            "B/14": _gated(14, 768, 12, 2048, 12, sub_norm="mlp"),
            "L/14": _gated(14, 1024, 24, 2730, 16, sub_norm="mlp"),
        },
    ),
    Follower(
        "CLIP",
        "Radford et al., 2021 (CLIP)",
        dict(stem_norm="tokens", gelu="quick", norm_epsilon=1e-5),
        _sized("B/32", "B/16", "L/14"),
    ),
    Follower(
        "OpenCLIP",
        "Cherti et al., 2023 (OpenCLIP)",
        dict(stem_norm="tokens", gelu="erf", norm_epsilon=1e-5),
        _sized("B/32", "B/16", "L/14", "H/14", "g/14", "G/14"),
    ),
    Follower(
        "SigLIP",
        "Zhai et al., 2023 (SigLIP)",
        dict(pooling="map"),
        _sized("B/32", "B/16", "L/16", "So400m/16", "So400m/14")
        | {"g-opt/16": dict(patch_size=16, dim=1536, depth=40, mlp_dim=6144, heads=16)},
    ),
    Follower(
        "AIMv2",
        "Fini et al., 2024 (AIMv2)",
        dict(stem_norm="patches", norm="rms", norm_epsilon=1e-5, bias=False, pooling="gap")
        | dict(qkv_bias="none"),
        {
            "L/14": _gated(14, 1024, 24, 2816, 8),
            "H/14": _gated(14, 1536, 24, 4096, 12),
            "1B/14": _gated(14, 2048, 24, 5632, 16),
            "3B/14": _gated(14, 3072, 24, 8192, 24),
        },
    ),
    Follower(
        "PE-core",
        "Bolya et al., 2025 (Perception Encoder)",
        _PE,
        {"T/16": SIZES["Ti"] | dict(patch_size=16, rope_grid=(24, 24))}
        | _sized("S/16", "L/14", rope_grid=(24, 24))
        | _sized("B/16", rope_grid=(14, 14)),
    ),
)
# Arguments and publication of each model of `FOLLOWERS`, by its full name.
_FOLLOWING = {
    f"{follower.family}-{name}": (follower.fixed | args, follower.source)
    for follower in FOLLOWERS
    for name, args in follower.models.items()
}

NAMES = (
    *("ViT-mu/16", "ViT-Ti/32", "ViT-Ti/16", "ViT-Ti/8"),
    *("ViT-S/32", "ViT-S/16", "ViT-S/14", "ViT-S/8"),
    *("ViT-b/32", "ViT-M/16", "ViT-B/32", "ViT-B/16", "ViT-B/14", "ViT-B/8"),
    *("ViT-L/32", "ViT-L/16", "ViT-L/14", "ViT-So400m/14", "ViT-H/32", "ViT-H/16", "ViT-H/14"),
    *("ViT-g/16", "ViT-g/14", "ViT-G/16", "ViT-G/14", "ViT-e/14"),
    *("R50+ViT-B/32", "R50+ViT-B/16", "R50+ViT-L/32", "R50+ViT-L/16"),
    *("ViT-32x4/4", "ViT-64x4/4", "ViT-96x4/4"),
    *("R14x1/16+ViT-32x4/8", "R14x1/8+ViT-64x4/8", "R14x1/4+ViT-96x4/8"),
    *("R14x1/8+ViT-32x4/4", "R14x1/4+ViT-64x4/4", "R26x1/4+ViT-96x4/4"),
    *("R+ViT-Ti/16", "R26+ViT-S/32", "R26+ViT-B/32", "Axial-ViT-B/32", "Axial-ViT-B/16"),
    *_FOLLOWING,
)

# Arguments that distinguish models of the same size and patch size, with their values in the ViT
# paper. Two kinds of arguments are not compared: pooling, which fine-tuning changes, and constants
# such as epsilons.
_TELLING = dict(
    resnet_blocks=None,
    distillation="none",
    stem_norm="none",
    position="1d",
    position_at="stem",
    rope="none",
    registers=0,
    attention="full",
    mlp="gelu",
    norm="layer",
    norm_at="before",
    sub_norm="none",
    qk_norm=False,
    qkv_bias="all",
    bias=True,
)
_SIZE = ("dim", "depth", "mlp_dim", "heads")


def _trunk(values: dict) -> dict:
    """Returns the arguments in which models with equal sizes and patch sizes can differ.

    An example is `registers`.
    """
    arguments = {name: values.get(name, papers) for name, papers in _TELLING.items()}
    if arguments["rope"] == "dinov3":
        del arguments["qkv_bias"]  # DINOv3's biases are all zero, and timm omits them.
    # CLIP and OpenCLIP differ only in the kind of GELU. Therefore CLIP's "quick" GELU counts as
    # different from other kinds. The exact GELU and its tanh approximation count as equal.
    return arguments | dict(
        scaled=values.get("layer_scale") is not None, quick=values.get("gelu") == "quick"
    )


_PAPERS_TRUNK = _trunk({})


def _following(values: dict) -> str | None:
    """Returns the name of the model in `FOLLOWERS` that has the arguments `values`, or None."""
    trunk = _trunk(values)
    size = {name: values[name] for name in (*_SIZE, "patch_size")}
    for name, (args, _) in _FOLLOWING.items():
        # Pooling is compared only for models that otherwise have the ViT paper's arguments. For
        # example, SigLIP's image towers differ from the paper's models only in pooling.
        pooled = trunk != _PAPERS_TRUNK or values.get("pooling", "cls") == args.get("pooling")
        if size.items() <= args.items() and trunk == _trunk(args) and pooled:
            return name
    return None


def parse(name: str) -> dict | None:
    """Returns the arguments that a ViT's name implies, or None if `name` is not a ViT's name."""
    if name in _FOLLOWING:
        return dict(_FOLLOWING[name][0])
    match = re.fullmatch(rf"(Axial-)?(?:(R\d*)(?:x({WIDTH}))?\+)?ViT-(\w+)/(\d+)", name)
    if not match or not int(match[5]):
        return None
    axial, resnet, width, size, patch = *match.groups()[:4], int(match[5])
    values = SIZES.get(size) or _numbered_size(size)
    trunk = _parse_trunk(resnet, width, patch)
    if values is None or trunk is None or (axial and resnet):
        return None
    return values | trunk | (dict(attention="axial", pooling="gap") if axial else {})


def _parse_trunk(resnet: str | None, width: str | None, patch: int) -> dict | None:
    """Returns the arguments of the ResNet, if any, and the patch size; None: unknown hybrid."""
    if resnet is None:
        return dict(resnet_blocks=None, patch_size=patch)
    hybrid = HYBRIDS.get((resnet, patch))
    if hybrid is None:
        return None
    return hybrid | (dict(resnet_width=parse_width(width)) if width else {})


def _numbered_size(text: str) -> dict | None:
    """Returns the arguments of a size such as `64x4`: width 64 and 4 layers.

    The MLP is four times as wide as a token, and the heads have the width `HEAD_WIDTH`.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match or int(match[1]) % HEAD_WIDTH:
        return None
    dim = int(match[1])
    return dict(dim=dim, depth=int(match[2]), mlp_dim=4 * dim, heads=dim // HEAD_WIDTH)


def spell(values: dict) -> str:
    """Returns a model's name, or a description of its size, from its arguments (`Family.spell`)."""
    if (following := _following(values)) is not None:
        return following
    blocks, stem = values["resnet_blocks"], values.get("resnet_stem", "large")
    size = {key: values[key] for key in _SIZE}
    name = next((name for name, known in SIZES.items() if known == size), None)
    if name is None:
        name = "{dim}x{depth}".format(**size)
        if _numbered_size(name) != size:
            name += " (MLP {mlp_dim}, {heads} heads)".format(**size)
    width = values.get("resnet_width", 1)
    wide = "" if width == 1 else f"x{spell_width(width)}"
    trunk = "" if blocks is None else f"R{3 * sum(blocks) + 2 if blocks else ''}{wide}+"
    down = values["patch_size"] * resnet_stride(blocks, stem)
    shown, large = values | dict(resnet_stem=stem), dict(resnet_stem="large")
    named = (
        number for (_, number), parts in HYBRIDS.items() if (large | parts).items() <= shown.items()
    )
    return f"{trunk}ViT-{name}/{next(named, down)}"


def source(name: str) -> str:
    """Returns the publication that introduced the model with this name."""
    if name in _FOLLOWING:
        return _FOLLOWING[name][1]
    if name.startswith(("R+", "R26")) or re.match(r"ViT-(Ti|S)/", name):
        return "Steiner et al., 2022 (AugReg)"
    if name.startswith("ViT-So400m"):
        return "Alabdulmohsin et al., 2023 (SoViT)"
    if re.match(r"ViT-(mu|M|g|G|e)/", name):
        return "Zhai et al., 2022 (Scaling ViT)"
    return "Dosovitskiy et al., 2021 (ViT)"
