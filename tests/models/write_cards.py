"""Writes the sizes of all listed models to cards.json: python -m tests.models.write_cards

The file is `vit_jax/published/cards.json`.
"""

import json

import vit_jax
from vit_jax.models import MODELS
from vit_jax.published.cards import FILE


def written() -> str:
    """Returns the content of the file, with a line for each listed model."""
    cards = map(vit_jax.model_card, MODELS)
    lines = [f' "{x.name}": {json.dumps([x.parameters, x.multiply_adds, x.tokens])}' for x in cards]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(written())
    print(FILE)
