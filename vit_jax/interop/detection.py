"""Reads the detection head of a run."""

from functools import partial

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, fill
from vit_jax.models.dense.detector import Detector
from vit_jax.models.dense.detr import detection_head
from vit_jax.models.image_model import ImageModel
from vit_jax.models.model_card import abstract, parameter_shapes
from vit_jax.options.objective import DetectionOptions

_HEAD = "head/"  # Start of the paths of its parameters.


def with_detection_head(checkpoint: Checkpoint, model: ImageModel) -> Detector:
    """Returns a run's model with its detection head.

    Args:
      checkpoint: the run's, opened.
      model: its model.

    Raises:
      UserError: the run has no detection head.
    """
    found = checkpoint.objective
    if found is None or found.name != "detection":
        raise UserError(
            f"{checkpoint.place} has no detection head: give the workdir of a run with "
            "config.objective.name='detection'"
        )
    options, names = DetectionOptions(**found.values), found.class_names
    sketched = abstract(partial(detection_head, options, model, len(names)))
    shapes = {_HEAD + path: shape for path, shape in parameter_shapes(sketched).items()}
    sources = found.sources(shapes)
    head = fill(sketched, {path.removeprefix(_HEAD): read for path, read in sources.items()})
    return Detector(model, head, names)
