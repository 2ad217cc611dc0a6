"""Update rules of the optimizers, without weight decay and learning rate.

Each file of this folder defines one update rule as a function `update_rule(config)`. `OPTIMIZERS`
(`options/optimizer.py`) lists the files' names.
"""

from importlib import import_module

import optax

from vit_jax.options.optimizer import OptimizerOptions


def make_update_rule(config: OptimizerOptions) -> optax.GradientTransformation:
    """Returns the update rule with the name and the options in the config's section `optimizer`."""
    return import_module(f"{__name__}.{config.name}").update_rule(config)
