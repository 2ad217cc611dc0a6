"""EVA, EVA-02, DINOv3, Perception Encoder and RoPE-ViT in timm (all of class Eva)."""

import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.layout import BLOCK, Rule
from vit_jax.interop.library import (
    Arrays,
    Format,
    Tensors,
    Values,
    read_image_size,
    require_defaults,
    require_one_of,
)
from vit_jax.interop.positions import image_size_of
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.timm.timm_config import (
    count_layers,
    first_in,
    given_arguments,
    implied_arguments,
    pretrained_config,
    refuse_contradictions,
    size_arguments,
    stated_size,
)
from vit_jax.interop.timm.timm_vit import (
    APART,
    POOLINGS,
    QV_BIAS,
    VIT_RULES,
    layer_values,
    rename_positions,
    with_registers,
)
from vit_jax.models.vit import ViT

_RULES = (
    Rule(BLOCK + "attention/frequencies", "blocks.{0}.attn.freqs"),
    Rule(BLOCK + r"scale(\d)", "blocks.{0}.gamma_{1}"),
    *VIT_RULES,
)


def _rules(values: Values) -> tuple[Rule, ...]:
    """Returns the rules for the tensor names of a model.

    In a gated MLP with a norm after the gate, the gate and the gated values are separate tensors.
    """
    gated_norm = values["mlp"] == "swiglu" and values["sub_norm"] != "none"
    biases = (QV_BIAS,) if values["qkv_bias"] == "qv" else ()
    return (*biases, *(APART if gated_norm else ()), *_RULES)


# timm's arguments for each kind of rotary positions and for each architecture, without the
# arguments that the tensors determine. `eps` is the epsilon of norms.
_ROPES = {
    "eva02": dict(use_rot_pos_emb=True, ref_feat_shape=(16, 16)),
    "dinov3": dict(
        use_rot_pos_emb=True, rope_type="dinov3", rope_temperature=100.0, rope_rotate_half=True
    ),
    "pe": dict(use_rot_pos_emb=True, rope_grid_indexing="xy", rope_grid_offset=1.0),
    "axial": dict(use_rot_pos_emb=True, rope_grid_indexing="xy", rope_temperature=100.0),
    "mixed": dict(
        use_rot_pos_emb=True, rope_grid_indexing="xy", rope_temperature=10.0, rope_type="mixed"
    ),
}
_NO_ROPE = dict(
    use_rot_pos_emb=False,
    rope_type="cat",
    rope_temperature=10000.0,
    rope_grid_indexing="ij",
    rope_grid_offset=0.0,
    rope_rotate_half=False,
    ref_feat_shape=None,
)
_DINOV3 = _ROPES["dinov3"] | dict(eps=1e-5, use_fc_norm=False, no_embed_class=False)
_NAMES = (
    (r"eva_giant_patch14_(clip_)?\d+", {}),
    (r"eva02_(tiny|small|base|large)_patch\d+_(clip_)?\d+", _ROPES["eva02"]),
    (r"eva02_enormous_patch14_clip_\d+", dict(use_post_norm=True)),
    (r"vit_(medium|mediumd|betwixt|base)_patch16_rope_reg\d_gap_\d+", _ROPES["eva02"]),
    (
        r"vit_(small|base|large)_patch16_rope(_ape)?_\d+",
        _ROPES["axial"] | dict(no_embed_class=True),
    ),
    (
        r"vit_(small|base|large)_patch16_rope_mixed(_ape)?_\d+",
        _ROPES["mixed"] | dict(no_embed_class=True),
    ),
    (
        r"vit_pe_(core|lang|spatial)_(tiny|small|base|large)_patch\d+_\d+",
        _ROPES["pe"] | dict(eps=1e-5),
    ),
    (
        r"vit_pe_(core|lang|spatial)_gigantic_patch\d+_\d+",
        _ROPES["pe"] | dict(eps=1e-5, rope_grid_offset=0.0),
    ),
    (r"vit_(tiny|small|small_plus|base|large|huge_plus|7b)_patch16_dinov3(_qkvb)?", _DINOV3),
    (r"vit_(small|base|large|giant)_patch16_lingbot", _DINOV3),
)
_HEADS = {"tiny": 3, "small": 6, "medium": 8, "mediumd": 8, "betwixt": 10, "base": 12, "large": 16}
_HEADS |= {"giant": 16, "gigantic": 16, "enormous": 16, "huge": 20, "7b": 32}
# For each Perception Encoder: side of the grid, in patches, to which the coordinates of rotary
# positions are scaled. The default is 32.
_PE_GRIDS = {"core_tiny": 24, "core_small": 24, "core_base": 14, "core_large": 24}
_UNCHECKED = (
    *("ref_feat_shape", "use_rot_pos_emb", "rope_type", "rope_temperature", "rope_grid_indexing"),
    *("rope_grid_offset", "rope_rotate_half", "rope_rescale_coords", "num_reg_tokens"),
    *("qkv_fused", "swiglu_mlp", "swiglu_align_to", "scale_mlp", "scale_attn_inner", "attn_type"),
    *("use_abs_pos_emb", "use_post_norm", "use_pre_transformer_norm", "use_post_transformer_norm"),
    *("use_fc_norm", "attn_pool_num_heads", "attn_pool_mlp_ratio", "head_init_scale"),
)


