"""Swin and Swin V2 in timm (classes SwinTransformer and SwinTransformerV2)."""

import math
import re
from typing import Any

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
    count_units,
    torch_dense,
    torch_norm,
)
from vit_jax.interop.library import Format, require_one_of
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.timm.timm_config import (
    given_arguments,
    implied_arguments,
    pretrained_config,
    refuse_contradictions,
    stated_size,
)
from vit_jax.models.swin import SEARCHED, SIZES, Swin

_THEIRS = "layers.{m[0]}.blocks.{m[1]}."
_ATTENTION = STAGED + "attention/"
_RULES = (
    *torch_dense("patch_embedding", "patch_embed.proj", CONV, SAME),
    *torch_norm("patch_norm", "patch_embed.norm"),
    *torch_norm(STAGED + r"norm(\d)", _THEIRS + "norm{2}"),
    Rule(_ATTENTION + "qkv/kernel", _THEIRS + "attn.qkv.weight", LINEAR),
    Rule(_ATTENTION + "bias_table", _THEIRS + "attn.relative_position_bias_table", TABLE),
    Rule(_ATTENTION + "logit_scale", _THEIRS + "attn.logit_scale", HEADS),
    *torch_dense(_ATTENTION + "bias_mlp/fc1", _THEIRS + "attn.cpb_mlp.0"),
    Rule(_ATTENTION + "bias_mlp/fc2/kernel", _THEIRS + "attn.cpb_mlp.2.weight", LINEAR),
    *torch_dense(_ATTENTION + "out", _THEIRS + "attn.proj", LINEAR_OUT),
    *torch_dense(STAGED + r"mlp/fc(\d)", _THEIRS + "mlp.fc{2}"),
    *torch_norm(r"merges/(\d+)/norm", "layers.{0}.downsample.norm"),
    Rule(r"merges/(\d+)/reduction/kernel", "layers.{0}.downsample.reduction.weight", LINEAR),
    *torch_norm("norm", "norm"),
    *torch_dense("head", "head.fc"),
)
_BIASES = {
    1: Rule(_ATTENTION + "qkv/bias", _THEIRS + "attn.qkv.bias", FLAT),
    2: Rule(
        _ATTENTION + "qkv/bias", (_THEIRS + "attn.q_bias", _THEIRS + "attn.v_bias"), FLAT, axis=0
    ),
}

_SIZES = dict(tiny="T", small="S", base="B", large="L")
_NAME = re.compile(
    r"swin(?:v2)?_(tiny|small|base|large)(?:_patch4)?_window(\d+)(?:to(\d+))?_(?:\d+to)?(\d+)"
)
# Names of tensors that some versions of timm store. vit_jax does not read them, because they can be
# computed from the window and image sizes.
_FOLLOW = ("relative_position_index", "relative_coords_table", "attn_mask", "k_bias")


def named(architecture: str) -> dict | None:
    """Parses a Swin architecture's name to timm's arguments; None for other architectures.

    Raises:
      UserError: the variant is unsupported, such as `swinv2_cr_*`.
    """
    if architecture.startswith("swinv2_cr_"):
        raise UserError(
            f"timm's {architecture} is unsupported: it differs from a Swin and a Swin V2"
        )
    if searched := re.fullmatch(r"swin_s3_(tiny|small|base)_224", architecture):
        size = SEARCHED[_SIZES[searched[1]]]
        return _model_args(size, 224, list(size["window"]), (0, 0, 0, 0))
    match = _NAME.fullmatch(architecture)
    if not match:
        return None
    size, first, last = SIZES[_SIZES[match[1]]], int(match[2]), match[3] and int(match[3])
    former = (first, first, first, first // 2) if last else (0, 0, 0, 0)
    return _model_args(size, int(match[4]), last or first, former)


def _model_args(size: dict, pixels: int, window: int | list[int], former: tuple[int, ...]) -> dict:
    """Returns timm's arguments for a Swin of a given size."""
    return dict(
        img_size=pixels,
        embed_dim=size["dim"],
        depths=size["blocks"],
        num_heads=size["stage_heads"],
        window_size=window,
        pretrained_window_sizes=former,
    )


def _rename(tensors: dict[str, Tensor], config: dict) -> dict[str, Tensor]:
    """Removes tensors that can be computed from the window and image sizes, such as masks."""
    return {name: tensor for name, tensor in tensors.items() if name.split(".")[-1] not in _FOLLOW}


def _arguments(tensors: dict[str, Tensor], config: dict, image_size) -> tuple[dict, str]:
    """Returns the model's arguments, and a text that lists the assumptions.

    Without a `config.json`, the window size is derived from the tables of relative position biases,
    and the side of images in pixels is assumed to be 32 times the side of windows in patches.
    """
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    settings = _settings(config)
    blocks = count_units(shapes, r"layers\.(\d+)\.blocks\.(\d+)\.", first=0)
    version = 2 if "layers.0.blocks.0.attn.logit_scale" in shapes else 1
    try:
        heads = _heads(shapes, len(blocks), version)
        width, channels, patch, _ = shapes["patch_embed.proj.weight"]
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"these are not the tensors of a Swin of timm's: {error} is missing or of an unknown "
            f"shape among {len(shapes)} tensors such as {min(shapes)!r}"
        ) from error
    refuse_contradictions(
        config,
        implied_arguments(config, named),
        dict(embed_dim=width, depths=blocks, num_heads=heads),
    )
    window, assumption = _window(shapes, settings, len(blocks))
    side = window if isinstance(window, int) else window[0]
    values = dict(
        image_size=stated_size(config) or settings.get("img_size") or image_size or 32 * side,
        channels=channels,
        num_classes=shapes.get("head.fc.bias", (0,))[0],
        dim=width,
        blocks=blocks,
        stage_heads=heads,
        window=window,
        version=version,
        pretrained_windows=_pretrained_windows(settings, len(blocks), version),
        patch_size=patch,
    )
    return values, assumption


