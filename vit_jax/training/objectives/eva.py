"""Masked prediction of a frozen teacher's features (EVA, 2211.07636; EVA-02, 2303.11331)."""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models import count_multiply_adds, initializers
from vit_jax.models.image_model import ImageModel, TokenModel
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.options import Option, number, one_of, whole
from vit_jax.training.objectives.block_masks import block_masks
from vit_jax.training.objectives.frozen import Frozen, teacher_of
from vit_jax.training.objectives.masking import check_hides_patches, patchify, pick, put, unpatchify
from vit_jax.training.objectives.objective import EVALUATION, Batch, Loss, Now, Objective
from vit_jax.training.objectives.prototypes import unit

MASK_RATIO = 0.41  # 105 of 256 patches, as the authors'.
SMALLEST_BLOCK = 16  # Patches, as BEiT's.
GREY = 127.5

OPTIONS = {
    "objective.teacher_size": Option(
        None,
        whole(1, 2**14),
        "Pixels of the crop as eva's teacher sees it, in as many patches as the model; None: the model's.",
    ),
    "objective.teacher_features": Option(
        "tokens",
        one_of("tokens", "head"),
        "What eva predicts of each patch: the teacher's last normalised tokens, or its head's outputs for "
        "them, which of a CLIP's tower are its projection.",
    ),
    "objective.embedding_gradient": Option(
        1.0,
        number(least=0, most=1),
        "Share of eva's gradient that reaches the patch embedding; EVA-02's is 0.1.",
    ),
}


