"""Directions of an update, before weight decay and the learning rate: what tells optimizers apart.

Each is a file of this folder with a function `direction(config)`, and its name in `OPTIMIZERS`
(`options/optimizer.py`).
"""

from importlib import import_module

import optax
from ml_collections import ConfigDict


def direction_of(config: ConfigDict) -> optax.GradientTransformation:
    """The direction that the config's section `optimizer` names."""
    return import_module(f"{__name__}.{config.name}").direction(config)
