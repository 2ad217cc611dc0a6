"""Writes CLIP and SigLIP with both towers for open_clip.

An image tower with CLIP's architecture (a norm before the first block) is written as open_clip's
own ViT. Any other image tower is written as a timm model.
"""

from dataclasses import asdict
from fractions import Fraction
from typing import Any

from vit_jax.errors import UserError
from vit_jax.interop import timm
from vit_jax.interop.image_text import TextPart
from vit_jax.interop.library import TRAINING_ONLY, Arrays, Format, Values, write_image_size
from vit_jax.interop.open_clip import open_clip_vit
from vit_jax.interop.open_clip.open_clip_text import text_config, text_rules
from vit_jax.interop.preprocessing import DEFAULT_PREPROCESSING, lost, per_channel, to_timm
from vit_jax.interop.tensor_files import Tensor
from vit_jax.interop.towers_format import (
    Towers,
    TowersFiles,
    TowersFormat,
    similarity_arrays,
    text_arrays,
    without_bias,
)
from vit_jax.interop.writing import content_of
from vit_jax.models import family_of
from vit_jax.models.text_tokens import OPEN_CLIP, open_clip_config
from vit_jax.published.weights import all_weights

_TITLE = "open_clip"
_VOCABULARY = 49408  # Number of token ids of open_clip's own tokenizer, which is CLIP's.
_MODES = {"center": "shortest", "squash": "squash"}
# Maps `Tokenizer.cleaning` to the most similar cleaning in open_clip. SigLIP with a spiece.model
# is an exception: its texts have no punctuation, so open_clip must use "canonicalize".
_CLEANINGS = {"clip": "whitespace", "siglip": "lower", "big_vision": "lower"}
_ALSO = "open_clip also repairs encodings and replaces HTML entities in texts"
_TOKENIZER = ("hf_tokenizer_name", "tokenizer_kwargs")


def _describe(towers: Towers) -> TowersFiles:
    """Converts an image-text model to open_clip's tensors and config, and notes for the user."""
    text_part, options, notes = towers.text_part, towers.options, []
    if asdict(options).get("stem_norm") == "tokens":
        towers, notes = without_bias(towers, _TITLE)
        vision, arrays = _own_tower(towers)
    else:
        vision, arrays = _timm_tower(towers)
    text, more = _tokenizer(text_part)
    biased = text_part.tower.options.head_bias
    model: dict[str, Any] = dict(
        embed_dim=text_part.tower.options.output_dim,
        vision_cfg=vision,
        text_cfg=text_config(text_part.tower.options) | text,
        custom_text=True,
    )
    if text_part.tower.options.gelu == "quick":
        model["quick_gelu"] = True
    if text_part.logit_bias is not None:
        model["init_logit_bias"] = text_part.logit_bias
    arrays |= {
        f"text.{name}": x for name, x in text_arrays(text_rules(biased), text_part, _TITLE).items()
    }
    arrays |= similarity_arrays(text_part, ())
    preprocessing, unwritten = _preprocessing(towers)
    notes += more + [f"not written: {line}" for line in unwritten]
    config = dict(model_cfg=model, preprocess_cfg=preprocessing)
    return TowersFiles(towers, arrays, {OPEN_CLIP: config}, {}, notes)


def _own_tower(towers: Towers) -> tuple[dict[str, Any], Arrays]:
    """Returns the `vision_cfg` and the tensors of open_clip's own ViT."""
    content = content_of(open_clip_vit.FORMAT, _TITLE, towers.options, towers.read)
    arrays = {f"visual.{name}": x for name, x in content.arrays.items()}
    arrays.pop("visual.proj.bias", None)  # The bias is zero, and open_clip has none.
    return content.described, arrays


def _timm_tower(towers: Towers) -> tuple[dict[str, Any], Arrays]:
    """Returns the `vision_cfg` and the tensors of an image tower that is a timm model.

    Raises:
      UserError: none of timm's architecture names stands for this model. open_clip builds the model
        from the name alone, without further arguments.
    """
    options, values = towers.options, asdict(towers.options)
    form = timm.LIBRARY.format_of(family_of(options).model, values)
    content = content_of(form, "timm", options, towers.read)
    pooling = content.described["model_args"]["global_pool"]
    candidates = _architectures(towers.text_part)
    architecture = next(
        (
            name
            for name in candidates
            if _is_architecture(name, pooling, form, content.arrays, values)
        ),
        None,
    )
    if architecture is None:
        raise UserError(
            "Unsupported: an image tower that is none of timm's CLIP or SigLIP architectures, from "
            "whose names open_clip builds it; write it for Transformers instead"
        )
    vision = dict(
        image_size=write_image_size(values),
        timm_model_name=architecture,
        timm_model_pretrained=False,
        timm_pool=pooling,
        timm_proj=None if options.num_classes else "none",
    )
    return vision, {f"visual.trunk.{name}": x for name, x in content.arrays.items()}


