"""The interface of a training objective: views, loss, and state beyond the parameters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from vit_jax.data.fields import Field
from vit_jax.data.randaugment import resolve
from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.options.run import RunOptions
from vit_jax.training.averages import Momentum, polyak_share
from vit_jax.training.objectives.frozen import TeacherSpec

Batch = dict[str, jax.Array]


class StepContext(NamedTuple):
    """Per-step context: RNGs, the objective's state and the number of the update.

    Attributes:
      rngs: RNGs for dropout; None in evaluation.
      state: the objective's state after the last update, by name.
      update: number of this update, counted from 1. In evaluation it is the number of the last
        update.
      mesh: devices over which the batch is split. None: the batch contains only the images of one
        device, as inside a `shard_map`.
    """

    rngs: nnx.Rngs | None = None
    state: dict = {}
    update: jax.Array | int = 0
    mesh: Mesh | None = None


EVALUATION = StepContext()  # For objectives without state.


class Loss(NamedTuple):
    """The outputs of an objective for a batch.

    Attributes:
      each: loss of each image, `[batch]`.
      metrics: metrics of each image, `[batch]`, by the names of `Objective.metrics`.
      aux: auxiliary outputs of each image for `Objective.update_state`, `[batch, ...]`.
      logits: logits of each image, `[batch, classes]`, for the list of mistakes in the run's
        report. If `logits` is None and the objective needs labels, the evaluation calls the model
        to compute the logits.
      outputs: values of each image for `Objective.over_split`, `[batch, ...]`. Only in evaluation.
    """

    each: jax.Array
    metrics: dict[str, jax.Array] = {}
    aux: dict[str, jax.Array] = {}
    logits: jax.Array | None = None
    outputs: dict[str, jax.Array] = {}


class ImageScores(NamedTuple):
    """A metric of each image. The run's report lists the worst images by this metric.

    Attributes:
      name: name of the metric.
      values: float `[images]`; NaN for an image without a value.
      form: format string of a value, such as `{:.1%}`.
      highest: True: images with the highest values are the worst, as for errors. False: images with
        the lowest values are the worst.
    """

    name: str
    values: np.ndarray
    form: str = "{:.1%}"
    highest: bool = False

    def worst(self, most: int) -> np.ndarray:
        """Returns the indices of at most `most` images, the worst first, without NaN."""
        order = np.argsort(-self.values if self.highest else self.values, kind="stable")
        return order[~np.isnan(self.values[order])][:most]


def in_format(value: float, format: str, digits: int = 2) -> str:
    """Formats a metric.

    Args:
      format: `share`: in percent, with `digits` decimals. `number`: as a number.
      digits: number of decimals of a percentage.
    """
    return f"{value:.{digits}%}" if format == "share" else f"{value:.4g}"


class Objective(nnx.Module):
    """A training objective; this base class has one view, no labels and no state.

    An objective can have its own parameters, such as a decoder, in addition to the model's. They
    are trained and saved together with the model. A model that is loaded from the run does not
    contain the objective's parameters.

    To add an objective:

    - Add a file to this folder that defines `OBJECTIVE`, a subclass of this class.
    - Add the file's name to `OBJECTIVE_NAMES` (`options/objective.py`).
    - If the objective has options, define them as a class in `options/objective.py`, and add a
      section with this class to `RunOptions` (`options/run.py`).

    Attributes:
      section: name of the config's section with the objective's options; empty: no options.
      labels: True if the objective needs labels and a model with a head.
      own_classes: True if the objective's own head predicts the data's classes, for example of each
        pixel. `make` then reads the number of classes from `config.data.num_classes`.
      metrics: format of each metric except the loss. `share`: a fraction of 1. `number`: any
        number.
      split_metrics: format of each metric that `over_split` returns.
      made_by: names of the options that determine the shapes of the objective's parameters. If
        these options are equal in a checkpoint, a run can start from the checkpoint's parameters of
        the objective. Empty: the objective's parameters are never read from another run.
      optional: path prefixes of parameters that either the run or the checkpoint may not have.
      files_option: the option that contains the folder of `files`.
      carried: names of state items that are read from a checkpoint together with the parameters.
      stem: path prefixes of parameters before the encoder, such as the mask token. Layer-wise decay
        treats these parameters like the patch embedding.
      frozen: the model requested by `teacher_spec`, which is not trained.
      pictures: None, or a function `(model, batch, context) -> (visible, predicted)`. It returns
        pictures of the visible part and of the prediction, each `[batch, height, width, channels]`
        in [0, 255].
      picture_rows: names of the rows of pictures in the run's report. The rows show the image, the
        visible part and the prediction.
      image_scores: None, or a function `outputs -> ImageScores`. It computes a metric of each image
        from `Loss.outputs`, for the report's list of the worst images.
      objects: None, or a function `outputs -> (true, predicted)`. It returns the `Boxes` and the
        `Detections` of each image. The run's report draws these objects over the worst images, in
        place of `pictures`.
      paired: None, or a function `outputs -> (paired, first)`. It returns the embeddings of images
        and texts, and the index of each distinct text's first image. The run's report uses these
        values to show retrieved images.
    """

    section: ClassVar[str] = ""
    labels: ClassVar[bool] = False
    own_classes: ClassVar[bool] = False
    metrics: ClassVar[dict[str, str]] = {}
    split_metrics: ClassVar[dict[str, str]] = {}
    made_by: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    files_option: ClassVar[str] = ""
    carried: ClassVar[tuple[str, ...]] = ()
    stem: ClassVar[tuple[str, ...]] = ()
    frozen: nnx.Module | None = None
    pictures = None
    picture_rows: ClassVar[str] = "original, visible, predicted"
    image_scores = None
    objects = None
    paired = None

    @classmethod
    def make(cls, config: RunOptions, model: nnx.Module, steps: int, rngs: nnx.Rngs) -> "Objective":
        """Creates the config's objective.

        If an objective has a `teacher_spec`, its `make` has an additional argument `frozen`: the
        frozen model with shapes in place of arrays. `make` uses these shapes, but does not store
        the frozen model. The calling code assigns it to the attribute `frozen` of the result.

        Args:
          model: model to train; may be abstract.
          steps: length of the run, for schedules.

        Raises:
          UserError: the objective is not compatible with the model or other values of the config.
        """
        raise NotImplementedError

    @staticmethod
    def views(config: RunOptions) -> tuple[View, ...]:
        """Returns the declarations of an image's views in a batch, such as two crops.

        The first view has the name `image`.
        """
        return (View(),)

    @staticmethod
    def fields(config: RunOptions) -> tuple[Field, ...]:
        """Returns the fields of a batch: entries other than views and labels, such as captions."""
        return ()

    @staticmethod
    def files(config: RunOptions) -> tuple[Path, ...]:
        """Returns the files that a loaded model needs; the run copies them to its workdir."""
        return ()

    @staticmethod
    def teacher_spec(config: RunOptions) -> TeacherSpec | None:
        """Returns the request for the frozen model that the objective needs, such as a teacher.

        None: the objective needs no frozen model.
        """
        return None

    @classmethod
    def random_teacher(cls, config: RunOptions, num_classes: int, rngs: nnx.Rngs) -> nnx.Module:
        """Returns a small untrained teacher for smoke tests, in place of `teacher_spec`'s model.

        Raises UserError if the objective has no untrained teacher.
        """
        raise UserError(
            f"config.objective.teacher='random' is unsupported with config.objective.name="
            f"{config.objective.name!r}: give a checkpoint"
        )

    @staticmethod
    def outputs(config: RunOptions) -> int:
        """Returns the width of the model's head for an objective without labels; 0: no head."""
        return 0

    @classmethod
    def needs_a_label(cls, config: RunOptions) -> bool:
        """Returns True if every image must have a label, False if labels may be missing."""
        return cls.labels

    @staticmethod
    def eval_params(config: RunOptions) -> str | None:
        """Returns the name of the state item that contains the model's parameters for evaluation.

        For example, it is `teacher`, an EMA of the parameters. A model that is loaded from the run
        has the same parameters. None: the trained parameters are evaluated and loaded.
        """
        return None

    @staticmethod
    def own_eval_params(config: RunOptions) -> str | None:
        """Returns the name of the state item with the objective's own parameters for evaluation.

        For example, the item is a moving average of these parameters. None: the trained parameters
        are evaluated.
        """
        return None

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        """Returns True if the objective depends on the run's length, for example by a schedule.

        If False, a run with a constant learning rate can be extended by more steps.
        """
        return True

    def frozen_prefixes(self) -> Mapping[str, int]:
        """Returns the objective's parameters that are frozen in the first updates of a run.

        The result is a dict from a path prefix to a number of updates. For example,
        `{"head/prototypes": 100}` freezes the objective's parameters whose path starts with
        `head/prototypes` for the first 100 updates, including skipped updates. While parameters are
        frozen, the optimizer's moments are updated, but weight decay is not applied.
        """
        return {}

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """Adds random values of each image, such as masks, to the batch.

        Args:
          keys: a random key for each image, `[batch]`.
        """
        return batch

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        raise NotImplementedError

    def over_split(self, outputs: dict[str, np.ndarray]) -> dict[str, float]:
        """Computes metrics over a whole split, with the names in `split_metrics`.

        `outputs` contains `Loss.outputs` of all readable images of the split.
        """
        return {}

    def legend(self, outputs: dict[str, np.ndarray], class_names: Sequence[str]) -> dict[str, str]:
        """Returns the legend of `pictures`, a dict from labels to HTML colours.

        A label is a text, such as a class name. `outputs` contains `Loss.outputs` of the images.
        """
        return {}

    def initial_state(self, params: dict) -> dict[str, Any]:
        """Returns the objective's state before the first update, a dict by name.

        Args:
          params: the model's parameters; `self` contains the objective's own parameters.
        """
        return {}

    def update_state(
        self, state: dict, params: dict, aux: dict[str, jax.Array], update: jax.Array
    ) -> dict:
        """Returns the objective's state after an update.

        Args:
          state: the state before the update.
          params: the model's parameters after the update; `self` contains the objective's own
            parameters.
          aux: `Loss.aux` of the global batch.
          update: number of the update, counted from 1. Skipped updates are not counted.
        """
        return state

    @staticmethod
    def summary(config: RunOptions) -> str:
        """Returns a line about the objective to log at the start of a run; empty: no line."""
        return ""

    def warning(self, means: dict[str, float], update: int) -> str | None:
        """Returns a warning if the metrics show that training has failed, else None.

        Args:
          means: metrics, averaged over the updates since the last log line.
          update: number of the current update.
        """
        return None

    def own_weights(self) -> dict:
        """Returns the objective's own parameters, without its frozen model's parameters."""
        return {
            name: x
            for name, x in nnx.to_pure_dict(nnx.state(self, nnx.Param)).items()
            if name != "frozen"
        }

    def multiply_adds(
        self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None
    ) -> float:
        """Returns the multiply-adds of one image in the forward pass, for the cost of training.

        `training_flops` counts the result three times, because a backward pass costs as much as two
        forward passes. Parts without a backward pass, such as a teacher, must count only once.
        Therefore this method divides the multiply-adds of these parts by 3. Model and objective may
        be abstract.

        Args:
          model: model to train.
          batch: shapes of a batch of one image with all views and labels. None: the batch contains
            only the image.
        """
        graphdef, weights = nnx.split((model, self))

        def losses(weights, batch, key):
            model, objective = nnx.merge(graphdef, weights)
            return objective(model, objective.prepare(batch, key[None])).each

        image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.uint8)
        return traced_multiply_adds(losses, weights, batch or {"image": image}, jax.random.key(0))


