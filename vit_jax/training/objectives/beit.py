"""BEiT (2106.08254): prediction of the codes of masked patches.

The codes (visual tokens) of an image are the output of a frozen tokenizer.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models import initializers, model_factory
from vit_jax.models.image_model import CodeModel, TokenModel
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.block_masked import BlockMasked, check_same_places
from vit_jax.training.objectives.frozen import teacher_patch
from vit_jax.training.objectives.masking import check_hides_patches, pick
from vit_jax.training.objectives.objective import EVALUATION, Batch, Loss, StepContext

RANDOM_CODES = 32  # Number of codes of the untrained tokenizer for smoke tests.


class BEiT(BlockMasked):
    """Prediction of a frozen tokenizer's codes for masked patches.

    The tokenizer has the whole image as its input. A linear head computes logits of the codes from
    the final representations of the masked patches. The loss is the mean cross-entropy over the
    masked patches.

    Args:
      codes: number of the tokenizer's codes.
    """

    section: ClassVar = "beit"
    metrics: ClassVar = {"accuracy": "share"}

    @staticmethod
    def views(config: RunOptions) -> tuple[View, ...]:
        image, *taught = BlockMasked.views(config)
        return (image, *(view._replace(crop={"interpolation": "lanczos"}) for view in taught))

    def __init__(self, model: TokenModel, codes: int, ratio: float, *, rngs: nnx.Rngs):
        super().__init__(model, ratio, rngs=rngs)
        drawn = initializers.cut_normal(0.02)
        self.head = nnx.Linear(model.dim, codes, kernel_init=drawn, dtype=jnp.float32, rngs=rngs)

    @classmethod
    def make(
        cls,
        config: RunOptions,
        model: nnx.Module,
        steps: int,
        rngs: nnx.Rngs,
        *,
        frozen: nnx.Module,
    ) -> "BEiT":
        check_hides_patches(config, model)
        codes = cls.count_codes(config, model, frozen)
        return cls(model, codes, config.beit.mask_ratio, rngs=rngs)

    @classmethod
    def random_teacher(cls, config: RunOptions, num_classes: int, rngs: nnx.Rngs) -> nnx.Module:
        size = config.objective.teacher_size or config.data.image_size
        stages = teacher_patch(config, size).bit_length()  # Stages 2, 3, ... halve the sides.
        small = dict(blocks=(1,) * stages, widths=tuple(8 * 2**stage for stage in range(stages)))
        build = model_factory("DVAE", num_classes=RANDOM_CODES, image_size=size, **small)
        return build(rngs=rngs)

    @classmethod
    def count_codes(cls, config: RunOptions, model: TokenModel, frozen: nnx.Module) -> int:
        """Returns the number of the tokenizer's codes.

        Raises:
          UserError: the frozen model is not a tokenizer, or its grid of codes differs from the
            model's grid of patches.
        """
        if not isinstance(frozen, CodeModel) or frozen.head is None:
            raise UserError(
                f"config.objective.teacher={config.objective.teacher!r} computes no codes: take a "
                "tokenizer, such as the workdir of a run of configs/dvae.py"
            )
        check_same_places(
            config, model, "codes", frozen.code_grid, frozen.image_size, frozen.code_stride
        )
        return frozen.num_classes

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss and the metric `accuracy` of each image, float32 `[batch]`.

        The accuracy is the share of masked patches whose code is predicted correctly.

        Args:
          batch: `image` uint8 `[batch, height, width, channels]`, `taught` if the tokenizer needs
            another image size, and the masks from `prepare`.
        """
        target_tokens = self.masked_tokens(batch)
        logits = self.predict(model, batch, context.rngs)
        return Loss(
            code_losses(logits, target_tokens),
            {"accuracy": (logits.argmax(-1) == target_tokens).mean(axis=1)},
        )

    def tokens(self, batch: Batch) -> jax.Array:
        """Returns the tokenizer's codes of all patches, int32 `[batch, patches]`.

        The patches are in raster order.
        """
        return self.frozen.codes(batch.get("taught", batch["image"]))

    def masked_tokens(self, batch: Batch) -> jax.Array:
        """Returns the tokenizer's codes of the masked patches, int32 `[batch, masked]`."""
        return pick(self.tokens(batch)[..., None], self.positions(batch))[..., 0]

    def predict(self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Returns logits of the codes of the masked patches, float32 `[batch, masked, codes]`."""
        return self.logits(model, model.encode(self.embed(model, batch, rngs), rngs), batch)

    def logits(self, model: nnx.Module, x: jax.Array, batch: Batch) -> jax.Array:
        """Returns logits of the codes of the masked patches, float32 `[batch, masked, codes]`.

        Args:
          x: all tokens after the last layer, before the final norm, `[batch, tokens, dim]`.
        """
        return self.head(self.read_masked(model, x, batch))

    def pictures(
        self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION
    ) -> tuple[jax.Array, jax.Array]:
        """Returns two versions of the images in [0, 255], each `[batch, height, width, channels]`.

        In the first version the masked patches are grey. In the second version each masked patch is
        replaced by the model's prediction. A code has no pixels of its own. Therefore the
        prediction is shown as an unmasked patch of the batch: the patch whose code has the highest
        predicted probability.
        """
        return self.filled(batch, self.predict(model, batch)[..., self.tokens(batch).reshape(-1)])

    def multiply_adds(
        self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None
    ) -> float:
        graphdef, weights = nnx.split(self)

        def tokens(weights, batch):
            return nnx.merge(graphdef, weights).tokens(batch)

        image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.uint8)
        taught = traced_multiply_adds(tokens, weights, batch or {"image": image})
        # The tokenizer has no backward pass, hence the division by 3: see
        # `Objective.multiply_adds`.
        return super().multiply_adds(model) + taught / 3


def code_losses(logits: jax.Array, codes: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of each image's codes, float32 `[batch]`.

    Args:
      logits: logits of the codes at each patch, `[batch, patches, codes]`.
      codes: the correct codes, int32 `[batch, patches]`.
    """
    return optax.softmax_cross_entropy_with_integer_labels(logits, codes).mean(axis=1)


OBJECTIVE = BEiT
