"""Masked prediction of a frozen teacher's features (EVA, 2211.07636; EVA-02, 2303.11331)."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models import count_multiply_adds, initializers
from vit_jax.models.image_model import ImageModel, TokenModel
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.block_masked import BlockMasked
from vit_jax.training.objectives.masking import check_hides_patches, pick
from vit_jax.training.objectives.objective import EVALUATION, Batch, Loss, StepContext
from vit_jax.training.objectives.patch_teacher import (
    cosine,
    features_of_teacher,
    teacher_patch_features,
)


class EVA(BlockMasked):
    """Prediction of a frozen teacher's features for masked patches.

    The teacher's input is the whole image. In the student's input, one learned embedding replaces
    the embeddings of the masked patches. A linear head predicts the teacher's features from the
    final representations of the masked patches. The loss is 1 minus the cosine similarity of
    predicted and true features. Masks consist of blocks, as in BEiT.

    Args:
      features: length of the teacher's feature vector of a patch.
      of_head: True: the features are outputs of the teacher's head. False: they are the teacher's
        patch tokens, that is, outputs of its method `features` with `dense=True`.
      gradient: factor of the gradient that is passed to the patch embedding; 1: the full gradient.
      head_init: initializer of the head's kernel.
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
        config: RunOptions,
        model: nnx.Module,
        steps: int,
        rngs: nnx.Rngs,
        *,
        frozen: ImageModel,
    ) -> "EVA":
        check_hides_patches(config, model)
        options = config.eva
        features = features_of_teacher(config, model, frozen)
        scheme = model.stack.scheme  # EVA's authors initialize the head like all other layers.
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
        """Returns the loss of each image: the mean over its masked patches.

        Args:
          batch: `image` uint8 `[batch, height, width, channels]`, `taught` if the teacher needs
            another image size, and the masks from `prepare`.
        """
        target_features = pick(self.teacher_features(batch), self.positions(batch))
        cosines = cosine(self.predict(model, batch, context.rngs), target_features).mean(axis=1)
        return Loss(1 - cosines, {"cosine": cosines})

    def teacher_features(self, batch: Batch) -> jax.Array:
        """Returns the teacher's features of all patches, float32 `[batch, patches, features]`."""
        return teacher_patch_features(self.frozen, batch, self.of_head)

    def predict(self, model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Predicts features of masked patches, float32 `[batch, masked, features]`."""
        x = model.encode(self.embed(model, batch, rngs), rngs)
        return self.head(self.read_masked(model, x, batch))

    def pictures(
        self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION
    ) -> tuple[jax.Array, jax.Array]:
        """Returns two versions of the images in [0, 255], each `[batch, height, width, channels]`.

        In the first version the masked patches are grey. In the second version each masked patch is
        replaced by the model's prediction. Predicted features have no pixels. Therefore the
        prediction is shown as the unmasked patch of the batch whose teacher features are nearest to
        the predicted features.
        """
        predicted = self.predict(model, batch)
        teacher_features = self.teacher_features(batch).reshape(-1, predicted.shape[-1])
        return self.filled(batch, cosine(predicted[:, :, None], teacher_features))

    def multiply_adds(
        self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None
    ) -> float:
        # The teacher has no backward pass, hence the division by 3: see `Objective.multiply_adds`.
        return super().multiply_adds(model, batch) + count_multiply_adds(self.frozen) / 3


OBJECTIVE = EVA
