"""Patch features of a frozen teacher, and a check that the teacher has them."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models.image_model import ImageModel, TokenModel
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.block_masked import check_same_places
from vit_jax.training.objectives.objective import Batch
from vit_jax.training.objectives.prototypes import unit


def features_of_teacher(config: RunOptions, model: TokenModel, teacher: nnx.Module) -> int:
    """Returns the teacher's number of features for each patch; the teacher may be abstract.

    Raises:
      UserError: the teacher has no patch features, its patches differ from the model's patches, or
        its head cannot be applied to single patches.
    """
    values = config.objective
    named = f"config.objective.teacher={values.teacher!r}"
    if not isinstance(teacher, TokenModel):
        raise UserError(f"{named} has no patch features: use a ViT, such as CLIP's or DINO's")
    check_same_places(
        config, model, "patches", teacher.grid, teacher.image_size, teacher.patch_size
    )
    of_head = values.teacher_features == "head"
    if of_head and teacher.head is None:
        raise UserError(f"{named} has no head: config.objective.teacher_features='tokens'")
    if of_head and not teacher.pools_plainly:
        raise UserError(
            f"{named} has a head that reads more than a patch's last token, as in attention "
            "pooling: config.objective.teacher_features='tokens'"
        )
    return teacher.num_classes if of_head else teacher.dim


def teacher_patch_features(teacher: ImageModel, batch: Batch, of_head: bool) -> jax.Array:
    """Returns the teacher's patch features for a batch, float32 `[batch, patches, features]`.

    Args:
      of_head: True: return the outputs of the teacher's head, applied to each patch token. False:
        return the patch tokens, that is, the output of the method `features` with `dense=True`.
    """
    x = teacher.features(batch.get("taught", batch["image"]), dense=True)
    x = teacher.head(x) if of_head else x
    return x.reshape(len(x), math.prod(teacher.grid), -1).astype(jnp.float32)


def cosine(one: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the cosine similarity over the last axis; 0 for vectors of zeros."""
    return (unit(one) * unit(other)).sum(-1)
