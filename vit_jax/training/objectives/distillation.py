"""Distillation of a frozen classifier (Hinton, Vinyals, Dean, 2015; DeiT: Touvron et al., 2021)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import count_multiply_adds
from vit_jax.models.image_model import ImageModel
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.classification import Classification, correct, values_of
from vit_jax.training.objectives.frozen import TeacherSpec, random_vit, teacher_of
from vit_jax.training.objectives.objective import EVALUATION, Batch, Loss, StepContext


class Distillation(Classification):
    """Classification by labels and by a frozen teacher's logits for the same image.

    In training the loss is (1 - s) * classification loss + s * distillation loss, where s is
    `share`. There are two kinds of distillation loss:

    - `soft`: t^2 KL(teacher || student). Both distributions have the temperature t (1503.02531,
      section 2).
    - `hard`: the cross-entropy with the teacher's top class (DeiT, 2012.12877, equation 3).

    The soft loss is summed over the classes, as in both papers. DeiT's code takes the mean over the
    classes, which divides the loss by 1,000 on ImageNet.

    A DeiT has two heads (`model.distillation='heads'`). The head on the class token is trained with
    the labels, and the head on the distillation token is trained with the teacher. Evaluation uses
    the mean of both heads' logits, as in DeiT's code. The paper adds the heads' probabilities.

    In evaluation the loss is only the classification loss.

    Args:
      kind: `soft` or `hard`.
      share: weight of the distillation loss, between 0 and 1.
      temperature: temperature of both distributions, for `soft`.
      **values: arguments of `Classification`.
    """

    section: ClassVar = "distillation"
    metrics: ClassVar = Classification.metrics | {"teacher_accuracy": "share", "agreement": "share"}

    def __init__(self, kind: str, share: float, temperature: float, **values: Any):
        super().__init__(**values)
        self.kind, self.share, self.temperature = kind, share, temperature

    @staticmethod
    def teacher_spec(config: RunOptions) -> TeacherSpec:
        return teacher_of(config, image_size=config.data.image_size)

    @classmethod
    def random_teacher(cls, config: RunOptions, num_classes: int, rngs: nnx.Rngs) -> nnx.Module:
        return random_vit(config, config.data.image_size, num_classes, rngs=rngs)

    @classmethod
    def make(
        cls,
        config: RunOptions,
        model: nnx.Module,
        steps: int,
        rngs: nnx.Rngs,
        *,
        frozen: ImageModel,
    ) -> "Distillation":
        teacher = config.objective.teacher
        if config.loss.name != "softmax":
            raise UserError(
                f"config.loss.name={config.loss.name!r} sums over classes that exclude no other; "
                "config.objective.name='distillation' compares distributions over them: "
                "loss.name='softmax'"
            )
        if not frozen.num_classes:
            raise UserError(
                f"config.objective.teacher={teacher!r} is not a classifier: it has features, "
                "but no head"
            )
        if frozen.num_classes != model.num_classes:
            raise UserError(
                f"config.objective.teacher={teacher!r} has {frozen.num_classes:,} classes, "
                f"and the data {model.num_classes:,}: use a teacher with the same classes"
            )
        options = config.distillation
        return cls(options.kind, options.teacher_weight, options.temperature, **values_of(config))

    def __call__(self, model: nnx.Module, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns each image's loss and three metrics.

        The metrics are the student's accuracy, the teacher's accuracy, and whether student and
        teacher predict the same class. The student's prediction is the top class of the mean of its
        heads' logits.
        """
        heads = model.each_head(batch["image"], context.rngs)
        logits = sum(heads) / len(heads)
        teacher_logits = self.frozen(batch["image"]).astype(jnp.float32)
        if context.rngs is None:
            losses = self.label_losses(logits, batch, context)
        else:
            losses = (1 - self.share) * self.label_losses(heads[0], batch, context)
            losses += self.share * self.teacher_losses(heads[-1], teacher_logits)
        return Loss(
            losses,
            {
                "accuracy": correct(logits, batch["labels"]),
                "teacher_accuracy": correct(teacher_logits, batch["labels"]),
                "agreement": logits.argmax(-1) == teacher_logits.argmax(-1),
            },
            logits=logits,
        )

    def teacher_losses(self, logits: jax.Array, teacher_logits: jax.Array) -> jax.Array:
        """Returns the distillation loss of each image, `[batch]`.

        Args:
          logits: the student's logits, `[batch, classes]`.
          teacher_logits: the teacher's logits, `[batch, classes]`.
        """
        if self.kind == "hard":
            targets = teacher_logits.argmax(-1)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        log_probs, teacher_log_probs = (
            jax.nn.log_softmax(x / self.temperature) for x in (logits, teacher_logits)
        )
        return self.temperature**2 * (
            jnp.exp(teacher_log_probs) * (teacher_log_probs - log_probs)
        ).sum(-1)

    def multiply_adds(
        self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None
    ) -> float:
        # The teacher has no backward pass, hence the division by 3: see `Objective.multiply_adds`.
        return super().multiply_adds(model, batch) + count_multiply_adds(self.frozen) / 3


OBJECTIVE = Distillation
