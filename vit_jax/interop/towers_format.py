"""Common code for writing image-text models in the formats of several libraries."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import params_of
from vit_jax.interop.image_text import TextPart
from vit_jax.interop.layout import Rule, entries
from vit_jax.interop.library import Arrays
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.models.text_tokens import TOKENIZER_FILES
from vit_jax.options.model import ImageOptions

Read = Callable[[str], Any]


class Towers(NamedTuple):
    """An image-text model to write.

    Attributes:
      options: arguments of the image tower.
      read: called with the path of a parameter of the image tower; returns the parameter.
      preprocessing: preprocessing of images; None: the default, `DEFAULT_PREPROCESSING`.
      text_part: text tower and tokenizer, and scale and bias of the similarity.
    """

    options: ImageOptions
    read: Read
    preprocessing: Preprocessing | None
    text_part: TextPart


class TowersFiles(NamedTuple):
    """The content of a library's files for an image-text model.

    Attributes:
      towers: the model as it is stored. Its parameters may differ from the original model's, but
        its embeddings are the same.
      arrays: tensors by name.
      files: content of each JSON file.
      tokenizer: values to add to `tokenizer_config.json`.
      notes: a line for each property that the format changes or cannot store.
    """

    towers: Towers
    arrays: Arrays
    files: dict[str, dict]
    tokenizer: dict[str, Any]
    notes: list[str]


class TowersFormat(NamedTuple):
    """A library's format for image-text models.

    Attributes:
      title: name of the library.
      describe: called with `Towers`; returns the content of the files. Raises UserError if the
        library has no model with these arguments.
      tensors: name of the file with the tensors in the folder; None: the format is a single npz
        file, without a tokenizer.
    """

    title: str
    describe: Callable[[Towers], TowersFiles]
    tensors: str | None


def text_arrays(rules: Sequence[Rule], text_part: TextPart, title: str) -> Arrays:
    """Returns the text tower's tensors by the names in `rules`."""
    params = {path: np.asarray(x) for path, x in params_of(text_part.tower).items()}
    arrays: Arrays = {}
    for entry in entries(rules, {path: x.shape for path, x in params.items()}, title):
        arrays |= entry.split(params[entry.path])
    return arrays


def similarity_arrays(text_part: TextPart, shape: tuple[int, ...]) -> Arrays:
    """Returns the tensor `logit_scale` and, if the model has a bias, the tensor `logit_bias`.

    `shape` is the shape of each tensor, such as `()` or `(1,)`.
    """
    arrays = {"logit_scale": np.full(shape, text_part.logit_scale, np.float32)}
    if text_part.logit_bias is not None:
        arrays["logit_bias"] = np.full(shape, text_part.logit_bias, np.float32)
    return arrays


def copied_files(text_part: TextPart) -> list[Path]:
    """Returns the tokenizer's files that belong in the folder of the written model."""
    return [file for file in text_part.tokenizer.files if file.name in TOKENIZER_FILES]


def copy_tokenizer(folder: Path, text_part: TextPart) -> None:
    """Copies the tokenizer's files to a folder."""
    for file in copied_files(text_part):
        shutil.copyfile(file, folder / file.name)


def describe_tokenizer(folder: Path, text_part: TextPart, more: dict[str, Any]) -> None:
    """Stores the length of texts in `tokenizer_config.json`.

    Args:
      more: further entries for `tokenizer_config.json`.
    """
    described = folder / "tokenizer_config.json"
    if described.is_file():
        config = json.loads(described.read_text(encoding="utf-8"))
    elif text_part.tower.options.causal:
        config = dict(tokenizer_class="CLIPTokenizer", pad_token="<|endoftext|>")
    else:
        config = dict(tokenizer_class="SiglipTokenizer")
    # Tokenizers pad texts to `model_max_length`. The padding must be correct, because SigLIP's text
    # tower pools the last token.
    config |= dict(model_max_length=text_part.tokenizer.length)
    described.write_text(json.dumps(config | more, indent=2) + "\n")


def without_bias(towers: Towers, title: str) -> tuple[Towers, list[str]]:
    """Removes the bias of the image tower's projection by changing the bias of the last norm.

    The embeddings stay the same, except for rounding.

    Returns:
      The changed model, and a list with a note about the change. If the projection's bias is
      already zero, the result is the unchanged model and an empty list.

    Raises:
      UserError: no bias of the last norm can replace the projection's bias.
    """
    options, read = towers.options, towers.read
    if not options.num_classes or not np.any(bias := np.asarray(read("head/bias"), np.float64)):
        return towers, []
    kernel = np.asarray(read("head/kernel"), np.float64)
    shift, *_ = np.linalg.lstsq(kernel.T, bias, rcond=None)
    if asdict(options)["pooling"] != "cls" or not np.allclose(shift @ kernel, bias, atol=1e-6):
        raise UserError(
            f"{title}' CLIP projects without biases, and head/bias is not zero: the last norm "
            "cannot replace it"
        )
    moved = {
        "head/bias": np.zeros(bias.shape, np.float32),
        "norm/bias": np.float32(np.asarray(read("norm/bias"), np.float64) + shift),
    }
    note = "head/bias is added to norm/bias, with the same embeddings except for rounding"
    return towers._replace(read=lambda path: moved[path] if path in moved else read(path)), [note]