class EVA(Objective):
    """Predicts what a frozen teacher, which sees the whole image, says of patches that are masked.

    The masked patches' embeddings become one learned embedding; a linear head predicts the teacher's features
    from their final representations. The loss is 1 less their cosine. Masks are of blocks, as BEiT's.

    Args:
      model: the ViT that is trained.
      features: numbers that the teacher says of a patch.
      ratio: share of the patches that is masked, rounded to whole patches.
      of_head: these are outputs of the teacher's head.
      gradient: share of the gradient that reaches the patch embedding.
      head_init: draws the head's kernel.

    Raises:
      UserError: no patch or all are masked.
    """

    metrics: ClassVar = {"cosine": "number"}

    def __init__(
        self,
        model: nnx.Module,
        features: int,
        ratio: float,
        *,
        of_head: bool,
        gradient: float,
        head_init: initializers.Initializer,
        rngs: nnx.Rngs,
    ):
        self.grid, self.patch, self.patches = model.grid, model.patch_size, math.prod(model.grid)
        self.of_head, self.gradient = of_head, gradient
        self.masked = round(ratio * self.patches)
        if not 0 < self.masked < self.patches:
            raise UserError(
                f"config.objective.mask_ratio = {ratio} masks {self.masked} of {self.patches} patches; it "
                "must leave some, and mask some"
            )
        self.mask = nnx.Param(initializers.normal(0.02)(rngs.params(), (1, 1, model.dim)))
        self.head = nnx.Linear(model.dim, features, kernel_init=head_init, dtype=jnp.float32, rngs=rngs)

    @staticmethod
    def sees_length(config: ConfigDict) -> bool:
        return False

    @staticmethod
    def views(config: ConfigDict) -> tuple[View, ...]:
        size = config.objective.teacher_size
        if size in (None, config.data.image_size):
            return (View(),)
        return View(), View("taught", size=size, same_rectangle_as="image")

    @staticmethod
    def learns_from(config: ConfigDict) -> Frozen:
        return teacher_of(config, image_size=config.objective.teacher_size or config.data.image_size)

    @classmethod
    def make(
        cls, config: ConfigDict, model: nnx.Module, steps: int, rngs: nnx.Rngs, *, frozen: ImageModel
    ) -> "EVA":
        check_hides_patches(config, model)
        values = config.objective
        named = f"config.objective.teacher={values.teacher!r}"
        if not isinstance(frozen, TokenModel):
            raise UserError(f"{named} has no features of patches: take a ViT, such as CLIP's or DINO's")
        if frozen.grid != model.grid:
            raise UserError(
                f"{named} sees {_times(frozen.grid)} patches of {_times(frozen.image_size)} pixels, and the "
                f"model {_times(model.grid)}: {_fitting(frozen, model)}"
            )
        of_head = values.teacher_features == "head"
        if of_head and frozen.head is None:
            raise UserError(f"{named} has no head: config.objective.teacher_features='tokens'")
        if of_head and not frozen.pools_plainly:
            raise UserError(
                f"{named} has a head that reads more than a patch's last token, as attention pooling "
                "makes it: config.objective.teacher_features='tokens'"
            )
        features = frozen.num_classes if of_head else frozen.dim
        ratio = MASK_RATIO if values.mask_ratio is None else values.mask_ratio
        # EVA-02's authors draw the head as all other layers.
        own = config.model.initialization == "eva02"
        return cls(
            model,
            features,
            ratio,
            of_head=of_head,
            gradient=values.embedding_gradient,
            head_init=initializers.xavier_normal() if own else initializers.normal(0.02),
            rngs=rngs,
        )

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """The batch with `masked` bool `[batch, patches]`, drawn for each image from its key."""
        counts = jnp.full(len(keys), self.masked, jnp.int32)
        return batch | {"masked": block_masks(keys, counts, self.grid, SMALLEST_BLOCK)}

    def __call__(self, model: nnx.Module, batch: Batch, now: Now = EVALUATION) -> Loss:
        """The loss of each image, the mean over its masked patches.

        Args:
          batch: `image` uint8 `[batch, height, width, channels]`, `taught` where the teacher sees another
            size, and what `prepare` drew.
        """
        positions = self.positions(batch)
        wanted = pick(self.wanted(batch), positions)
        cosines = cosine(self.predict(model, batch, now.rngs, positions), wanted).mean(axis=1)
        return Loss(1 - cosines, {"cosine": cosines})

    def positions(self, batch: Batch) -> jax.Array:
        """The masked patches of each image in raster order, int32 `[batch, masked]`."""
        return jnp.argsort(~batch["masked"], axis=1)[:, : self.masked].astype(jnp.int32)

    def wanted(self, batch: Batch) -> jax.Array:
        """The teacher's features of all patches, float32 `[batch, patches, features]`."""
        x = self.frozen.features(batch.get("taught", batch["image"]), dense=True)
        x = self.frozen.head(x) if self.of_head else x
        return x.reshape(len(x), self.patches, -1).astype(jnp.float32)

    def predict(
        self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None, positions: Any = None
    ) -> jax.Array:
        """Predicts the teacher's features of patches, float32 `[batch, picked, features]`.

        Args:
          positions: of the patches; None: the masked ones.
        """
        x = model.patches(batch["image"])
        x = self.gradient * x + (1 - self.gradient) * jax.lax.stop_gradient(x)
        x = jnp.where(batch["masked"][..., None], self.mask[...].astype(x.dtype), x)
        x = model.encode(model.assemble(x, rngs), rngs)
        x = x if model.norm is None else model.norm(x)
        picked = self.positions(batch) if positions is None else positions
        return self.head(pick(x[:, model.patch_tokens], picked))

    def pictures(self, model: nnx.Module, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The images with masked patches in grey, and with other patches in their place, in [0, 255].

        These are, of all patches of the batch that are not masked, those of which the teacher says what comes
        nearest to the prediction.
        """
        positions, pixels = self.positions(batch), patchify(batch["image"].astype(jnp.float32), self.patch)
        predicted = self.predict(model, batch, positions=positions)
        known = self.wanted(batch).reshape(-1, predicted.shape[-1])
        likeness = cosine(predicted[:, :, None], known)
        likeness = jnp.where(batch["masked"].reshape(-1), -jnp.inf, likeness)
        found = pixels.reshape(-1, pixels.shape[-1])[likeness.argmax(-1)]
        filled = (put(pixels, positions, content) for content in (jnp.full_like(found, GREY), found))
        return tuple(unpatchify(patches, self.grid, self.patch) for patches in filled)

    def multiply_adds(self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None) -> float:
        """Those of the student, and of the teacher, which has no backward pass."""
        graphdef, weights = nnx.split((model, self))

        def predicted(weights, batch):
            model, objective = nnx.merge(graphdef, weights)
            return objective.predict(model, batch)

        image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.uint8)
        masked = jax.ShapeDtypeStruct((1, self.patches), jnp.bool_)
        student = traced_multiply_adds(predicted, weights, {"image": image, "masked": masked})
        return student + count_multiply_adds(self.frozen) / 3


def cosine(one: jax.Array, other: jax.Array) -> jax.Array:
    """The cosine of vectors, over the last axis; 0 where one is of no length."""
    return (unit(one) * unit(other)).sum(-1)


def _times(sides: tuple[int, int]) -> str:
    return "x".join(map(str, sides))


def _fitting(teacher: TokenModel, model: TokenModel) -> str:
    """The remedy: the size at which the teacher's patches are the model's."""
    rows, columns = model.grid
    if rows != columns or not teacher.patch_size:
        return "take a teacher of the same patches"
    return f"config.objective.teacher_size={rows * teacher.patch_size}"
