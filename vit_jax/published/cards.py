"""Sizes and costs of all models of `list_models`, read from `cards.json`.

The file exists because computing these numbers takes a minute. `tests/models/write_cards.py` writes
the file.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "cards.json"


class Figures(NamedTuple):
    """Size and cost of a model with 1,000 classes, for one image of 224 x 224 pixels."""

    parameters: int
    multiply_adds: int
    tokens: int | None  # None for a model without tokens.


@functools.cache
def all_figures() -> dict[str, Figures]:
    """Returns size and cost of each model of `list_models`, by the model's name."""
    return {name: Figures(*values) for name, values in json.loads(FILE.read_text()).items()}
