"""Reads and writes the preprocessing of images in other libraries' files.

The mean and std of pixels are arguments of the model, because the model normalizes images. All
other values are in `Preprocessing`.
"""

import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError

# vit_jax's name of each of timm's interpolations. Except for `bilinear` and `area`, vit_jax's
# interpolations use antialiasing, as Pillow's do.
_TIMM = {"bilinear": "bilinear_antialias", "bicubic": "bicubic", "lanczos": "lanczos"}
_PILLOW = {1: "lanczos", 2: "bilinear_antialias", 3: "bicubic"}
_PILLOW_NAMES = {0: "nearest", 4: "box", 5: "hamming"}

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}

# Steps of Transformers' image processors that are unsupported here.
_UNSUPPORTED_STEPS = (
    "do_pad",
    "do_flip_channel_order",
    "rescale_offset",
    "do_thumbnail",
    "do_align_long_axis",
    "do_crop_margin",
    "do_color_quantize",
    "do_grayscale",
)

# Defaults of Transformers' image processors.
_SQUARE = {"height": 224, "width": 224}
_CROP = dict(do_center_crop=True, crop_size=_SQUARE)
_CLIP = dict(size={"shortest_edge": 224}, resample=3, **_CROP)
_CLIP |= dict(image_mean=CLIP["mean"], image_std=CLIP["std"])
_PROCESSORS = {
    "ViT": dict(size=_SQUARE, resample=2),
    "DeiT": dict(size={"height": 256, "width": 256}, resample=3, **_CROP),
    "Bit": _CLIP,
    "CLIP": _CLIP,
    "Beit": dict(size=_SQUARE, resample=3),
    "Siglip": dict(size=_SQUARE, resample=3),
    "DINOv3ViT": dict(
        size=_SQUARE, resample=2, image_mean=IMAGENET["mean"], image_std=IMAGENET["std"]
    ),
    "ConvNext": dict(size={"shortest_edge": 384}, resample=3, crop_pct=224 / 256),
}


class Preprocessing(NamedTuple):
    """Settings for resizing and cropping an image to a model's input size.

    Unsupported values are stored as text, such as `crop_mode=border`.

    Attributes:
      kind: kind of the resize before the centre crop: `short_side`, `square` or `fit`, as in
        `TestCrop`.
      share: side of the crop divided by the side of the resized image; a `Fraction` if both sides
        are whole numbers.
      interpolation: interpolation of the resize.
      half: how the crop's position is rounded if it ends in .5, such as `even`; see `TestCrop`.
      background: background colour of transparent images.
      mode: decoding mode of images, `fast` or `exact`.
    """

    kind: str
    share: float | Fraction
    interpolation: str
    half: str = "even"
    background: str = "white"
    mode: str = "fast"

    def resize(self, size: tuple[int, int]) -> float:
        """Returns the shorter side of the resized image, in pixels, before the crop to `size`.

        Args:
          size: height and width of the crop in pixels.
        """
        return float(min(size) / self.share)


# The default for checkpoints that do not contain the preprocessing. As in the pre-training of the
# ViT paper, images are resized to 256 pixels and cropped to 224 pixels.
DEFAULT_PREPROCESSING = Preprocessing("short_side", Fraction(7, 8), "bilinear")


def per_channel(value: float | tuple[float, ...], channels: int) -> list[float]:
    """Returns a mean or std as a list of one value per channel."""
    return list(value) if isinstance(value, tuple) else [value] * channels


def of_timm(config: dict, channels: int) -> tuple[dict[str, Any], Preprocessing]:
    """Returns mean and std, and the preprocessing, from timm's `config.json`.

    Missing entries have timm's defaults.

    Raises:
      UserError: a mean, a std or `crop_pct` is invalid.
    """
    pretrained_cfg = config.get("pretrained_cfg", config) or {}
    found = {
        "mean": pretrained_cfg.get("mean") or IMAGENET["mean"],
        "std": pretrained_cfg.get("std") or IMAGENET["std"],
    }
    for name, value in found.items():
        if isinstance(value, list | tuple) and len(value) != channels:
            found[name] = float(np.mean(value))  # As in timm's loader.
    interpolation = pretrained_cfg.get("interpolation") or "bicubic"
    mode = pretrained_cfg.get("crop_mode") or "center"
    return found, Preprocessing(
        {"center": "short_side", "squash": "square"}.get(mode, f"crop_mode={mode}"),
        _share(pretrained_cfg.get("crop_pct") or 0.875),
        _TIMM.get(interpolation, f"interpolation={interpolation}"),
    )


