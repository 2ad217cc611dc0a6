"""The published models of images and texts that load by name, one line each in `towers.tsv`.

Names and repositories are from open_clip's table of published weights (`pretrained.py`), from
big_vision's page on SigLIP 2, and, for SigLIP, from the Hub's collection of Google.
"""

import functools
from pathlib import Path
from typing import NamedTuple

from vit_jax.errors import UserError, nearest

FILE = Path(__file__).parent / "towers.tsv"


class Towers(NamedTuple):
    """Published weights of a model of images and texts.

    Attributes:
      model: our name of the model.
      tag: name of the weights: their training data, or who trained them.
      repository: repository on the Hugging Face Hub.
      pixels: side of the images.
    """

    model: str
    tag: str
    repository: str
    pixels: int


@functools.cache
def all_towers() -> tuple[Towers, ...]:
    """Returns all published models of images and texts, each model's by their size of images."""
    rows = (line.split("\t") for line in FILE.read_text().splitlines()[1:])
    return tuple(
        Towers(model, tag, repository, int(pixels)) for model, tag, repository, pixels in rows
    )


def find_towers(model: str, pretrained: str, pixels: int | None = None) -> Towers:
    """Returns a model's published weights by tag, or by repository with or without its owner.

    Args:
      pixels: side of the images; of several repositories, one of this size is returned, else the
        one with the smallest images.

    Raises:
      UserError: there are none.
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
    """Returns the repository of a published model with one tag, else the source itself.

    Of several sizes of images it is the smallest.

    Raises:
      UserError: the model has weights of several tags.
    """
    of_model = [towers for towers in all_towers() if towers.model == source]
    if not of_model:
        return source
    if len({towers.tag for towers in of_model}) > 1:
        names = ", ".join(f"hf://{towers.repository}" for towers in of_model)
        raise UserError(f"{source} has several weights; give one of {names}")
    return f"hf://{of_model[0].repository}"
