"""Masked patch prediction, the ViT paper's self-supervised objective (sections 4.6 and B.1.2)."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.pixels import to_floats
from vit_jax.models.resnet import linear_head
from vit_jax.options.objective import CELLS
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.masking import (
    check_hides_patches,
    patchify,
    pick,
    put,
    shuffled,
    split_keys,
    unpatchify,
)
from vit_jax.training.objectives.objective import EVALUATION, Batch, Loss, Objective, StepContext

LEVELS = 8  # Number of levels of each colour channel: 3 bits.
COLORS = LEVELS**3
# The first 80 % of the corrupted patches get the learned embedding. The next 10 % get the embedding
# of another patch. The last 10 % stay unchanged.
MASKED, REPLACED = 0.8, 0.9


class MaskedPatch(Objective):
    """Prediction of the original content of corrupted patches from their final representations.

    Of the corrupted patches, 80 % get a learned embedding, 10 % get the embedding of another random
    patch of the image, and 10 % keep their own embedding. The objective's parameters are the
    learned embedding and a linear head.

    Args:
      ratio: share of corrupted patches, rounded to whole patches.
      target: the prediction target of a patch. `color`: the patch's mean colour with 3 bits per
        channel, one of 512 classes. `cells`: the patch is divided into 4 x 4 cells, and the mean
        colour of each cell is one of 512 classes. `pixels`: all pixels, with the squared error as
        the loss.

    Raises:
      UserError: `ratio` corrupts no patch or all patches, or the patches cannot be divided into
        cells.
    """

    section: ClassVar = "masked_patch"
    made_by: ClassVar = ("target",)
    stem: ClassVar = ("mask",)

    def __init__(self, model: nnx.Module, ratio: float, target: str, *, rngs: nnx.Rngs):
        self.grid, self.patch, self.target = model.grid, model.patch_size, target
        self.patches = math.prod(model.grid)
        self.corrupted = round(ratio * self.patches)
        if not 0 < self.corrupted < self.patches:
            raise UserError(
                f"config.masked_patch.mask_ratio = {ratio} corrupts {self.corrupted} of "
                f"{self.patches} patches; it must leave some, and corrupt some"
            )
        if target == "pixels":
            outputs = self.patch**2 * model.channels
        elif self.patch % CELLS[target]:
            raise UserError(
                "config.masked_patch.target='cells' cuts a patch into 4 x 4 cells, and 4 does not "
                f"divide its {self.patch} pixels; use target='color' or 'pixels', or another "
                "patch size"
            )
        elif model.channels != 3:
            raise UserError(
                f"config.masked_patch.target={target!r} needs 3 channels, not {model.channels}"
            )
        else:
            outputs = CELLS[target] ** 2 * COLORS
        self.mask = nnx.Param(initializers.normal(0.02)(rngs.params(), (1, 1, model.dim)))
        self.head = linear_head(model.dim, outputs, 0.0, rngs)

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return False

    @classmethod
    def make(
        cls, config: RunOptions, model: nnx.Module, steps: int, rngs: nnx.Rngs
    ) -> "MaskedPatch":
        check_hides_patches(config, model)
        options = config.masked_patch
        return cls(model, options.mask_ratio, options.target, rngs=rngs)

    @property
    def metrics(self) -> dict[str, str]:
        """The only metric is `patch_accuracy`; for the target `pixels` there is no metric."""
        return {"patch_accuracy": "share"} if self.target in CELLS else {}

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """Draws the corrupted patches of each image at random, and adds them to the batch.

        Returns:
          The batch with two additional entries:

          - `corrupted`, int32 `[batch, corrupted]`: indices of the corrupted patches.
          - `source`, int32 `[batch, patches]`: for each patch, the index of the patch whose
            embedding is the encoder's input at this position. -1: the learned embedding. Patches
            that are not corrupted have their own index.
        """
        order_keys, kind_keys, other_keys = split_keys(keys, 3)
        order = shuffled(order_keys, self.patches)
        chosen = jnp.argsort(order, axis=1) < self.corrupted
        kind = jax.vmap(lambda key: jax.random.uniform(key, (self.patches,)))(kind_keys)
        steps = jax.vmap(lambda key: jax.random.randint(key, (self.patches,), 1, self.patches))(
            other_keys
        )
        positions = jnp.arange(self.patches)
        other = (positions + steps) % self.patches
        source = jnp.where(kind < MASKED, -1, jnp.where(kind < REPLACED, other, positions))
        return batch | {
            "corrupted": order[:, : self.corrupted].astype(jnp.int32),
            "source": jnp.where(chosen, source, positions).astype(jnp.int32),
        }

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss of each image: the mean over its corrupted patches.

        For the targets `color` and `cells`, which are classes, the metric `patch_accuracy` is also
        returned: the accuracy over the image's corrupted patches.

        Args:
          batch: `image` uint8 `[batch, height, width, 3]`, and the entries from `prepare`.
        """
        predicted, targets = self.predict(model, batch, context.rngs), self.targets(batch["image"])
        targets = pick(targets, batch["corrupted"])
        if self.target == "pixels":
            return Loss(jnp.square(predicted - targets).mean(axis=(1, 2)))
        losses = optax.softmax_cross_entropy_with_integer_labels(predicted, targets)
        right = predicted.argmax(-1) == targets
        return Loss(losses.mean(axis=(1, 2)), {"patch_accuracy": right.mean(axis=(1, 2))})

    def predict(self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Predicts the content of corrupted patches.

        For the targets `color` (1 cell) and `cells` (16 cells), the result is logits,
        `[batch, corrupted, cells, 512]`. For the target `pixels`, the result is pixels in [-1, 1],
        `[batch, corrupted, patch * patch * 3]`.
        """
        x = model.patches(batch["image"])
        source = batch["source"]
        x = jnp.where(
            source[..., None] < 0, self.mask[...].astype(x.dtype), pick(x, jnp.maximum(source, 0))
        )
        x = model.norm(model.encode(model.assemble(x, rngs), rngs))
        x = self.head(pick(x[:, model.patch_tokens], batch["corrupted"]))
        return x if self.target == "pixels" else x.reshape(*x.shape[:2], -1, COLORS)

    def targets(self, images: jax.Array) -> jax.Array:
        """Returns the targets of all patches.

        Targets are classes, int32 `[batch, patches, cells]`, where `cells` is 1 for the target
        `color` and 16 for `cells`. For the target `pixels` they are pixels in [-1, 1],
        `[batch, patches, patch * patch * 3]`.

        The class of a colour is 64 * red + 8 * green + blue, where red, green and blue are levels
        from 0 to 7. A level is min(7, floor(8 * mean)), where mean is the mean of a channel over
        the cell's pixels in [0, 1]. Levels are computed with integers, so they are exact.
        """
        if self.target == "pixels":
            return patchify(to_floats(images), self.patch)
        cells = CELLS[self.target]
        side = self.patch // cells
        pixels = patchify(images, self.patch).reshape(len(images), -1, cells, side, cells, side, 3)
        sums = pixels.astype(jnp.int32).sum(axis=(3, 5))
        levels = jnp.minimum(sums * LEVELS // (255 * side**2), LEVELS - 1)
        return (levels @ jnp.array([LEVELS**2, LEVELS, 1])).reshape(len(images), -1, cells**2)

    def pictures(
        self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION
    ) -> tuple[jax.Array, jax.Array]:
        """Returns two versions of the images in [0, 255], each `[batch, height, width, channels]`.

        In the first version the corrupted patches are grey. In the second version they contain the
        predicted pixels or colours.
        """
        predicted = self.predict(model, batch)
        if self.target == "pixels":
            pixels = (predicted + 1) * 127.5
        else:
            cells = CELLS[self.target]
            levels = jnp.stack(jnp.unravel_index(predicted.argmax(-1), (LEVELS,) * 3), axis=-1)
            colors = ((levels + 0.5) * 255 / LEVELS).reshape(*predicted.shape[:2], cells, cells, 3)
            side = self.patch // cells
            pixels = (
                colors.repeat(side, axis=2).repeat(side, axis=3).reshape(*predicted.shape[:2], -1)
            )
        known = patchify(batch["image"].astype(jnp.float32), self.patch)
        filled = (
            put(known, batch["corrupted"], content)
            for content in (jnp.full_like(pixels, 127.5), pixels)
        )
        return tuple(unpatchify(patches, self.grid, self.patch) for patches in filled)


OBJECTIVE = MaskedPatch
