"""The sizes and costs of the listed models, in `cards.json`, since computing them takes most of a
minute.

`tests/models/write_cards.py` makes the file.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "cards.json"


class Figures(NamedTuple):
    """The size and cost of a model with 1,000 classes, for one image of 224 x 224 pixels."""

    parameters: int
    multiply_adds: int
    tokens: int | None  # None for a model without.


@functools.cache
def all_figures() -> dict[str, Figures]:
    """The figures of each listed model by its name."""
    return {name: Figures(*values) for name, values in json.loads(FILE.read_text()).items()}
