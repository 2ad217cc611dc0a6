"""Reads text towers from the folders of Transformers and from runs."""

import dataclasses
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.interop.beside import ObjectiveParams, Shapes, check_shapes
from vit_jax.interop.checkpoint import Checkpoint, check_finite
from vit_jax.interop.layout import Entry, entries
from vit_jax.interop.library import Tensors
from vit_jax.interop.reading import MALFORMED, check_tensors, read_files
from vit_jax.interop.tensor_files import check_float
from vit_jax.interop.transformers.transformers_text import TextFormat, read_text_tower
from vit_jax.models.model_card import abstract
from vit_jax.models.text import TextTower, text_options, tokenizer_of
from vit_jax.models.text_tokens import Tokenizer, open_tokenizer
from vit_jax.options.objective import ContrastiveOptions
from vit_jax.options.text import TextOptions
from vit_jax.paths import OBJECTIVE_FILES, is_workdir


class TextPart(NamedTuple):
    """Text tower, tokenizer and similarity of a model of images and texts."""

    tower: TextTower
    tokenizer: Tokenizer
    logit_scale: float
    logit_bias: float | None
    probabilities: str


def open_text(folder: Path) -> TextPart:
    """Reads all of a model of images and texts in Transformers' format except its image tower.

    Raises:
      UserError: the folder has no text tower or no tokenizer, or is damaged.
    """
    config, tensors = read_files(folder)
    form = _read_form(folder, config, tensors)
    tokenizer = open_tokenizer(
        folder, form.options.length, form.lower_case, form.options.vocabulary
    )
    if form.options.pooling == "end" and form.options.end not in tokenizer([""]):
        raise UserError(
            f"the tokenizer in {folder} does not end texts with the token {form.options.end}, "
            "which the text tower reads (eos_token_id in config.json): it is of another model"
        )
    tower = _built(form.options, _sources(folder, form))
    scale = _number(folder, tensors, "logit_scale")
    bias = _number(folder, tensors, "logit_bias") if form.probabilities == "sigmoid" else None
    return TextPart(tower, tokenizer, scale, bias, form.probabilities)


def open_trained_text(checkpoint: Checkpoint, workdir: Path) -> TextPart:
    """Reads all of a run's model of images and texts except its image tower.

    Args:
      checkpoint: the run's, opened.
      workdir: the folder with the run's tokenizer.

    Raises:
      UserError: the run has no text tower, or its tokenizer is missing or damaged.
    """
    found = checkpoint.objective
    if found is None or found.name != "contrastive" or found.shapes is None:
        raise UserError(
            f"{checkpoint.place} has no text tower: it is a run without "
            "config.objective.name='contrastive'"
        )
    options = ContrastiveOptions(**found.values)
    shapes, files = found.shapes(), workdir / OBJECTIVE_FILES
    if files.is_dir():
        options = dataclasses.replace(options, tokenizer=str(files))
    elif (tokens := shapes["text/token_embedding/embedding"][0]) != tokenizer_of(
        options
    ).vocabulary:
        raise UserError(
            f"{files} does not exist, and the text tower has {tokens:,} tokens: put back the files "
            "of its tokenizer"
        )
    sources = found.sources(shapes)
    width = shapes["text/head/kernel"][-1]
    tower = _built(
        text_options(options, width, "float32"),
        {path.removeprefix("text/"): read for path, read in sources.items() if "text/" in path},
    )
    scale = float(sources["logit_scale"]())
    if options.max_scale is not None:
        scale = min(scale, math.log(options.max_scale))
    bias = float(sources["logit_bias"]()) if "logit_bias" in sources else None
    probabilities = "sigmoid" if options.loss == "sigmoid" else "softmax"
    return TextPart(tower, tokenizer_of(options), scale, bias, probabilities)


def text_params(folder: Path) -> ObjectiveParams | None:
    """Returns the text tower of a folder of Transformers as parameters of a contrastive run.

    Returns:
      None if the folder has no text tower.
    """
    if not folder.is_dir() or is_workdir(folder):
        return None
    config, tensors = read_files(folder)
    if not any(name.startswith("text_model.") for name in tensors):
        return None
    form = _read_form(folder, config, tensors)

    def sources(shapes: Shapes) -> dict[str, Callable[[], np.ndarray]]:
        found = {f"text/{path}": read for path, read in _sources(folder, form).items()}
        for name in numbers:
            if name in shapes and name in own:
                found[name] = partial(np.asarray, _number(folder, tensors, name), np.float32)
        check_shapes(str(folder), "contrastive", own, shapes)
        return {path: found[path] for path in shapes}

    numbers = ("logit_scale", "logit_bias")
    own: Shapes = _text_shapes(form) | {name: () for name in numbers if name in tensors}
    return ObjectiveParams("contrastive", contrastive_values(form), sources, lambda: own)


