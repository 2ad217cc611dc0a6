"""Writes models of images and texts for Transformers, and compares the files with the model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import params_of
from vit_jax.interop.image_text import TextPart, open_text
from vit_jax.interop.layout import entries
from vit_jax.interop.libraries import LIBRARIES
from vit_jax.interop.library import Arrays, Values
from vit_jax.interop.preprocessing import Preprocessing, lost
from vit_jax.interop.reading import open_files
from vit_jax.interop.tensor_files import whole
from vit_jax.interop.transformers.transformers_text import describe_text_tower, text_rules
from vit_jax.interop.writing import (
    compare_arguments,
    compare_parameters,
    content_of,
    write_folder,
)
from vit_jax.models import family_of
from vit_jax.models.text_tokens import TOKENIZER_FILES
from vit_jax.options.model import ImageOptions

Read = Callable[[str], Any]
_TITLE = "Transformers"
_CLASSES = {"clip": "CLIP", "siglip": "Siglip"}
# Image processors with the same values as a model's own.
_PROCESSORS = {("clip", "Bit"): "CLIP", ("siglip", "ViT"): "Siglip"}
# Cleanings of texts that Transformers does not apply.
_CLEANINGS = {
    "open_clip": "open_clip's cleaning of texts (encodings, HTML entities, spaces)",
    "big_vision": "big_vision's lower-casing of texts",
}


def save_towers(
    destination: Path,
    options: ImageOptions,
    read: Read,
    preprocessing: Preprocessing | None,
    part: TextPart,
) -> list[str]:
    """Writes both towers, the preprocessing and the tokenizer's files, and reads the files back.

    Args:
      destination: a new folder.
      options: arguments of the image tower.
      read: returns the image tower's parameter of a path.
      preprocessing: preprocessing of images; None: 7/8 of the short side, bilinear.
      part: all parts except the image tower.

    Returns:
      A line for each property that the format stores otherwise, or not.

    Raises:
      UserError: Transformers has no such model, or the destination exists.
    """
    kind, text_config = describe_text_tower(part.tower.options, part.probabilities)
    values = asdict(options)
    if not part.tokenizer.files:
        raise UserError(
            f"{_TITLE} has no tokenizer of UTF-8 bytes: only runs with a folder in "
            "config.contrastive.tokenizer can be written"
        )
    read, notes = _without_bias(options, read) if kind == "clip" else (read, [])
    library = LIBRARIES["transformers"]
    form = library.format_of(family_of(options).model, values)
    image = content_of(form, _TITLE, options, read)
    if image.described["model_type"] != f"{kind}_vision_model":
        raise UserError(
            f"{_TITLE} has no model with a text tower of {_CLASSES[kind]} and an image tower of "
            f"type {image.described['model_type']}"
        )
    files = library.files(image.described, values, preprocessing, (), "softmax") or {}
    files["config.json"] = _config(kind, files["config.json"], text_config)
    _name_processor(files["preprocessor_config.json"], kind)
    with whole(destination) as temporary:
        write_folder(temporary, image.arrays | _text_arrays(kind, part), files)
        _copy_tokenizer(temporary, kind, part)
        written = open_files(temporary, values["image_size"])
        compare_arguments(written, _TITLE, family_of(options).model, values)
        compare_parameters(written, _TITLE, read)
        _compare_text(open_text(temporary), part)
    unwritten = lost(preprocessing, part.probabilities, values["image_size"], "transformers")
    if cleaning := _CLEANINGS.get(part.tokenizer.cleaning):
        unwritten.append(cleaning)
    return [*notes, *(f"not written: {line}" for line in unwritten)]


def _config(kind: str, vision: dict, text: dict) -> dict:
    """Returns the `config.json` of both towers."""
    vision = {name: value for name, value in vision.items() if name != "architectures"}
    described = dict(
        architectures=[f"{_CLASSES[kind]}Model"],
        model_type=kind,
        dtype="float32",
        text_config=text,
        vision_config=vision,
    )
    return described | (dict(projection_dim=text["projection_dim"]) if kind == "clip" else {})


def _name_processor(processor: dict, kind: str) -> None:
    """Gives an image processor the name of the model's own where that does the same."""
    name = processor["image_processor_type"].removesuffix("ImageProcessor")
    name = _PROCESSORS.get((kind, name), name)
    processor["image_processor_type"] = f"{name}ImageProcessor"


