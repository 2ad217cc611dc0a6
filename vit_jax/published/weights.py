"""The published weights that load by name, one line each in `weights.tsv`, with their accuracies.

`tests/interop/write_weights.py` writes the file from timm's registry, and `data_sets.py` describes
its data sets. `write_accuracies.py` writes timm's evaluation results to `accuracies.json`; the
other results in that file are from the authors' pages, which it cites.
"""

import functools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from vit_jax.errors import UserError, nearest
from vit_jax.published.unheld import refuse_unheld

Statistic = float | tuple[float, ...]

FILE = Path(__file__).parent / "weights.tsv"
ACCURACIES = Path(__file__).parent / "accuracies.json"


class Accuracy(NamedTuple):
    """One published result of some weights.

    Attributes:
      what: `ImageNet top-1` of a classifier, or `ImageNet k-NN` or `linear` of a frozen model.
      percent: accuracy in percent.
      pixels: side of the images; None: the source does not contain it.
      crop: side of the crop relative to the resized image; None: the source does not contain it.
      source: author and place of the publication.
    """

    what: str
    percent: float
    pixels: int | None
    crop: float | None
    source: str

    def __str__(self):
        size = f" at {self.pixels} pixels" if self.pixels else ""
        return f"{self.what} {self.percent} %{size}"


class Weights(NamedTuple):
    """Published weights of a model.

    Attributes:
      model: our name of the model.
      tag: name of the weights, in timm's words: the training method and data.
      repository: repository on the Hugging Face Hub; its last part is unique.
      pixels: side of the images.
      classes: number of classes; 0: no head.
      data: training data sets in order, names of `DATA_SETS`, according to the tag. A teacher's
        data are excluded, and so are the data of initial weights that the tag does not mention.
      crop: side of the square crop relative to the resized image.
      kind: `short_side` or `square`: which sides are resized before the central crop.
      interpolation: as in `data.interpolation`.
      mean, std: normalization of pixels in [0, 1]; one number, or one per channel.
      licence: licence in the words of the registry.
      gelu: the model's argument in training, if the repository's own files imply another one; else
        `-`.
    """

    model: str
    tag: str
    repository: str
    pixels: int
    classes: int
    data: tuple[str, ...]
    crop: float
    kind: str
    interpolation: str
    mean: Statistic
    std: Statistic
    licence: str
    gelu: str

    def __str__(self):
        head = f"{self.classes:,} classes" if self.classes else "no head"
        words = (
            f"{self.model:15} {self.repository}  {self.pixels} pixels, {head}, licence "
            f"{self.licence}"
        )
        words += "" if self.gelu == "-" else f", {self.gelu} GELU"
        trained = f"trained on {' then '.join(self.data)}"
        pixels = f"mean {_numbers(self.mean)}, std {_numbers(self.std)}"
        return ", ".join([words, trained, self.crop_words, pixels, *map(str, self.accuracies)])

    @property
    def crop_words(self) -> str:
        """Description of the crop that the model is evaluated on."""
        if self.kind == "square":
            part = "all of" if self.crop == 1 else f"the centre, {self.crop:g} of each side of"
            return f"sees {part} the image squeezed, {self.interpolation}"
        part = (
            "the centre square"
            if self.crop == 1
            else f"the centre, {self.crop:g} of the short side"
        )
        return f"sees {part}, {self.interpolation}"

    @property
    def arguments(self) -> dict[str, str]:
        """Arguments of the model that the repository's own files lack."""
        return {} if self.gelu == "-" else dict(gelu=self.gelu)

    @property
    def accuracies(self) -> tuple[Accuracy, ...]:
        """The published results of these weights; empty: none is known."""
        return _accuracies().get(self.repository, ())


HEADER = Weights._fields


def _numbers(value: Statistic) -> str:
    """Formats one number, or the numbers of the channels, with four digits."""
    return " ".join(f"{x:.4g}" for x in (value if isinstance(value, tuple) else (value,)))


@functools.cache
def all_weights() -> tuple[Weights, ...]:
    """Returns all published weights."""
    lines = FILE.read_text().splitlines()[1:]
    return tuple(_read(dict(zip(HEADER, line.split("\t"), strict=True))) for line in lines)


def _read(row: dict[str, str]) -> Weights:
    """Returns the weights of a line."""
    found: dict[str, Any] = dict(row, pixels=int(row["pixels"]), classes=int(row["classes"]))
    found |= dict(data=tuple(row["data"].split(", ")), crop=float(row["crop"]))
    for name in ("mean", "std"):
        values = [float(x) for x in row[name].split()]
        found[name] = tuple(values) if len(values) > 1 else values[0]
    return Weights(**found)


@functools.cache
def _accuracies() -> dict[str, tuple[Accuracy, ...]]:
    """Returns the published results by repository."""
    found = defaultdict(tuple)
    for group in json.loads(ACCURACIES.read_text()):
        for repository, values in group["figures"].items():
            found[repository] += (Accuracy(group["what"], *values, group["source"]),)
    return dict(found)


def find_weights(model: str, pretrained: str) -> Weights:
    """Returns the weights of a model by tag or repository, with or without its owner.

    Of timm's two forms of DINOv3's weights it returns the one with biases of queries and values.

    Raises:
      UserError: there are none, or several.
    """
    of_model = [weights for weights in all_weights() if weights.model == model]
    if not of_model:
        refuse_unheld(model)
        known = dict.fromkeys(weights.model for weights in all_weights())
        raise UserError(f"no published weights of {model!r} are known; {nearest(model, known)}")
    matching = [weights for weights in of_model if pretrained in _names(weights)]
    if _are_forms_of_dinov3(matching):
        return matching[1]
    if len(matching) > 1:
        names = ", ".join(weights.repository.split("/")[-1] for weights in matching)
        raise UserError(f"{model} has several weights {pretrained!r}; give one of {names}")
    if not matching:
        tags = dict.fromkeys(weights.tag for weights in of_model)
        raise UserError(f"{model} has no weights {pretrained!r}; {nearest(pretrained, tags)}")
    return matching[0]


def _are_forms_of_dinov3(weights: list[Weights]) -> bool:
    """Returns True for a pair of the same weights without biases, and with them (`..._qkvb`)."""
    if len(weights) != 2:
        return False
    return weights[1].repository == weights[0].repository.replace(".", "_qkvb.")


def _names(weights: Weights) -> tuple[str, str, str]:
    """Returns the names by which weights can be requested."""
    return weights.tag, weights.repository, weights.repository.split("/")[-1]


def checkpoint_of(source: str) -> str:
    """Returns the repository of a model with exactly one set of weights, else the source itself.

    Raises:
      UserError: the model has several sets of weights, or its repository lacks some of its
        arguments.
    """
    found = [weights for weights in all_weights() if weights.model == source]
    if len(found) > 1:
        names = ", ".join(f"hf://{weights.repository}" for weights in found)
        raise UserError(f"{source} has several weights; give one of {names}")
    if found and found[0].arguments:
        said = " ".join(
            f"--config.model.{name}={value}" for name, value in found[0].arguments.items()
        )
        raise UserError(f"{source} is hf://{found[0].repository} with {said}: give both")
    return f"hf://{found[0].repository}" if found else source
