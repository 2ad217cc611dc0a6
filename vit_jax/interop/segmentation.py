"""Reads the segmentation head of a run."""

from functools import partial

from flax import nnx

from vit_jax.errors import UserError
from vit_jax.interop.checkpoint import Checkpoint, fill
from vit_jax.models.dense import make_head
from vit_jax.models.dense.segmenter import Segmenter
from vit_jax.models.image_model import ImageModel
from vit_jax.models.model_card import abstract, parameter_shapes
from vit_jax.options.objective import SegmentationOptions

_HEAD, _STATISTICS = "head/", "statistics/"  # Starts of paths of parameters, and of the state.


def with_head(checkpoint: Checkpoint, model: ImageModel) -> Segmenter:
    """Returns a run's model with its segmentation head.

    Args:
      checkpoint: the run's, opened.
      model: its model.

    Raises:
      UserError: the run has no segmentation head.
    """
    found = checkpoint.objective
    if found is None or found.name != "segmentation":
        raise UserError(
            f"{checkpoint.place} has no segmentation head: give the workdir of a run with "
            "config.objective.name='segmentation'"
        )
    options, classes = SegmentationOptions(**found.values), len(found.class_names)
    sketched = abstract(partial(make_head, options, model, classes))
    shapes = {_HEAD + path: shape for path, shape in parameter_shapes(sketched).items()}
    sources = found.sources(shapes)
    head = fill(sketched, {path.removeprefix(_HEAD): read for path, read in sources.items()})
    statistics = {
        tuple(path.removeprefix(_STATISTICS).split("/")): tensor.read()
        for path, tensor in found.state.items()
        if path.startswith(_STATISTICS)
    }
    return Segmenter(
        model, head, found.class_names, nnx.traversals.unflatten_mapping(statistics) or None
    )
