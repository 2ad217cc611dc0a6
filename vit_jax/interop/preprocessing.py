"""Reads and writes the preprocessing of images in other libraries' files.

Mean and std are arguments of the model, which normalizes images; all else is `Preprocessing`.
"""

import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError

# Our names of timm's interpolations. All our interpolations except `bilinear` and `area` use
# antialiasing, like Pillow.
_TIMM = {"bilinear": "bilinear_antialias", "bicubic": "bicubic", "lanczos": "lanczos"}
_PILLOW = {1: "lanczos", 2: "bilinear_antialias", 3: "bicubic"}
_PILLOW_NAMES = {0: "nearest", 4: "box", 5: "hamming"}

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}

# Defaults of Transformers' image processors.
_PROCESSORS = {
    "ViT": dict(size={"height": 224, "width": 224}, resample=2),
    "DeiT": dict(
        size={"height": 256, "width": 256},
        resample=3,
        do_center_crop=True,
        crop_size={"height": 224, "width": 224},
    ),
    "Bit": dict(
        size={"shortest_edge": 224},
        resample=3,
        do_center_crop=True,
        crop_size={"height": 224, "width": 224},
        image_mean=CLIP["mean"],
        image_std=CLIP["std"],
    ),
    "CLIP": dict(
        size={"shortest_edge": 224},
        resample=3,
        do_center_crop=True,
        crop_size={"height": 224, "width": 224},
        image_mean=CLIP["mean"],
        image_std=CLIP["std"],
    ),
    "Beit": dict(size={"height": 224, "width": 224}, resample=3),
    "Siglip": dict(size={"height": 224, "width": 224}, resample=3),
    "DINOv3ViT": dict(
        size={"height": 224, "width": 224},
        resample=2,
        image_mean=IMAGENET["mean"],
        image_std=IMAGENET["std"],
    ),
    "ConvNext": dict(
        size={"shortest_edge": 384},
        resample=3,
        crop_pct=224 / 256,
    ),
}


class Preprocessing(NamedTuple):
    """Preprocessing from an image to a model's input size; unknown values are kept as text.

    Attributes:
      kind: kind of the resize before the centre crop: `short_side`, `square` or `fit`, as in
        `TestCrop`.
      share: side of the crop relative to the resized image; a fraction if both are integers.
      interpolation: interpolation of the resize.
      half: rounding of a crop position between two pixels; see `TestCrop`.
      background: background color of transparent images.
      mode: decoding mode of images.
    """

    kind: str
    share: float | Fraction
    interpolation: str
    half: str = "even"
    background: str = "white"
    mode: str = "fast"

    def resize(self, size: tuple[int, int]) -> float:
        """Returns the length of the shorter side after the resize, before a crop to `size`."""
        return float(min(size) / self.share)


# Default for checkpoints without preprocessing: the paper's pre-training (resize to 256, crop to
# 224 pixels).
UNSAID = Preprocessing("short_side", Fraction(7, 8), "bilinear")


def per_channel(value: float | tuple[float, ...], channels: int) -> list[float]:
    """Returns a mean or std as a list of one value per channel."""
    return list(value) if isinstance(value, tuple) else [value] * channels


def of_timm(config: dict, channels: int) -> tuple[dict[str, Any], Preprocessing]:
    """Returns mean and std, and the preprocessing, from timm's `config.json` (or its defaults).

    Raises:
      UserError: a mean, std or crop share is invalid.
    """
    said = config.get("pretrained_cfg", config) or {}
    found = {
        "mean": said.get("mean") or IMAGENET["mean"],
        "std": said.get("std") or IMAGENET["std"],
    }
    for name, value in found.items():
        if isinstance(value, list | tuple) and len(value) != channels:
            found[name] = float(np.mean(value))  # As in timm's loader.
    interpolation, mode = said.get("interpolation") or "bicubic", said.get("crop_mode") or "center"
    return found, Preprocessing(
        {"center": "short_side", "squash": "square"}.get(mode, f"crop_mode={mode}"),
        _share(said.get("crop_pct") or 0.875),
        _TIMM.get(interpolation, f"interpolation={interpolation}"),
    )


def of_transformers(said: dict) -> tuple[dict[str, Any], Preprocessing]:
    """Returns mean and std, and the preprocessing, from a `preprocessor_config.json`.

    The first dict also contains `image_size` if images are resized to a known size.

    Raises:
      UserError: values are invalid, or missing for a processor with unknown defaults.
    """
    said = _with_defaults(said)
    found = _statistics(said)
    size = _sides(
        said.get("size"), "shortest_edge" if _kind(said).startswith(("Bit", "CLIP")) else None
    )
    crop = _sides(said.get("crop_size"))
    resample = said["resample"]
    interpolation = _PILLOW.get(resample, f"resample={_PILLOW_NAMES.get(resample, resample)}")
    kind, share = "square", Fraction(1)
    if not said.get("do_resize", True):
        kind = "do_resize=false"
    elif size.keys() not in ({"height", "width"}, {"shortest_edge"}):
        kind = f"size={said['size']}"
    elif "shortest_edge" in size and not said.get("do_center_crop"):
        kind = f"size={said['size']} without a crop"
    else:
        whole = min(size.values())
        if "shortest_edge" in size:
            kind = "short_side"
        if said.get("do_center_crop"):
            if crop.keys() != {"height", "width"}:
                raise UserError(
                    f"crop_size is {said.get('crop_size')!r} and must be a height and a width"
                )
            share = Fraction(min(crop.values()), whole)
            size = crop
        found["image_size"] = size["height"], size["width"]
    return found, Preprocessing(kind, share, interpolation, half="down")


