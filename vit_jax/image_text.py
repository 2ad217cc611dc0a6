"""Models of images and texts: loading and zero-shot classification."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint
from vit_jax.interop.hub import download
from vit_jax.interop.image_text import TextPart, open_text, open_trained_text
from vit_jax.interop.open import open_checkpoint
from vit_jax.interop.transformers.transformers_clip import IMAGES_ALONE
from vit_jax.load import build_model
from vit_jax.models.image_text import TEMPLATES, ImageTextModel
from vit_jax.models.prediction import Prediction
from vit_jax.models.text_tokens import TOKENIZER_FILES
from vit_jax.paths import is_workdir, split_checkpoint


def load_image_text(
    source: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    log: Callable[[str], None] = print,
) -> ImageTextModel:
    """Loads a CLIP, SigLIP or SigLIP 2 with both towers and its tokenizer.

    `model.encode_image(images)` and `model.encode_text(texts)` return embeddings of length 1, and
    `model.classifier(names)` is an image classifier for any class names.

    Args:
      source: the workdir of a contrastive run; a folder of Transformers with `config.json`,
        `model.safetensors`, `preprocessor_config.json` and the tokenizer's files; or
        `hf://owner/name`.
      image_size: size of the images in pixels; None: the checkpoint's.
      log: callback for each line of the log.

    Raises:
      UserError: the checkpoint does not exist or is damaged, or has no text tower or no tokenizer.
    """
    changes: dict[str, Any] = {} if image_size is None else {"image_size": image_size}
    place = source if _is_run(source) else _folder_of(source)
    checkpoint = open_checkpoint(place, image_size)
    part = open_text_part(place, checkpoint)
    assumed = checkpoint.assumed.removeprefix(IMAGES_ALONE).removeprefix(" and ")
    image = build_model(checkpoint._replace(assumed=assumed, objective=None), log=log, **changes)
    options = part.tower.options
    log(
        f"text tower: {options.depth} layers of width {options.dim}, {options.vocabulary:,} tokens "
        f"in the vocabulary, {options.length} in a text; {part.probabilities} of the similarities"
    )
    return ImageTextModel(
        image,
        part.tower,
        part.logit_scale,
        part.logit_bias,
        part.probabilities,
        part.tokenizer,
    )


def open_text_part(source: str | Path, checkpoint: Checkpoint) -> TextPart:
    """Reads all of a model of images and texts except its image tower.

    Args:
      source: as in `load_image_text`.
      checkpoint: the source, opened.

    Raises:
      UserError: the source has no text tower or no tokenizer, or is damaged.
    """
    if _is_run(source):
        part = open_trained_text(checkpoint, Path(split_checkpoint(source)[0]))
    else:
        part = open_text(_folder_of(source))
    options: Any = checkpoint.options  # A family without a width has a head.
    width = options.num_classes or options.dim
    if width != part.tower.options.output_dim:
        raise UserError(
            f"{source} has image embeddings of {width} values and text embeddings of "
            f"{part.tower.options.output_dim}: they cannot be compared"
        )
    return part


def _is_run(source: str | Path) -> bool:
    return is_workdir(split_checkpoint(source)[0])


def _folder_of(source: str | Path) -> Path:
    """Returns the folder of a model of images and texts, downloaded if it is `hf://...`."""
    if str(source).startswith("hf://"):
        return download(str(source), TOKENIZER_FILES)
    if not Path(source).is_dir():
        raise UserError(
            f"{source} has no text tower: a model of images and texts is the workdir of a run with "
            "config.objective.name='contrastive', a folder of Transformers, or hf://owner/name"
        )
    return Path(source)


def zero_shot(
    model: ImageTextModel,
    images: Any,
    class_names: Sequence[str],
    templates: Sequence[str] = TEMPLATES,
    top: int | None = None,
) -> list[Prediction]:
    """Classifies images by class names that the model was not trained on.

    `model.classifier(class_names, templates)` returns a classifier for several calls with the same
    names, which are encoded once.

    Args:
      images: as in `ImageModel.predict`: paths, PIL images or arrays of any size.
      class_names: names of the classes.
      templates: texts with `{}` for the name; a class's embedding is their mean.
      top: maximum number of classes for each image; None: 3.

    Raises:
      UserError: an image cannot be read, or a name or a template is invalid.
    """
    return model.classifier(class_names, templates).predict(images, top=top)
