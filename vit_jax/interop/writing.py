"""Writes models in the formats of other libraries, and verifies the files by reading them."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, sketch
from vit_jax.interop.layout import Entry, entries
from vit_jax.interop.libraries import LIBRARIES
from vit_jax.interop.library import TRAINING_ONLY, Arrays, Format, Values
from vit_jax.interop.objective_files import ObjectiveParams, Shapes, write_objective_files
from vit_jax.interop.preprocessing import Preprocessing
from vit_jax.interop.reading import open_files
from vit_jax.interop.tensor_files import whole, write_npz, write_safetensors
from vit_jax.models import family_of
from vit_jax.models.image_model import ImageModel
from vit_jax.models.model_card import parameter_shapes
from vit_jax.options.model import ImageOptions

# Model arguments for which the command `convert` has a flag. If a format requires another value,
# the error message names the flag.
_FLAGS = {"gelu", "norm_epsilon", "resnet_epsilons", "image_size"}


class Content(NamedTuple):
    """The content of a library's files: an `Entry` per parameter, `config.json` and tensors."""

    mapped: list[Entry]
    described: dict
    arrays: Arrays


class _Objective(NamedTuple):
    """The parameters of an objective by vit_jax's path, and its state by name, as arrays."""

    name: str
    values: Values
    params: Arrays
    state: Arrays


def save(
    destination: Path,
    library: str,
    options: ImageOptions,
    read: Callable[[str], Any],
    preprocessing: Preprocessing | None = None,
    class_names: Sequence[str] = (),
    objective: ObjectiveParams | None = None,
    objective_shapes: Shapes | None = None,
    probabilities: str = "softmax",
) -> list[Entry]:
    """Writes a model in another library's format, and verifies the files by reading them.

    Google's format stores only the model's parameters.

    Args:
      destination: path of a new file (google) or a new folder (timm, transformers).
      library: a key of `LIBRARIES`.
      options: the arguments of the model.
      read: called with the path of a parameter; returns the parameter.
      preprocessing: preprocessing of images; None: the default, `DEFAULT_PREPROCESSING`.
      class_names: names of all classes; empty: unknown.
      objective: parameters of a training objective to write with the model. They are written in the
        library's own format or, if it has none, in additional files. None: no such parameters.
      objective_shapes: shapes of the objective's parameters by vit_jax's path.
      probabilities: name of the function from logits to probabilities: `softmax` or `sigmoid`.

    Raises:
      UserError: the format cannot store the model or one of its arguments, or the destination
        exists.
    """
    target, model, values = LIBRARIES[library], family_of(options).model, asdict(options)
    form = target.format_of(model, values)
    content = content_of(form, target.title, options, read)
    objective_arrays = _read_objective(objective, objective_shapes) if objective else None
    inside = objective_arrays is not None and target.writes_objective(
        model, values, objective_arrays.name, objective_arrays.values
    )
    if objective_arrays and inside:
        content = _with_objective(
            content, form, target.title, values, objective_arrays, objective_shapes or {}
        )
    files = target.files(content.described, values, preprocessing, class_names, probabilities)
    with whole(destination) as temporary:
        if files is None:
            write_npz(temporary, content.arrays)
        else:
            write_folder(temporary, content.arrays, files)
            if objective_arrays and not inside:
                write_objective_files(
                    temporary,
                    objective_arrays.name,
                    objective_arrays.values,
                    objective_arrays.params,
                    objective_arrays.state,
                    values,
                )
        written = open_files(temporary, values["image_size"])
        compare_arguments(written, target.title, model, values)
        compare_parameters(written, target.title, read)
        if objective_arrays:
            _compare_objective(written.objective, target.title, objective_arrays)
    return content.mapped


def content_of(
    form: Format, title: str, options: ImageOptions, read: Callable[[str], Any]
) -> Content:
    """Converts a model to the content of a library's files, without an objective's parameters.

    `read` is called with the path of a parameter and returns the parameter.
    """
    shapes, values = parameter_shapes(sketch(options)), asdict(options)
    described = form.describe(values)
    mapped = form.number(entries(form.rules(values), shapes, title), values)
    arrays = {}
    for entry in mapped:
        arrays |= entry.split(np.asarray(read(entry.path)))
    return Content(mapped, described, form.finish(arrays, values))


