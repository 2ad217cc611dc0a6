"""Saves models in other libraries' formats: the Python counterpart of `vit_jax.convert`."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.interop.adapting import Fit, fit
from vit_jax.interop.checkpoint import Checkpoint, params_of
from vit_jax.interop.layout import Entry
from vit_jax.interop.libraries import LIBRARIES, WRITTEN
from vit_jax.interop.objective_files import ObjectiveParams, Shapes
from vit_jax.interop.open import open_checkpoint
from vit_jax.interop.preprocessing import Preprocessing, lost
from vit_jax.interop.writing import save
from vit_jax.models import family_of
from vit_jax.models.image_model import ImageModel, height_and_width
from vit_jax.models.image_text import ImageTextModel
from vit_jax.options.model import ImageOptions
from vit_jax.paths import absolute


def save_model(
    model: ImageModel | ImageTextModel | str | Path,
    path: str | Path,
    *,
    library: str | None = None,
    log: Callable[[str], None] = print,
    **changes: Any,
) -> Path:
    """Saves a model. Preprocessing and class names are also saved if the format can store them.

    After saving, the files are read again and compared: they must equal the model bit for bit.

    If `model` is a checkpoint, the parameters of its objective are also saved, such as MAE's
    decoder, DINO's heads or the mask token. If the library has no format for them, they are saved
    in additional files next to the model.

    Args:
      model: one of these:

        - A model of `load_model` or `create_model`. It is saved with its current parameters.
        - A model of `load_image_text`. It is saved for Transformers, with image encoder, text
          encoder and tokenizer. With `library="open_clip"` it is saved for open_clip. A `FILE.npz`
          is saved for big_vision, without the tokenizer: copy the tokenizer's files into the folder
          of the file.
        - A checkpoint: a workdir, a file or `hf://owner/name`, as in `load_model`.

      path: a new `FILE.npz` for Google's format, or a new folder. A folder is written for
        Transformers, for timm if Transformers does not have the model, or for OpenAI's code if the
        model is a `DVAE`.
      library: the library that can load the saved model: `google`, `timm`, `transformers` or
        `openai`. For a model of `load_image_text`: `transformers`, `open_clip` or `big_vision`.
        None: it is chosen by path and model.
      log: callback for messages about values that the format cannot store.
      **changes: arguments of a checkpoint's model to change, as in `load_model`.

    Returns:
      The absolute path of the file or folder.

    Raises:
      UserError: the format cannot store the model, the path exists, or the checkpoint cannot be
        read.
    """
    destination = absolute(path)
    if isinstance(model, ImageTextModel):
        _save_image_text(model, destination, library, log, changes)
        return destination
    if not isinstance(model, ImageModel):
        checkpoint = open_checkpoint(model, changes.get("image_size"))
        write_checkpoint(checkpoint, destination, library, log, **changes)
        return destination
    if model.about is None:
        raise UserError("save_model takes a model of vit_jax.load_model or vit_jax.create_model")
    if type(model) is not family_of(model.options).model:
        raise UserError(
            f"Unsupported: saving a {type(model).__name__}. Supported: models of load_model and "
            "create_model; a zero-shot classifier is made again by load_image_text(CHECKPOINT)"
            ".classifier(names)."
        )
    if changes:
        raise UserError(
            f"{', '.join(changes)}: arguments are changed only where a checkpoint is saved"
        )
    about, options, params = model.about, model.options, params_of(model)
    library = library or library_of(destination, options)
    check_destination(destination, library)
    save(
        destination,
        library,
        options,
        lambda name: np.asarray(params[name]),
        about.preprocessing,
        about.class_names,
        probabilities=about.probabilities,
    )
    if about.objective:
        log(f"not saved: {about.objective.words}; save_model(CHECKPOINT, path) saves them")
    _say_lost(about.preprocessing, about.probabilities, options, library, log)
    return destination


def _save_image_text(
    model: ImageTextModel,
    destination: Path,
    library: str | None,
    log: Callable[[str], None],
    changes: dict[str, Any],
) -> None:
    """Saves image encoder, text encoder and tokenizer of a model, as `save_model` does."""
    from vit_jax.interop.image_text import TextPart
    from vit_jax.interop.towers_format import Towers
    from vit_jax.interop.towers_writing import FORMATS, library_of_towers, save_towers

    library = library or library_of_towers(destination)
    if library not in FORMATS:
        raise UserError(
            f"Unsupported: both towers for library={library!r}. Supported: "
            f"{', '.join(map(repr, FORMATS))}; save_model(model.image, path) saves the image tower."
        )
    if changes:
        raise UserError(
            f"{', '.join(changes)}: arguments are changed only where a checkpoint is saved"
        )
    bias = None if model.logit_bias is None else float(model.logit_bias[...])
    scale = float(model.logit_scale[...])
    text_part = TextPart(model.text, model.tokenizer, scale, bias, model.probabilities)
    image, params = model.image, params_of(model.image)
    preprocessing = image.about.preprocessing if image.about else None
    towers = Towers(image.options, params.__getitem__, preprocessing, text_part)
    for line in save_towers(destination, library, towers):
        log(f"note: {line}")


class Written(NamedTuple):
    """What was saved of a checkpoint."""

    library: str  # It can load the saved model.
    entries: list[Entry]  # The written tensors.
    fit: Fit  # Changes of the model.
    objective: str  # Description of the saved parameters of the objective; empty: none.


def write_checkpoint(
    checkpoint: Checkpoint,
    destination: Path,
    library: str | None,
    log: Callable[[str], None] = print,
    **changes: Any,
) -> Written:
    """Saves the model of a checkpoint, and the objective's parameters if the format allows it.

    Args:
      checkpoint: the result of `open_checkpoint`.
      destination: absolute path of the new file or folder.
      library: the library that can load the saved model. None: it is chosen by path and model.
      log: callback for messages about values that the format cannot store.
      **changes: arguments of the model to change, as in `load_model`.
    """
    options, sources, done = fit(checkpoint, changes)
    same_head = options.num_classes == checkpoint.options.num_classes
    library = library or library_of(destination, options)
    check_destination(destination, library)
    objective, shapes = _objective_to_save(checkpoint, options, library)
    entries = save(
        destination,
        library,
        options,
        lambda name: sources[name](),
        checkpoint.preprocessing,
        checkpoint.class_names if same_head else (),
        objective,
        shapes,
        checkpoint.probabilities if same_head else "softmax",
    )
    if checkpoint.objective and not objective:
        log(f"not saved, as the format cannot store them: {checkpoint.objective.words}")
    _say_lost(checkpoint.preprocessing, checkpoint.probabilities, options, library, log)
    return Written(library, entries, done, objective.count(shapes) if objective else "")


def _say_lost(
    preprocessing: Preprocessing | None,
    probabilities: str,
    options: ImageOptions,
    library: str,
    log: Callable[[str], None],
) -> None:
    for line in lost(preprocessing, probabilities, height_and_width(options.image_size), library):
        log(f"note: not written: {line}")


def _objective_to_save(
    checkpoint: Checkpoint, options: ImageOptions, library: str
) -> tuple[ObjectiveParams | None, Shapes]:
    """Returns the objective's parameters to save next to the model, and their shapes.

    The result is None and {} if the checkpoint contains no objective parameters, or if the model is
    saved in a single file, as in Google's format.

    Raises:
      UserError: the parameters do not match the model.
    """
    if (objective := checkpoint.objective) is None:
        return None, {}
    from vit_jax.runs.warm_start import objective_shapes  # Imports the training code, so not above.

    shapes = objective_shapes(objective, options)
    return (None, {}) if LIBRARIES[library].suffix else (objective, shapes)


def library_of(destination: Path, options: ImageOptions) -> str:
    """Returns the library that can load the saved model, such as `timm`, by path and model."""
    if destination.suffix == ".npz":
        return "google"
    folders, model, values = ("transformers", "openai"), family_of(options).model, asdict(options)
    return next((library for library in folders if LIBRARIES[library].has(model, values)), "timm")


def check_destination(destination: Path, library: str) -> None:
    """Raises UserError if the library is unknown, or if its format has another file suffix."""
    if library not in WRITTEN:
        raise UserError(f"Unsupported: library={library!r}. Supported: {', '.join(WRITTEN)}.")
    if destination.suffix != LIBRARIES[library].suffix:
        raise UserError(
            f"{destination}: give FILE.npz for Google's format, or a new folder for the others"
        )
