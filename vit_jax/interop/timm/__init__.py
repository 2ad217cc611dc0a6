"""timm's format: a folder with `model.safetensors` and `config.json`.

`timm.create_model("local-dir:FOLDER", pretrained=True)` loads such a folder.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.interop.library import Library, problem_type
from vit_jax.interop.preprocessing import (
    DEFAULT_PREPROCESSING,
    Preprocessing,
    of_timm,
    per_channel,
    to_timm,
)
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.timm import timm_mae
from vit_jax.published.unheld import refuse_unheld

# One module for each family of models. Each module defines `FORMAT` and `named`, a function that
# parses names of timm's architectures.
_MODULES = tuple(
    import_module(f"{__name__}.{module}")
    for module in ("timm_beit", "timm_bit", "timm_convnext", "timm_eva", "timm_swin", "timm_vit")
)


def _prepare(
    path: Path, tensors: dict[str, Tensor], config: dict
) -> tuple[dict[str, Tensor], dict]:
    """Rejects unsupported architectures by their names; changes nothing."""
    architecture = config.get("architecture")
    if architecture is None:
        return tensors, config
    refuse_unheld(architecture)
    if any(module.named(architecture) is not None for module in _MODULES):
        return tensors, config
    raise UserError(
        f"timm's {architecture} is unsupported; supported: ViTs, hybrids, BiTs, ConvNeXts, Swins"
    )


def _preprocessing(
    config: dict, processor_config: dict, channels: int
) -> tuple[dict, Preprocessing | None, str]:
    """Without a `config.json`, timm's defaults are assumed."""
    if not config:
        return {}, None, "pixels in [-1, 1]"
    return *of_timm(config, channels), ""


def _class_names(config: dict) -> list:
    """Returns the names of the classes in a `config.json`; empty if it contains no names."""
    names = config.get("label_names") or (config.get("pretrained_cfg") or {}).get("label_names")
    return list(names or [])


def _files(
    described: dict,
    values: dict,
    seen: Preprocessing | None,
    names: Sequence[str],
    probabilities: str,
) -> dict[str, dict]:
    channels = values["channels"]
    described["pretrained_cfg"] |= dict(
        mean=per_channel(values["mean"], channels), std=per_channel(values["std"], channels)
    ) | to_timm(seen or DEFAULT_PREPROCESSING, values["image_size"])
    # The entry `problem_type` is for Transformers, which can also read folders in timm's format.
    # timm ignores it.
    described |= problem_type(values["num_classes"], probabilities)
    return {"config.json": described | (dict(label_names=list(names)) if names else {})}


LIBRARY = Library(
    title="timm",
    formats=(timm_mae.FORMAT, *(module.FORMAT for module in _MODULES)),
    suffix="",
    claims=lambda path, config, tensors: True,  # timm is the last library in `LIBRARIES`.
    prepare=_prepare,
    unknown=lambda config, tensors: (
        "these are not the tensors of a ViT, BiT, ConvNeXt or Swin of timm's: "
        f"'patch_embed.proj.weight' is missing among {len(tensors)} tensors such as "
        f"{min(tensors, default='none')!r}"
    ),
    preprocessing=_preprocessing,
    class_names=_class_names,
    files=_files,
)
