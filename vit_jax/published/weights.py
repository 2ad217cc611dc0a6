"""The published weights that can be loaded by a model's name and a tag, with their accuracies.

`weights.tsv` lists the weights. `tests/interop/write_weights.py` writes this file from timm's
registry. `data_sets.py` describes the data sets. `accuracies.json` contains the accuracies. Some
are timm's evaluation results, which `write_accuracies.py` writes to this file. The others are from
the authors' pages; `accuracies.json` cites each page.
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
    """One published accuracy of published weights."""

    # The evaluation: `ImageNet top-1` for a classifier, `ImageNet k-NN` or `linear` for a frozen
    # model.
    metric: str
    percent: float  # Accuracy in percent.
    pixels: int | None  # Side of the images in pixels; None: unknown.
    # Side of the central crop, divided by the short side of the resized image, such as 0.875. None:
    # unknown.
    crop: float | None
    source: str  # Publisher of the accuracy, and the page or file that contains it.

    def __str__(self):
        size = f" at {self.pixels} pixels" if self.pixels else ""
        return f"{self.metric} {self.percent} %{size}"


class Weights(NamedTuple):
    """Published weights of a model.

    Attributes:
      model: our name of the model, such as `ViT-B/16`.
      tag: timm's tag, which names training method and data, such as `augreg_in21k_ft_in1k`.
      repository: repository on the Hugging Face Hub, `owner/name`. Each `name` occurs only once.
      pixels: side of the images in pixels.
      classes: number of classes; 0: no head.
      data: the data sets on which the weights were trained, as keys of `DATA_SETS`, in the order of
        training. They are derived from the tag. The data sets of the initial weights are included
        only if the tag contains them. The data sets of a teacher are not included.
      crop: side of the square central crop, divided by the short side of the resized image, such as
        0.875.
      kind: resizing before the central crop. `short_side`: resizes the short side and keeps the
        aspect ratio. `square`: resizes the image to a square.
      interpolation: interpolation of the resize, as in `config.data.interpolation`.
      mean, std: normalization of pixels in [0, 1]; one number, or one per channel.
      licence: licence as in timm's registry.
      gelu: variant of GELU with which the model was trained, if the repository's files name another
        variant by mistake. `-`: the repository's files are correct.
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
        words = f"{self.model:15} {self.repository}  {self.pixels} pixels, {head}, "
        words += f"licence {self.licence}" + ("" if self.gelu == "-" else f", {self.gelu} GELU")
        trained = f"trained on {' then '.join(self.data)}"
        pixels = f"mean {_numbers(self.mean)}, std {_numbers(self.std)}"
        return ", ".join([words, trained, self.crop_words, pixels, *map(str, self.accuracies)])

    @property
    def crop_words(self) -> str:
        """Description of the crop in evaluation, for tables.

        An example is "sees the centre, 0.875 of the short side, bicubic".
        """
        if self.kind == "square":
            part = "all of" if self.crop == 1 else f"the centre, {self.crop:g} of each side of"
            return f"sees {part} the image squeezed, {self.interpolation}"
        part = "the centre square"
        if self.crop != 1:
            part = f"the centre, {self.crop:g} of the short side"
        return f"sees {part}, {self.interpolation}"

    @property
    def arguments(self) -> dict[str, str]:
        """Arguments that replace wrong values in the repository's files when a model is loaded."""
        return {} if self.gelu == "-" else dict(gelu=self.gelu)

    @property
    def accuracies(self) -> tuple[Accuracy, ...]:
        """The published accuracies of these weights; empty if none is known."""
        return _accuracies().get(self.repository, ())


HEADER = Weights._fields


def _numbers(value: Statistic) -> str:
    """Formats a mean or std with four digits: one number, or one for each channel."""
    return " ".join(f"{x:.4g}" for x in (value if isinstance(value, tuple) else (value,)))


@functools.cache
def all_weights() -> tuple[Weights, ...]:
    """Returns all published weights."""
    lines = FILE.read_text().splitlines()[1:]
    return tuple(_read(dict(zip(HEADER, line.split("\t"), strict=True))) for line in lines)


