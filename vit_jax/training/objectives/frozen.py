"""Frozen models of objectives, such as teachers, and the specs that request them.

A frozen model is not trained, averaged or saved in checkpoints. A resumed run reads the frozen
model again from its source, such as a checkpoint. This module does not read the source, so it is
independent of file formats.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import model_factory, parse_name
from vit_jax.models.image_model import ImageModel
from vit_jax.options.run import RunOptions

RANDOM = "random"


class TeacherSpec(NamedTuple):
    """Request for a frozen model.

    Attributes:
      source: source of the checkpoint, such as a run's workdir or `hf://owner/name` (`load_model`).
      changes: arguments of the model that replace the checkpoint's, such as `dict(image_size=448)`.
      objective: name of an objective, such as `dino`. The checkpoint must also contain the
        parameters of this objective.
      make_heads: function that creates the frozen model's heads. Its arguments are the options of
        the objective in the checkpoint, and the shapes of the objective's parameters and state
        items, by path. The values of the heads' parameters are read from the objective's parameters
        and state items of the same path. The frozen model is then a `WithHeads`. None: no heads.
    """

    source: str
    changes: Mapping[str, Any] = {}
    objective: str | None = None
    make_heads: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], nnx.Module] | None = (
        None
    )


class WithHeads(nnx.Module):
    """A frozen model together with the heads with which it was trained."""

    def __init__(self, model: ImageModel, heads: nnx.Module):
        self.model, self.heads = model, heads


def teacher_of(config: RunOptions, **changes: Any) -> TeacherSpec:
    """Returns the `TeacherSpec` of the config's teacher.

    `changes` are arguments of the teacher model to change, such as `image_size=448`.

    Raises:
      UserError: the config has no teacher.
    """
    values = config.objective
    if values.teacher is None:
        raise UserError(
            f"config.objective.name={values.name!r} learns from a frozen model: give "
            "config.objective.teacher, a workdir, a file, a folder or hf://owner/name"
        )
    if values.teacher_dtype:
        changes["dtype"] = values.teacher_dtype
    return TeacherSpec(values.teacher, changes)


def teacher_patch(config: RunOptions, image_size: int) -> int:
    """Returns the patch size, in pixels, that gives a teacher the patch grid of the run's model.

    `image_size` is the side of the teacher's images in pixels.
    """
    patch = config.model.patch_size or parse_name(config.model.name)[1].get("patch_size")
    return image_size if patch is None else patch * image_size // config.data.image_size


def random_vit(
    config: RunOptions, image_size: int, num_classes: int, *, rngs: nnx.Rngs
) -> ImageModel:
    """Returns a small untrained ViT with as many patches as the run's model.

    `image_size` is the side of the small ViT's images in pixels.
    """
    small = dict(patch_size=teacher_patch(config, image_size), dim=16, depth=1, heads=2, mlp_dim=32)
    return model_factory("ViT-Ti/16", num_classes=num_classes, image_size=image_size, **small)(
        rngs=rngs
    )
