"""Objectives of training: each is one file, as `objective.py` describes, and one line of this table.

All objectives go through the one step of `training/step.py`.
"""

from flax import nnx
from ml_collections import ConfigDict

from vit_jax.options import Option, text, unless
from vit_jax.training.objectives.classification import Classification
from vit_jax.training.objectives.dino import DINO
from vit_jax.training.objectives.mae import MAE
from vit_jax.training.objectives.masked_patch import MaskedPatch
from vit_jax.training.objectives.objective import Objective

OBJECTIVES: dict[str, type[Objective]] = {
    "classification": Classification,
    "masked_patch": MaskedPatch,
    "mae": MAE,
    "dino": DINO,
}

OPTIONS = {
    "objective.name": Option(
        "classification",
        text(r"\w+"),
        "What is learned: classification, or masked_patch, mae and others, without labels.",
        fits=lambda value, config: unless(value in OBJECTIVES, " or ".join(OBJECTIVES)),
    ),
}


def objective_of(config: ConfigDict) -> type[Objective]:
    """The kind of objective that the config names, which says what it wants before there is a model."""
    return OBJECTIVES[config.objective.name]


def make_objective(config: ConfigDict, model: nnx.Module, *, rngs: nnx.Rngs, steps: int = 1) -> Objective:
    """The config's objective for a model, which may be abstract.

    Args:
      steps: of the run, over which schedules go.

    Raises:
      UserError: it does not fit the model or the config's other values.
    """
    return objective_of(config).make(config, model, steps, rngs)