def _read(row: dict[str, str]) -> Weights:
    """Parses a line of `weights.tsv`."""
    found: dict[str, Any] = dict(row, pixels=int(row["pixels"]), classes=int(row["classes"]))
    found |= dict(data=tuple(row["data"].split(", ")), crop=float(row["crop"]))
    for name in ("mean", "std"):
        values = [float(x) for x in row[name].split()]
        found[name] = tuple(values) if len(values) > 1 else values[0]
    return Weights(**found)


@functools.cache
def _accuracies() -> dict[str, tuple[Accuracy, ...]]:
    """Returns the published accuracies of each repository's weights, by repository."""
    found = defaultdict(tuple)
    for group in json.loads(ACCURACIES.read_text()):
        for repository, values in group["figures"].items():
            found[repository] += (Accuracy(group["what"], *values, group["source"]),)
    return dict(found)


def find_weights(model: str, pretrained: str) -> Weights:
    """Returns published weights of a model.

    timm has DINOv3's weights twice, without and with (`_qkvb`) biases of queries and values. This
    function returns the weights with biases.

    Args:
      pretrained: the weights' tag, or their repository with or without its owner.

    Raises:
      UserError: the model has no such weights, or several weights have this tag.
    """
    of_model = [weights for weights in all_weights() if weights.model == model]
    if not of_model:
        refuse_unheld(model)
        known = {weights.model for weights in all_weights()}
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


def timm_hint(name: str) -> str | None:
    """Returns a hint for timm's name of a model: our name of it, and how to load the weights.

    Args:
      name: timm's name, with or without a tag, such as `vit_base_patch16_224.augreg_in21k`.

    Returns:
      The hint; None: no published weights have this name.
    """
    bare = name.removeprefix("hf_hub:").removeprefix("timm/")
    tags = defaultdict(list)  # timm's tags, by our name of the model.
    for weights in all_weights():
        full = weights.repository.split("/")[-1]
        architecture, _, tag = full.partition(".")
        if bare in (full, architecture):
            tags[weights.model].append(tag)
    if not tags:
        return None
    model, listed = next(iter(tags)), ""
    # Our tags may be ambiguous: weights for 224 and 384 pixels have the same one. Names of
    # repositories are unambiguous.
    repository = bare if "." in bare else f"{bare}.TAG"
    if repository != bare:
        listed = "; tags" + ";".join(
            (f" of {key!r}" if len(tags) > 1 else "") + f": {', '.join(each)}"
            for key, each in tags.items()
        )
    return (
        f"it is timm's name of {' and '.join(map(repr, tags))}: load_model({model!r}, "
        f"pretrained={repository!r}) loads published weights, create_model({model!r}) makes "
        f"random ones{listed}"
    )


def _are_forms_of_dinov3(weights: list[Weights]) -> bool:
    """Returns True for the same weights of DINOv3 without and with biases, in this order."""
    names = [each.repository for each in weights]
    return len(names) == 2 and names[1] == names[0].replace(".", "_qkvb.")


def _names(weights: Weights) -> tuple[str, str, str]:
    """Returns the names by which users can request weights: tag, repository, and its last part."""
    return weights.tag, weights.repository, weights.repository.split("/")[-1]


def checkpoint_of(source: str) -> str:
    """Converts the name of a model to the repository of its published weights, `hf://owner/name`.

    Any other source, such as a path, is returned unchanged.

    Raises:
      UserError: several weights are published for the model, or the repository's files lack an
        argument of the model.
    """
    found = [weights for weights in all_weights() if weights.model == source]
    if len(found) > 1:
        names = ", ".join(f"hf://{weights.repository}" for weights in found)
        raise UserError(f"{source} has several weights; give one of {names}")
    if found and found[0].arguments:
        arguments = [f"--config.model.{name}={x}" for name, x in found[0].arguments.items()]
        words = f"{source} is hf://{found[0].repository} with {' '.join(arguments)}: give both"
        raise UserError(words)
    return f"hf://{found[0].repository}" if found else source
