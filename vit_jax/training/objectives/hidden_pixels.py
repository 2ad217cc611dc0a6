"""Base class of MAE and FCMAE: prediction of hidden patches' pixels from visible patches."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.masking import patchify, pick, put, shuffled, unpatchify
from vit_jax.training.objectives.objective import EVALUATION, Batch, Loss, Objective, StepContext


class HiddenPixels(Objective):
    """Prediction of the pixels of hidden patches; subclasses implement `predict`.

    Args:
      grid: rows and columns of patches.
      patch: side of a patch in pixels.
      ratio: share of hidden patches; the number of visible patches is rounded down.
      normalize_targets: True: the targets are the patch's pixels, normalized by the mean and std of
        the patch. False: the targets are pixels with the model's normalization.

    Raises:
      UserError: `ratio` hides no patch, or all patches.
    """

    def __init__(self, grid: tuple[int, int], patch: int, ratio: float, normalize_targets: bool):
        self.grid, self.patch, self.normalize_targets = grid, patch, normalize_targets
        self.patches = math.prod(grid)
        # 1e-9 corrects rounding: 10 * (1 - 0.9) is 0.99... in floating point.
        self.visible = math.floor(self.patches * (1 - ratio) + 1e-9)
        if not 0 < self.visible < self.patches:
            raise UserError(
                f"config.{self.section}.mask_ratio = {ratio} leaves {self.visible} of "
                f"{self.patches} patches visible; it must leave some, and hide some"
            )

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return False

    def prepare(self, batch: Batch, keys: jax.Array) -> Batch:
        """Adds `order`, int32 `[batch, patches]`, to the batch: a random order of the patches.

        The first `self.visible` patches of an image's order are visible, all others are hidden.
        """
        return batch | {"order": shuffled(keys, self.patches).astype(jnp.int32)}

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss of each image: the mean squared error of its hidden patches' pixels.

        Args:
          batch: `image` uint8 `[batch, height, width, channels]`, and the random order of the
            patches from `prepare`.
        """
        pixels = patchify(model.normalize(batch["image"]), self.patch)
        targets = pick(pixels, batch["order"][:, self.visible :])
        if self.normalize_targets:
            mean, deviation = moments(targets)
            targets = (targets - mean) / deviation
        return Loss(
            jnp.square(self.predict(model, batch, context.rngs) - targets).mean(axis=(1, 2))
        )

    def predict(self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Predicts normalized pixels of the hidden patches, float32 `[batch, hidden, pixels]`.

        The hidden patches have the same order as in `batch["order"]`.
        """
        raise NotImplementedError

    def pictures(
        self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION
    ) -> tuple[jax.Array, jax.Array]:
        """Returns two versions of the images in [0, 255], each `[batch, height, width, channels]`.

        In the first version the hidden patches are grey. In the second version they contain the
        predicted pixels.

        With normalized targets, the model does not predict the mean and std of a patch. The
        predicted pixels are then denormalized with the true mean and std of the patch.
        """
        hidden = batch["order"][:, self.visible :]
        images = model.normalize(batch["image"])
        pixels, known = self.predict(model, batch), patchify(images, self.patch)
        if self.normalize_targets:
            mean, deviation = moments(pick(known, hidden))
            pixels = pixels * deviation + mean
        grey = pick(patchify(model.normalize(jnp.zeros_like(images)), self.patch), hidden)
        filled = (put(known, hidden, content) for content in (grey, pixels))
        return tuple(
            model.denormalize(unpatchify(patches, self.grid, self.patch)) for patches in filled
        )


def moments(patches: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and unbiased std of each patch's pixels, `[batch, patches, 1]`."""
    mean = patches.mean(axis=-1, keepdims=True)
    return mean, jnp.sqrt(patches.var(axis=-1, keepdims=True, ddof=1) + 1e-6)
