"""Reads files of other libraries as a `Checkpoint`.

Opening a file reads the names and shapes of tensors only. `Checkpoint.read` reads the values of one
parameter. The table lists the functions from a checkpoint to a model, as `inputs -> outputs`:

    load.py: load_model           source, changed arguments -> model
    1. open.py: open_checkpoint   source -> Checkpoint; downloads hf://, opens workdirs by Orbax
       reading.py: open_files     file or folder -> Checkpoint
       a. read_files              path -> config.json, Tensors (name, shape, function that reads)
       b. Library.claims          path, config, tensors -> True for the library's files; the first
                                  library in LIBRARIES that returns True is selected
       c. Library.prepare         tensors, config -> those of the image model; for timm they are
                                  unchanged, and unsupported names of architectures are rejected
       d. Library.read_format     config, tensors -> the first Format whose `claims` returns True,
                                  such as timm_vit.py; most formats check the tensors' names, and
                                  timm_eva.py checks the architecture's name
       e. Format.rename           tensors -> tensors with the names in the format's rules
       f. Format.arguments        tensors, config, image size -> arguments, assumptions
       g. Library.preprocessing   config.json, preprocessor_config.json -> mean, std, preprocessing
       h. make_options            arguments, mean, std -> options; sketch(options) -> shapes by path
       i. Format.rules            arguments -> rules
          layout.py: entries      rules, shapes by path -> the tensors of each parameter
       j. check_tensors           entries, tensors -> error unless all names and shapes agree
    2. load.py: build_model       Checkpoint, changed arguments -> model
       a. adapting.py: fit        Checkpoint, changes -> options, a function per parameter, report
       b. checkpoint.py: build    options, functions -> model; calls the functions in threads:
          Checkpoint.read         path -> array, joined from the tensors that the rule names
"""

import functools
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, all_names, check_finite, sketch
from vit_jax.interop.layout import Entry, entries
from vit_jax.interop.libraries import LIBRARIES
from vit_jax.interop.library import Format, Library, ObjectiveFormat, Tensors, Values
from vit_jax.interop.objective_files import ObjectiveParams, open_objective_files
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.interop.tensor_files import (
    TORCH_MODEL,
    TORCH_SUFFIXES,
    check_float,
    open_sharded,
    open_tensors,
)
from vit_jax.models import family_of
from vit_jax.models.model_card import parameter_shapes
from vit_jax.options.model import ImageOptions, make_options
from vit_jax.small_files import read_small

PREPROCESSOR = "preprocessor_config.json"

# Errors caused by unexpected names, shapes or values in files.
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def open_files(path: str | Path, image_size: int | tuple[int, int] | None = None) -> Checkpoint:
    """Opens the checkpoint in a file, or in a folder with a `config.json`.

    Args:
      path: the file or folder.
      image_size: image size for which the model is loaded. It is required only if the file has
        position embeddings for images that are not square, and does not contain the size of these
        images.

    Raises:
      UserError: the files cannot be read, or their model is unsupported.
    """
    path = Path(path)
    config, tensors = read_files(path)
    library = next(known for known in LIBRARIES.values() if known.claims(path, config, tensors))
    try:
        tensors, config = library.prepare(path, tensors, config)
        form = library.read_format(config, tensors)
        tensors = form.rename(tensors, config)
        for name, tensor in tensors.items():
            check_float(path, name, tensor.dtype)
        return _open(path, library, form, config, tensors, image_size)
    except UserError:
        raise
    except MALFORMED as error:
        raise UserError(
            f"{path} does not describe a supported model ({type(error).__name__}: {error})"
        ) from error


def _open(
    path: Path,
    library: Library,
    form: Format,
    config: dict,
    tensors: Tensors,
    image_size: int | tuple[int, int] | None,
) -> Checkpoint:
    """Opens a checkpoint of a known format; `tensors` have the names in the format's rules."""
    objective = open_objective_files(path, check_finite)
    options, preprocessing, assumed = _options(
        path, library, form, config, tensors, image_size, objective
    )
    values = asdict(options)
    _check_depth(path, values, tensors)
    shapes = parameter_shapes(sketch(options))
    mapped = entries(form.rules(values), shapes, library.title)
    owned = form.objective and re.compile(form.objective.owns)
    objective_tensors = {name: x for name, x in tensors.items() if owned and owned.match(name)}
    tensors = {name: x for name, x in tensors.items() if name not in objective_tensors}
    check_tensors(path, mapped, tensors)
    if objective is None and form.objective and objective_tensors:
        objective = _objective_params(
            path, library.title, form.objective, objective_tensors, config, values
        )
    by_path = {entry.path: entry for entry in mapped}

    def read(name: str) -> np.ndarray:
        entry = by_path[name]
        return entry.join([tensors[name].read() for name in entry.names])

    return Checkpoint(
        str(path),
        library.title,
        options,
        shapes,
        read,
        mapped,
        assumed,
        preprocessing,
        all_names(library.class_names(config), values["num_classes"]),
        objective,
        probabilities=library.probabilities(config, values["num_classes"]),
    )


