"""Training objectives. A file of this folder defines an objective as `OBJECTIVE`.

`objective.py` contains the interface, and `OBJECTIVE_NAMES` (`options/objective.py`) lists the
files. The training step, `training/step.py`, is the same for all objectives.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from importlib import import_module

from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import abstract
from vit_jax.options.objective import OBJECTIVE_NAMES
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.objective import Objective

OBJECTIVES: dict[str, type[Objective]] = {
    name: import_module(f"{__name__}.{name}").OBJECTIVE for name in OBJECTIVE_NAMES
}

# Number of steps for calls that only need the shapes of an objective's parameters. The number is
# larger than the length of every schedule, so no check of a schedule fails.
ENDLESS = 2**31 - 1

# The objective class that was passed to `vit_jax.train`. Other threads have their own value.
_HANDED_IN: ContextVar[type[Objective] | None] = ContextVar(
    "the objective that was passed", default=None
)


@contextlib.contextmanager
def handing_in(objective: type[Objective] | None) -> Iterator[None]:
    """Registers an objective that is not in `OBJECTIVES` while the context is open.

    Raises:
      UserError: the objective is not a subclass of `Objective`, or `OBJECTIVES` has the same name.
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
    """Returns True if the objective `name` was passed to `vit_jax.train` as a class.

    `OBJECTIVES` does not contain such an objective, so other processes cannot find it by its name.
    """
    return name not in OBJECTIVES


def objective_of(name: str) -> type[Objective]:
    """Returns the class of the objective with the name `name`."""
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
    """Creates the config's objective.

    If the objective has a frozen model, its shapes are used here, but the result does not contain
    it. The calling code must then assign the frozen model to the result's attribute `frozen`.

    Args:
      model: model to train; may be abstract.
      frozen: the frozen model that `Objective.teacher_spec` requests, with shapes in place of
        arrays. None: the objective has no frozen model.

    Raises:
      UserError: the objective is incompatible with the model or with other values of the config.
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
    """Creates the config's objective with shapes in place of arrays.

    If the objective has a frozen model, the attribute `frozen` of the result is set.

    Args:
      frozen: the frozen model with shapes in place of arrays; None: the objective has none.
      class_weights: weight of each class in the classification loss; empty: all are 1.
    """
    objective = abstract(partial(make_objective, config, model, steps=steps, frozen=frozen))
    if frozen is not None:
        objective.frozen = frozen
    if class_weights:
        objective.class_weights = class_weights
    return objective
