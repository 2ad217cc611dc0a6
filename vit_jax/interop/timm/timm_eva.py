"""EVA, EVA-02, DINOv3, Perception Encoder and RoPE-ViT in timm: its class Eva."""

import re

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.layout import BLOCK, CONV, FLAT, LINEAR, LINEAR_OUT, SAME, Rule, torch_dense, torch_norm
from vit_jax.interop.library import Arrays, Format, Tensors, Values, refuse_unsaid
from vit_jax.interop.positions import image_size_of
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.timm.timm_config import (
    given_arguments,
    mlp_ratio,
    pretrained_config,
    refuse_contradictions,
    stated_size,
)
from vit_jax.interop.timm.timm_vit import APART, POOLING_RULES, POOLINGS, rename_positions, with_registers
from vit_jax.models.vit import ViT

_THEIRS = "blocks.{0}."
_MLP = _THEIRS + "mlp."
_RULES = (
    *torch_dense("patch_embedding", "patch_embed.proj", CONV, SAME),
    Rule("cls", "cls_token"),
    Rule("register_tokens", "reg_token"),
    Rule("position_embedding/table", "pos_embed"),
    *torch_norm("stem_norm", "norm_pre"),
    *torch_norm(BLOCK + r"norm(\d)", _THEIRS + "norm{1}"),
    Rule(BLOCK + "attention/qkv/kernel", _THEIRS + "attn.qkv.weight", LINEAR),
    *torch_norm(BLOCK + "attention/query_norm", _THEIRS + "attn.q_norm"),
    *torch_norm(BLOCK + "attention/key_norm", _THEIRS + "attn.k_norm"),
    *torch_norm(BLOCK + "attention/norm", _THEIRS + "attn.norm"),
    Rule(BLOCK + "attention/frequencies", _THEIRS + "attn.freqs"),
    *torch_dense(BLOCK + "attention/out", _THEIRS + "attn.proj", LINEAR_OUT),
    Rule(BLOCK + r"scale(\d)", _THEIRS + "gamma_{1}"),
    *torch_norm(BLOCK + "mlp/norm", _MLP + "norm"),
    *torch_dense(BLOCK + "mlp/fc2", _MLP + "fc2"),
    *torch_norm("norm", "norm"),
    *torch_norm("fc_norm", "fc_norm"),
    *POOLING_RULES,
    *torch_dense("head", "head"),
)
_BIASES = {
    "all": Rule(BLOCK + "attention/qkv/bias", _THEIRS + "attn.qkv.bias", FLAT),
    "qv": Rule(
        BLOCK + "attention/qkv/bias", (_THEIRS + "attn.q_bias", _THEIRS + "attn.v_bias"), FLAT, axis=0
    ),
}
_PACKED = torch_dense(BLOCK + "mlp/fc1", _MLP + "fc1")


def _rules(values: Values) -> tuple[Rule, ...]:
    """The rules of a model: a gate has a tensor of its own where there is a norm behind it."""
    gated_norm = values["mlp"] == "swiglu" and values["sub_norm"] != "none"
    biases = _BIASES.get(values["qkv_bias"])
    return (*_RULES, *([biases] if biases else []), *(APART if gated_norm else _PACKED))