def of_transformers(config: dict) -> tuple[dict[str, Any], Preprocessing]:
    """Returns a dict with mean and std, and the preprocessing, from a `preprocessor_config.json`.

    The dict also contains `image_size` if images are resized to a known size.

    Raises:
      UserError: a value is invalid; or it is missing, and its default is unknown.
    """
    config = _with_defaults(config)
    found = _statistics(config)
    size = _sides(
        config.get("size"), "shortest_edge" if _kind(config).startswith(("Bit", "CLIP")) else None
    )
    crop = _sides(config.get("crop_size"))
    resample = config["resample"]
    interpolation = _PILLOW.get(resample, f"resample={_PILLOW_NAMES.get(resample, resample)}")
    kind, share = "square", Fraction(1)
    if step := _unsupported_step(config):
        kind = step
    elif size.keys() not in ({"height", "width"}, {"shortest_edge"}):
        kind = f"size={config['size']}"
    elif "shortest_edge" in size and not config.get("do_center_crop"):
        kind = f"size={config['size']} without a crop"
    else:
        whole = min(size.values())
        if "shortest_edge" in size:
            kind = "short_side"
        if config.get("do_center_crop"):
            if crop.keys() != {"height", "width"}:
                raise UserError(
                    f"crop_size is {config.get('crop_size')!r} and must be a height and a width"
                )
            share = Fraction(min(crop.values()), whole)
            if not _is_proportional(size, crop):
                kind = f"size={config['size']} and crop_size={config['crop_size']}"
            size = crop
        found["image_size"] = size["height"], size["width"]
    return found, Preprocessing(kind, share, interpolation, half="down")


def _unsupported_step(config: dict) -> str:
    """Returns the first unsupported step of a processor, such as `do_pad=true`, or ""."""
    if not config.get("do_resize", True):
        return "do_resize=false"
    return next((f"{name}=true" for name in _UNSUPPORTED_STEPS if config.get(name)), "")


def _is_proportional(size: dict[str, int], crop: dict[str, int]) -> bool:
    """Returns True if both sides of a crop have the same share of the resized image.

    `TestCrop` has a single share. The short side of an image may be its height or its width, so a
    crop of it must be square.
    """
    if "shortest_edge" in size:
        return crop["height"] == crop["width"]
    share = Fraction(min(crop.values()), min(size.values()))
    return size == {name: int(side / share) for name, side in crop.items()}


def _with_defaults(config: dict) -> dict:
    """Adds missing entries to a `preprocessor_config.json`: the defaults of its processor class."""
    kind = _kind(config) or "ViTImageProcessor"
    bare = re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", kind)
    if bare in _PROCESSORS:
        config = _PROCESSORS[bare] | {
            key: value for key, value in config.items() if value is not None
        }
        return _of_convnext(config) if bare == "ConvNext" else config
    required = ("size", "resample", "do_rescale", "do_normalize", "image_mean", "image_std")
    if missing := [key for key in required if config.get(key) is None]:
        raise UserError(
            f"preprocessor_config.json is of a {kind}, whose defaults are unknown: it must "
            f"contain {', '.join(missing)}"
        )
    return config


def _of_convnext(config: dict) -> dict:
    """Converts the settings of ConvNeXt's processor to those of other processors."""
    # From 384 pixels on, ConvNeXt's processor resizes images to a square. For smaller sizes, it
    # resizes the short side and crops the centre.
    side = min(_sides(config["size"]).values(), default=384)
    square = {"height": side, "width": side}
    if side >= 384:
        return config | dict(size=square, do_center_crop=False)
    return config | dict(
        size={"shortest_edge": int(side / _share(config["crop_pct"]))},
        do_center_crop=True,
        crop_size=square,
    )


def _statistics(config: dict) -> dict[str, Any]:
    """Combines a processor's rescaling and normalization of pixels into one mean and std.

    The returned mean and std apply to pixels in [0, 1].
    """
    scale = 255 * config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 255.0
    if not (isinstance(scale, int | float) and math.isfinite(scale) and scale > 0):
        raise UserError(f"rescale_factor is {config['rescale_factor']!r} and must be above 0")
    mean, std = 0.0, 1.0
    if config.get("do_normalize", True):
        mean, std = config.get("image_mean", 0.5), config.get("image_std", 0.5)

    def scaled(value):
        if abs(scale - 1) < 1e-9:  # Not divided, so that 0.5 stays exactly 0.5.
            return value
        return [x / scale for x in value] if isinstance(value, list | tuple) else value / scale

    return {"mean": scaled(mean), "std": scaled(std)}


def _kind(config: dict) -> str:
    """Returns the name of the processor class; empty if the file does not contain it."""
    return config.get("image_processor_type") or config.get("feature_extractor_type") or ""


