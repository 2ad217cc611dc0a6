"""Training objectives: each is a file, as described in `objective.py`, and a line of `OBJECTIVES`.

All objectives use the same step, `training/step.py`.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial

from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import abstract
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.beit import BEiT
from vit_jax.training.objectives.beitv2 import BEiTv2
from vit_jax.training.objectives.classification import Classification
from vit_jax.training.objectives.contrastive import Contrastive
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
    "contrastive": Contrastive,
}

# Steps for calls that only need an objective's sizes, so that no schedule is too long.
ENDLESS = 2**31 - 1

# A program's own objective, only visible to its call of `vit_jax.train`, not to other threads.
_HANDED_IN: ContextVar[type[Objective] | None] = ContextVar(
    "the objective that was passed", default=None
)


@contextlib.contextmanager
def handing_in(objective: type[Objective] | None) -> Iterator[None]:
    """Lets configs use an objective outside the table by its class name while the context is open.

    Raises:
      UserError: it is not a subclass of `Objective`, or has the name of one in the table.
    """
    if objective is not None:
        if not (isinstance(objective, type) and issubclass(objective, Objective)):
            raise UserError(
                f"objective is {objective!r}, and must be a subclass of "
                "vit_jax.training.objectives.objective.Objective"
            )
        if OBJECTIVES.get(objective.__name__, objective) is not objective:
            raise UserError(
                f"there is an objective {objective.__name__!r} already: rename the class"
            )
    token = _HANDED_IN.set(objective)
    try:
        yield
    finally:
        _HANDED_IN.reset(token)


def is_handed_in(name: str) -> bool:
    """Returns True if the config's objective is not in the table.

    Later processes cannot find such an objective by its name.
    """
    return name not in OBJECTIVES


def objective_of(name: str) -> type[Objective]:
    """Returns the class of the config's objective, which needs no model."""
    handed_in = _HANDED_IN.get()
    return handed_in if handed_in and is_handed_in(name) else OBJECTIVES[name]


def make_objective(
    config: RunOptions,
    model: nnx.Module,
    *,
    rngs: nnx.Rngs,
    steps: int = ENDLESS,
    frozen: nnx.Module | None = None,
) -> Objective:
    """Makes the config's objective for a model, which may be abstract, without its frozen model.

    Args:
      config: config of the run.
      model: model to train.
      rngs: random keys for initialization.
      steps: number of steps of the run, for schedules.
      frozen: the abstract model that the objective requires by `teacher_spec`.

    Raises:
      UserError: the objective does not fit the model or the config's other values.
    """
    kind = objective_of(config.objective.name)
    if frozen is None and kind.teacher_spec(config) is not None:
        raise UserError(
            f"config.objective.name={config.objective.name!r} needs its frozen model to be opened"
        )
    more = {} if frozen is None else {"frozen": frozen}
    return kind.make(config, model, steps, rngs, **more)


def abstract_objective(
    config: RunOptions,
    model: nnx.Module,
    *,
    steps: int = ENDLESS,
    frozen: nnx.Module | None = None,
    class_weights: tuple[float, ...] = (),
) -> Objective:
    """Returns the config's objective with shapes in place of arrays, and with its frozen model."""
    objective = abstract(partial(make_objective, config, model, steps=steps, frozen=frozen))
    if frozen is not None:
        objective.frozen = frozen
    if class_weights:
        objective.class_weights = class_weights
    return objective