def _read_objective(objective: ObjectiveParams, shapes: Shapes | None) -> _Objective:
    params = {path: source() for path, source in objective.sources(shapes or {}).items()}
    state = {name: tensor.read() for name, tensor in objective.state.items()}
    return _Objective(objective.name, objective.values, params, state)


def _with_objective(
    content: Content,
    form: Format,
    title: str,
    values: Values,
    objective: _Objective,
    shapes: Shapes,
) -> Content:
    """Adds the parameters of an objective, in the library's own format, to the files' content."""
    known = form.objective
    # The caller has checked by `Library.writes_objective` that the format contains objectives.
    assert known is not None and known.describe is not None
    mapped = [
        entry._replace(names=tuple(known.prefix + name for name in entry.names))
        for entry in content.mapped
    ]
    arrays = {known.prefix + name: array for name, array in content.arrays.items()}
    for entry in entries(known.rules(values), shapes, title):
        arrays |= entry.split(np.asarray(objective.params[entry.path]))
    arrays |= known.finish(values, objective.values)
    return Content(mapped, content.described | known.describe(values, objective.values), arrays)


def write_folder(
    folder: Path, arrays: Arrays, files: dict[str, dict], tensors: str = "model.safetensors"
) -> None:
    """Writes a new folder with tensors and JSON files."""
    folder.mkdir()
    write_safetensors(folder / tensors, arrays)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def compare_arguments(
    written: Checkpoint,
    title: str,
    model: type[ImageModel],
    values: Values,
    remedies: Collection[str] = _FLAGS,
) -> None:
    """Raises UserError if the files that were just written imply other arguments of the model.

    Arguments without an effect are not compared.

    Args:
      written: the checkpoint that was read back from the files.
      remedies: arguments that the user can change by a flag of `convert`.
    """
    ignored = _without_effect(model, values)
    changed = {
        name: written.arguments[name]
        for name, value in values.items()
        if name not in ignored and written.arguments[name] != value
    }
    if not changed:
        return
    remedy = ""
    if changed.keys() <= set(remedies):
        flags = " ".join(f"--{name}={_flag(value)}" for name, value in changed.items())
        remedy = f"; the format implies {flags}: give that to write the model so"
    arguments = ", ".join(f"{name}={_flag(values[name])}" for name in changed)
    raise UserError(f"{title} cannot store {arguments}{remedy}")


def _without_effect(model: type[ImageModel], values: Values) -> set[str]:
    """Returns the names of the arguments that do not change the trained model's outputs."""
    names = set(TRAINING_ONLY)
    if family_of(model).any_size:
        names.add("image_size")
    # In a model with gated MLPs (SwiGLU) and without attention pooling, no layer uses a GELU.
    if values.get("mlp") == "swiglu" and values["pooling"] != "map":
        names.add("gelu")
    return names


def compare_parameters(written: Checkpoint, title: str, read: Callable[[str], Any]) -> None:
    """Raises UserError if a parameter in the written files differs from the original parameter.

    `read` is called with the path of a parameter and returns the original parameter.
    """
    for path in written.shapes:
        if not np.array_equal(written.read(path), np.asarray(read(path)), equal_nan=True):
            raise UserError(f"{title} does not store {path} exactly")


def _compare_objective(written: ObjectiveParams | None, title: str, objective: _Objective) -> None:
    """Raises UserError if the files do not store the objective's parameters and state exactly."""
    if written is None:
        raise UserError(f"{title} cannot store {objective.name}'s parameters")
    for name, value in written.values.items():
        if objective.values.get(name, value) != value:
            raise UserError(
                f"{title} cannot store config.{objective.name}.{name}={objective.values[name]!r}"
            )
    sources = written.sources({path: array.shape for path, array in objective.params.items()})
    read = {path: source() for path, source in sources.items()}
    read |= {name: written.state[name].read() for name in objective.state}
    for path, array in (objective.params | objective.state).items():
        if not np.array_equal(read[path], array):
            raise UserError(f"{title} does not store {objective.name}'s {path} exactly")


def _flag(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
