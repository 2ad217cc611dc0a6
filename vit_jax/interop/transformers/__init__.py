"""The format of Hugging Face Transformers: a folder with `model.safetensors` and `config.json`.

`from_pretrained(FOLDER)` loads such a folder.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.interop.library import Library, load_formats, problem_type
from vit_jax.interop.preprocessing import (
    DEFAULT_PREPROCESSING,
    Preprocessing,
    of_transformers,
    per_channel,
    to_transformers,
)
from vit_jax.interop.tensor_files import Tensor


def _prepare(
    path: Path, tensors: dict[str, Tensor], config: dict
) -> tuple[dict[str, Tensor], dict]:
    """Removes an unused mask token, and prefixes of tensor names.

    A mask token of zeros was not used in training.

    Base classes such as `ViTModel` store tensors without a prefix. Other classes, such as
    `ViTForMaskedImageModeling`, add a prefix such as `vit.`. The prefix is kept in models with a
    classifier, whose formats expect it.

    Raises:
      UserError: there is no `config.json`.
    """
    if not config:
        raise UserError(
            f"{path} is of Transformers, which needs its model's config.json next to it"
        )
    model_tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith("embeddings.mask_token") or tensor.read().any()
    }
    if not any("classifier" in name for name in model_tensors):
        model_tensors = {
            re.sub(
                r"^(vit|deit|beit|bit|convnext|convnextv2|dinov2|dinov2_with_registers|swin|swinv2)\.",
                "",
                name,
            ): tensor
            for name, tensor in model_tensors.items()
        }
    return model_tensors, config


def _preprocessing(
    config: dict, processor_config: dict, channels: int
) -> tuple[dict, Preprocessing | None, str]:
    if not processor_config:
        return {}, None, "pixels in [-1, 1], as there is no preprocessor_config.json"
    return *of_transformers(processor_config), ""


def _class_names(config: dict) -> list:
    """Returns the names of the classes; [] if they are Transformers' placeholders `LABEL_0`, ..."""
    named = config.get("id2label") or {}
    names = [named[key] for key in sorted(named, key=int)]
    return [] if names == [f"LABEL_{label}" for label in range(len(names))] else names


def _files(
    described: dict,
    values: dict,
    seen: Preprocessing | None,
    names: Sequence[str],
    probabilities: str,
) -> dict[str, dict]:
    channels = values["channels"]
    if names:
        described |= dict(
            id2label={str(label): name for label, name in enumerate(names)},
            label2id={name: label for label, name in enumerate(names)},
        )
    described |= problem_type(values["num_classes"], probabilities)
    processor = to_transformers(seen or DEFAULT_PREPROCESSING, values["image_size"]) | dict(
        image_mean=per_channel(values["mean"], channels),
        image_std=per_channel(values["std"], channels),
    )
    return {"config.json": described, "preprocessor_config.json": processor}


LIBRARY = Library(
    title="Transformers",
    formats=load_formats(
        __name__,
        "transformers_beit",
        "transformers_bit",
        "transformers_clip",
        "transformers_convnext",
        "transformers_dinov2",
        "transformers_dinov3",
        "transformers_mae",
        "transformers_siglip",
        "transformers_swin",
        "transformers_vit",
    ),
    suffix="",
    claims=lambda path, config, tensors: (
        "model_type" in config or any("embeddings.patch_embeddings." in name for name in tensors)
    ),
    prepare=_prepare,
    unknown=lambda config, tensors: (
        f"a Transformers model of type {config.get('model_type')!r} is unsupported; supported: "
        "beit, bit, clip, clip_vision_model, convnext, convnextv2, deit, dinov2, "
        "dinov2_with_registers, dinov3_vit, siglip, siglip_vision_model, swin, swinv2, vit, vit_mae"
    ),
    preprocessing=_preprocessing,
    class_names=_class_names,
    files=_files,
)
