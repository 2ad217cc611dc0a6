"""Swin and Swin V2 in Hugging Face Transformers."""

from collections.abc import Sequence

from vit_jax.errors import UserError
from vit_jax.interop.layout import (
    CONV,
    FLAT,
    HEADS,
    LINEAR,
    LINEAR_OUT,
    SAME,
    STAGED,
    TABLE,
    Rule,
    torch_dense,
    torch_norm,
)
from vit_jax.interop.library import Format, read_image_size, write_image_size
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.transformers.transformers_config import (
    class_name,
    common_config,
    count_classes,
    mask_format,
    require_always,
    with_classifier,
)
from vit_jax.models.swin import EPSILON, RATIO, Swin, windows

_KINDS = {"swin": ("Swin", 1), "swinv2": ("Swinv2", 2)}
_ALWAYS = dict(hidden_act="gelu", qkv_bias=True, mlp_ratio=RATIO, layer_norm_eps=EPSILON)
_THEIRS = "encoder.layers.{m[0]}.blocks.{m[1]}."
_SELF = _THEIRS + "attention.self."
_ATTENTION = STAGED + "attention/"
_MERGE = "encoder.layers.{m[0]}.downsample."
_RULES = (
    *torch_dense("patch_embedding", "embeddings.patch_embeddings.projection", CONV, SAME),
    *torch_norm("patch_norm", "embeddings.norm"),
    Rule("position_embedding/table", "embeddings.position_embeddings"),
    *torch_norm(STAGED + "norm1", _THEIRS + "layernorm_before"),
    Rule(
        _ATTENTION + "qkv/kernel",
        tuple(f"{_SELF}{x}.weight" for x in ("query", "key", "value")),
        LINEAR,
        axis=1,
    ),
    Rule(_ATTENTION + "bias_table", _SELF + "relative_position_bias_table", TABLE),
    Rule(_ATTENTION + "logit_scale", _SELF + "logit_scale", HEADS),
    *torch_dense(_ATTENTION + "bias_mlp/fc1", _SELF + "continuous_position_bias_mlp.0"),
    Rule(
        _ATTENTION + "bias_mlp/fc2/kernel", _SELF + "continuous_position_bias_mlp.2.weight", LINEAR
    ),
    *torch_dense(_ATTENTION + "out", _THEIRS + "attention.output.dense", LINEAR_OUT),
    *torch_norm(STAGED + "norm2", _THEIRS + "layernorm_after"),
    *torch_dense(STAGED + "mlp/fc1", _THEIRS + "intermediate.dense"),
    *torch_dense(STAGED + "mlp/fc2", _THEIRS + "output.dense"),
    *torch_norm(r"merges/(\d+)/norm", _MERGE + "norm"),
    Rule(r"merges/(\d+)/reduction/kernel", _MERGE + "reduction.weight", LINEAR),
    *torch_norm("norm", "layernorm"),
)
_BIASED = {1: ("query", "key", "value"), 2: ("query", "value")}
# Names of tensors that some versions of Transformers store. vit_jax does not read them, because
# they can be computed from the window size.
_FOLLOW = ("relative_position_index", "relative_coords_table")


def _rules(values: dict) -> Sequence[Rule]:
    names = tuple(f"{_SELF}{x}.bias" for x in _BIASED[values["version"]])
    trunk = (*_RULES, Rule(_ATTENTION + "qkv/bias", names, FLAT, axis=0))
    return with_classifier(_model_type(values), trunk, values)


def _model_type(values: dict) -> str:
    return "swin" if values["version"] == 1 else "swinv2"


def _rename(tensors: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """Removes tensors that can be computed from the window size, such as indices."""
    return {name: tensor for name, tensor in tensors.items() if name.split(".")[-1] not in _FOLLOW}


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    kind = config["model_type"]
    start, version = _KINDS[kind]
    classes = count_classes(tensors, config, start)
    require_always(config, _ALWAYS)
    try:
        size, former = config["image_size"], tuple(config.get("pretrained_window_sizes") or ())
        values = dict(
            image_size=read_image_size(size),
            num_classes=classes,
            patch_size=config["patch_size"],
            channels=config.get("num_channels", 3),
            dim=config["embed_dim"],
            blocks=tuple(config["depths"]),
            stage_heads=tuple(config["num_heads"]),
            window=config["window_size"],
            version=version,
            pretrained_windows=former[: len(config["depths"])]
            if version == 2 and any(former)
            else None,
            position="1d" if config.get("use_absolute_embeddings") else "none",
        )
    except KeyError as error:
        raise UserError(f"config.json of a Transformers {kind} lacks {error}") from error
    _refuse_other_maps(values)
    return values, ""


def _refuse_other_maps(values: dict) -> None:
    """Raises UserError if the outputs of Transformers' Swin would differ from vit_jax's outputs.

    The two libraries differ in these cases:

    - A feature map must be padded. Transformers pads the map before the cyclic shift.
    - A feature map is not larger than a window. Transformers then uses square windows with the
      map's shorter side, but the relative position biases of windows of the full size.
    - A Swin V2 merges the patches of a feature map with an odd height or width.
    """
    side, version = values["window"], values["version"]
    if not isinstance(side, int):
        raise UserError(
            f"Transformers' Swin has one window for all stages, not {side} (model.window)"
        )
    grid = tuple(length // values["patch_size"] for length in values["image_size"])
    stages = len(values["blocks"])
    for stage, window in enumerate(windows(grid, side, stages)):
        places = tuple(-(-length // 2**stage) for length in grid)
        is_merged = stage + 1 < stages
        same = _same_windows(places, window, side)
        same &= window == (side, side) if version == 1 else not (is_merged and _is_odd(places))
        if not same:
            raise UserError(
                f"Transformers' Swin computes otherwise on a map of {places[0]}x{places[1]} "
                f"places, stage {stage + 1}'s, with windows of {side} (model.window, "
                "data.image_size)"
            )


def _same_windows(places: tuple[int, ...], window: tuple[int, ...], side: int) -> bool:
    """Returns True if vit_jax and Transformers divide a feature map into the same windows."""
    divides = all(length % one == 0 for length, one in zip(places, window, strict=True))
    is_square = window[0] == window[1]
    return divides and is_square and (window == places or min(places) > side)


def _is_odd(places: tuple[int, ...]) -> bool:
    return any(length % 2 for length in places)


def _describe(values: dict) -> dict:
    _refuse_other_maps(values)
    version = values["version"]
    if version == 2 and values["position"] != "none":
        raise UserError(f"Transformers' Swin V2 has no position={values['position']!r}")
    kind = _model_type(values)
    start, stages = _KINDS[kind][0], len(values["blocks"])
    former = dict(pretrained_window_sizes=list(values["pretrained_windows"] or (0,) * stages))
    return (
        dict(
            architectures=[class_name(start, values)],
            model_type=kind,
            image_size=write_image_size(values),
            patch_size=values["patch_size"],
            embed_dim=values["dim"],
            depths=list(values["blocks"]),
            num_heads=list(values["stage_heads"]),
            window_size=values["window"],
            mlp_ratio=float(RATIO),
            qkv_bias=True,
            hidden_act="gelu",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            use_absolute_embeddings=values["position"] == "1d",
            layer_norm_eps=EPSILON,
        )
        | (former if version == 2 else {})
        | common_config(values)
    )


FORMAT = Format(
    model=Swin,
    claims=lambda config, tensors: config.get("model_type") in _KINDS,
    arguments=_arguments,
    rules=_rules,
    describe=_describe,
    rename=_rename,
    objective=mask_format(_model_type, None),
)
