"""Image-text models: loading and zero-shot classification."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.interop.image_text import (
    TextPart,
    download_towers,
    open_text,
    open_trained_text,
    towers_at,
)
from vit_jax.interop.open import open_checkpoint
from vit_jax.load import build_model
from vit_jax.models.image_text import TEMPLATES, ImageTextModel
from vit_jax.models.prediction import Prediction
from vit_jax.paths import is_workdir, split_checkpoint
from vit_jax.published.towers import all_towers, find_towers

# `open_checkpoint` reads only the image encoder of an image-text model, and its log message states
# this. The pattern matches this part of the message, which is removed if both encoders are read.
_ONE_TOWER = (
    r"(, )?the (model|tower) of images alone, of two(, and its projection as the head)?( and )?"
)


def load_image_text(
    source: str | Path,
    *,
    pretrained: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    log: Callable[[str], None] = print,
) -> ImageTextModel:
    """Loads a CLIP, SigLIP or SigLIP 2: image encoder, text encoder and tokenizer.

    `model.encode_image(images)` and `model.encode_text(texts)` return embeddings of unit norm, and
    `model.classifier(names)` is an image classifier for any class names.

    Args:
      source: one of these:

        - The workdir of a contrastive run.
        - A folder of Transformers (`config.json`, `model.safetensors`, `preprocessor_config.json`)
          or open_clip (`open_clip_config.json`, `open_clip_model.safetensors`), with the
          tokenizer's files.
        - An npz file of big_vision, with `spiece.model` or `tokenizer.json` in the same folder.
        - `hf://owner/name`.
        - The name of a model, if `pretrained` is set.

      pretrained: tag of published weights, or the name of their repository. If weights for several
        image sizes are published, those for `image_size` are loaded, or, without `image_size`,
        those for the smallest size.
      image_size: size of the images in pixels; None: the checkpoint's.
      log: callback for each line of the log.

    Raises:
      UserError: the checkpoint does not exist or is damaged, or has no text encoder or tokenizer.
    """
    changes: dict[str, Any] = {} if image_size is None else {"image_size": image_size}
    if pretrained is not None:
        source = _published(str(source), pretrained, image_size, log)
    checkpoint, text_part = open_towers(source, image_size)
    image = build_model(checkpoint, log=log, **changes)
    log(text_part.describe())
    return ImageTextModel(
        image,
        text_part.tower,
        text_part.logit_scale,
        text_part.logit_bias,
        text_part.probabilities,
        text_part.tokenizer,
    )


def _published(
    model: str,
    pretrained: str,
    image_size: int | tuple[int, int] | None,
    log: Callable[[str], None],
) -> str:
    """Returns the address of published weights on the Hub, `hf://owner/name`."""
    towers = find_towers(model, pretrained, image_size if isinstance(image_size, int) else None)
    address = f"hf://{towers.repository}"
    log(f"{model}, {towers.tag}, {towers.pixels} pixels: {address}")
    return address


def open_towers(
    source: str | Path, image_size: int | tuple[int, int] | None = None
) -> tuple[Checkpoint, TextPart]:
    """Opens the image encoder of an image-text model, and reads text encoder and tokenizer.

    Args:
      source: as in `load_image_text`.
      image_size: size of the images in pixels; None: the checkpoint's.

    Raises:
      UserError: the checkpoint does not exist or is damaged, or has no text encoder or tokenizer.
    """
    place = towers_place(source)
    checkpoint = open_checkpoint(place, image_size)
    text_part = open_text_part(place, checkpoint)
    assumed = re.sub(_ONE_TOWER, "", checkpoint.assumed)
    return checkpoint._replace(assumed=assumed, objective=None), text_part


def open_text_part(place: str | Path, checkpoint: Checkpoint) -> TextPart:
    """Reads the text encoder and the tokenizer of an image-text model.

    Args:
      place: the model's workdir, folder or file, as returned by `towers_place`.
      checkpoint: the opened image encoder.

    Raises:
      UserError: the model has no text encoder or no tokenizer, or is damaged.
    """
    workdir, _ = split_checkpoint(place)
    if is_workdir(workdir):
        text_part = open_trained_text(checkpoint, Path(workdir))
    else:
        text_part = open_text(Path(place))
    # Number of values of an image embedding. With a head, the embedding is the head's output.
    # Without a head, it has `dim` values. Model families without the option `dim` always have a
    # head here.
    options: Any = checkpoint.options
    width = options.num_classes or options.dim
    if width != text_part.tower.options.output_dim:
        raise UserError(
            f"{place} has image embeddings of {width} values and text embeddings of "
            f"{text_part.tower.options.output_dim}: they cannot be compared"
        )
    return text_part


def towers_place(source: str | Path) -> str | Path:
    """Returns the workdir, folder or file of an image-text model. Models on the Hub are downloaded.

    `open_checkpoint` opens the image encoder of the result.

    Raises:
      UserError: the model does not exist.
    """
    if str(source).startswith("hf://"):
        return towers_at(download_towers(str(source)))
    if is_workdir(split_checkpoint(source)[0]):
        return source
    if not Path(source).exists():
        if found := [towers for towers in all_towers() if towers.model == source]:
            raise UserError(
                f"there is no {source}, which is the name of a model: "
                f"load_image_text({str(source)!r}, pretrained={found[0].tag!r}) loads published "
                f"weights, and commands take hf://{found[0].repository}"
            )
        raise UserError(
            f"there is no {source}: give an image-text model, which is the workdir of a run with "
            "config.objective.name='contrastive', a folder of Transformers or open_clip, an npz "
            "file of big_vision, or hf://owner/name"
        )
    return towers_at(Path(source))


def zero_shot(
    model: ImageTextModel,
    images: Any,
    class_names: Sequence[str],
    templates: Sequence[str] = TEMPLATES,
    top: int | None = None,
) -> list[Prediction]:
    """Classifies images by class names that the model was not trained on.

    For several calls with the same names, use `model.classifier(class_names, templates)`, which
    encodes the names only once.

    Args:
      model: an image-text model.
      images: as in `ImageModel.predict`: paths, PIL images or arrays of any size.
      templates: prompt templates, with `{}` for the class name. The embedding of a class is the
        mean over the templates.
      top: maximum number of classes for each image; None: 3.

    Raises:
      UserError: an image cannot be read, or a name or a template is invalid.
    """
    return model.classifier(class_names, templates).predict(images, top=top)
