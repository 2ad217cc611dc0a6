"""Writes the model card (README.md) of a model on the Hub: description, usage and training."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.interop.checkpoint import Checkpoint, model_name, params_of
from vit_jax.interop.image_text import TextPart
from vit_jax.publishing.run_facts import RunFacts
from vit_jax.publishing.usage import PICTURE, TOLERANCE, Tried

NAMES = 10  # Number of classes listed on the page; the files contain all of them.
_TITLES = {"timm": "timm", "transformers": "Transformers"}


class Published(NamedTuple):
    """The content of a model's card."""

    name: str  # `owner/name` on the Hub.
    form: str  # Format of the folder, `timm` or `transformers`.
    task: str  # The Hub's identifier of the task.
    properties: Mapping[str, str]  # Properties of the model, by name.
    licence: str  # The Hub's identifier of the licence.
    # Name `owner/name` of the base model, for the Hub's field `base_model`. It is the model from
    # which the run was initialized, or the published model that is uploaded again. None: unknown.
    base: str | None
    # Facts about the training run; None: the model is not from one of our runs.
    facts: RunFacts | None
    differs: Sequence[str]  # Lines about preprocessing that the folder cannot store.
    tried: Sequence[Tried]  # Usage examples that were run successfully.


def card_text(about: Published) -> str:
    """Returns the text of a model's card."""
    rows = dict(about.properties) | {"files": f"for {_TITLES[about.form]}"}
    table = _table(("property", "value"), rows | {"licence": about.licence})
    parts = [_data(about), f"# {about.name.split('/')[1]}", table]
    note = "These files preprocess images slightly differently"
    differs = [f"{note}: {line}." for line in about.differs]
    if about.tried:
        parts += ["## Use", *_usage(about)]
    if facts := about.facts:
        parts.append("## Figures")
        if facts.figures:
            parts.append(_table(("figure", "value"), facts.figures))
            parts += ["vit_jax measured them in the run itself.", _list(facts.protocol), *differs]
        else:
            parts += ["No accuracy was measured for this checkpoint.", *differs]
        parts += ["## Data", facts.data, "## Recipe"]
        differing = "Values of its config that differ from vit_jax's defaults."
        parts.append(f"{differing} Made with {facts.made_with}.")
        parts.append(_table(("config", "value"), facts.recipe))
    else:
        origin = "are published by its authors"
        if about.base:
            page = f"[{about.base}](https://huggingface.co/{about.base})"
            origin = f"are on the page of the original, {page}"
        parts += [
            "## Training",
            "vit_jax has written these files from a checkpoint, and did not train it. Its data, "
            f"its recipe and its published accuracies {origin}.",
            *differs,
        ]
    return "\n\n".join(parts) + "\n"


def _data(about: Published) -> str:
    """Returns the card's YAML metadata, which the Hub reads."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        license=about.licence,
        library_name=about.form,
        pipeline_tag=about.task,
        tags=["vit_jax", "jax"],
        base_model=about.base,
    )
    return f"---\n{data.to_yaml()}\n---"


def properties_of(checkpoint: Checkpoint) -> tuple[str, dict[str, str]]:
    """Returns the Hub's identifier of an image model's task, and the properties for the card."""
    values, names = checkpoint.arguments, checkpoint.class_names
    task = "image-classification" if values["num_classes"] else "image-feature-extraction"
    classes = f"{values['num_classes']:,}" if values["num_classes"] else "none: it gives features"
    if values["num_classes"] and checkpoint.probabilities == "sigmoid":
        classes += ", each with a probability of its own (a sigmoid)"
    if names:
        classes += f": {', '.join(names[:NAMES])}" + (", ..." if len(names) > NAMES else "")
    return task, {
        "model": model_name(checkpoint.options),
        "parameters": _millions(checkpoint.shapes.values()),
        "images": _size(checkpoint),
        "classes": classes,
    }


def properties_of_towers(checkpoint: Checkpoint, text_part: TextPart) -> tuple[str, dict[str, str]]:
    """Returns the Hub's task of an image-text model, and the properties for its card."""
    shapes = [x.shape for x in params_of(text_part.tower).values()]
    return "zero-shot-image-classification", {
        "image tower": model_name(checkpoint.options),
        "text tower": text_part.describe().removeprefix("text tower: "),
        "parameters": _millions([*checkpoint.shapes.values(), *shapes]),
        "images": _size(checkpoint),
    }


def _millions(shapes: Iterable[Sequence[int]]) -> str:
    """Formats the number of parameters in millions."""
    return f"{sum(int(np.prod(shape)) for shape in shapes) / 1e6:,.2f} M"


def _size(checkpoint: Checkpoint) -> str:
    height, width = checkpoint.arguments["image_size"]
    return f"{height}x{width}"


def _usage(about: Published) -> list[str]:
    """Returns the card's section on usage.

    It contains a code example for each library, and the relative difference between its output and
    the output of the trained model.
    """
    parts = []
    for usage, _ in about.tried:
        kind, code = "python", usage.code
        if code.startswith("$ "):
            kind, code = "sh", code[2:]
        parts += [f"### {usage.title}", f"```{kind}\n{code.strip()}\n```"]
    if about.form == "timm" and any(usage.title == "Transformers" for usage, _ in about.tried):
        parts.append(
            "Transformers reads timm's form through timm, which must be installed beside it."
        )
    found = "; ".join(
        f"{tried.usage.title} {tried.distance:.0e} of the largest number ({tried.versions})"
        for tried in about.tried
    )
    parts.append(
        f"These lines were run as they stand before this page was written. `{PICTURE}` was a "
        "picture of noise that is cropped without a resize; what they computed was off from the "
        f"trained model's by: {found}. Lines that were off by more than {TOLERANCE:.0e} would not "
        "be here."
    )
    return parts


def _table(head: Sequence[str], rows: dict[str, str]) -> str:
    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(' '.join(x.split()).replace('|', chr(92) + '|') for x in cells)} |"

    return "\n".join([row(head), row(["---"] * len(head)), *(row(cells) for cells in rows.items())])


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
