"""Objectives of training: each is one file, as `objective.py` describes, and one line of this
table.

All objectives go through the one step of `training/step.py`.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial

from flax import nnx
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.models import abstract
from vit_jax.training.objectives.beit import BEiT
from vit_jax.training.objectives.beitv2 import BEiTv2
from vit_jax.training.objectives.classification import Classification
from vit_jax.training.objectives.dino import DINO
from vit_jax.training.objectives.distillation import Distillation
from vit_jax.training.objectives.dvae import DVAE
from vit_jax.training.objectives.eva import EVA
from vit_jax.training.objectives.fcmae import FCMAE
from vit_jax.training.objectives.mae import MAE
from vit_jax.training.objectives.masked_patch import MaskedPatch
from vit_jax.training.objectives.objective import Objective
from vit_jax.training.objectives.vqkd import VQKD

OBJECTIVES: dict[str, type[Objective]] = {
    "classification": Classification,
    "masked_patch": MaskedPatch,
    "mae": MAE,
    "fcmae": FCMAE,
    "dino": DINO,
    "distillation": Distillation,
    "eva": EVA,
    "dvae": DVAE,
    "beit": BEiT,
    "vqkd": VQKD,
    "beitv2": BEiTv2,
}

ENDLESS = (
    2**31 - 1
)  # Steps, where only an objective's sizes are wanted, and no schedule is too long.

# The one that a program hands in, seen by its call of `vit_jax.train` and by no other thread's.
_HANDED_IN: ContextVar[type[Objective] | None] = ContextVar(
    "the objective that was handed in", default=None
)


@contextlib.contextmanager
def handing_in(objective: type[Objective] | None) -> Iterator[None]:
    """The context in which a config may name an objective that is not of the table, by its class's
    name.

    Raises:
      UserError: it is no class of objectives, or has the name of one in the table.
    """
    if objective is not None:
        if not (isinstance(objective, type) and issubclass(objective, Objective)):
            raise UserError(
                f"objective is {objective!r}, and must be a subclass of "
                "vit_jax.training.objectives.objective.Objective"
            )
        if OBJECTIVES.get(objective.__name__, objective) is not objective:
            raise UserError(
                f"there is an objective {objective.__name__!r} already: name the class otherwise"
            )
    token = _HANDED_IN.set(objective)
    try:
        yield
    finally:
        _HANDED_IN.reset(token)


def is_handed_in(config: ConfigDict) -> bool:
    """The config names an objective that no later process knows by its name alone."""
    return config.objective.name not in OBJECTIVES


def objective_of(config: ConfigDict) -> type[Objective]:
    """The kind of objective that the config names, which says what it wants before there is a
    model.
    """
    handed_in = _HANDED_IN.get()
    return handed_in if handed_in and is_handed_in(config) else OBJECTIVES[config.objective.name]


def make_objective(
    config: ConfigDict,
    model: nnx.Module,
    *,
    rngs: nnx.Rngs,
    steps: int = ENDLESS,
    frozen: nnx.Module | None = None,
) -> Objective:
    """The config's objective for a model, which may be abstract, and without its frozen model.

    Args:
      steps: of the run, over which schedules go.
      frozen: the abstract model that the objective asked for by `teacher_spec`.

    Raises:
      UserError: it does not fit the model or the config's other values.
    """
    kind = objective_of(config)
    if frozen is None and kind.teacher_spec(config) is not None:
        raise UserError(
            f"config.objective.name={config.objective.name!r} needs its frozen model to be opened"
        )
    more = {} if frozen is None else {"frozen": frozen}
    return kind.make(config, model, steps, rngs, **more)


def abstract_objective(
    config: ConfigDict,
    model: nnx.Module,
    *,
    steps: int = ENDLESS,
    frozen: nnx.Module | None = None,
    class_weights: tuple[float, ...] = (),
) -> Objective:
    """The config's objective, abstract, with its frozen model and its weights of classes."""
    objective = abstract(partial(make_objective, config, model, steps=steps, frozen=frozen))
    if frozen is not None:
        objective.frozen = frozen
    if class_weights:
        objective.class_weights = class_weights
    return objective
