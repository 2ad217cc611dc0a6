"""Base class of BEiT and EVA: block masks, and a frozen teacher that reads the whole image."""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.image_model import TokenModel
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.block_masks import block_masks
from vit_jax.training.objectives.frozen import TeacherSpec, random_vit, teacher_of
from vit_jax.training.objectives.masking import patchify, pick, put, unpatchify
from vit_jax.training.objectives.objective import Batch, Objective

SMALLEST_BLOCK = 16  # Minimum number of patches of a block, as in BEiT.
GREY = 127.5


class PatchTeacher(Objective):
    """Base class of objectives with a frozen teacher that reads the same crop as the student."""

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return False

    @staticmethod
    def views(config: RunOptions) -> tuple[View, ...]:
        """Returns the images of a batch: `image`, the student's input, and perhaps `taught`.

        `taught` is the teacher's input. It is the same crop as `image`, resized to the teacher's
        image size. If the two sizes are equal, there is no `taught`, and the teacher's input is
        `image`.
        """
        size = config.objective.teacher_size
        if size in (None, config.data.image_size):
            return (View(),)
        return View(), View("taught", size=size, same_rectangle_as="image")

    @staticmethod
    def teacher_spec(config: RunOptions) -> TeacherSpec:
        return teacher_of(
            config, image_size=config.objective.teacher_size or config.data.image_size
        )

    @classmethod
    def random_teacher(cls, config: RunOptions, num_classes: int, rngs: nnx.Rngs) -> nnx.Module:
        size = config.objective.teacher_size or config.data.image_size
        return random_vit(config, size, num_classes, rngs=rngs)


class BlockMasked(PatchTeacher):
    """Prediction of a frozen teacher's output for masked patches.

    The teacher's input is the whole image. In the student's input, one learned embedding replaces
    the embeddings of the masked patches. Masks consist of blocks, and all images have the same
    number of masked patches. Subclasses implement `predict`.

    Args:
      ratio: share of masked patches, rounded to whole patches.
      gradient: factor of the gradient that is passed to the patch embedding; 1: the full gradient.

    Raises:
      UserError: `ratio` masks no patch, or all patches.
    """

    stem: ClassVar = ("mask",)

    def __init__(self, model: TokenModel, ratio: float, *, gradient: float = 1.0, rngs: nnx.Rngs):
        self.grid, self.patch, self.patches = model.grid, model.patch_size, math.prod(model.grid)
        self.gradient = gradient
        self.masked = round(ratio * self.patches)
        if not 0 < self.masked < self.patches:
            raise UserError(
                f"config.{self.section}.mask_ratio = {ratio:.4g} masks {self.masked} of "
                f"{self.patches} patches; it must leave some, and mask some"
            )
        drawn = model.stack.scheme.token or initializers.cut_normal(0.02)
        self.mask = nnx.Param(drawn(rngs.params(), (1, 1, model.dim)))

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """Adds a random mask of each image to the batch: `masked`, bool `[batch, patches]`."""
        counts = jnp.full(len(keys), self.masked, jnp.int32)
        return batch | {"masked": block_masks(keys, counts, self.grid, SMALLEST_BLOCK)}

    def positions(self, batch: Batch) -> jax.Array:
        """Returns the ascending indices of each image's masked patches, int32 `[batch, masked]`."""
        return jnp.argsort(~batch["masked"], axis=1)[:, : self.masked].astype(jnp.int32)

    def embed(self, model: TokenModel, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Returns all input tokens of the first layer, `[batch, tokens, dim]`.

        The learned embedding replaces the embeddings of masked patches.
        """
        x = model.patches(batch["image"])
        x = self.gradient * x + (1 - self.gradient) * jax.lax.stop_gradient(x)
        x = jnp.where(batch["masked"][..., None], self.mask[...].astype(x.dtype), x)
        return model.assemble(x, rngs)

    def predict(self, model: TokenModel, batch: Batch, rngs: nnx.Rngs | None = None) -> Any:
        """Predicts the teacher's output for the masked patches, `[batch, masked, ...]`."""
        raise NotImplementedError

    def filled(self, batch: Batch, likeness: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns two copies of the images in [0, 255], with masked patches replaced.

        In the first copy masked patches are grey. In the second copy each masked patch is replaced
        by the most similar unmasked patch of the batch.

        Args:
          likeness: similarity of each masked patch to all patches of the batch,
            `[batch, masked, batch * patches]`.
        """
        positions = self.positions(batch)
        pixels = patchify(batch["image"].astype(jnp.float32), self.patch)
        likeness = jnp.where(batch["masked"].reshape(-1), -jnp.inf, likeness)
        nearest = pixels.reshape(-1, pixels.shape[-1])[likeness.argmax(-1)]
        filled = (
            put(pixels, positions, content) for content in (jnp.full_like(nearest, GREY), nearest)
        )
        return tuple(unpatchify(patches, self.grid, self.patch) for patches in filled)

    def read_masked(self, model: TokenModel, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns the masked patches' final representations, `[batch, masked, dim]`.

        `x` contains all tokens after the last layer, before the final norm, `[batch, tokens, dim]`.
        """
        x = x if model.norm is None else model.norm(x)
        return pick(x[:, model.patch_tokens], self.positions(batch))

    def multiply_adds(
        self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None
    ) -> float:
        """Counts the multiply-adds of the student for one image, without those of the teacher."""
        graphdef, weights = nnx.split((model, self))

        def predicted(weights, batch):
            model, objective = nnx.merge(graphdef, weights)
            return objective.predict(model, batch)

        image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.uint8)
        masked = jax.ShapeDtypeStruct((1, self.patches), jnp.bool_)
        return traced_multiply_adds(predicted, weights, {"image": image, "masked": masked})


def check_same_places(
    config: RunOptions,
    model: TokenModel,
    outputs: str,
    grid: tuple[int, int],
    size: tuple[int, int],
    side: int,
) -> None:
    """Raises UserError if the teacher's outputs do not correspond to the model's patches.

    Output i of the teacher and patch i of the model must cover the same part of the image.

    Args:
      outputs: name of the teacher's outputs for the error message, such as `patches`.
      grid: rows and columns of the teacher's outputs.
      size: height and width of the teacher's images in pixels.
      side: side in pixels of the square that one output of the teacher covers; 0: unknown.
    """
    if grid == model.grid:
        return
    rows, columns = model.grid
    known = rows == columns and side
    remedy = (
        f"config.objective.teacher_size={rows * side}"
        if known
        else f"use a teacher with the same {outputs}"
    )
    raise UserError(
        f"config.objective.teacher={config.objective.teacher!r} has {_times(grid)} {outputs} of "
        f"{_times(size)} pixels, and the model {_times(model.grid)}: {remedy}"
    )


def _times(sides: tuple[int, int]) -> str:
    return "x".join(map(str, sides))
