"""The sizes and costs of the listed models, which take most of a minute to compute, in `cards.json`.

`tests/models/write_cards.py` makes the file.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "cards.json"


class Figures(NamedTuple):
    """Of a model with 1,000 classes, of one image of 224 x 224 pixels."""

    parameters: int
    multiply_adds: int
    tokens: int | None  # None for a model without.


@functools.cache
def all_figures() -> dict[str, Figures]:
    """The figures of each listed model by its name."""
    return {name: Figures(*values) for name, values in json.loads(FILE.read_text()).items()}