def check_self_supervised(
    config: RunOptions, averages: bool = False, all_trained: bool = True
) -> None:
    """Raises UserError if the config has values that an objective without labels does not support.

    Args:
      averages: True if the objective supports a moving average of the parameters for evaluation.
      all_trained: True if the objective can only train all parameters of the model.
    """
    name = config.objective.name
    _, mixup = resolve(config.augment.level, config.augment.randaugment, config.augment.mixup)
    for key, value in dict(
        mixup=mixup, cutmix=config.augment.cutmix, erasing=config.augment.erasing
    ).items():
        if value:
            raise UserError(
                f"config.augment.{key} is {value} and must be 0: config.objective.name={name!r} "
                "predicts what is in whole images"
            )
    if all_trained and config.finetune.train != "all":
        raise UserError(
            f"config.objective.name={name!r} trains all parameters: config.finetune.train must be "
            "'all'"
        )
    if config.optimizer.average and not averages:
        raise UserError(
            f"config.objective.name={name!r} keeps no average of the parameters: "
            f"config.optimizer.average is {config.optimizer.average:g} and must be 0"
        )


def average_of(config: RunOptions) -> Momentum | None:
    """Returns the config's moving average of the parameters; None: the config has no average."""
    factor, start = config.optimizer.average, config.optimizer.average_from
    return Momentum(polyak_share(factor, start)) if factor else None