def named(architecture: str) -> dict | None:
    """Parses an Eva architecture's name to timm's arguments; None for other architectures."""
    model_args = next((values for name, values in _NAMES if re.fullmatch(name, architecture)), None)
    if model_args is None:
        return None
    words = architecture.split("_")
    model_args = dict(model_args, num_heads=next(_HEADS[word] for word in words if word in _HEADS))
    model_args["patch_size"] = int(next(word for word in words if word.startswith("patch"))[5:])
    if words[1] == "pe":
        side = _PE_GRIDS.get("_".join(words[2:4]), 32)
        model_args |= dict(ref_feat_shape=(side, side))
        if words[2] == "core":
            model_args["attn_pool_num_heads"] = 8
    if "lingbot" in words and "giant" in words:
        model_args["num_heads"] = 24
    return model_args


def _rename(tensors: Tensors, config: dict) -> Tensors:
    """Renames and merges tensors, so that all versions of the files match `_rules`.

    - Separate projections of queries, keys and values are concatenated.
    - The gate and the gated values of an MLP are concatenated.
    - Rotary frequencies, `rope.freqs`, are split into one tensor for each layer.
    - The position embeddings are converted by `rename_positions`.
    """
    model_args = implied_arguments(config, named) | (config.get("model_args") or {})
    tensors = dict(rename_positions(tensors, config | dict(model_args=model_args)))
    for name in list(tensors):
        if name.endswith("attn.q_proj.weight"):
            _join_qkv(tensors, name.removesuffix("q_proj.weight"))
        elif name.endswith("mlp.fc1_g.weight"):
            _join_gate(tensors, name.removesuffix("fc1_g.weight"))
    if "rope.freqs" in tensors:
        table = tensors.pop("rope.freqs")
        axes, depth, *rest = table.shape
        for layer in range(depth):
            one = Tensor((axes, *rest), table.dtype, lambda layer=layer: table.read()[:, layer])
            tensors[f"blocks.{layer}.attn.freqs"] = one
    return tensors


def _join_qkv(tensors: Tensors, prefix: str) -> None:
    """Replaces a layer's three projections to query, key and value by timm's fused projection."""
    weights = [tensors.pop(f"{prefix}{part}_proj.weight") for part in "qkv"]
    tensors[f"{prefix}qkv.weight"] = _joined(weights)
    for part in "qv":
        if f"{prefix}{part}_proj.bias" in tensors:
            tensors[f"{prefix}{part}_bias"] = tensors.pop(f"{prefix}{part}_proj.bias")


