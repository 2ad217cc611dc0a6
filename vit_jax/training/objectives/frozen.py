"""The frozen model that an objective learns from, such as a teacher: what it is asked for by.

It is not trained, averaged or saved: it is read again where a run goes on. Who opens it hands it
in, so that nothing here knows formats of files.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.models import model_factory, parse_name
from vit_jax.models.image_model import ImageModel

RANDOM = "random"


class TeacherSpec(NamedTuple):
    """A wish for a frozen model.

    Attributes:
      source: where it is: what `load_model` takes.
      changes: arguments of the model to change, as of `load_model`, such as `dict(image_size=448)`.
      objective: name of the objective of which the checkpoint must have parameters too.
      beside: makes what is wanted of these, which may be abstract, from the values of
        `config.objective` that the checkpoint says and the shapes, by path, of the parameters and
        of what the objective remembers; a parameter by the name of a memory is that. The model is a
        `WithHeads` then.
    """

    source: str
    changes: Mapping[str, Any] = {}
    objective: str | None = None
    beside: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], nnx.Module] | None = None


class WithHeads(nnx.Module):
    """A frozen model, and what its training had behind it."""

    def __init__(self, model: ImageModel, heads: nnx.Module):
        self.model, self.heads = model, heads


def teacher_of(config: ConfigDict, **changes: Any) -> TeacherSpec:
    """The wish for the config's teacher, with some arguments of the model changed.

    Raises:
      UserError: the config names none.
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


def teacher_patch(config: ConfigDict, image_size: int) -> int:
    """Returns the side of a patch in images of `image_size` pixels that hold as many as the run's
    images.
    """
    patch = config.model.patch_size or parse_name(config.model.name)[1].get("patch_size")
    return image_size if patch is None else patch * image_size // config.data.image_size


def random_vit(
    config: ConfigDict, image_size: int, num_classes: int, *, rngs: nnx.Rngs
) -> ImageModel:
    """Returns a small untrained ViT with as many patches as the run's model has.

    Args:
      image_size: side of its images in pixels.
    """
    small = dict(patch_size=teacher_patch(config, image_size), dim=16, depth=1, heads=2, mlp_dim=32)
    return model_factory("ViT-Ti/16", num_classes=num_classes, image_size=image_size, **small)(
        rngs=rngs
    )