# timm's arguments of its architectures, beside those that the tensors show. `eps` is that of the norms.
_ROPES = {
    "eva02": dict(use_rot_pos_emb=True, ref_feat_shape=(16, 16)),
    "dinov3": dict(use_rot_pos_emb=True, rope_type="dinov3", rope_temperature=100.0, rope_rotate_half=True),
    "pe": dict(use_rot_pos_emb=True, rope_grid_indexing="xy", rope_grid_offset=1.0),
    "axial": dict(use_rot_pos_emb=True, rope_grid_indexing="xy", rope_temperature=100.0),
    "mixed": dict(use_rot_pos_emb=True, rope_grid_indexing="xy", rope_temperature=10.0, rope_type="mixed"),
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
    (r"vit_(small|base|large)_patch16_rope(_ape)?_\d+", _ROPES["axial"] | dict(no_embed_class=True)),
    (r"vit_(small|base|large)_patch16_rope_mixed(_ape)?_\d+", _ROPES["mixed"] | dict(no_embed_class=True)),
    (r"vit_pe_(core|lang|spatial)_(tiny|small|base|large)_patch\d+_\d+", _ROPES["pe"] | dict(eps=1e-5)),
    (
        r"vit_pe_(core|lang|spatial)_gigantic_patch\d+_\d+",
        _ROPES["pe"] | dict(eps=1e-5, rope_grid_offset=0.0),
    ),
    (r"vit_(tiny|small|small_plus|base|large|huge_plus|7b)_patch16_dinov3(_qkvb)?", _DINOV3),
    (r"vit_(small|base|large|giant)_patch16_lingbot", _DINOV3),
)
_HEADS = {
    "tiny": 3,
    "small": 6,
    "medium": 8,
    "mediumd": 8,
    "betwixt": 10,
    "base": 12,
    "large": 16,
    "giant": 16,
}
_HEADS |= {"giant": 16, "gigantic": 16, "enormous": 16, "huge": 20, "7b": 32}
_PE_GRIDS = {"core_tiny": 24, "core_small": 24, "core_base": 14, "core_large": 24}  # The others have 32.
_GRIDS_SAID = ("ref_feat_shape", "use_rot_pos_emb", "rope_type", "rope_temperature", "rope_grid_indexing")
_SAID = (*_GRIDS_SAID, "rope_grid_offset", "rope_rotate_half", "rope_rescale_coords", "num_reg_tokens")
_SAID += ("qkv_fused", "swiglu_mlp", "swiglu_align_to", "scale_mlp", "scale_attn_inner", "attn_type")
_SAID += ("use_abs_pos_emb", "use_post_norm", "use_pre_transformer_norm", "use_post_transformer_norm")
_SAID += ("use_fc_norm", "attn_pool_num_heads", "attn_pool_mlp_ratio", "head_init_scale")


def named(architecture: str) -> dict | None:
    """Reads the name of an architecture of timm's Eva into its arguments; None: it is of none."""
    said = next((values for name, values in _NAMES if re.fullmatch(name, architecture)), None)
    if said is None:
        return None
    words = architecture.split("_")
    said = dict(said, kind="eva", num_heads=next(_HEADS[word] for word in words if word in _HEADS))
    said["patch_size"] = int(next(word for word in words if word.startswith("patch"))[5:])
    if words[1] == "pe":
        side = _PE_GRIDS.get("_".join(words[2:4]), 32)
        said |= dict(ref_feat_shape=(side, side))
        if words[2] == "core":
            said["attn_pool_num_heads"] = 8
    if "lingbot" in words and "giant" in words:
        said["num_heads"] = 24
    return said


def _rename(tensors: Tensors, config: dict) -> Tensors:
    """The same tensors, with queries, keys and values in one and gates beside what they gate."""
    given = (config.get("named") or {}) | (config.get("model_args") or {})
    tensors = dict(rename_positions(tensors, config | dict(model_args=given)))
    for name in list(tensors):
        if name.endswith("attn.q_proj.weight"):
            start = name.removesuffix("q_proj.weight")
            parts = [tensors.pop(f"{start}{part}_proj.weight") for part in "qkv"]
            tensors[start + "qkv.weight"] = _joined(parts)
            for part in "qv":
                if f"{start}{part}_proj.bias" in tensors:
                    tensors[f"{start}{part}_bias"] = tensors.pop(f"{start}{part}_proj.bias")
        elif name.endswith("mlp.fc1_g.weight"):
            start = name.removesuffix("fc1_g.weight")
            if start + "norm.weight" not in tensors:
                for part in ("weight", "bias"):
                    gate = tensors.pop(f"{start}fc1_g.{part}")
                    tensors[f"{start}fc1.{part}"] = _joined([gate, tensors.pop(f"{start}fc1_x.{part}")])
    if "rope.freqs" in tensors:
        table = tensors.pop("rope.freqs")
        axes, depth, *rest = table.shape
        for layer in range(depth):
            one = Tensor((axes, *rest), table.dtype, lambda layer=layer: table.read()[:, layer])
            tensors[f"blocks.{layer}.attn.freqs"] = one
    return tensors