def _join_gate(tensors: Tensors, prefix: str) -> None:
    """Concatenates the tensors of an MLP's gate and gated values, if no norm follows the gate."""
    if f"{prefix}norm.weight" in tensors:
        return
    for part in ("weight", "bias"):
        gate, gated = (tensors.pop(f"{prefix}fc1_{branch}.{part}") for branch in "gx")
        tensors[f"{prefix}fc1.{part}"] = _joined([gate, gated])


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenates tensors along the first axis; the result is read on demand."""
    rows = sum(part.shape[0] for part in parts)
    shape = (rows, *parts[0].shape[1:])
    return Tensor(shape, parts[0].dtype, lambda: np.concatenate([part.read() for part in parts]))


def _finish(tensors: Arrays, values: Values) -> Arrays:
    """Adds zeros for the registers to the position embeddings; stacks the rotary frequencies."""
    tensors = with_registers(tensors, values)
    layers = [tensors.pop(f"blocks.{i}.attn.freqs", None) for i in range(values["depth"])]
    return tensors if layers[0] is None else tensors | {"rope.freqs": np.stack(layers, axis=1)}


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[Values, str]:
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    model_args = given_arguments(config, *_UNCHECKED)
    implied = implied_arguments(config, named)
    settings = _NO_ROPE | implied
    settings |= {key: value for key, value in model_args.items() if value is not None}
    dim, channels, patch, _ = shapes["patch_embed.proj.weight"]
    refuse_contradictions(config, implied, dict(patch_size=patch))
    values = dict(
        patch_size=patch,
        channels=channels,
        resnet_blocks=None,
        dim=dim,
        depth=count_layers(shapes),
        mlp_dim=shapes["blocks.0.mlp.fc2.weight"][1],
        heads=settings["num_heads"],
        num_classes=shapes.get("head.bias", (0,))[0],
        registers=shapes.get("reg_token", (0, 0))[1],
        **_pooling(config, settings, shapes),
        **_layer_values(shapes),
        norm_at="after" if settings.get("use_post_norm") else "before",
        norm_epsilon=settings.get("eps", 1e-6),
        position="1d" if "pos_embed" in shapes else "none",
        position_resize="bicubic_antialias",
        **_rope(settings, "cls_token" in shapes),
    )
    rows = shapes["pos_embed"][1] if "pos_embed" in shapes else None
    size = image_size_of(values, rows, stated_size(config), image_size)
    return values | dict(image_size=size), ""


def _pooling(config: dict, settings: dict, shapes: dict) -> Values:
    """Returns the model's arguments for pooling.

    `settings` are timm's arguments, from the architecture's name and `config.json`.

    Raises:
      UserError: the pooling is unknown or unsupported.
    """
    model_args = config.get("model_args") or {}
    global_pool = model_args.get("global_pool") or config.get("global_pool")
    if global_pool is None:
        raise UserError(
            "config.json lacks the pooling of timm's Eva (global_pool): token, avg or map"
        )
    pooling = next((ours for ours, name in POOLINGS.items() if name == global_pool), None)
    has_cls = "cls_token" in shapes
    values = dict(
        pooling=pooling, cls_token=has_cls and pooling != "cls", pool_all=False, pool_heads=None
    )
    if pooling == "map":
        if shapes["attn_pool.mlp.fc1.weight"][0] != shapes["blocks.0.mlp.fc2.weight"][1]:
            raise UserError(
                "a timm model whose attention pooling has an MLP of another width is unsupported"
            )
        values["pool_all"] = has_cls or "reg_token" in shapes
        heads = settings.get("attn_pool_num_heads")
        values["pool_heads"] = None if heads == settings["num_heads"] else heads
    return values


def _layer_values(shapes: dict) -> Values:
    """Returns the model's arguments for norms, biases and the kind of MLP, from tensor shapes."""
    return layer_values(shapes) | dict(
        gelu="erf",
        norm="layer",
        bias=True,
        qkv_bias=first_in(shapes, {"blocks.0.attn.qkv.bias": "all", "blocks.0.attn.q_bias": "qv"}),
        layer_scale=1e-5 if "blocks.0.gamma_1" in shapes else None,
    )


def _rope(settings: dict, has_cls: bool) -> Values:
    """Converts timm's arguments for rotary positions to vit_jax's arguments.

    Raises:
      UserError: the kind of rotary positions is unsupported.
    """
    if not settings["use_rot_pos_emb"]:
        return dict(rope="none")
    shape = settings["ref_feat_shape"]
    grid = None if shape is None else read_image_size(shape)
    rope_settings = _without_grid({name: settings[name] for name in settings if name in _NO_ROPE})
    if rope_settings["rope_type"] == "mixed":
        # In models of the type `mixed`, the rotary frequencies are learned parameters. The setting
        # `rope_temperature` determines only their initial values, so any value is supported.
        rope_settings["rope_temperature"] = 10.0
    for rope, arguments in _ROPES.items():
        supported = _without_grid(_NO_ROPE | arguments)
        if rope == "pe":
            supported["rope_grid_offset"] = float(has_cls)
        if rope_settings == supported and (rope in ("eva02", "pe") or grid is None):
            return dict(rope=rope, rope_grid=grid)
    shown = ", ".join(f"{name}={value!r}" for name, value in rope_settings.items())
    raise UserError(f"a timm model with {shown} is unsupported")