def _text_arrays(kind: str, part: TextPart) -> Arrays:
    """Returns the text tower's tensors, and those of the similarities."""
    params = {path: np.asarray(x) for path, x in params_of(part.tower).items()}
    arrays: Arrays = {}
    shapes = {path: x.shape for path, x in params.items()}
    for entry in entries(text_rules(kind), shapes, _TITLE):
        arrays |= entry.split(params[entry.path])
    shape = () if kind == "clip" else (1,)
    arrays["logit_scale"] = np.full(shape, part.logit_scale, np.float32)
    if part.logit_bias is not None:
        arrays["logit_bias"] = np.full(shape, part.logit_bias, np.float32)
    return arrays


def _copy_tokenizer(folder: Path, kind: str, part: TextPart) -> None:
    """Copies the tokenizer's files, and writes its configuration with the tower's length."""
    for file in part.tokenizer.files:
        if file.name in TOKENIZER_FILES:
            shutil.copyfile(file, folder / file.name)
    described = folder / "tokenizer_config.json"
    if described.is_file():
        config = json.loads(described.read_text(encoding="utf-8"))
    else:
        config = dict(tokenizer_class=f"{_CLASSES[kind]}Tokenizer")
        if kind == "clip":
            config |= dict(pad_token="<|endoftext|>")
    # Texts are padded to this length, and SigLIP's text tower reads the last token.
    config |= dict(model_max_length=part.tokenizer.length)
    if kind == "siglip":  # Its text tower attends to the padding, as in training: without a mask.
        config |= dict(model_input_names=["input_ids"])
    described.write_text(json.dumps(config, indent=2) + "\n")


def _without_bias(options: ImageOptions, read: Read) -> tuple[Read, list[str]]:
    """Returns the parameters of a projection without bias, and a note if there was one.

    The last norm's bias has the same effect on the embeddings.
    """
    if not options.num_classes or not np.any(bias := np.asarray(read("head/bias"), np.float64)):
        return read, []
    values: Values = asdict(options)
    kernel = np.asarray(read("head/kernel"), np.float64)
    shift, *_ = np.linalg.lstsq(kernel.T, bias, rcond=None)
    if values["pooling"] != "cls" or not np.allclose(shift @ kernel, bias, atol=1e-6):
        raise UserError(
            f"{_TITLE}' CLIP projects without biases, and head/bias is not zero: the last norm "
            "cannot replace it"
        )
    moved = {
        "head/bias": np.zeros(bias.shape, np.float32),
        "norm/bias": np.float32(np.asarray(read("norm/bias"), np.float64) + shift),
    }
    return (
        lambda path: moved[path] if path in moved else read(path),
        ["head/bias is added to norm/bias, with the same embeddings except for rounding"],
    )


def _compare_text(written: TextPart, part: TextPart) -> None:
    """Raises UserError unless the files have the same text tower, similarity and tokens."""
    theirs, ours = params_of(written.tower), params_of(part.tower)
    for path, array in ours.items():
        if not np.array_equal(theirs[path], array):
            raise UserError(f"{_TITLE} does not store the text tower's {path} exactly")
    for name in ("logit_scale", "logit_bias", "probabilities"):
        if getattr(written, name) != getattr(part, name):
            raise UserError(f"{_TITLE} cannot store {name}={getattr(part, name)!r}")
    unread = dict(dtype="float32") | ({} if part.tower.options.pooling == "end" else dict(end=0))
    if replace(written.tower.options, **unread) != replace(part.tower.options, **unread):
        raise UserError(f"{_TITLE} cannot store {part.tower.options}")
