"""Reads text towers from other libraries' files and from training runs."""

import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, check_finite, fill
from vit_jax.interop.google import google_text
from vit_jax.interop.hub import download
from vit_jax.interop.layout import Entry, entries
from vit_jax.interop.library import Tensors, TextFormat
from vit_jax.interop.objective_files import ObjectiveParams, Shapes, check_shapes
from vit_jax.interop.open_clip import open_clip_text
from vit_jax.interop.reading import MALFORMED, check_tensors, read_files
from vit_jax.interop.tensor_files import check_float
from vit_jax.interop.transformers import transformers_text
from vit_jax.models.model_card import abstract, parameter_shapes
from vit_jax.models.text import TextTower, text_options, tokenizer_of
from vit_jax.models.text_tokens import (
    BYTES,
    OPEN_CLIP,
    TOKENIZER_FILES,
    Tokenizer,
    is_of_transformers,
    open_clip_config,
    open_tokenizer,
    tokenizer_files,
)
from vit_jax.options.objective import ContrastiveOptions
from vit_jax.options.text import TextOptions
from vit_jax.paths import OBJECTIVE_FILES, is_workdir, split_checkpoint

OPEN_CLIP_MODEL = "open_clip_model.safetensors"
# Prefixes of the text tower's tensors in Transformers, open_clip and big_vision.
_TEXT_TENSORS = r"text_model\.|(text\.)?token_embedding\.|(params/|opt/target/)?txt/"


# Options of the config section `contrastive` that describe towers, loss and similarity.
_OF_TOWERS = ("loss", "text_tower", "text_cleaning", "text_length", "text_dim", "text_depth")
_OF_TOWERS += ("text_heads", "text_mlp_dim", "text_gelu", "embedding_dim", "max_scale")
_PROBES = ("a cat", "red dogs", "three")  # Texts to compare tokenizers; text cleaning keeps them.


class TextPart(NamedTuple):
    """An image-text model without its image tower.

    Attributes:
      tower: the text tower.
      tokenizer: the tokenizer of the text tower.
      logit_scale: logarithm of the factor that multiplies cosine similarities.
      logit_bias: bias that is added to the scaled similarities; None: no bias.
      probabilities: name of the function from logits to probabilities, `softmax` or `sigmoid`.
    """

    tower: TextTower
    tokenizer: Tokenizer
    logit_scale: float
    logit_bias: float | None
    probabilities: str

    def describe(self) -> str:
        """Describes in one line the text tower's size, and how logits become probabilities."""
        options = self.tower.options
        return (
            f"text tower: {options.depth} layers of width {options.dim}, {options.vocabulary:,} "
            f"tokens in the vocabulary, {options.length} in a text; {self.probabilities} of the "
            "similarities"
        )

    def tower_in(self, dtype: str) -> TextTower:
        """Returns a text tower that computes in `dtype` and shares this tower's parameters."""
        options = dataclasses.replace(self.tower.options, dtype=dtype)
        graphdef, _ = nnx.split(abstract(partial(TextTower, options)))
        return nnx.merge(graphdef, nnx.state(self.tower))


def towers_at(path: Path) -> Path:
    """Returns the file or folder from which both towers of an image-text model can be read.

    The result is usually `path`. If `path` is a folder in open_clip's format, the result is
    open_clip's weights file in this folder, because a `config.json` in the same folder may describe
    the image tower only.
    """
    weights = path / OPEN_CLIP_MODEL
    if path.is_dir() and open_clip_config(path) is not None and weights.is_file():
        return weights
    return path


def download_towers(address: str) -> Path:
    """Downloads an image-text model from the Hugging Face Hub; returns its folder.

    If a repository contains the model in the formats of several libraries, only the weights in one
    format are downloaded.

    Args:
      address: `hf://owner/name` or `hf://owner/name@revision`, as in `hub.download`.

    Raises:
      UserError: the model is not on the Hub, or the Hub cannot be reached.
    """
    described = (*TOKENIZER_FILES, OPEN_CLIP)
    folder = download(address, described, weights=False)
    if is_of_transformers(folder) or not (folder / OPEN_CLIP).is_file():
        folder = download(address, described)
    if open_clip_config(folder) is None:
        return folder
    return download(address, (*described, OPEN_CLIP_MODEL), weights=False)


def open_text(path: Path, tokenizer_folder: Path | None = None) -> TextPart:
    """Reads an image-text model of another library, without its image tower.

    Args:
      path: a result of `towers_at`.
      tokenizer_folder: the folder with the tokenizer's files; None: the folder of the checkpoint.

    Raises:
      UserError: the checkpoint has no text tower or no tokenizer, or is damaged.
    """
    form, tensors = _read_form(path)
    options = form.options
    folder = tokenizer_folder or _tokenizer_folder(path)
    tokenizer = open_tokenizer(folder, options.length, form.cleaning, options.vocabulary)
    _check_end(path, options, tokenizer)
    tower = fill(abstract(partial(TextTower, options)), _sources(path, form))
    scale = _number(path, tensors, form.logit_scale)
    bias = None if form.logit_bias is None else _number(path, tensors, form.logit_bias)
    return TextPart(tower, tokenizer, scale, bias, form.probabilities)


