"""The published image-text models that can be loaded by name; they are listed in `towers.tsv`.

Names and repositories are from open_clip's table of published weights (`pretrained.py`), from
big_vision's page on SigLIP 2, and, for SigLIP, from Google's collection on the Hub.
"""

import functools
from pathlib import Path
from typing import NamedTuple

from vit_jax.errors import UserError, nearest

FILE = Path(__file__).parent / "towers.tsv"


class Towers(NamedTuple):
    """Published weights of an image-text model."""

    model: str  # Our name of the model, such as `SigLIP-B/16`.
    tag: str  # Name of the weights: the training data (`webli`) or the author (`openai`).
    repository: str  # Repository on the Hugging Face Hub.
    pixels: int  # Side of the images in pixels.


@functools.cache
def all_towers() -> tuple[Towers, ...]:
    """Returns all published image-text models. The weights of a model are sorted by image size."""
    rows = (line.split("\t") for line in FILE.read_text().splitlines()[1:])
    return tuple(
        Towers(model, tag, repository, int(pixels)) for model, tag, repository, pixels in rows
    )


def find_towers(model: str, pretrained: str, pixels: int | None = None) -> Towers:
    """Returns published weights of an image-text model.

    Args:
      pretrained: the weights' tag, or their repository with or without its owner.
      pixels: side of the images in pixels, if there are weights for several image sizes. If no
        weights have this size, the weights with the smallest images are returned.

    Raises:
      UserError: the model has no such weights.
    """
    of_model = [towers for towers in all_towers() if towers.model == model]
    if not of_model:
        known = dict.fromkeys(towers.model for towers in all_towers())
        raise UserError(
            f"no published model of images and texts is called {model!r}; {nearest(model, known)}"
        )
    matching = [
        towers
        for towers in of_model
        if pretrained in (towers.tag, towers.repository, towers.repository.split("/")[-1])
    ]
    if not matching:
        tags = dict.fromkeys(towers.tag for towers in of_model)
        raise UserError(f"{model} has no weights {pretrained!r}; {nearest(pretrained, tags)}")
    return next((towers for towers in matching if towers.pixels == pixels), matching[0])


def towers_of(source: str) -> str:
    """Converts the name of an image-text model to the `hf://owner/name` of its published weights.

    If there are several image sizes, the repository with the smallest one is returned. Any other
    source, such as a path, is returned unchanged.

    Raises:
      UserError: the model has weights with several tags.
    """
    of_model = [towers for towers in all_towers() if towers.model == source]
    if not of_model:
        return source
    if len({towers.tag for towers in of_model}) > 1:
        names = ", ".join(f"hf://{towers.repository}" for towers in of_model)
        raise UserError(f"{source} has several weights; give one of {names}")
    return f"hf://{of_model[0].repository}"
