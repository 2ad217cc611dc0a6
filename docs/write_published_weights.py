"""Writes docs/published_weights.md: python docs/write_published_weights.py"""

import re
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.published.weights import Weights, all_weights, find_weights

HEAD = """# Published weights

`vit_jax.load_model("DINOv2-S/14", pretrained="lvd142m")` takes the weights of a line from the Hugging Face
Hub, and `vit_jax.list_models(pretrained=True)` lists them; `--config.finetune.checkpoint=hf://REPOSITORY`
starts a run from them. The accuracies are published ones, of ImageNet's validation images unless it says
otherwise, with the side of the images in pixels; none was measured here. Mind the licences. What is in a
model by its name: [models](models.md).

CLIPs that were trained with quick GELU, x sigmoid(1.702 x), have it in the last column: their repositories'
own files mean exact GELU, which `pretrained=` puts right. From such a repository itself, `hf://REPOSITORY`,
say `gelu="quick"`, or `--config.model.gelu=quick`.

Written by `python docs/write_published_weights.py`.
"""


def page() -> str:
    """The page: a table for each family, by the letters with which its models' names begin."""
    families: dict[str, list[Weights]] = {}
    for weights in sorted(all_weights(), key=lambda x: x.model.lower()):
        families.setdefault(re.split(r"[-/]", weights.model)[0], []).append(weights)
    lines = [HEAD]
    for family, held in families.items():
        head = "| model | `pretrained=` | pixels | classes | published, % | licence |"
        rows, rule = [*map(_row, held)], "|---|---|---|---|---|---|"
        if any(weights.arguments for weights in held):
            head, rule = f"{head} GELU |", f"{rule}---|"
            rows = [f"{row} {x.arguments.get('gelu', '')} |" for row, x in zip(rows, held, strict=True)]
        lines += [f"## {family}", "", head, rule, *rows, ""]
    return "\n".join(lines)


def _name(weights: Weights) -> str:
    """What finds these weights of their model: their tag, or their repository where several have the tag."""
    try:
        found = find_weights(weights.model, weights.tag)
    except UserError:
        found = None
    return weights.tag if found == weights else weights.repository.split("/")[-1]


def _row(weights: Weights) -> str:
    reached = [
        f"{x.percent} {x.what.removeprefix('ImageNet ')}" + (f" ({x.pixels})" if x.pixels else "")
        for x in weights.accuracies
    ]
    classes = f"{weights.classes:,}" if weights.classes else "none"
    cells = f"`{weights.model}`", f"`{_name(weights)}`", f"{weights.pixels}", classes
    return "| " + " | ".join((*cells, ", ".join(reached), weights.licence)) + " |"


if __name__ == "__main__":
    Path(__file__).with_name("published_weights.md").write_text(page())
