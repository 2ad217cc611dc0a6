"""A model with its preprocessing and class names, for the commands `predict` and `serve`."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit_jax.checkpoint_crop import checkpoint_crop
from vit_jax.data.class_names import parse_names
from vit_jax.data.preprocess import TestCrop
from vit_jax.errors import UserError
from vit_jax.image_text import load_image_text, towers_place
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.interop.open import open_checkpoint
from vit_jax.load import build_model
from vit_jax.models.image_model import ImageModel
from vit_jax.models.image_text import TEMPLATES, ImageTextModel
from vit_jax.small_files import read_lines


class Classifier(NamedTuple):
    """A classifier of RGB or grey images.

    Attributes:
      model: the model.
      class_names: the names of the classes; empty: the model has no head.
      crop: the evaluation transform.
      probabilities: function from logits to probabilities: `softmax` or `sigmoid`.
      image_text: the image-text model of a zero-shot classifier; None for other classifiers.
    """

    model: ImageModel
    class_names: list[str]
    crop: TestCrop
    probabilities: str
    image_text: ImageTextModel | None = None


def open_classifier(
    source: str,
    *,
    image_size: int | tuple[int, int] | None = None,
    resize: int | None = None,
    merge_tokens: int = 0,
    decode: str | None = None,
    classes: str | None = None,
    names: str | None = None,
    templates: Sequence[str] = (),
    log: Callable[[str], None] = print,
) -> Classifier:
    """Loads a classifier from a checkpoint.

    Args:
      source: the checkpoint, as in `vit_jax.load_model`.
      image_size: image size of the model; None: the checkpoint's.
      resize: short side of the image before the central crop, in pixels; None: the checkpoint's.
      merge_tokens: number of patches that each layer of a ViT merges (`ViTOptions.merge_tokens`).
      decode: how JPEGs are decoded: `fast`, or `exact` (like Pillow); None: the mode of the
        checkpoint's run, or `fast` if the checkpoint is not from a run.
      classes: a file with a class name in each line; None: the checkpoint's names.
      names: class names for zero-shot classification by an image-text model, separated by commas,
        or a file with a name in each line. None: no zero-shot classification; the model's head
        predicts its own classes.
      templates: prompt templates, with `{}` for the class name; empty: the default templates.
      log: callback for each line of the log.

    Raises:
      UserError: the checkpoint does not exist, its images are neither RGB nor grey, or sizes or
        names do not match the model.
    """
    changes = _changes(image_size=image_size, merge_tokens=merge_tokens)
    place = source if names is None else towers_place(source)
    checkpoint = open_checkpoint(place, image_size)
    if names is None:
        if templates:
            raise UserError("--template is for zero-shot classification: give --names, too")
        model, image_text = build_model(checkpoint, log=log, **changes), None
    else:
        model, image_text = _zero_shot(place, names, templates, classes, log, **changes)
    if model.channels not in (1, 3):
        raise UserError(
            f"the model takes images of {model.channels} channels, and files are read as RGB: "
            "pass arrays to vit_jax.load_model(...).predict"
        )
    count = model.num_classes
    about = checkpoint if names is None or model.about is None else model.about
    known_names = _names(classes, count) if classes else about.class_names
    if count and not known_names:
        log(
            "the checkpoint has no class names: classes are shown as indices from 0; "
            "--classes=FILE gives their names"
        )
    crop = _crop(checkpoint, model.image_size, resize, decode)
    log(f"of each image: {crop}")
    shown = [*(known_names or map(str, range(count)))]
    return Classifier(model, shown, crop, about.probabilities, image_text)


def _changes(**arguments: Any) -> dict[str, Any]:
    """Returns the arguments that are neither None nor 0: the model arguments to change."""
    return {name: value for name, value in arguments.items() if value}


def _zero_shot(
    source: str | Path,
    names: str,
    templates: Sequence[str],
    classes: str | None,
    log: Callable[[str], None],
    *,
    image_size: int | tuple[int, int] | None = None,
    merge_tokens: int = 0,
) -> tuple[ImageModel, ImageTextModel]:
    """Loads an image-text model; returns its zero-shot classifier and the model."""
    if classes:
        raise UserError("--names and --classes exclude each other: give the names in one of them")
    if merge_tokens:
        raise UserError("--merge_tokens is for models with a head: give it without --names")
    model = load_image_text(source, image_size=image_size, log=log)
    return model.classifier(parse_names(names), templates or TEMPLATES), model


def _crop(
    checkpoint: Checkpoint, size: tuple[int, int], resize: int | None, decode: str | None
) -> TestCrop:
    if resize and resize < min(size):
        raise UserError(
            f"--resize={resize} is less than the {min(size)} pixels that the model takes"
        )
    crop = checkpoint_crop(checkpoint, size, decode)
    return dataclasses.replace(crop, kind="short_side", resize=resize) if resize else crop


def _names(file: str, count: int) -> list[str]:
    names = read_lines(file, "classes")
    if len(names) != count:
        raise UserError(f"{file} has {len(names):,} names, and the model {count:,} classes")
    return names
