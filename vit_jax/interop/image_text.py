"""Reads models of images and texts from the folders of Transformers."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import check_finite
from vit_jax.interop.layout import Entry, entries
from vit_jax.interop.library import Tensors
from vit_jax.interop.reading import MALFORMED, check_tensors, read_files
from vit_jax.interop.tensor_files import check_float
from vit_jax.models.text_tokens import Tokenizer, open_tokenizer
from vit_jax.interop.transformers.transformers_text import read_text_tower
from vit_jax.models.model_card import abstract
from vit_jax.models.text import TextTower


class TextPart(NamedTuple):
    """Text tower, tokenizer and similarity of a model of images and texts."""

    tower: TextTower
    tokenizer: Tokenizer
    logit_scale: float
    logit_bias: float | None
    probabilities: str


def open_text(folder: Path) -> TextPart:
    """Reads all of a model of images and texts except its image tower.

    Raises:
      UserError: the folder has no text tower or no tokenizer, or is damaged.
    """
    config, tensors = read_files(folder)
    try:
        form = read_text_tower(config, tensors)
    except UserError:
        raise
    except MALFORMED as error:
        raise UserError(
            f"{folder} does not describe a supported text tower ({type(error).__name__}: {error})"
        ) from error
    tokenizer = open_tokenizer(
        folder, form.options.length, form.lower_case, form.options.vocabulary
    )
    if form.options.pooling == "end" and form.options.end not in tokenizer([""]):
        raise UserError(
            f"the tokenizer in {folder} does not end texts with the token {form.options.end}, "
            "which the text tower reads (eos_token_id in config.json): it is of another model"
        )
    if form.options.depth > len(form.tensors):
        raise UserError(f"{folder} describes {form.options.depth:,} layers and lacks tensors")
    graphdef, state = nnx.split(abstract(partial(TextTower, form.options)))
    shapes = {"/".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(state)}
    mapped = entries(form.rules, shapes, "Transformers")
    check_tensors(folder, mapped, form.tensors)
    for name, tensor in form.tensors.items():
        check_float(folder, name, tensor.dtype)

    def read(entry: Entry) -> jax.Array:
        array = entry.join([form.tensors[name].read() for name in entry.names])
        return jax.device_put(check_finite(array, f"{folder}: {entry.path}"))

    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        arrays = dict(zip((entry.path for entry in mapped), pool.map(read, mapped), strict=True))
    flat = {tuple(path.split("/")): array for path, array in arrays.items()}
    tower = nnx.merge(graphdef, nnx.traversals.unflatten_mapping(flat))
    scale = _number(folder, tensors, "logit_scale")
    bias = _number(folder, tensors, "logit_bias") if form.probabilities == "sigmoid" else None
    return TextPart(tower, tokenizer, scale, bias, form.probabilities)


def _number(folder: Path, tensors: Tensors, name: str) -> float:
    """Reads a tensor of one number."""
    if name not in tensors:
        raise UserError(f"{folder} lacks {name}")
    array = np.asarray(tensors[name].read(), np.float32)
    values = check_finite(array, f"{folder}: {name}").reshape(-1)
    if len(values) != 1:
        raise UserError(f"{folder}: {name} has {len(values)} values, and must have one")
    return float(values[0])