def contrastive_values(form: TextFormat) -> dict[str, Any]:
    """Returns the values of `config.contrastive` that describe a text tower of Transformers.

    Raises:
      UserError: no such tower can be trained.
    """
    options = form.options
    if not math.isclose(options.norm_epsilon, 1e-5 if options.causal else 1e-6):
        raise UserError(
            f"Unsupported: training a text tower with layer_norm_eps={options.norm_epsilon:g}. "
            "Supported: 1e-05 (CLIP), 1e-06 (SigLIP)."
        )
    return dict(
        loss="sigmoid" if form.probabilities == "sigmoid" else "softmax",
        text_tower="clip" if options.causal else "siglip",
        text_length=options.length,
        text_dim=options.dim,
        text_depth=options.depth,
        text_heads=options.heads,
        text_mlp_dim=options.mlp_dim,
        text_gelu=options.gelu,
        vocabulary=options.vocabulary,
    )


def values_of_folder(folder: str | Path) -> dict[str, Any]:
    """Returns the values of `config.contrastive` that continue a model of Transformers' format.

    Raises:
      UserError: the folder has no text tower, or is damaged.
    """
    config, tensors = read_files(Path(folder))
    form = _read_form(Path(folder), config, tensors)
    values = contrastive_values(form) | dict(tokenizer=str(folder))
    if form.probabilities == "softmax":
        values["embedding_dim"] = form.options.output_dim
    return values


def _text_shapes(form: TextFormat) -> Shapes:
    state = nnx.state(abstract(partial(TextTower, form.options)))
    return {"text/" + "/".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(state)}


def _read_form(folder: Path, config: dict, tensors: Tensors) -> TextFormat:
    """Returns the text tower that a folder of Transformers describes.

    Raises:
      UserError: there is none, or it is damaged.
    """
    try:
        form = read_text_tower(config, tensors)
    except UserError:
        raise
    except MALFORMED as error:
        raise UserError(
            f"{folder} does not describe a supported text tower ({type(error).__name__}: {error})"
        ) from error
    if form.options.depth > len(form.tensors):
        raise UserError(f"{folder} describes {form.options.depth:,} layers and lacks tensors")
    return form


def _sources(folder: Path, form: TextFormat) -> dict[str, Callable[[], np.ndarray]]:
    """Returns functions that read the parameters of a text tower, by path.

    Raises:
      UserError: tensors are missing, or have other names or shapes.
    """
    shapes = {path.removeprefix("text/"): shape for path, shape in _text_shapes(form).items()}
    mapped = entries(form.rules, shapes, "Transformers")
    check_tensors(folder, mapped, form.tensors)
    for name, tensor in form.tensors.items():
        check_float(folder, name, tensor.dtype)

    def read(entry: Entry) -> np.ndarray:
        array = entry.join([form.tensors[name].read() for name in entry.names])
        return check_finite(array, f"{folder}: {entry.path}")

    return {entry.path: partial(read, entry) for entry in mapped}


def _built(options: TextOptions, sources: dict[str, Callable[[], np.ndarray]]) -> TextTower:
    """Returns a text tower with the parameters that are read."""
    graphdef, _ = nnx.split(abstract(partial(TextTower, options)))
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        arrays = pool.map(lambda read: jax.device_put(read()), sources.values())
        flat = {tuple(path.split("/")): array for path, array in zip(sources, arrays, strict=True)}
    return nnx.merge(graphdef, nnx.traversals.unflatten_mapping(flat))


def _number(folder: Path, tensors: Tensors, name: str) -> float:
    """Reads a tensor of one number."""
    if name not in tensors:
        raise UserError(f"{folder} lacks {name}")
    array = np.asarray(tensors[name].read(), np.float32)
    values = check_finite(array, f"{folder}: {name}").reshape(-1)
    if len(values) != 1:
        raise UserError(f"{folder}: {name} has {len(values)} values, and must have one")
    return float(values[0])