def _sides(size: Any, alone: str | None = None) -> dict[str, int]:
    """Returns a size as a dict such as `{"height": 224, "width": 224}`, in pixels.

    Args:
      size: a dict, a pair of height and width, or a number.
      alone: key for a single number, such as `shortest_edge`. None: the number is the side of a
        square.
    """
    sides = {key: side for key, side in _named_sides(size, alone).items() if side is not None}
    if not all(_is_integer(side) and side > 0 for side in sides.values()):
        raise UserError(
            f"a size of preprocessor_config.json is {size!r} and must be numbers of pixels"
        )
    return sides


def _named_sides(size: Any, alone: str | None) -> dict[str, Any]:
    """Implements `_sides`, without checking that the values are positive integers."""
    if size is None:
        return {}
    if isinstance(size, dict):
        return size
    if isinstance(size, list | tuple) and len(size) == 2:
        return {"height": size[0], "width": size[1]}
    if not _is_integer(size):
        return {"": size}
    return {alone: size} if alone else {"height": size, "width": size}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"crop_pct is {value!r} and must be a number above 0")
    return float(value)


def to_timm(seen: Preprocessing, size: tuple[int, int]) -> dict[str, Any]:
    """Converts preprocessing to entries of timm's `pretrained_cfg`, without mean and std.

    The function `lost` lists the properties that these entries cannot store.

    Raises:
      UserError: timm does not support the kind of crop.
    """
    names = {ours: theirs for theirs, ours in _TIMM.items()}
    names |= {"bilinear": "bilinear", "area": "bilinear"}
    _require(seen, names, "timm")
    share = float(seen.share)
    while math.floor(min(size) / share) < math.floor(seen.resize(size)):
        share = math.nextafter(share, 0)
    mode = {"short_side": "center", "square": "squash"}[seen.kind]
    return dict(interpolation=names[seen.interpolation], crop_pct=share, crop_mode=mode)


def to_transformers(seen: Preprocessing, size: tuple[int, int]) -> dict[str, Any]:
    """Converts preprocessing to entries of `preprocessor_config.json`, without mean and std.

    The function `lost` lists the properties that these entries cannot store.

    Raises:
      UserError: Transformers does not support the kind of crop.
    """
    names = {ours: theirs for theirs, ours in _PILLOW.items()} | {"bilinear": 2, "area": 2}
    _require(seen, names, "Transformers")
    height, width = size
    crop = dict(do_center_crop=True, crop_size={"height": height, "width": width})
    if seen.kind == "short_side" and height == width:
        kind, whole = "Bit", {"shortest_edge": int(seen.resize(size))}
    elif seen.kind == "square" and seen.share < 1:
        kind, whole = "DeiT", {"height": int(height / seen.share), "width": int(width / seen.share)}
    else:
        kind, whole, crop = "ViT", crop["crop_size"], {}
    return dict(
        image_processor_type=f"{kind}ImageProcessor",
        do_resize=True,
        size=whole,
        resample=names[seen.interpolation],
        **crop,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
    )


def lost(
    seen: Preprocessing | None, probabilities: str, size: tuple[int, int], library: str
) -> list[str]:
    """Returns a line for each setting of preprocessing or probabilities that cannot be stored.

    Args:
      seen: the preprocessing; None: unknown.
      probabilities: name of the function from logits to probabilities: `softmax` or `sigmoid`.
      size: height and width of the model's images in pixels.
      library: the library whose files are written.
    """
    if library == "google":
        found = ["Google's npz contains no crop, no interpolation and no class names"]
        if probabilities == "sigmoid":
            found.append(
                "the sigmoid of each class: predictions by this file would be of a softmax"
            )
        return found
    seen, found = seen or DEFAULT_PREPROCESSING, []
    if seen.interpolation in ("bilinear", "area"):
        found.append(
            f"interpolation {seen.interpolation!r}: bilinear there, antialiased as in Pillow"
        )
    if seen.background != DEFAULT_PREPROCESSING.background:
        found.append(
            f"the background of transparent images, {seen.background!r}: paste them on it before"
        )
    if library == "transformers" and seen.kind == "short_side" and size[0] != size[1]:
        found.append(
            "the crop that keeps the aspect ratio: Transformers resizes to squares, "
            "without keeping it"
        )
    return found


def _require(seen: Preprocessing, names: dict, library: str) -> None:
    if seen.kind == "fit":
        raise UserError(
            f"{library} cannot store the crop fit (the whole image, padded to a square). Use the "
            "workdir itself, or export the model with its preprocessing and the head of a dense "
            "run, python -m vit_jax.export WORKDIR FILE.onnx, or convert a ViT without head and "
            "crop to FILE.npz"
        )
    if seen.kind not in ("short_side", "square"):
        raise UserError(f"{library} cannot store the crop {seen.kind}, which is unsupported here")
    if seen.interpolation not in names:
        raise UserError(
            f"{library} cannot store the interpolation {seen.interpolation!r}: it is "
            "unsupported here"
        )