def _with_defaults(said: dict) -> dict:
    """Completes a `preprocessor_config.json` with the defaults of its class."""
    kind = _kind(said) or "ViTImageProcessor"
    bare = re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", kind)
    if bare in _PROCESSORS:
        said = _PROCESSORS[bare] | {key: value for key, value in said.items() if value is not None}
        return _of_convnext(said) if bare == "ConvNext" else said
    wanted = ("size", "resample", "do_rescale", "do_normalize", "image_mean", "image_std")
    if missing := [key for key in wanted if said.get(key) is None]:
        raise UserError(
            f"preprocessor_config.json is of a {kind}, whose defaults are unknown: it must "
            f"contain {', '.join(missing)}"
        )
    return said


def _of_convnext(said: dict) -> dict:
    """Converts ConvNeXt's processor: a resize to a square for 384 pixels or more, else a crop."""
    side = min(_sides(said["size"]).values(), default=384)
    square = {"height": side, "width": side}
    if side >= 384:
        return said | dict(size=square, do_center_crop=False)
    return said | dict(
        size={"shortest_edge": int(side / _share(said["crop_pct"]))},
        do_center_crop=True,
        crop_size=square,
    )


def _statistics(said: dict) -> dict[str, Any]:
    """Returns the mean and std, for pixels in [0, 1], equivalent to rescaling and normalization."""
    scale = 255 * said.get("rescale_factor", 1 / 255) if said.get("do_rescale", True) else 255.0
    if not (isinstance(scale, int | float) and math.isfinite(scale) and scale > 0):
        raise UserError(f"rescale_factor is {said['rescale_factor']!r} and must be above 0")
    mean, std = 0.0, 1.0
    if said.get("do_normalize", True):
        mean, std = said.get("image_mean", 0.5), said.get("image_std", 0.5)

    def scaled(value):
        if abs(scale - 1) < 1e-9:  # Avoids rounding errors: 0.5 stays 0.5.
            return value
        return [x / scale for x in value] if isinstance(value, list | tuple) else value / scale

    return {"mean": scaled(mean), "std": scaled(std)}


def _kind(said: dict) -> str:
    """Returns the class of a processor, or an empty string."""
    return said.get("image_processor_type") or said.get("feature_extractor_type") or ""


def _sides(size: Any, alone: str | None = None) -> dict[str, int]:
    """Returns a size as a dict of numbers of pixels.

    Args:
      size: a dict, a pair of height and width, or a number.
      alone: key for a single number; None: it is the side of a square.
    """
    sides = {key: side for key, side in _named_sides(size, alone).items() if side is not None}
    if not all(_is_integer(side) and side > 0 for side in sides.values()):
        raise UserError(
            f"a size of preprocessor_config.json is {size!r} and must be numbers of pixels"
        )
    return sides


def _named_sides(size: Any, alone: str | None) -> dict[str, Any]:
    """Returns a size as a dict, without checking its values; arguments as in `_sides`."""
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
    """Returns the values of timm's `pretrained_cfg` except mean and std; see `lost`.

    Raises:
      UserError: timm has no such crop.
    """
    names = {ours: theirs for theirs, ours in _TIMM.items()} | {
        "bilinear": "bilinear",
        "area": "bilinear",
    }
    _require(seen, names, "timm")
    share = float(seen.share)
    while math.floor(min(size) / share) < math.floor(seen.resize(size)):
        share = math.nextafter(share, 0)
    mode = {"short_side": "center", "square": "squash"}[seen.kind]
    return dict(interpolation=names[seen.interpolation], crop_pct=share, crop_mode=mode)


def to_transformers(seen: Preprocessing, size: tuple[int, int]) -> dict[str, Any]:
    """Returns the values of `preprocessor_config.json` except mean and std; see `lost`.

    Raises:
      UserError: Transformers has no such crop.
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
    """Returns lines about preprocessing and probabilities that a library's files cannot store."""
    if library == "google":
        found = ["Google's npz contains no crop, no interpolation and no class names"]
        if probabilities == "sigmoid":
            found.append(
                "the sigmoid of each class: predictions by this file would be of a softmax"
            )
        return found
    seen, found = seen or UNSAID, []
    if seen.interpolation in ("bilinear", "area"):
        found.append(
            f"interpolation {seen.interpolation!r}: bilinear there, antialiased as in Pillow"
        )
    if library == "transformers" and seen.kind == "short_side" and size[0] != size[1]:
        found.append(
            "the crop that keeps the aspect ratio: Transformers resizes to squares, "
            "without keeping it"
        )
    return found


def _require(seen: Preprocessing, names: dict, library: str) -> None:
    if seen.kind not in ("short_side", "square"):
        raise UserError(f"{library} cannot store the crop {seen.kind}, which is unsupported here")
    if seen.interpolation not in names:
        raise UserError(
            f"{library} cannot store the interpolation {seen.interpolation!r}: it is "
            "unsupported here"
        )
