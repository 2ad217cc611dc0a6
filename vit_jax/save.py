"""Writes a model in the format of another library: what `python -m vit_jax.convert` does, from Python."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.beside import ObjectiveParams, Shapes
from vit_jax.interop.checkpoint import (
    LIBRARIES,
    WRITTEN,
    Checkpoint,
    complete,
    fit,
    params_of,
    save,
)
from vit_jax.interop.preprocessing import Preprocessing, lost
from vit_jax.models.image_model import ImageModel
from vit_jax.runs.warm_start import objective_shapes
from vit_jax.runs.workdir import absolute, open_any


def save_model(
    model: ImageModel | str | Path,
    path: str | Path,
    *,
    library: str | None = None,
    say: Callable[[str], None] = print,
    **changes: Any,
) -> Path:
    """Writes a model, with its preprocessing and its class names where the format can hold them.

    What was written is read back and compared, bit for bit. Of a checkpoint what its objective has is written
    too, such as mae's decoder, dino's heads or the token of masked patches: in the library's way, or in files
    of ours beside the model.

    Args:
      model: of `load_model` or `create_model`, with its parameters as they are now; or a checkpoint, what
        `load_model` takes.
      path: a new `FILE.npz` for Google's format, or a new folder for Transformers, or for timm where
        Transformers has no such model; of a `DVAE` for OpenAI's code.
      library: `google`, `timm`, `transformers` or `openai`; None: as the path and the model say.
      say: is told in a line each of what the format has no place for.
      **changes: of a checkpoint, arguments of the model to change, as of `load_model`.

    Returns:
      The absolute path.

    Raises:
      UserError: the format cannot hold the model, the path is taken, or the checkpoint cannot be read.
    """
    destination = absolute(path)
    if not isinstance(model, ImageModel):
        write_checkpoint(open_any(model, changes.get("image_size")), destination, library, say, **changes)
        return destination
    if model.about is None:
        raise UserError("save_model takes a model of vit_jax.load_model or vit_jax.create_model")
    if changes:
        raise UserError(f"{', '.join(changes)}: only a checkpoint is changed while it is saved")
    about, kind = model.about, type(model)
    values, params = complete(kind, about.arguments), params_of(model)
    library = library or library_of(destination, kind, values)
    check_destination(destination, library)
    save(
        destination,
        library,
        kind,
        values,
        lambda name: np.asarray(params[name]),
        about.preprocessing,
        about.class_names,
        probabilities=about.probabilities,
    )
    if about.objective:
        say(f"left out: {about.objective.words}, which is written where the checkpoint itself is saved")
    _say_lost(about.preprocessing, about.probabilities, values, library, say)
    return destination


def write_checkpoint(
    checkpoint: Checkpoint,
    destination: Path,
    library: str | None,
    say: Callable[[str], None] = print,
    **changes: Any,
) -> None:
    """Writes an open checkpoint as `save_model` does, to an absolute path."""
    values, sources, _ = fit(checkpoint, changes)
    kind, preprocessing = checkpoint.model, checkpoint.preprocessing
    same_head = values["num_classes"] == checkpoint.arguments["num_classes"]
    library = library or library_of(destination, kind, values)
    check_destination(destination, library)
    objective = objective_beside(checkpoint, values, library)
    save(
        destination,
        library,
        kind,
        values,
        lambda name: sources[name](),
        preprocessing,
        checkpoint.class_names if same_head else (),
        *objective,
        probabilities=checkpoint.probabilities if same_head else "softmax",
    )
    if checkpoint.objective and objective[0] is None:
        say(left_out(checkpoint.objective))
    _say_lost(preprocessing, checkpoint.probabilities, values, library, say)


def _say_lost(
    preprocessing: Preprocessing | None,
    probabilities: str,
    values: dict[str, Any],
    library: str,
    say: Callable[[str], None],
) -> None:
    for line in lost(preprocessing, probabilities, values["image_size"], library):
        say(f"note: not written: {line}")


def left_out(own: ObjectiveParams) -> str:
    """The line that says that an objective's parameters were not written."""
    return f"left out, for want of a place: {own.words}"


def objective_beside(
    checkpoint: Checkpoint, values: dict[str, Any], library: str
) -> tuple[ObjectiveParams | None, Shapes]:
    """The parameters of an objective that a checkpoint has, and their shapes; None where the library's files
    are no folder, and have no place for them.

    Args:
      values: the model's arguments, all of them.
    """
    own, model = checkpoint.objective, checkpoint.model
    if own is None:
        return None, {}
    shapes = objective_shapes(own, model, values)
    return (None, {}) if LIBRARIES[library].suffix else (own, shapes)


def library_of(destination: Path, model: type[ImageModel], values: dict[str, Any]) -> str:
    """The format that a destination means."""
    if destination.suffix == ".npz":
        return "google"
    folders = ("transformers", "openai")
    return next((library for library in folders if LIBRARIES[library].has(model, values)), "timm")


def check_destination(destination: Path, library: str) -> None:
    """Raises UserError unless there is such a library, and the destination has its ending."""
    if library not in WRITTEN:
        raise UserError(f"models are not written for {library!r}, but for: {', '.join(WRITTEN)}")
    if destination.suffix != LIBRARIES[library].suffix:
        raise UserError(f"{destination}: give FILE.npz for Google's format, or a new folder for the others")