def _architectures(text_part: TextPart) -> list[str]:
    """Returns the names of timm's architectures for image towers of CLIP and SigLIP.

    If the model was read from open_clip's files, the architecture's name in these files comes
    first.
    """
    described = _read_config(text_part).get("vision_cfg", {}).get("timm_model_name")
    names = {weights.repository.removeprefix("timm/").split(".")[0] for weights in all_weights()}
    known = sorted(name for name in names if "clip" in name or "siglip" in name)
    return [described, *known] if described else known


def _is_architecture(name: str, pooling: str, form: Format, arrays: Arrays, values: Values) -> bool:
    """Returns True if a timm architecture is the image tower of this model.

    `name` is the name of the architecture, `pooling` timm's `global_pool`, and `arrays` the model's
    tensors by timm's names. The architecture must have the same arguments as the model, `values`.
    """
    tensors = {key: Tensor(x.shape, x.dtype, lambda x=x: x) for key, x in arrays.items()}
    config = dict(architecture=name, model_args=dict(global_pool=pooling), pretrained_cfg={})
    try:
        found, _ = form.arguments(tensors, config, values["image_size"])
    except UserError:
        return False
    ignored = TRAINING_ONLY | {"mean", "std"}
    return all(values[key] == x for key, x in found.items() if key not in ignored)


def _read_config(text_part: TextPart) -> dict[str, Any]:
    """Returns the `model_cfg` of a model that was read from open_clip's files; {} for others."""
    files = {file.name: file for file in text_part.tokenizer.files}
    if OPEN_CLIP not in files:
        return {}
    return (open_clip_config(files[OPEN_CLIP].parent) or {}).get("model_cfg", {})


def _tokenizer(text_part: TextPart) -> tuple[dict[str, Any], list[str]]:
    """Returns the entries of `text_cfg` that describe the tokenizer, and notes for the user."""
    if text_part.tokenizer.cleaning == _TITLE:
        described = _read_config(text_part)["text_cfg"]
        return {name: described[name] for name in _TOKENIZER if described.get(name)}, []
    if text_part.tower.options.causal and text_part.tokenizer.vocabulary == _VOCABULARY:
        return {}, [_ALSO]
    cleaning = _CLEANINGS[text_part.tokenizer.cleaning]
    names = {file.name for file in text_part.tokenizer.files}
    if text_part.tokenizer.cleaning == "siglip" and "spiece.model" in names:
        cleaning = "canonicalize"
    # If the model is in a local folder, open_clip reads the tokenizer from the same folder.
    text = dict(hf_tokenizer_name="OWNER/NAME", tokenizer_kwargs=dict(clean=cleaning))
    note = f"before an upload, replace OWNER/NAME in {OPEN_CLIP} by the repository's name"
    return text, [note, _ALSO]


def _preprocessing(towers: Towers) -> tuple[dict[str, Any], list[str]]:
    """Returns the `preprocess_cfg`, and a line for each property that it cannot store.

    Raises:
      UserError: open_clip does not support the kind of crop.
    """
    seen, values = towers.preprocessing or DEFAULT_PREPROCESSING, asdict(towers.options)
    size, channels = values["image_size"], values["channels"]
    crop = to_timm(seen, size)
    unwritten = lost(seen, towers.text_part.probabilities, size, "timm")
    if seen.share != Fraction(1):
        unwritten.append(
            f"the share {seen.share} of the resized image that the crop keeps: all of it in "
            "open_clip"
        )
    return dict(
        size=write_image_size(values),
        mean=per_channel(values["mean"], channels),
        std=per_channel(values["std"], channels),
        interpolation=crop["interpolation"],
        resize_mode=_MODES[crop["crop_mode"]],
    ), unwritten


FORMAT = TowersFormat(_TITLE, _describe, "open_clip_model.safetensors")