def _tokenizer_folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _check_end(path: Path, options: TextOptions, tokenizer: Tokenizer) -> None:
    """Checks that the tokenizer appends the end token, if the text tower pools it.

    Raises:
      UserError: the tokenizer does not append the token `options.end`.
    """
    if options.pooling == "end" and options.end not in tokenizer([""]):
        raise UserError(
            f"the tokenizer of {path} does not end texts with the token {options.end}, which the "
            "text tower reads (eos_token_id in config.json): it is of another model"
        )


def open_trained_text(checkpoint: Checkpoint, workdir: Path) -> TextPart:
    """Reads the image-text model of a training run, without its image tower.

    Args:
      checkpoint: the opened checkpoint of the run.
      workdir: the run's workdir, which contains the tokenizer.

    Raises:
      UserError: the run has no text tower, or its tokenizer is missing or damaged.
    """
    objective = checkpoint.objective
    if objective is None or objective.name != "contrastive" or objective.shapes is None:
        raise UserError(
            f"{checkpoint.place} has no text tower: it is a run without "
            "config.objective.name='contrastive'"
        )
    options = ContrastiveOptions(**objective.values)
    shapes, files = objective.shapes(), workdir / OBJECTIVE_FILES
    if files.is_dir():
        options = dataclasses.replace(options, tokenizer=str(files))
    elif (tokens := shapes["text/token_embedding/embedding"][0]) != tokenizer_of(
        options
    ).vocabulary:
        raise UserError(
            f"{files} does not exist, and the text tower has {tokens:,} tokens: put back the files "
            "of its tokenizer"
        )
    sources = objective.sources(shapes)
    width = shapes["text/head/kernel"][-1]
    tower = fill(
        abstract(partial(TextTower, text_options(options, width, "float32"))),
        {path.removeprefix("text/"): read for path, read in sources.items() if "text/" in path},
    )
    scale = float(sources["logit_scale"]())
    if options.max_scale is not None:
        scale = min(scale, math.log(options.max_scale))
    bias = float(sources["logit_bias"]()) if "logit_bias" in sources else None
    probabilities = "sigmoid" if options.loss == "sigmoid" else "softmax"
    return TextPart(tower, tokenizer_of(options), scale, bias, probabilities)


def text_params(place: Path) -> ObjectiveParams | None:
    """Converts another library's text tower to parameters of the objective `contrastive`.

    Args:
      place: file or folder of the checkpoint.

    Returns:
      The parameters; None if the checkpoint has no text tower.
    """
    if not place.exists() or is_workdir(place):
        return None
    path = towers_at(place)
    config, tensors = read_files(path)
    if not any(re.match(_TEXT_TENSORS, name) for name in tensors):
        return None
    form = _form(path, config, tensors)
    names = {"logit_scale": form.logit_scale, "logit_bias": form.logit_bias}
    numbers = {ours: name for ours, name in names.items() if name in tensors}

    def sources(shapes: Shapes) -> dict[str, Callable[[], np.ndarray]]:
        found = {f"text/{path}": read for path, read in _sources(place, form).items()}
        for ours, name in numbers.items():
            if ours in shapes:
                found[ours] = partial(np.asarray, _number(place, tensors, name), np.float32)
        check_shapes(str(place), "contrastive", text_shapes, shapes)
        return {path: found[path] for path in shapes}

    tower = abstract(partial(TextTower, form.options))
    text_shapes = {f"text/{path}": shape for path, shape in parameter_shapes(tower).items()}
    text_shapes |= dict.fromkeys(numbers, ())
    return ObjectiveParams("contrastive", contrastive_values(form), sources, lambda: text_shapes)


def check_tokenizer(place: str, objective: ObjectiveParams, options: ContrastiveOptions) -> None:
    """Checks that a training run has the same tokenizer as the checkpoint that initializes it.

    The check compares the tokens of a few words, and the padding token. Without the check, a run
    with a wrong tokenizer of the same vocabulary size would train without an error.

    Raises:
      UserError: the tokenizers differ.
    """
    workdir, path = Path(split_checkpoint(place)[0]), Path(place)
    of_run = workdir / OBJECTIVE_FILES
    if is_workdir(workdir):
        folder = str(of_run) if of_run.is_dir() else BYTES
    elif path.exists() and tokenizer_files(_tokenizer_folder(towers_at(path))):
        folder = str(_tokenizer_folder(towers_at(path)))
    else:  # The checkpoint has no tokenizer to compare with.
        return
    stored = tokenizer_of(
        dataclasses.replace(ContrastiveOptions(**objective.values), tokenizer=folder)
    )
    ours = tokenizer_of(options)
    for text in _PROBES:
        if (theirs := stored.tokens_of(text)) != (tokens := ours.tokens_of(text)):
            difference = f"tokens of {text!r} are {theirs} there and {tokens} here"
            break
    else:
        if stored.padding == ours.padding or options.text_tower == "clip":
            return  # CLIP's text tower ignores the padding.
        difference = f"the padding is {stored.padding} there and {ours.padding} here"
    raise UserError(
        f"{place} has another tokenizer than config.contrastive.tokenizer={options.tokenizer!r}: "
        f"{difference}; set config.contrastive.tokenizer={folder}"
    )


