"""CLIP's prompts for ImageNet (Radford et al., 2021): 80 templates and a name of each class.

`imagenet_prompts.json` contains the prompts, their source and their license. Two names, missile and
sunglasses, are names of two classes each.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "imagenet_prompts.json"


class Prompts(NamedTuple):
    """Prompt templates with `{}` for a class name, and class names in the order of the synsets."""

    templates: tuple[str, ...]
    class_names: tuple[str, ...]


@functools.cache
def imagenet_prompts() -> Prompts:
    """Returns CLIP's templates and class names for ImageNet."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return Prompts(tuple(content["templates"]), tuple(content["class_names"]))
