"""The image towers of open_clip's models: `open_clip_model.safetensors` beside `open_clip_config.json`.

A tower is a ViT of open_clip's own, or one of timm's. They are read, not written: files hold both towers.
"""

from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import timm
from vit_jax.interop.library import Library, load_formats
from vit_jax.interop.tensor_files import Tensor

_TOWER, _TIMM = "visual.", "visual.trunk."
_CROPS = {"shortest": "center", "squash": "squash"}  # timm's, by the way in which images are resized.


def _prepare(path: Path, tensors: dict[str, Tensor], config: dict) -> tuple[dict[str, Tensor], dict]:
    """Leaves the tensors of the image tower alone, without what comes before their names.

    Raises:
      UserError: there is no `open_clip_config.json`, or it asks for what is not read.
    """
    if "model_cfg" not in config:
        raise UserError(f"{path} is of open_clip, which needs its open_clip_config.json beside it")
    tower, seen = config["model_cfg"]["vision_cfg"], config.get("preprocess_cfg") or {}
    crop = seen.get("resize_mode", "shortest")
    if crop not in _CROPS:
        raise UserError(f"an open_clip model with resize_mode={crop!r} is not read")
    shown = dict(crop_pct=1.0, crop_mode=_CROPS[crop], interpolation=seen.get("interpolation", "bicubic"))
    shown |= {theirs: seen[ours] for ours, theirs in dict(mean="mean", std="std").items() if ours in seen}
    size = tower.get("image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    channels = next(x.shape[1] for x in tensors.values() if len(x.shape) == 4)
    shown["input_size"] = [channels, height, width]
    config = config | dict(pretrained_cfg=shown)
    if architecture := tower.get("timm_model_name"):
        kept = {name.removeprefix(_TIMM): x for name, x in tensors.items() if name.startswith(_TIMM)}
        left = [name for name in tensors if name.startswith(_TOWER) and not name.startswith(_TIMM)]
        if left:
            raise UserError(f"an open_clip model of timm's {architecture} with {left[0]} is not read")
        # The head is in the trunk unless attention pools, whose result is the embedding.
        pooled = {"map": "map", "token": "token", "avg": "avg"}.get(tower.get("timm_pool") or "")
        args = dict(global_pool=pooled) if pooled else {}
        return timm.LIBRARY.prepare(path, kept, config | dict(architecture=architecture, model_args=args))
    kept = {name.removeprefix(_TOWER): x for name, x in tensors.items() if name.startswith(_TOWER)}
    if "proj" in kept:  # A head without a bias.
        classes = kept["proj"].shape[1]
        kept["proj.bias"] = Tensor((classes,), np.dtype(np.float32), lambda: np.zeros(classes, np.float32))
    return kept, config


LIBRARY = Library(
    title="open_clip",
    formats=(*load_formats(__name__, "open_clip_vit"), *timm.LIBRARY.formats),
    suffix="",
    claims=lambda path, config, tensors: any(name.startswith(_TOWER) for name in tensors),
    prepare=_prepare,
    unknown=lambda config, tensors: "an open_clip model without an image tower of ViT's kind is not read",
    preprocessing=timm.LIBRARY.preprocessing,
    class_names=lambda config: [],
    files=lambda described, values, seen, names, probabilities: {},
    written=False,
)
