"""A model with what it needs to name the classes of photographs, for the commands `predict` and `serve`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from vit_jax.data.preprocess import TestCrop
from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.load import build_model
from vit_jax.models.image_model import ImageModel
from vit_jax.runs.workdir import checkpoint_crop, open_any
from vit_jax.small_files import read_small


class Classifier(NamedTuple):
    """A model of RGB images, or of grey ones."""

    model: ImageModel
    class_names: list[str]  # None, where the model has no head.
    crop: TestCrop  # What the model sees of an image.
    probabilities: str  # Of `PROBABILITIES`.


def open_classifier(
    source: str,
    *,
    image_size: int | tuple[int, int] | None = None,
    resize: int | None = None,
    decode: str | None = None,
    classes: str | None = None,
    say: Callable[[str], None] = print,
) -> Classifier:
    """The classifier that a checkpoint holds.

    Args:
      source: what `vit_jax.load_model` takes.
      image_size: that the model is made for, if not the checkpoint's.
      resize: short side before the central crop, if not the checkpoint's.
      decode: `fast` or `exact`; None: as the run, or fast.
      classes: a file with the classes' names, one a line, if not the checkpoint's.
      say: is told what was loaded, and what is seen of an image.

    Raises:
      UserError: there is no such checkpoint; the model's images are neither RGB nor grey; sizes or names do
        not fit.
    """
    changes: dict[str, Any] = {"image_size": image_size} if image_size else {}
    checkpoint = open_any(source, image_size)
    model = build_model(checkpoint, say=say, **changes)
    if model.channels not in (1, 3):
        raise UserError(
            f"the model takes images of {model.channels} channels, and files are read as RGB: hand arrays to "
            "predict of vit_jax.load_model"
        )
    count = model.num_classes
    given = _names(classes, count) if classes else checkpoint.class_names
    crop = _crop(checkpoint, model.image_size, resize, decode)
    say(f"of each image: {crop}")
    return Classifier(model, [*(given or map(str, range(count)))], crop, checkpoint.probabilities)


def _crop(checkpoint: Checkpoint, size: tuple[int, int], resize: int | None, decode: str | None) -> TestCrop:
    if resize and resize < min(size):
        raise UserError(f"--resize={resize} is less than the {min(size)} pixels that the model takes")
    crop = checkpoint_crop(checkpoint, size, decode)
    return dataclasses.replace(crop, kind="short_side", resize=resize) if resize else crop


def _names(file: str, count: int) -> list[str]:
    try:
        names = read_small(file).splitlines()
    except OSError as error:
        raise UserError(f"cannot read --classes={file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--classes={file} is not a text in UTF-8: {error}") from error
    if len(names) != count:
        raise UserError(f"{file} has {len(names):,} names, and the model {count:,} classes")
    return names