def _joined(parts: list[Tensor]) -> Tensor:
    """Tensors one behind the other, read when they are asked for."""
    rows = sum(part.shape[0] for part in parts)
    shape = (rows, *parts[0].shape[1:])
    return Tensor(shape, parts[0].dtype, lambda: np.concatenate([part.read() for part in parts]))


def _finish(tensors: Arrays, values: Values) -> Arrays:
    """Tensors to write, with the frequencies of all layers in one."""
    tensors = with_registers(tensors, values)
    layers = [tensors.pop(f"blocks.{i}.attn.freqs", None) for i in range(values["depth"])]
    return tensors if layers[0] is None else tensors | {"rope.freqs": np.stack(layers, axis=1)}


def _arguments(tensors: Tensors, config: dict, image_size) -> tuple[Values, str]:
    """The model that tensors (renamed) and a `config.json` belong to; see `image_size_of`."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    given = given_arguments(config, *_SAID)
    said = _NO_ROPE | config["named"] | {key: value for key, value in given.items() if value is not None}
    kernel, first = shapes["patch_embed.proj.weight"], "blocks.0."
    refuse_contradictions(config, dict(patch_size=kernel[-1]))
    dim, inputs, patch, _ = kernel
    hidden = shapes[first + "mlp.fc2.weight"][1]
    gated = first + "mlp.fc1_g.weight" in shapes or shapes[first + "mlp.fc1.weight"][0] == 2 * hidden
    cls, registers = "cls_token" in shapes, shapes.get("reg_token", (0, 0))[1]
    pooled = given.get("global_pool") or config.get("global_pool")
    if pooled is None:
        raise UserError("config.json does not say what timm's Eva pools (global_pool): token, avg or map")
    pooling = next((ours for ours, theirs in POOLINGS.items() if theirs == pooled), None)
    if pooling == "map" and shapes["attn_pool.mlp.fc1.weight"][0] != hidden:
        raise UserError("a timm model whose attention pooling has an MLP of another width is not read")
    biases = "qv" if first + "attn.q_bias" in shapes else "none"
    sub_norm = "mlp" if first + "mlp.norm.weight" in shapes else "none"
    pool_heads = said.get("attn_pool_num_heads")
    values = dict(
        patch_size=patch,
        channels=inputs,
        resnet_blocks=None,
        dim=dim,
        depth=sum(bool(re.fullmatch(r"blocks\.\d+\.norm1\.weight", name)) for name in shapes),
        hidden=hidden,
        heads=said["num_heads"],
        num_classes=shapes.get("head.bias", (0,))[0],
        pooling=pooling,
        cls_token=cls and pooling != "cls",
        pool_all=pooling == "map" and bool(cls or registers),
        pool_heads=None if pooling != "map" or pool_heads == said["num_heads"] else pool_heads,
        fc_norm="fc_norm.weight" in shapes,
        final_norm="fc_norm.weight" in shapes or "norm.weight" in shapes,
        stem_norm="tokens" if "norm_pre.weight" in shapes else "none",
        registers=registers,
        mlp="swiglu" if gated else "gelu",
        gelu="erf",
        qk_norm=first + "attn.q_norm.weight" in shapes,
        qkv_bias="all" if first + "attn.qkv.bias" in shapes else biases,
        sub_norm="both" if first + "attn.norm.weight" in shapes else sub_norm,
        norm_at="after" if said.get("use_post_norm") else "before",
        norm_epsilon=said.get("eps", 1e-6),
        layer_scale=1e-5 if first + "gamma_1" in shapes else None,
        position="1d" if "pos_embed" in shapes else "none",
        position_resize="bicubic_antialias",
        **_rope(said, cls),
    )
    rows = shapes["pos_embed"][1] if "pos_embed" in shapes else None
    return values | dict(image_size=image_size_of(values, rows, stated_size(config), image_size)), ""


def _rope(said: dict, cls: bool) -> Values:
    """Our arguments of rotary positions, by timm's.

    Raises:
      UserError: they are of another kind.
    """
    if not said["use_rot_pos_emb"]:
        return dict(rope="none")
    grid = said["ref_feat_shape"]
    grid = (grid, grid) if isinstance(grid, int) else grid and tuple(grid)
    told = {name: value for name, value in said.items() if name in _NO_ROPE and name != "ref_feat_shape"}
    if told["rope_type"] == "mixed":
        told["rope_temperature"] = 10.0  # Which learned frequencies start from.
    for ours, theirs in _ROPES.items():
        wanted = {key: value for key, value in (_NO_ROPE | theirs).items() if key != "ref_feat_shape"}
        if ours == "pe":
            wanted["rope_grid_offset"] = float(cls)
        if told == wanted and (ours in ("eva02", "pe") or grid is None):
            return dict(rope=ours, rope_grid=grid)
    shown = ", ".join(f"{name}={value!r}" for name, value in told.items())
    raise UserError(f"a timm model with {shown} is not read")


def _describe(values: Values) -> dict:
    """A model's `config.json` in timm.

    Raises:
      UserError: timm has no such model.
    """
    said = ("registers", "mlp", "qk_norm", "qkv_bias", "sub_norm", "norm_at", "stem_norm", "final_norm")
    said += ("fc_norm", "pooling", "cls_token", "pool_all", "pool_heads", "position", "rope", "rope_grid")
    title = "timm's Eva"
    refuse_unsaid(title, ViT, values, *said, gelu="erf")
    if values["position"] not in ("1d", "none"):
        raise UserError(f"{title} has no position={values['position']!r}")
    if values["pooling"] == "cls_gap" or (values["pooling"] == "gap" and values["pool_all"]):
        raise UserError(f"{title} has no pooling={values['pooling']!r} with pool_all={values['pool_all']}")
    epsilon, dim, rope = values["norm_epsilon"], values["dim"], values["rope"]
    # Of what no argument can say: the norms' constant, and that there is no LayerScale.
    plain = "vit_base_patch16_dinov3" if values["layer_scale"] is not None else "vit_pe_core_base_patch16_224"
    architectures = {1e-6: "eva_giant_patch14_224", 1e-5: plain}
    if epsilon not in architectures:
        raise UserError(f"{title} has no norm_epsilon={epsilon!r}; its norms have 1e-06 or 1e-05")
    cls = values["pooling"] == "cls" or values["cls_token"]
    turned = _NO_ROPE | (_ROPES[rope] if rope != "none" else {})
    turned["ref_feat_shape"] = list(values["rope_grid"]) if values["rope_grid"] else None
    if rope == "pe":
        turned["rope_grid_offset"] = float(cls)
    chosen = turned | dict(
        img_size=list(values["image_size"]),
        patch_size=values["patch_size"],
        in_chans=values["channels"],
        embed_dim=dim,
        depth=values["depth"],
        num_heads=values["heads"],
        mlp_ratio=mlp_ratio(values["hidden"], dim),
        attn_type="rope" if values["qkv_bias"] == "all" else "eva",
        qkv_fused=True,
        qkv_bias=values["qkv_bias"] != "none",
        qk_norm=values["qk_norm"],
        swiglu_mlp=values["mlp"] == "swiglu",
        swiglu_align_to=0,
        scale_mlp=values["sub_norm"] != "none",
        scale_attn_inner=values["sub_norm"] == "both",
        init_values=values["layer_scale"],
        class_token=cls,
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
        chosen |= dict(
            attn_pool_num_heads=values["pool_heads"] or values["heads"],
            attn_pool_mlp_ratio=chosen["mlp_ratio"],
        )
    return dict(architecture=architectures[epsilon], model_args=chosen, num_features=dim) | pretrained_config(
        values, fixed_input_size=True
    )


FORMAT = Format(
    model=ViT,
    claims=lambda config, tensors: (config.get("named") or {}).get("kind") == "eva",
    arguments=_arguments,
    rules=_rules,
    describe=_describe,
    rename=_rename,
    finish=_finish,
    holds=lambda values: values["rope"] != "none" or values["qkv_bias"] == "qv",
)
