"""Writes CLIP and SigLIP with both towers for Transformers."""

from dataclasses import asdict

from vit_jax.errors import UserError
from vit_jax.interop import transformers
from vit_jax.interop.preprocessing import lost
from vit_jax.interop.towers_format import (
    Towers,
    TowersFiles,
    TowersFormat,
    similarity_arrays,
    text_arrays,
    without_bias,
)
from vit_jax.interop.transformers.transformers_text import describe_text_tower, text_rules
from vit_jax.interop.writing import content_of
from vit_jax.models import family_of

_TITLE = "Transformers"
_CLASSES = {"clip": "CLIP", "siglip": "Siglip"}
# Maps (model type, image processor) to the image processor with the same settings that Transformers
# provides for this model type.
_PROCESSORS = {("clip", "Bit"): "CLIP", ("siglip", "ViT"): "Siglip"}
# Maps kinds of text cleaning (`Tokenizer.cleaning`) that Transformers lacks to their description.
_CLEANINGS = {
    "open_clip": "open_clip's cleaning of texts (encodings, HTML entities, spaces)",
    "big_vision": "big_vision's cleaning of texts, which keeps the punctuation that a "
    "SiglipTokenizer removes",
}


def _describe(towers: Towers) -> TowersFiles:
    """Returns the content of a folder in Transformers' format."""
    text_part, notes = towers.text_part, []
    kind, text_config = describe_text_tower(text_part.tower.options, text_part.probabilities)
    if kind == "clip":
        towers, notes = without_bias(towers, _TITLE)
    library, options, values = transformers.LIBRARY, towers.options, asdict(towers.options)
    form = library.format_of(family_of(options).model, values)
    image = content_of(form, _TITLE, options, towers.read)
    if image.described["model_type"] != f"{kind}_vision_model":
        raise UserError(
            f"{_TITLE} has no model with a text tower of {_CLASSES[kind]} and an image tower of "
            f"type {image.described['model_type']}"
        )
    files = library.files(image.described, values, towers.preprocessing, (), "softmax") or {}
    files["config.json"] = _config(kind, files["config.json"], text_config)
    processor = files["preprocessor_config.json"]
    name = processor["image_processor_type"].removesuffix("ImageProcessor")
    processor["image_processor_type"] = f"{_PROCESSORS.get((kind, name), name)}ImageProcessor"
    arrays = image.arrays | text_arrays(text_rules(kind), text_part, _TITLE)
    arrays |= similarity_arrays(text_part, () if kind == "clip" else (1,))
    unwritten = lost(
        towers.preprocessing, text_part.probabilities, values["image_size"], "transformers"
    )
    if cleaning := _CLEANINGS.get(text_part.tokenizer.cleaning):
        unwritten.append(cleaning)
    notes += [f"not written: {line}" for line in unwritten]
    # SigLIP's tokenizer must not return an attention mask, because the text tower attends to the
    # padding tokens, as in its training.
    tokenizer = dict(model_input_names=["input_ids"]) if kind == "siglip" else {}
    return TowersFiles(towers, arrays, files, tokenizer, notes)


def _config(kind: str, vision: dict, text: dict) -> dict:
    """Returns the `config.json` for both towers."""
    vision = {name: value for name, value in vision.items() if name != "architectures"}
    described = dict(
        architectures=[f"{_CLASSES[kind]}Model"],
        model_type=kind,
        dtype="float32",
        text_config=text,
        vision_config=vision,
    )
    return described | (dict(projection_dim=text["projection_dim"]) if kind == "clip" else {})


FORMAT = TowersFormat(_TITLE, _describe, "model.safetensors")
