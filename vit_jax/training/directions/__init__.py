"""Directions of an update, before weight decay and the learning rate: what tells optimizers apart.

Each is a file of this folder with a function `direction(config)`, and its name in `DIRECTIONS`.
"""

from importlib import import_module

import optax
from ml_collections import ConfigDict

from vit_jax.options import RATE, Option, number, one_of, only_with

# The files of this folder, by which `optimizer.name` chooses.
DIRECTIONS = (
    "adam",
    "adafactor",
    "sgd",
    "muon",
    "lamb",
)

OPTIONS = {
    "optimizer.name": Option("adam", one_of(*DIRECTIONS), "The optimizer."),
    "optimizer.beta1": Option(0.9, RATE, "Decay of the first moment; momentum, for sgd and muon."),
    "optimizer.beta2": Option(
        0.999,
        RATE,
        "Decay of the second moment.",
        needs=only_with("optimizer.name", "adam", "adafactor", "muon", "lamb"),
    ),
    "optimizer.epsilon": Option(
        1e-8,
        number(least=0, most=1),
        "Added to the root of the second moment.",
        needs=only_with("optimizer.name", "adam", "lamb", "muon"),
    ),
    "optimizer.moment_dtype": Option(
        "float32", one_of("float32", "bfloat16"), "Type of the first moment, or momentum."
    ),
}


def direction_of(config: ConfigDict) -> optax.GradientTransformation:
    """The direction that the config's section `optimizer` names."""
    return import_module(f"{__name__}.{config.name}").direction(config)