def _settings(config: dict) -> dict[str, Any]:
    """Returns timm's arguments that the architecture's name implies or `config.json` contains.

    Raises:
      UserError: the pooling is unsupported.
    """
    model_args = given_arguments(config, "depths", "window_size", "pretrained_window_sizes")
    pooling = model_args.get("global_pool") or config.get("global_pool")
    if pooling not in (None, "avg"):
        raise UserError(
            f"a timm Swin with global_pool={pooling!r} is unsupported; supported: 'avg'"
        )
    stated = {key: value for key, value in model_args.items() if value is not None}
    return implied_arguments(config, named) | stated


def _heads(shapes: dict, stages: int, version: int) -> tuple[int, ...]:
    """Returns the number of heads in each stage.

    Raises:
      KeyError, IndexError: a tensor that determines the number is missing, or has too few axes.
    """
    name, axis = ("logit_scale", 0) if version == 2 else ("relative_position_bias_table", 1)
    return tuple(shapes[f"layers.{stage}.blocks.0.attn.{name}"][axis] for stage in range(stages))


def _window(shapes: dict, settings: dict, stages: int) -> tuple[int | tuple[int, ...], str]:
    """Derives the side of the windows, in patches, from timm's settings or the tensors' shapes.

    Returns:
      The side of the windows, one number for all stages or a number for each stage; and a text with
      the assumption made, which may be empty.

    Raises:
      UserError: neither the settings nor the tensors determine the side.
    """
    if "window_size" in settings:
        return _sides(settings["window_size"], stages), ""
    table = shapes.get("layers.0.blocks.0.attn.relative_position_bias_table")
    if table is None:
        raise UserError(
            "the tensors of a Swin V2 do not contain its window sizes: timm's config.json is needed"
        )
    window = (math.isqrt(table[0]) + 1) // 2
    return window, f"windows of {window} places, as there is no config.json"


def _pretrained_windows(settings: dict, stages: int, version: int) -> tuple[int, ...] | None:
    """Returns the side of a window in pre-training, in patches, for each stage of a Swin V2.

    The result is None if the model is no Swin V2, or the settings do not contain these sides.
    """
    sides = settings.get("pretrained_window_sizes") or ()
    return tuple(sides[:stages]) if version == 2 and any(sides) else None


def _sides(window, stages: int) -> int | tuple[int, ...]:
    """Converts timm's `window_size` to the side of square windows, in patches.

    The result is one number, or a number for each stage if the sides differ.

    Raises:
      UserError: the windows are not square.
    """
    # In timm, a pair of numbers is the height and width of one window for all stages.
    whole = isinstance(window, int) or len(window) == 2 and isinstance(window[0], int)
    each = [window] * stages if whole else window
    sides = [{side} if isinstance(side, int) else set(side) for side in each]
    if len(sides) != stages or any(len(side) != 1 for side in sides):
        raise UserError(
            f"a timm Swin with window_size={window!r} is unsupported; supported: square windows"
        )
    flat = tuple(side.pop() for side in sides)
    return flat[0] if len(set(flat)) == 1 else flat


def _describe(values: dict) -> dict:
    require_one_of("timm's Swin", values, position=("none",))
    window, size = values["window"], {key: values[key] for key in ("dim", "blocks", "stage_heads")}
    word = next((word for word, name in _SIZES.items() if SIZES[name] == size), "tiny")
    chosen = dict(
        img_size=list(values["image_size"]),
        patch_size=values["patch_size"],
        in_chans=values["channels"],
        embed_dim=values["dim"],
        depths=list(values["blocks"]),
        num_heads=list(values["stage_heads"]),
        window_size=window if isinstance(window, int) else [[side, side] for side in window],
    )
    if values["version"] == 2:
        former = values["pretrained_windows"] or (0,) * len(values["blocks"])
        chosen["pretrained_window_sizes"] = list(former)
        # timm has architectures with `window8_256` for all sizes of a Swin V2 except `large`.
        window = "window12_192" if word == "large" else "window8_256"
        architecture = f"swinv2_{word}_{window}"
    else:
        architecture = f"swin_{word}_patch4_window7_224"
    features = values["dim"] * 2 ** (len(values["blocks"]) - 1)
    return dict(
        architecture=architecture, model_args=chosen, num_features=features, global_pool="avg"
    ) | pretrained_config(values, fixed_input_size=True)


FORMAT = Format(
    model=Swin,
    claims=lambda config, tensors: (
        "patch_embed.proj.weight" in tensors and "layers.0.blocks.0.attn.qkv.weight" in tensors
    ),
    arguments=_arguments,
    rules=lambda values: (*_RULES, _BIASES[values["version"]]),
    describe=_describe,
    rename=_rename,
)
