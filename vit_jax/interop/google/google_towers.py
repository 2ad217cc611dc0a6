"""Writes SigLIP with both towers as an npz file of big_vision.

The file contains the parameters of big_vision's `two_towers` with its `vit` and `text_transformer`.
It contains neither the tokenizer nor the preprocessing.
"""

from dataclasses import asdict

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop import google
from vit_jax.interop.google import google_text, google_vit
from vit_jax.interop.preprocessing import DEFAULT_PREPROCESSING, Preprocessing
from vit_jax.interop.towers_format import (
    Towers,
    TowersFiles,
    TowersFormat,
    copied_files,
    text_arrays,
)
from vit_jax.interop.writing import content_of
from vit_jax.models import family_of
from vit_jax.models.vit import ViT
from vit_jax.options.model import ImageOptions
from vit_jax.options.text import TextOptions

_TITLE = "big_vision"
_PREFIX = "params/"
_REMEDY = "write it for Transformers or open_clip instead"
# Maps arguments of the towers to the values that big_vision supports.
_IMAGE = dict(pooling=("map", "gap", "cls"), position=("1d", "sincos2d"), resnet_blocks=(None,))
_TEXT = dict(
    causal=(False,), pooling=("last",), head_bias=(True,), gelu=("tanh",), norm_epsilon=(1e-6,)
)
_TOKENIZERS = ("spiece.model", "tokenizer.json")
# Maps `Tokenizer.cleaning` to a note about steps of text cleaning that big_vision lacks.
_CLEANINGS = {
    "clip": "the cleaning of texts: for an npz file, ASCII letters are converted to lower case",
    "siglip": "the cleaning of texts: for an npz file, punctuation is not removed, and only ASCII "
    "letters are converted to lower case",
    "open_clip": "open_clip's cleaning of texts (encodings, HTML entities, spaces)",
}
_FORMAT = google_vit.FORMAT._replace(
    number=lambda mapped, values: google_vit.with_big_vision_names(mapped)
)


def _describe(towers: Towers) -> TowersFiles:
    """Converts an image-text model to the tensors of a big_vision file, and notes for the user."""
    text_part, options = towers.text_part, towers.options
    if family_of(options).model is not ViT:
        raise UserError(
            f"Unsupported: a {family_of(options).model.__name__} as image tower for {_TITLE}. "
            f"Supported: ViT; {_REMEDY}"
        )
    _check_arguments("an image tower", options, _IMAGE)
    height, width = options.image_size
    if asdict(options)["pooling"] == "cls" and height != width:
        raise UserError(
            f"Unsupported: an image tower with pooling='cls' and images of {height}x{width} for "
            f"{_TITLE}. Supported: square images; {_REMEDY}"
        )
    _check_arguments("a text tower", text_part.tower.options, _TEXT)
    image = content_of(_FORMAT, _TITLE, options, towers.read).arrays
    arrays = {f"{_PREFIX}img/{name}": x for name, x in image.items()}
    text = text_arrays(google_text.RULES, text_part, _TITLE)
    arrays |= {_PREFIX + google_text.big_vision_name(name): x for name, x in text.items()}
    arrays[f"{_PREFIX}t"] = np.full(1, text_part.logit_scale, np.float32)
    if text_part.logit_bias is not None:
        arrays[f"{_PREFIX}b"] = np.full(1, text_part.logit_bias, np.float32)
    return TowersFiles(towers, arrays, {}, {}, _notes(towers))


def _check_arguments(
    tower: str, options: ImageOptions | TextOptions, supported: dict[str, tuple]
) -> None:
    """Raises UserError if an argument of a tower has an unsupported value."""
    values = asdict(options)
    for name, allowed in supported.items():
        if values[name] not in allowed:
            raise UserError(
                f"Unsupported: {tower} with {name}={values[name]!r} for {_TITLE}. Supported: "
                f"{', '.join(map(repr, allowed))}; {_REMEDY}"
            )


def _notes(towers: Towers) -> list[str]:
    """Returns a line for each property of the model that the file does not contain.

    Raises:
      UserError: the model has no tokenizer file that can be used with an npz file.
    """
    names = [file.name for file in copied_files(towers.text_part)]
    if not set(names) & set(_TOKENIZERS):
        raise UserError(
            f"Unsupported: a tokenizer of {', '.join(names)} for {_TITLE}. Supported: "
            f"{', '.join(_TOKENIZERS)}; {_REMEDY}"
        )
    notes = [
        f"not written: the tokenizer; copy {', '.join(names)} of the source into the folder of the "
        "npz file"
    ]
    seen, read = towers.preprocessing or DEFAULT_PREPROCESSING, google.TOWERS_PREPROCESSING
    if seen[:3] != read[:3]:
        notes.append(
            f"not written: the preprocessing {_words(seen)}; for an npz file it is {_words(read)}"
        )
    if cleaning := _CLEANINGS.get(towers.text_part.tokenizer.cleaning):
        notes.append(f"not written: {cleaning}")
    return notes


def _words(seen: Preprocessing) -> str:
    return f"({seen.kind}, {float(seen.share):.3g} of the image, {seen.interpolation})"


FORMAT = TowersFormat(_TITLE, _describe, None)
