"""Options that suites share during training: when they are due, and on which data sets."""

from collections.abc import Sequence
from typing import Any

from vit_jax.data.sources import data_set
from vit_jax.options import Option, several, text, unless, whole


def due(about: str) -> Option:
    """Steps between two evaluations; 0, which `about` explains, by default."""
    return Option(
        0,
        whole(0),
        about,
        fits=lambda value, config: unless(
            value % config.evaluate_every == 0,
            f"a multiple of evaluate_every = {config.evaluate_every}, or 0",
        ),
    )


def data_sets(section: str) -> Option:
    """The data sets of a suite that has a section of the config to itself."""

    def misfit(sets: Sequence[str], config: Any) -> str:
        names = [data_set(written).name for written in sets]
        if config[section].every and not sets:
            return "such as ('tfds:cifar100',)"
        different = len(set(names)) == len(names)
        return unless(different, f"of different names; these are {', '.join(names)}")

    return Option((), several(text()), "('tfds:cifar100', 'folder:/data/pets@train,val').", fits=misfit)
