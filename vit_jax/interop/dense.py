"""Reads models with a segmentation, depth or detection head from checkpoints of training runs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from flax import nnx

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, fill
from vit_jax.interop.tensor_files import without_prefix
from vit_jax.models.dense import make_head
from vit_jax.models.dense.dense_model import DenseModel
from vit_jax.models.dense.depth import depth_head
from vit_jax.models.dense.depth_model import DepthModel
from vit_jax.models.dense.detector import Detector
from vit_jax.models.dense.detr import detection_head
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.models.image_model import ImageModel
from vit_jax.models.model_card import abstract, parameter_shapes
from vit_jax.options.objective import DepthOptions, DetectionOptions, SegmentationOptions

_HEAD, _STATISTICS = "head/", "statistics/"  # Prefixes of parameter paths and of state paths.

Kind = TypeVar("Kind", bound=DenseModel)


@dataclass(frozen=True)
class Task(Generic[Kind]):
    """A task of dense prediction, such as segmentation.

    Attributes:
      objective: name of the training objective, which is also the name of its config section.
      options: class of the objective's options.
      head: called with the options, the image model and the number of classes; returns the head.
      model: class of the image model with its head, such as `Segmenter`.
    """

    objective: str
    options: type[Any]
    head: Callable[..., nnx.Module]
    model: type[Kind]


SEGMENTATION = Task("segmentation", SegmentationOptions, make_head, Segmenter)
DETECTION = Task("detection", DetectionOptions, detection_head, Detector)
DEPTH = Task(
    "depth",
    DepthOptions,
    lambda options, model, _, **more: depth_head(options, model, **more),
    DepthModel,
)
TASKS: dict[str, Task[Any]] = {task.objective: task for task in (SEGMENTATION, DETECTION, DEPTH)}


def with_head(task: Task[Kind], checkpoint: Checkpoint, model: ImageModel) -> Kind:
    """Returns the image model of a training run together with the run's head.

    Args:
      task: the task of the head.
      checkpoint: the opened checkpoint of the run.
      model: the model of the run.

    Raises:
      UserError: the run has no head for this task.
    """
    objective = checkpoint.objective
    if objective is None or objective.name != task.objective:
        raise UserError(
            f"{checkpoint.place} has no {task.objective} head: give the workdir of a run with "
            f"config.objective.name={task.objective!r}"
        )
    options, names = task.options(**objective.values), objective.class_names
    sketched = abstract(partial(task.head, options, model, len(names)))
    shapes = {_HEAD + path: shape for path, shape in parameter_shapes(sketched).items()}
    sources = objective.sources(shapes)
    head = fill(sketched, {path.removeprefix(_HEAD): read for path, read in sources.items()})
    statistics = {
        tuple(path.split("/")): tensor.read()
        for path, tensor in without_prefix(objective.state, _STATISTICS).items()
    }
    return task.model(model, head, names, nnx.traversals.unflatten_mapping(statistics))