def _options(
    path: Path,
    library: Library,
    form: Format,
    config: dict,
    tensors: Tensors,
    image_size: int | tuple[int, int] | None,
    objective: ObjectiveParams | None,
) -> tuple[ImageOptions, Preprocessing | None, str]:
    """Returns the model's options, its preprocessing, and a text with the assumptions made.

    Arguments in `objective.model_values` replace those that the model's own files imply.
    """
    values, assumed = form.arguments(tensors, config, image_size)
    statistics, preprocessing, unknown = library.preprocessing(
        config, _read_json(path, PREPROCESSOR), values["channels"]
    )
    # The image size in the preprocessing is used only if the model supports images of any size and
    # `image_size` is None.
    if not family_of(form.model).any_size or image_size is not None:
        statistics.pop("image_size", None)
    statistics |= objective.model_values if objective else {}
    assumed = " and ".join(part for part in (assumed, unknown) if part)
    options = make_options(form.model.options_type, values | statistics)
    return options, preprocessing, assumed


def _check_depth(path: Path, values: Values, tensors: Tensors) -> None:
    """Raises UserError if a model has more layers than the file has tensors.

    Without this check, a damaged `config.json` could create a huge model.
    """
    layers = values.get("depth", 0)
    layers += sum(values.get("resnet_blocks") or ()) + sum(values.get("blocks") or ())
    if layers > len(tensors):
        raise UserError(f"{path} describes {layers:,} layers, but has {len(tensors):,} tensors")


def _objective_params(
    path: Path, title: str, form: ObjectiveFormat, tensors: Tensors, config: dict, values: Values
) -> ObjectiveParams:
    """Returns the parameters of a training objective, whose tensors are read on demand."""

    def sources(shapes):
        renamed, mapped = form.rename(tensors, config), entries(form.rules(values), shapes, title)
        check_tensors(path, mapped, renamed)
        return {entry.path: functools.partial(read, renamed, entry) for entry in mapped}

    def read(renamed: Tensors, entry: Entry) -> np.ndarray:
        array = entry.join([renamed[name].read() for name in entry.names])
        return check_finite(array, f"{path}: {form.name}'s {entry.path}")

    shapes = None if form.shapes is None else functools.partial(form.shapes, values)
    return ObjectiveParams(form.name, form.values(tensors, config), sources, shapes)


def read_files(path: Path) -> tuple[dict, Tensors]:
    """Returns the content of `config.json` (or {}) and the tensors in a file or folder."""
    if not path.is_dir():
        prefix = "open_clip_" if path.name.startswith("open_clip_") else ""
        return _read_json(path, prefix + "config.json"), open_tensors(path)
    config = _read_json(path, "config.json")
    if (path / "model.safetensors").is_file():
        return config, open_tensors(path / "model.safetensors")
    if (path / "model.safetensors.index.json").is_file():
        return config, open_sharded(path / "model.safetensors.index.json")
    if (path / "open_clip_model.safetensors").is_file():
        return read_files(path / "open_clip_model.safetensors")
    if (path / "pytorch_model.bin.index.json").is_file():
        raise UserError(
            f"Unsupported: tensors in several pickles ({path}). Convert them with Transformers: "
            "AutoModel.from_pretrained(FOLDER).save_pretrained(NEW) writes safetensors."
        )
    pickles = [name for name in os.listdir(path) if name.endswith(TORCH_SUFFIXES)]
    # For a pickle, `open_tensors` raises a UserError with the command to convert the file. If there
    # are several pickles, the model's file is chosen, not a trainer's file.
    if pickles:
        open_tensors(path / min(pickles, key=lambda name: (name != TORCH_MODEL, name)))
    raise UserError(
        f"there is no model.safetensors in {path}: give a folder of timm or Transformers, a run's "
        "workdir, a .npz or .safetensors file, or hf://owner/name"
    )


def _read_json(path: Path, name: str) -> dict:
    """Reads a JSON file in a folder or next to a file; returns {} if it does not exist."""
    file = (path if path.is_dir() else path.parent) / name
    if path.suffix == ".npz" or not file.is_file():
        return {}
    try:
        content = json.loads(read_small(file))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} does not describe a model: it contains no JSON object")
    return content


def check_tensors(path: Path, mapped: list[Entry], tensors: Tensors) -> None:
    """Raises UserError if names or shapes of tensors do not match the model's parameters."""
    expected = {}
    for entry in mapped:
        expected |= entry.their_shapes()
    for name, shape in expected.items():
        if name in tensors and tensors[name].shape != shape:
            raise UserError(
                f"{path}: {name} is {list(tensors[name].shape)}, but the model has {list(shape)}"
            )
    missing, additional = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    if missing:
        raise UserError(f"{path} lacks {_first_names(missing)}")
    if additional:
        raise UserError(
            f"{path} has tensors that are not part of the model: {_first_names(additional)}"
        )


def _first_names(names: set[str]) -> str:
    """Formats a set of names for an error message: the first three, and how many follow."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(sorted(names)[:3])}{more}"
