"""Image towers of open_clip: `open_clip_model.safetensors` and `open_clip_config.json`.

The image tower is open_clip's own ViT or a timm model. `open_clip_text.py` reads text towers. Image
towers alone are read, but not written; `open_clip_towers.py` writes models with both towers.
"""

from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import timm
from vit_jax.interop.library import Library, load_formats
from vit_jax.interop.preprocessing import CLIP
from vit_jax.interop.tensor_files import Tensor, without_prefix
from vit_jax.models.image_model import height_and_width

_TOWER, _TIMM = "visual.", "visual.trunk."
# timm's `crop_mode` for each of open_clip's values of `resize_mode`.
_CROPS = {"shortest": "center", "squash": "squash"}


def _prepare(
    path: Path, tensors: dict[str, Tensor], config: dict
) -> tuple[dict[str, Tensor], dict]:
    """Returns the image tower's tensors without their prefix, and the config with `pretrained_cfg`.

    The entry `pretrained_cfg` contains the preprocessing in timm's form.

    Raises:
      UserError: there is no `open_clip_config.json`, or the model is unsupported.
    """
    if "model_cfg" not in config:
        raise UserError(f"{path} is of open_clip, which needs its open_clip_config.json next to it")
    config = config | dict(pretrained_cfg=_pretrained_config(tensors, config))
    if config["model_cfg"]["vision_cfg"].get("timm_model_name"):
        return _prepare_timm(path, tensors, config)
    tower_tensors = without_prefix(tensors, _TOWER)
    if "proj" in tower_tensors:  # The head has no bias.
        classes = tower_tensors["proj"].shape[1]
        tower_tensors["proj.bias"] = Tensor(
            (classes,), np.dtype(np.float32), lambda: np.zeros(classes, np.float32)
        )
    return tower_tensors, config


def _pretrained_config(tensors: dict[str, Tensor], config: dict) -> dict:
    """Converts open_clip's preprocessing to timm's `pretrained_cfg`.

    Raises:
      UserError: the resize mode is unsupported.
    """
    preprocess_cfg = config.get("preprocess_cfg") or {}
    preprocessing = CLIP | {
        key: value for key, value in preprocess_cfg.items() if value is not None
    }
    crop = preprocessing.get("resize_mode", "shortest")
    if crop not in _CROPS:
        raise UserError(
            f"an open_clip model with resize_mode={crop!r} is unsupported; supported: "
            f"{', '.join(_CROPS)}"
        )
    size = config["model_cfg"]["vision_cfg"].get("image_size", 224)
    channels = next(x.shape[1] for x in tensors.values() if len(x.shape) == 4)
    return dict(
        crop_pct=1.0,
        crop_mode=_CROPS[crop],
        interpolation=preprocessing.get("interpolation", "bicubic"),
        input_size=[channels, *height_and_width(size)],
        mean=preprocessing["mean"],
        std=preprocessing["std"],
    )


def _prepare_timm(
    path: Path, tensors: dict[str, Tensor], config: dict
) -> tuple[dict[str, Tensor], dict]:
    """Implements `_prepare` for an image tower that is a timm model."""
    tower = config["model_cfg"]["vision_cfg"]
    architecture = tower["timm_model_name"]
    for name in tensors:
        if name.startswith(_TOWER) and not name.startswith(_TIMM):
            raise UserError(
                f"an open_clip model of timm's {architecture} with {name} is unsupported"
            )
    tower_tensors = without_prefix(tensors, _TIMM)
    # The projection to the embedding is the head of timm's model (`trunk`). If the model has
    # attention pooling, there is no head, and the output of the pooling is the embedding.
    pooling = tower.get("timm_pool")
    arguments = dict(global_pool=pooling) if pooling in ("map", "token", "avg") else {}
    arguments |= tower.get("timm_model_kwargs") or {}
    config = config | dict(architecture=architecture, model_args=arguments)
    return timm.LIBRARY.prepare(path, tower_tensors, config)


LIBRARY = Library(
    title="open_clip",
    formats=(*load_formats(__name__, "open_clip_vit"), *timm.LIBRARY.formats),
    suffix="",
    claims=lambda path, config, tensors: any(name.startswith(_TOWER) for name in tensors),
    prepare=_prepare,
    unknown=lambda config, tensors: (
        "an open_clip model without an image tower of ViT's kind is unsupported"
    ),
    preprocessing=timm.LIBRARY.preprocessing,
    class_names=lambda config: [],
    files=lambda described, values, seen, names, probabilities: {},
    written=False,
)
