"""Masking of blocks of patches by one learned embedding, under a frozen model that sees the image
whole.
"""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.image_model import TokenModel
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.training.objectives.block_masks import block_masks
from vit_jax.training.objectives.frozen import TeacherSpec, random_vit, teacher_of
from vit_jax.training.objectives.masking import patchify, pick, put, unpatchify
from vit_jax.training.objectives.objective import Batch, Objective

SMALLEST_BLOCK = 16  # Patches, as BEiT's.
GREY = 127.5


class BlockMasked(Objective):
    """Predicts what a frozen teacher, which sees the whole image, says of patches that are masked.

    The masked patches' embeddings become one learned embedding. Masks are of blocks, with exact
    counts. A subclass has `predict` of masked patches.

    Args:
      model: the ViT that is trained.
      ratio: share of the patches that is masked, rounded to whole patches.
      gradient: share of the gradient that reaches the patch embedding.
      rngs: the key for initialisation.

    Raises:
      UserError: no patch or all are masked.
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

    @staticmethod
    def sees_length(config: ConfigDict) -> bool:
        return False

    @staticmethod
    def views(config: ConfigDict) -> tuple[View, ...]:
        """The picture, and where the teacher sees it at another size, the same rectangle as
        `taught`.
        """
        size = config.objective.teacher_size
        if size in (None, config.data.image_size):
            return (View(),)
        return View(), View("taught", size=size, same_rectangle_as="image")

    @staticmethod
    def teacher_spec(config: ConfigDict) -> TeacherSpec:
        return teacher_of(
            config, image_size=config.objective.teacher_size or config.data.image_size
        )

    @classmethod
    def random_teacher(cls, config: ConfigDict, num_classes: int, rngs: nnx.Rngs) -> nnx.Module:
        size = config.objective.teacher_size or config.data.image_size
        return random_vit(config, size, num_classes, rngs=rngs)

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """The batch with `masked` bool `[batch, patches]`, drawn for each image from its key."""
        counts = jnp.full(len(keys), self.masked, jnp.int32)
        return batch | {"masked": block_masks(keys, counts, self.grid, SMALLEST_BLOCK)}

    def positions(self, batch: Batch) -> jax.Array:
        """The masked patches of each image in raster order, int32 `[batch, masked]`."""
        return jnp.argsort(~batch["masked"], axis=1)[:, : self.masked].astype(jnp.int32)

    def embed(self, model: TokenModel, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """All tokens before the first layer, masked patches as the learned one, `[batch, tokens,
        dim]`.
        """
        x = model.patches(batch["image"])
        x = self.gradient * x + (1 - self.gradient) * jax.lax.stop_gradient(x)
        x = jnp.where(batch["masked"][..., None], self.mask[...].astype(x.dtype), x)
        return model.assemble(x, rngs)

    def predict(self, model: TokenModel, batch: Batch, rngs: nnx.Rngs | None = None) -> Any:
        """Predicts what the teacher says of the masked patches, `[batch, masked, ...]`."""
        raise NotImplementedError

    def filled(self, batch: Batch, likeness: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The images with masked patches in grey, and with other patches in their place, in [0,
        255].

        Args:
          likeness: of each masked patch to all patches of the batch, `[batch, masked, batch *
            patches]`; the most alike that is not masked itself stands in its place.
        """
        positions, pixels = (
            self.positions(batch),
            patchify(batch["image"].astype(jnp.float32), self.patch),
        )
        likeness = jnp.where(batch["masked"].reshape(-1), -jnp.inf, likeness)
        found = pixels.reshape(-1, pixels.shape[-1])[likeness.argmax(-1)]
        filled = (
            put(pixels, positions, content) for content in (jnp.full_like(found, GREY), found)
        )
        return tuple(unpatchify(patches, self.grid, self.patch) for patches in filled)

    def read_masked(self, model: TokenModel, x: jax.Array, batch: Batch) -> jax.Array:
        """The masked patches' final representations, `[batch, masked, dim]`.

        Args:
          x: all tokens after the last layer, not yet normalised.
        """
        x = x if model.norm is None else model.norm(x)
        return pick(x[:, model.patch_tokens], self.positions(batch))

    def multiply_adds(
        self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None
    ) -> float:
        """Those of the student alone."""
        graphdef, weights = nnx.split((model, self))

        def predicted(weights, batch):
            model, objective = nnx.merge(graphdef, weights)
            return objective.predict(model, batch)

        image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.uint8)
        masked = jax.ShapeDtypeStruct((1, self.patches), jnp.bool_)
        return traced_multiply_adds(predicted, weights, {"image": image, "masked": masked})


def check_same_places(
    config: ConfigDict,
    model: TokenModel,
    what: str,
    grid: tuple[int, int],
    size: tuple[int, int],
    side: int,
) -> None:
    """Raises UserError where a teacher says of other places than the model's patches.

    Args:
      what: these are, such as `patches`.
      grid: rows and columns of them.
      size: of its images, in pixels.
      side: of a place, in pixels; 0: it is not known.
    """
    if grid == model.grid:
        return
    rows, columns = model.grid
    known = rows == columns and side
    remedy = (
        f"config.objective.teacher_size={rows * side}"
        if known
        else f"take a teacher of the same {what}"
    )
    raise UserError(
        f"config.objective.teacher={config.objective.teacher!r} sees {_times(grid)} {what} of "
        f"{_times(size)} pixels, and the model {_times(model.grid)}: {remedy}"
    )


def _times(sides: tuple[int, int]) -> str:
    return "x".join(map(str, sides))