def _without_grid(arguments: dict) -> dict:
    return {name: value for name, value in arguments.items() if name != "ref_feat_shape"}


_TITLE = "timm's Eva"
# Arguments of vit_jax's models that timm's `config.json` can store.
_DESCRIBED = ("registers", "mlp", "qk_norm", "qkv_bias", "sub_norm", "norm_at", "stem_norm")
_DESCRIBED += ("final_norm", "fc_norm", "pooling", "cls_token", "pool_all", "pool_heads")
_DESCRIBED += ("position", "rope", "rope_grid")


def _describe(values: Values) -> dict:
    require_defaults(_TITLE, ViT, values, *_DESCRIBED, gelu="erf")
    require_one_of(_TITLE, values, position=("1d", "none"), stem_norm=("tokens", "none"))
    if values["pooling"] == "cls_gap" or (values["pooling"] == "gap" and values["pool_all"]):
        raise UserError(
            f"{_TITLE} has no pooling={values['pooling']!r} with pool_all={values['pool_all']}"
        )
    architecture = _architecture(values)
    has_cls = values["pooling"] == "cls" or values["cls_token"]
    arguments = _rope_arguments(values, has_cls) | size_arguments(values)
    arguments |= dict(
        attn_type="rope" if values["qkv_bias"] == "all" else "eva",
        qkv_fused=True,
        qkv_bias=values["qkv_bias"] != "none",
        qk_norm=values["qk_norm"],
        swiglu_mlp=values["mlp"] == "swiglu",
        swiglu_align_to=0,
        scale_mlp=values["sub_norm"] != "none",
        scale_attn_inner=values["sub_norm"] == "both",
        init_values=values["layer_scale"],
        class_token=has_cls,
        num_reg_tokens=values["registers"],
        no_embed_class=False,
        use_abs_pos_emb=values["position"] == "1d",
        use_post_norm=values["norm_at"] == "after",
        use_pre_transformer_norm=values["stem_norm"] == "tokens",
        use_post_transformer_norm=values["final_norm"] and not values["fc_norm"],
        use_fc_norm=values["fc_norm"],
        global_pool=POOLINGS[values["pooling"]],
        dynamic_img_size=False,
    )
    if values["pooling"] == "map":
        arguments |= dict(
            attn_pool_num_heads=values["pool_heads"] or values["heads"],
            attn_pool_mlp_ratio=arguments["mlp_ratio"],
        )
    return dict(
        architecture=architecture, model_args=arguments, num_features=values["dim"]
    ) | pretrained_config(values, fixed_input_size=True)


def _architecture(values: Values) -> str:
    """Returns the name of a timm architecture with the model's norm epsilon and LayerScale.

    timm has no arguments for these two properties; the architecture's name determines them.

    Raises:
      UserError: timm has no architecture with this epsilon.
    """
    epsilon = values["norm_epsilon"]
    if epsilon == 1e-6:
        return "eva_giant_patch14_224"
    if epsilon != 1e-5:
        raise UserError(f"{_TITLE} has no norm_epsilon={epsilon!r}; its norms have 1e-06 or 1e-05")
    if values["layer_scale"] is not None:
        return "vit_base_patch16_dinov3"
    return "vit_pe_core_base_patch16_224"


def _rope_arguments(values: Values, has_cls: bool) -> dict:
    """Converts vit_jax's arguments for rotary positions to timm's arguments."""
    rope, grid = values["rope"], values["rope_grid"]
    arguments = _NO_ROPE | _ROPES.get(rope, {})
    arguments["ref_feat_shape"] = list(grid) if grid else None
    if rope == "pe":
        arguments["rope_grid_offset"] = float(has_cls)
    return arguments


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: bool(implied_arguments(config, named)),
    arguments=_arguments,
    rules=_rules,
    describe=_describe,
    rename=_rename,
    finish=_finish,
    holds=lambda values: values["rope"] != "none" or values["qkv_bias"] == "qv",
)
