"""The interface of an objective: the views it wants, the loss it computes of them, the memory it keeps."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.data.randaugment import resolve
from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.training.memory import Momentum, polyak_share
from vit_jax.training.objectives.frozen import Frozen

Batch = dict[str, jax.Array]


class Now(NamedTuple):
    """The circumstances that an objective is told besides the batch.

    Attributes:
      rngs: for dropout; None in evaluation.
      memory: what the objective remembers, as it was after the last update.
      update: number of this update, from 1; in evaluation that of the last one.
    """

    rngs: nnx.Rngs | None = None
    memory: dict = {}
    update: jax.Array | int = 0


EVALUATION = Now()  # Without anything to remember.


class Loss(NamedTuple):
    """The result of an objective on a batch.

    Attributes:
      each: loss of each image, `[batch]`.
      metrics: of each image, `[batch]`, by the names of `Objective.metrics`.
      seen: what `Objective.remember` needs of each image, arrays `[batch, ...]`.
      logits: the answers that are right or wrong, `[batch, classes]`, which evaluation keeps for the report;
        None: with `Objective.labels` it asks the model for them once more.
    """

    each: jax.Array
    metrics: dict[str, jax.Array] = {}
    seen: dict[str, jax.Array] = {}
    logits: jax.Array | None = None


def in_format(value: float, format: str, digits: int = 2) -> str:
    """A metric in words: a `share` of 1 in percent, of so many digits behind the point, or a `number`."""
    return f"{value:.{digits}%}" if format == "share" else f"{value:.4g}"


class Objective(nnx.Module):
    """An objective of training; this class asks for one view, needs no labels, remembers nothing.

    The parameters of an objective are what training needs beyond the model's, such as a decoder. They are
    trained with the model's and kept with the run's state, and no model that is loaded from it has them.

    Attributes:
      labels: the objective needs labels, and its model a head.
      metrics: what it reports besides the loss, with the format of each: `share`, of 1, or `number`.
      made_by: values of `config.objective` that its parameters are made by; a checkpoint's are taken where
        these are the same. Empty: none are taken.
      optional: parts of its own, by the start of their paths, that a run may have and its checkpoint not, or
        the other way round where the run has none of them.
      carried: names of memories that are taken from a checkpoint with its parameters.
      stem: starts of the paths of its own parameters that enter before the encoder, such as the token of a
        masked patch: layer-wise decay gives them the learning rate of the patch embedding's layer.
      frozen: the model that it asked for by `learns_from`, on the devices with the rest; nothing trains it.
      pictures: None, or `(model, batch, now) -> (visible, predicted)`, which draws what is left of the images
        and what is predicted, each `[batch, height, width, channels]` in [0, 255].
    """

    labels: ClassVar[bool] = False
    metrics: ClassVar[dict[str, str]] = {}
    made_by: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    carried: ClassVar[tuple[str, ...]] = ()
    stem: ClassVar[tuple[str, ...]] = ()
    frozen: nnx.Module | None = None
    pictures = None

    @classmethod
    def make(cls, config: ConfigDict, model: nnx.Module, steps: int, rngs: nnx.Rngs) -> "Objective":
        """The config's objective for a model, which may be abstract, in a run of so many steps.

        An objective that asks for a frozen model is made with `frozen=` that one besides, abstract, for its
        sizes: `self.frozen` is set afterwards.

        Raises:
          UserError: it does not fit the model or the config's other values.
        """
        raise NotImplementedError

    @staticmethod
    def views(config: ConfigDict) -> tuple[View, ...]:
        """The pictures that it wants of an image; the first one is the batch's `image`."""
        return (View(),)

    @staticmethod
    def learns_from(config: ConfigDict) -> Frozen | None:
        """The frozen model that it wants beside the one that is trained; None: there is none."""
        return None

    @classmethod
    def random_teacher(cls, config: ConfigDict, num_classes: int, rngs: nnx.Rngs) -> nnx.Module:
        """Returns a small untrained model of the kind that `learns_from` describes, for smoke tests.

        Args:
          num_classes: number of the data's classes.

        Raises:
          UserError: there is none for this objective.
        """
        raise UserError(
            f"config.objective.teacher='random' is unsupported with config.objective.name="
            f"{config.objective.name!r}: give a checkpoint"
        )

    @staticmethod
    def outputs(config: ConfigDict) -> int:
        """Width of its model's head where it needs no labels; 0: it has none."""
        return 0

    @classmethod
    def needs_a_label(cls, config: ConfigDict) -> bool:
        """True where every image must have a label; otherwise one without a label is of no class."""
        return cls.labels

    @staticmethod
    def judged(config: ConfigDict) -> str | None:
        """Name of the memory that holds the parameters that are evaluated, and loaded as the run's model.

        None: those that are trained.
        """
        return None

    @staticmethod
    def own_memory(config: ConfigDict) -> str | None:
        """Name of the memory that holds its own parameters as they are beside the judged ones.

        None: those that are trained.
        """
        return None

    @staticmethod
    def sees_length(config: ConfigDict) -> bool:
        """True where training depends on the length of the run, as a schedule over it does.

        Otherwise a run of a constant learning rate may be made longer.
        """
        return True

    def held(self) -> Mapping[str, int]:
        """The first updates during which the learning rate of some of its own parameters is 0.

        By the start of their paths among its own, such as `head/prototypes`; an update that is left out
        counts. Moments go on meanwhile, and nothing decays.
        """
        return {}

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """The batch with what is drawn at random for each image, from its key."""
        return batch

    def __call__(self, model: nnx.Module, batch: Batch, now: Now = EVALUATION) -> Loss:
        raise NotImplementedError

    def first_memory(self, params: dict) -> dict[str, Any]:
        """The memory before the first update, by name.

        Args:
          params: of the model. The objective's own are those of this module.
        """
        return {}

    def remember(self, memory: dict, params: dict, seen: dict[str, jax.Array], update: jax.Array) -> dict:
        """The memory after an update.

        Args:
          params: of the model after the update, as the objective's own are here.
          seen: of the whole batch, from `Loss`.
          update: its number, from 1; updates that were left out do not count.
        """
        return memory

    def warning(self, means: dict[str, float], update: int) -> str | None:
        """A line for the user when the metrics show that training has failed; None: they do not.

        Args:
          means: of the metrics since the last line of the log.
          update: number of the last of these updates.
        """
        return None

    def own_weights(self) -> dict:
        """Its own parameters, without those of its frozen model: what a memory of them takes."""
        return {
            name: x for name, x in nnx.to_pure_dict(nnx.state(self, nnx.Param)).items() if name != "frozen"
        }

    def multiply_adds(self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None) -> float:
        """Those of an image's way to its loss. What has no backward pass counts a third.

        Args:
          model: it may be abstract, as may be this objective.
          batch: shapes of a batch of one image, with all views and labels; None: one picture alone.
        """
        graphdef, weights = nnx.split((model, self))

        def losses(weights, batch, key):
            model, objective = nnx.merge(graphdef, weights)
            return objective(model, objective.prepare(batch, key[None])).each

        image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.uint8)
        return traced_multiply_adds(losses, weights, batch or {"image": image}, jax.random.key(0))


def check_self_supervised(config: ConfigDict, averages: bool = False) -> None:
    """Raises UserError for values that an objective without labels cannot use.

    Args:
      averages: the objective may be judged by an average of its parameters.
    """
    name = config.objective.name
    _, mixup = resolve(config.augment.level, config.augment.randaugment, config.augment.mixup)
    for key, value in dict(mixup=mixup, cutmix=config.augment.cutmix, erasing=config.augment.erasing).items():
        if value:
            raise UserError(
                f"config.augment.{key} is {value} and must be 0: config.objective.name={name!r} "
                "predicts what is in whole images"
            )
    if config.finetune.train != "all":
        raise UserError(
            f"config.objective.name={name!r} trains all parameters: config.finetune.train must be 'all'"
        )
    if config.optimizer.average and not averages:
        raise UserError(
            f"config.objective.name={name!r} keeps no average of the parameters: config.optimizer.average "
            f"is {config.optimizer.average:g} and must be 0"
        )


def average_of(config: ConfigDict) -> Momentum | None:
    """The average of the parameters that a config asks for; None: it asks for none."""
    factor, start = config.optimizer.average, config.optimizer.average_from
    return Momentum(polyak_share(factor, start)) if factor else None
