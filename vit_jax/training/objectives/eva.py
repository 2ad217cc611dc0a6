"""Masked prediction of a frozen teacher's features (EVA, 2211.07636; EVA-02, 2303.11331)."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.models import count_multiply_adds, initializers
from vit_jax.models.image_model import ImageModel, TokenModel
from vit_jax.training.objectives.block_masked import BlockMasked
from vit_jax.training.objectives.masking import check_hides_patches, pick
from vit_jax.training.objectives.objective import EVALUATION, Batch, Loss, StepContext
from vit_jax.training.objectives.patch_teacher import cosine, features_of_teacher, said_of_patches


class EVA(BlockMasked):
    """Predicts what a frozen teacher, which sees the whole image, says of patches that are masked.

    The masked patches' embeddings become one learned embedding; a linear head predicts the
    teacher's features from their final representations. The loss is 1 less their cosine. Masks are
    of blocks, as BEiT's.

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

    section: ClassVar = "eva"
    metrics: ClassVar = {"cosine": "number"}

    def __init__(
        self,
        model: TokenModel,
        features: int,
        ratio: float,
        *,
        of_head: bool,
        gradient: float,
        head_init: initializers.Initializer,
        rngs: nnx.Rngs,
    ):
        super().__init__(model, ratio, gradient=gradient, rngs=rngs)
        self.of_head = of_head
        self.head = nnx.Linear(
            model.dim, features, kernel_init=head_init, dtype=jnp.float32, rngs=rngs
        )

    @classmethod
    def make(
        cls,
        config: ConfigDict,
        model: nnx.Module,
        steps: int,
        rngs: nnx.Rngs,
        *,
        frozen: ImageModel,
    ) -> "EVA":
        check_hides_patches(config, model)
        options = config.eva
        features = features_of_teacher(config, model, frozen)
        scheme = model.stack.scheme  # The authors draw the head as all other layers.
        return cls(
            model,
            features,
            options.mask_ratio,
            of_head=config.objective.teacher_features == "head",
            gradient=options.embedding_gradient,
            head_init=scheme.dense if scheme.token else initializers.cut_normal(0.02),
            rngs=rngs,
        )

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """The loss of each image, the mean over its masked patches.

        Args:
          batch: `image` uint8 `[batch, height, width, channels]`, `taught` where the teacher sees
            another size, and what `prepare` drew.
        """
        wanted = pick(self.wanted(batch), self.positions(batch))
        cosines = cosine(self.predict(model, batch, context.rngs), wanted).mean(axis=1)
        return Loss(1 - cosines, {"cosine": cosines})

    def wanted(self, batch: Batch) -> jax.Array:
        """The teacher's features of all patches, float32 `[batch, patches, features]`."""
        return said_of_patches(self.frozen, batch, self.of_head)

    def predict(self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Predicts the teacher's features of the masked patches, float32 `[batch, masked,
        features]`.
        """
        x = model.encode(self.embed(model, batch, rngs), rngs)
        return self.head(self.read_masked(model, x, batch))

    def pictures(
        self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION
    ) -> tuple[jax.Array, jax.Array]:
        """The images with masked patches in grey, and with other patches in their place, in [0,
        255].

        These are, of all patches of the batch that are not masked, those of which the teacher says
        what comes nearest to the prediction.
        """
        predicted = self.predict(model, batch)
        known = self.wanted(batch).reshape(-1, predicted.shape[-1])
        return self.filled(batch, cosine(predicted[:, :, None], known))

    def multiply_adds(
        self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None
    ) -> float:
        """Those of the student, and of the teacher, which has no backward pass."""
        return super().multiply_adds(model, batch) + count_multiply_adds(self.frozen) / 3
