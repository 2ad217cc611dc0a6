"""Writes docs/published_weights.md: python docs/write_published_weights.py"""

import re
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError
from vit_jax.interop.timm.authors import PIXELS
from vit_jax.published.data_sets import DATA_SETS
from vit_jax.published.weights import Weights, all_weights, find_weights

HEAD = """# Published weights

`vit_jax.load_model("DINOv2-S/14", pretrained="lvd142m")` takes the weights of a line from the Hugging Face
Hub, and `vit_jax.list_models(pretrained=True)` lists them; `--config.finetune.checkpoint=hf://REPOSITORY`
starts a run from them. The accuracies are published ones, on ImageNet's validation images unless another
test set is named, with the side of the images in pixels; none was measured here. Mind the licences. The
page on [models](models.md) explains the names of models.

The data sets are listed in the order of training and described [below](#data). They follow from the weights'
tag: a teacher's data are missing, and those of weights from which training started may be. The preprocessing
column has the side of the crop over that of the resized image, whose short side is resized (both sides if
the column has "squeezed"), the interpolation if it is not bicubic, and the name of the mean and std of the
pixels. These values are from timm's registry. At loading, the repository's own files take precedence, and a
line reports differences.

{pixels}

CLIPs that were trained with quick GELU, x sigmoid(1.702 x), have it in the last column: their repositories'
own files mean exact GELU, which `pretrained=` corrects. For such a repository itself, `hf://REPOSITORY`, give
`gelu="quick"` or `--config.model.gelu=quick`.

Written by `python docs/write_published_weights.py`.
"""

# Names of pairs of mean and std: those of `convert --pixels`, and two further ones.
WAYS: dict[str, dict[str, Any]] = {
    **PIXELS,
    "half": dict(mean=0.5, std=0.5),
    "none": dict(mean=0.0, std=1.0),
}


def page() -> str:
    """Returns the page with a table for each family of models.

    The family is the beginning of a model's name, up to a hyphen or slash.
    """
    families: dict[str, list[Weights]] = {}
    for weights in sorted(all_weights(), key=lambda x: x.model.lower()):
        families.setdefault(re.split(r"[-/]", weights.model)[0], []).append(weights)
    ways = ["| | mean | std |", "|---|---|---|"]
    ways += [
        f"| `{way}` | {_numbers(x['mean'])} | {_numbers(x['std'])} |" for way, x in WAYS.items()
    ]
    lines = [HEAD.replace("{pixels}", "\n".join(ways))]
    for family, held in families.items():
        head = "| model | `pretrained=` | pixels | classes | published, % | data | sees | licence |"
        rows, rule = [*map(_row, held)], "|---|---|---|---|---|---|---|---|"
        if any(weights.arguments for weights in held):
            head, rule = f"{head} GELU |", f"{rule}---|"
            rows = [
                f"{row} {x.arguments.get('gelu', '')} |" for row, x in zip(rows, held, strict=True)
            ]
        lines += [f"## {family}", "", head, rule, *rows, ""]
    lines += ["## Data", "", "| name | what it is |", "|---|---|"]
    lines += [f"| {name} | {what} |" for name, what in DATA_SETS.items()]
    lines += ["", "Pairs are of an image and a text.", ""]
    return "\n".join(lines)


def _name(weights: Weights) -> str:
    """Returns the tag or repository by which weights of a model are found.

    It is the repository if several weights of the model have the same tag.
    """
    try:
        found = find_weights(weights.model, weights.tag)
    except UserError:
        found = None
    return weights.tag if found == weights else weights.repository.split("/")[-1]


def _row(weights: Weights) -> str:
    reached = [
        f"{x.percent} {x.metric.removeprefix('ImageNet ')}" + (f" ({x.pixels})" if x.pixels else "")
        for x in weights.accuracies
    ]
    classes = f"{weights.classes:,}" if weights.classes else "none"
    cells = f"`{weights.model}`", f"`{_name(weights)}`", f"{weights.pixels}", classes
    data = ", ".join(weights.data)
    return (
        "| "
        + " | ".join((*cells, ", ".join(reached), data, _sees(weights), weights.licence))
        + " |"
    )


def _sees(weights: Weights) -> str:
    words = [f"{weights.crop:g}", "squeezed" if weights.kind == "square" else ""]
    words.append(
        "" if weights.interpolation == "bicubic" else weights.interpolation.replace("_", " ")
    )
    found = dict(mean=weights.mean, std=weights.std)
    way = next(way for way, x in WAYS.items() if x == found)
    return ", ".join(word for word in (*words, f"`{way}`") if word)


def _numbers(values: float | tuple[float, ...]) -> str:
    return " ".join(f"{x:.4g}" for x in (values if isinstance(values, tuple) else (values,)))


if __name__ == "__main__":
    Path(__file__).with_name("published_weights.md").write_text(page())