def contrastive_values(form: TextFormat) -> dict[str, Any]:
    """Returns the values of `config.contrastive` that describe another library's text tower.

    Raises:
      UserError: training does not support this text tower.
    """
    options = form.options
    if not math.isclose(options.norm_epsilon, 1e-5 if options.causal else 1e-6):
        raise UserError(
            f"Unsupported: training a text tower with layer_norm_eps={options.norm_epsilon:g}. "
            "Supported: 1e-05 (CLIP), 1e-06 (SigLIP)."
        )
    if not options.causal == (not options.head_bias) == (options.pooling != "last"):
        raise UserError(
            f"Unsupported: training a text tower with causal={options.causal}, "
            f"head_bias={options.head_bias} and pooling={options.pooling!r}. Supported: CLIP's and "
            "SigLIP's."
        )
    return dict(
        loss="sigmoid" if form.probabilities == "sigmoid" else "softmax",
        text_tower="clip" if options.causal else "siglip",
        text_cleaning="big_vision" if form.cleaning == "big_vision" else None,
        text_length=options.length,
        text_dim=options.dim,
        text_depth=options.depth,
        text_heads=options.heads,
        text_mlp_dim=options.mlp_dim,
        text_gelu=options.gelu,
        vocabulary=options.vocabulary,
    )


def values_of_towers(source: str | Path) -> dict[str, Any]:
    """Returns the values of `config.contrastive` for a run that continues a model's training.

    Args:
      source: the workdir of a contrastive run, or the folder or file of another library's model.
        The tokenizer's files must be in the same folder.

    Raises:
      UserError: there is no text tower, or the files are damaged.
    """
    workdir = Path(split_checkpoint(str(source))[0])
    if is_workdir(workdir):
        return _values_of_run(str(source), workdir)
    path = towers_at(Path(source))
    form, _ = _read_form(path)
    values = contrastive_values(form) | dict(tokenizer=str(_tokenizer_folder(path)))
    if form.probabilities == "softmax":
        values["embedding_dim"] = form.options.output_dim
        if form.options.causal:
            values["max_scale"] = 100.0  # As in CLIP's training.
    return values


def _values_of_run(source: str, workdir: Path) -> dict[str, Any]:
    """Returns a run's values of `config.contrastive` for its towers, loss and tokenizer."""
    from vit_jax.interop.open import open_checkpoint

    checkpoint = open_checkpoint(source)
    open_trained_text(checkpoint, workdir)  # Raises UserError if there is no text tower.
    assert checkpoint.objective is not None
    options, files = ContrastiveOptions(**checkpoint.objective.values), workdir / OBJECTIVE_FILES
    return {name: getattr(options, name) for name in _OF_TOWERS} | dict(
        tokenizer=str(files) if files.is_dir() else options.tokenizer, vocabulary=options.vocabulary
    )


def _read_form(path: Path) -> tuple[TextFormat, Tensors]:
    """Returns the text tower in another library's file or folder, and all tensors of the model.

    Raises:
      UserError: there is no text tower, or the files are damaged.
    """
    config, tensors = read_files(path)
    return _form(path, config, tensors), tensors


def _form(path: Path, config: dict, tensors: Tensors) -> TextFormat:
    library = open_clip_text if "model_cfg" in config else transformers_text
    if path.suffix == ".npz":
        library = google_text
    try:
        form = library.read_text_tower(config, tensors)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except MALFORMED as error:
        raise UserError(
            f"{path} does not describe a supported text tower ({type(error).__name__}: {error})"
        ) from error
    if form.options.depth > len(form.tensors):
        raise UserError(f"{path} describes {form.options.depth:,} layers and lacks tensors")
    return form


def _sources(place: Path, form: TextFormat) -> dict[str, Callable[[], np.ndarray]]:
    """Maps the path of each parameter of a text tower to a function that reads the parameter.

    Raises:
      UserError: tensors are missing or have unexpected names or shapes.
    """
    shapes = parameter_shapes(abstract(partial(TextTower, form.options)))
    mapped = entries(form.rules, shapes, form.title)
    check_tensors(place, mapped, form.tensors)
    for name, tensor in form.tensors.items():
        check_float(place, name, tensor.dtype)

    def read(entry: Entry) -> np.ndarray:
        array = entry.join([form.tensors[name].read() for name in entry.names])
        return check_finite(array, f"{place}: {entry.path}")

    return {entry.path: partial(read, entry) for entry in mapped}


def _number(place: Path, tensors: Tensors, name: str) -> float:
    """Returns the value of a tensor that contains one number."""
    if name not in tensors:
        raise UserError(f"{place} lacks {name}")
    array = np.asarray(tensors[name].read(), np.float32)
    values = check_finite(array, f"{place}: {name}").reshape(-1)
    if len(values) != 1:
        raise UserError(f"{place}: {name} has {len(values)} values, and must have one")
    return float(values[0])
