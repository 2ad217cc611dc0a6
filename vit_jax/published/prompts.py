"""CLIP's prompts for ImageNet (Radford et al., 2021): 80 templates and a name of each class.

`imagenet_prompts.json` has their source and license. Two names stand for two classes each: missile
and sunglasses.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "imagenet_prompts.json"


class Prompts(NamedTuple):
    """Templates with `{}` for the name, and class names in the order of ImageNet's synsets."""

    templates: tuple[str, ...]
    class_names: tuple[str, ...]


@functools.cache
def imagenet_prompts() -> Prompts:
    """Returns CLIP's templates and class names for ImageNet."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return Prompts(tuple(content["templates"]), tuple(content["class_names"]))
