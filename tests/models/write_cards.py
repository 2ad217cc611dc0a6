"""Writes `vit_jax/published/cards.json`, what lists of models show: python -m
tests.models.write_cards
"""

import json

import vit_jax
from vit_jax.models import MODELS
from vit_jax.published.cards import FILE


def written() -> str:
    """The file: a line for each listed model."""
    cards = map(vit_jax.model_card, MODELS)
    lines = [f' "{x.name}": {json.dumps([x.parameters, x.multiply_adds, x.tokens])}' for x in cards]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(written())
    print(FILE)
