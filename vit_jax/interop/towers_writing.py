"""Writes image-text models for other libraries, and verifies the files."""

import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import params_of
from vit_jax.interop.google import google_towers
from vit_jax.interop.image_text import TextPart, open_text, towers_at
from vit_jax.interop.open_clip import open_clip_towers
from vit_jax.interop.reading import open_files
from vit_jax.interop.tensor_files import whole, write_npz
from vit_jax.interop.towers_format import Towers, copy_tokenizer, describe_tokenizer
from vit_jax.interop.transformers import transformers_towers
from vit_jax.interop.writing import compare_arguments, compare_parameters, write_folder
from vit_jax.models import family_of

FORMATS = {
    "transformers": transformers_towers.FORMAT,
    "open_clip": open_clip_towers.FORMAT,
    "big_vision": google_towers.FORMAT,
}
_TEXTS = ("a cat", "red")  # The tokens of these texts are compared. No cleaning changes the texts.


def library_of_towers(destination: Path) -> str:
    """Returns the default library for a path to write: big_vision for `.npz`, else Transformers."""
    return "big_vision" if destination.suffix == ".npz" else "transformers"


def save_towers(destination: Path, library: str, towers: Towers) -> list[str]:
    """Writes both towers, the preprocessing and the tokenizer; verifies the files by reading them.

    An npz file contains neither the preprocessing nor the tokenizer.

    Args:
      destination: path of a new folder, or of a new npz file (big_vision).
      library: a key of `FORMATS`.
      towers: the model.

    Returns:
      A line for each property that the format changes or cannot store.

    Raises:
      UserError: the library has no model with these arguments, or the destination exists.
    """
    form = FORMATS[library]
    if (destination.suffix == ".npz") != (form.tensors is None):
        raise UserError(
            f"{destination}: give FILE.npz for big_vision, or a new folder for the other libraries"
        )
    if not towers.text_part.tokenizer.files:
        raise UserError(
            f"{form.title} has no tokenizer of UTF-8 bytes: only runs with a folder in "
            "config.contrastive.tokenizer can be written"
        )
    content = form.describe(towers)
    options, read = content.towers.options, content.towers.read
    with whole(destination) as temporary, tempfile.TemporaryDirectory() as elsewhere:
        if form.tensors is None:
            write_npz(temporary, content.arrays)
            tokenizer_folder = Path(elsewhere)
            copy_tokenizer(tokenizer_folder, towers.text_part)
        else:
            write_folder(temporary, content.arrays, content.files, form.tensors)
            tokenizer_folder = temporary
            copy_tokenizer(temporary, towers.text_part)
            describe_tokenizer(temporary, towers.text_part, content.tokenizer)
        path = towers_at(temporary)
        written = open_files(path, options.image_size)
        compare_arguments(
            written, form.title, family_of(options).model, asdict(options), ("image_size",)
        )
        compare_parameters(written, form.title, read)
        _compare_text(open_text(path, tokenizer_folder), towers.text_part, form.title)
    return content.notes


def _compare_text(written: TextPart, text_part: TextPart, title: str) -> None:
    """Raises UserError if the written files do not store the text tower and tokenizer exactly.

    The scale and bias of the similarity are also compared. Tokenizers are compared by the tokens of
    a few texts.
    """
    written_params, params = params_of(written.tower), params_of(text_part.tower)
    for path, array in params.items():
        if not np.array_equal(written_params[path], array):
            raise UserError(f"{title} does not store the text tower's {path} exactly")
    for name in ("logit_scale", "logit_bias", "probabilities"):
        if getattr(written, name) != getattr(text_part, name):
            raise UserError(f"{title} cannot store {name}={getattr(text_part, name)!r}")
    unread = dict(dtype="float32") | (
        {} if text_part.tower.options.pooling == "end" else dict(end=0)
    )
    if replace(written.tower.options, **unread) != replace(text_part.tower.options, **unread):
        raise UserError(f"{title} cannot store {text_part.tower.options}")
    if _tokens(written) != _tokens(text_part):
        raise UserError(f"{title} reads other tokens from the tokenizer's files")


def _tokens(text_part: TextPart) -> list[list[int]]:
    """Returns the tokens of the texts `_TEXTS`, without padding if the text tower ignores it."""
    rows = text_part.tokenizer(_TEXTS).tolist()
    if not text_part.tower.options.causal:
        return rows
    return [row[: 1 + row.index(text_part.tokenizer.end)] for row in rows]
