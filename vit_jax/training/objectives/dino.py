"""Self-distillation without labels (DINO; Caron et al., 2021; 2104.14294).

A student learns what its teacher says of another view of an image; the teacher is an EMA of the student. It
sees the large views alone, the student also local crops: smaller parts of the image, of fewer pixels.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.data.colour_distortion import distortions
from vit_jax.data.views import View
from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.model_card import traced_multiply_adds
from vit_jax.options import RATE, Option, number, several, unless, whole
from vit_jax.training.memory import Momentum, cosine_share, with_weights
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    Loss,
    Now,
    Objective,
    check_self_supervised,
)

VIEWS = 2  # Large ones.
BOTTLENECK = 256  # Width of what is compared with the prototypes.
STUDENT_TEMPERATURE = 0.1
CENTRE_SHARE = 0.1  # Of the newest batch in the centre.

OPTIONS = {
    "objective.head_hidden": Option(2048, whole(1, 2**20), "Width of the MLP of dino's head.", smoke=32),
    "objective.prototypes": Option(
        65_536, whole(2, 2**22), "Directions that dino's head tells apart.", smoke=64
    ),
    "objective.teacher_momentum": Option(0.996, RATE, "Momentum of dino's teacher at first; it rises to 1."),
    "objective.local_crops": Option(
        0,
        whole(0, 64),
        "Small crops of an image, which dino's student sees besides the two large ones.",
        fits=lambda value, config: unless(
            not value or config.data.crop in ("inception", "random_resized"),
            f"0 with data.crop={config.data.crop!r}, which draws no area; 'random_resized' does",
        ),
    ),
    "objective.local_size": Option(96, whole(1, 2**14), "Height and width of a small crop in pixels."),
    "objective.local_area": Option(
        (0.05, 0.4),
        several(number(above=0, most=1), count=2, ascending=True),
        "Share of the image's area in a small crop; that of a large one is data.crop_area.",
    ),
    "objective.teacher_temperature": Option(0.04, number(1e-3, 100.0), "Temperature of dino's teacher."),
}


class DINO(Objective):
    """Predicts the teacher's distribution over prototypes for one view from the other one, both ways.

    The teacher is a moving average of the student, and is what a run is judged by. Its logits are centred by
    their running mean and sharpened, lest both say the same of all images. Parameters: the head behind the
    features, an MLP of three layers and directions of the prototypes.

    Args:
      features: width of what enters the model's head.
      hidden: width of the MLP.
      prototypes: how many; the authors take 65,536.
      temperature: of the teacher.
      teacher: makes the teacher.
      local: number of local crops, and their height and width in pixels.
    """

    metrics: ClassVar = {"spread": "number", "teacher_entropy": "number"}

    def __init__(
        self,
        features: int,
        *,
        hidden: int,
        prototypes: int,
        temperature: float,
        teacher: Momentum,
        local: tuple[int, int] = (0, 0),
        rngs: nnx.Rngs,
    ):
        self.prototype_count, self.feature_count = prototypes, features
        self.temperature, self.teacher = temperature, teacher
        self.local_crops, self.local_size = local
        normal = initializers.normal(0.02)
        widths = (features, hidden, hidden, BOTTLENECK)
        self.layers = nnx.Dict(
            {
                str(number): nnx.Linear(before, after, kernel_init=normal, rngs=rngs)
                for number, (before, after) in enumerate(zip(widths, widths[1:], strict=False))
            }
        )
        self.prototypes = nnx.Param(normal(rngs.params(), (BOTTLENECK, prototypes)))

    @classmethod
    def make(cls, config: ConfigDict, model: nnx.Module, steps: int, rngs: nnx.Rngs) -> "DINO":
        check_self_supervised(config)
        if config.model.pre_logits:
            raise UserError(
                "config.objective.name='dino' trains no layer of the model's head: model.pre_logits=False"
            )
        values = config.objective
        if values.local_crops:
            try:
                _width(model, (values.local_size, values.local_size))
            except UserError as error:
                raise UserError(f"config.objective.local_size = {values.local_size}: {error}") from error
        return cls(
            _width(model, model.image_size),
            hidden=values.head_hidden,
            prototypes=values.prototypes,
            temperature=values.teacher_temperature,
            teacher=Momentum(cosine_share(values.teacher_momentum, steps)),
            local=(values.local_crops, values.local_size),
            rngs=rngs,
        )

    @staticmethod
    def views(config: ConfigDict) -> tuple[View, ...]:
        values, (first, second, small) = config.objective, distortions(config)
        large = View(count=VIEWS, distort=(first, second))
        if not values.local_crops:
            return (large,)
        area, count = tuple(values.local_area), values.local_crops
        return large, View("local", count, values.local_size, crop={"area": area}, distort=(small,) * count)

    @staticmethod
    def judged(config: ConfigDict) -> str | None:
        return "teacher"

    def __call__(self, model: nnx.Module, batch: Batch, now: Now = EVALUATION) -> Loss:
        """Cross-entropy of the student's distributions under the teacher's.

        It is the mean over all pairs of a large view, which the teacher sees, and another view, which the
        student sees.

        Two metrics show a collapse: `spread`, the variance of the teacher's features of length 1 about their
        mean, which goes to 0 where all images look the same; and the entropy of its distribution, which goes
        to the logarithm of the number of prototypes where it says nothing.

        Args:
          batch: `image` uint8 `[batch, 2, height, width, channels]`, and `local` where there are such crops.
        """
        logits, _ = self.compare(model, batch["image"], now.rngs)
        teacher = with_weights(model, now.memory["teacher"])
        head = with_weights(self, now.memory["teacher_head"])
        wanted, embedded = head.compare(teacher, batch["image"])
        targets = jax.nn.softmax((wanted - now.memory["centre"]) / self.temperature)
        said = jax.nn.log_softmax(logits / STUDENT_TEMPERATURE)
        losses = -(targets * said[:, ::-1]).sum(-1).mean(axis=1)
        if self.local_crops:
            small, _ = self.compare(model.resized(self.local_size), batch["local"], now.rngs)
            of_locals = -jnp.einsum("btp,blp->b", targets, jax.nn.log_softmax(small / STUDENT_TEMPERATURE))
            losses = (VIEWS * losses + of_locals) / (VIEWS + VIEWS * self.local_crops)
        entropy = -(targets * jnp.log(jnp.maximum(targets, 1e-30))).sum(-1).mean(axis=1)
        spread = jnp.square(embedded - now.memory["mean"]).sum(-1).mean(axis=1)
        seen = {"centre": wanted.mean(axis=1), "mean": embedded.mean(axis=1)}
        return Loss(losses, {"spread": spread, "teacher_entropy": entropy}, seen)

    def compare(
        self, model: nnx.Module, images: jax.Array, rngs: nnx.Rngs | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Cosines of each view with the prototypes, `[batch, views, prototypes]`, and features of length 1,
        `[batch, views, features]`."""
        features = model.features(images.reshape(-1, *images.shape[2:]), rngs).astype(jnp.float32)
        x = features
        for index, layer in self.layers.items():
            x = layer(x if index == "0" else jax.nn.gelu(x, approximate=False))
        cosines = unit(x) @ unit(self.prototypes[...], axis=0)
        return tuple(each.reshape(*images.shape[:2], -1) for each in (cosines, unit(features)))

    def first_memory(self, params: dict) -> dict[str, Any]:
        centre, mean = np.zeros(self.prototype_count, np.float32), np.zeros(self.feature_count, np.float32)
        return {"teacher": params, "teacher_head": self.own_weights(), "centre": centre, "mean": mean}

    def remember(self, memory: dict, params: dict, seen: dict, update: jax.Array) -> dict:
        means = {
            name: memory[name] + CENTRE_SHARE * (x.mean(axis=0) - memory[name]) for name, x in seen.items()
        }
        return means | {
            "teacher": self.teacher.after(memory["teacher"], params, update),
            "teacher_head": self.teacher.after(memory["teacher_head"], self.own_weights(), update),
        }

    def multiply_adds(self, model: nnx.Module, batch: dict[str, jax.ShapeDtypeStruct] | None = None) -> float:
        graphdef, weights = nnx.split((model, self))

        def of(count: int, size: tuple[int, int]) -> int:
            def compared(weights, images):
                model, objective = nnx.merge(graphdef, weights)
                return objective.compare(model.resized(size), images)

            images = jax.ShapeDtypeStruct((1, count, *size, model.channels), jnp.uint8)
            return traced_multiply_adds(compared, weights, images)

        large = of(VIEWS, model.image_size) * (1 + 1 / 3)
        return large + (of(self.local_crops, 2 * (self.local_size,)) if self.local_crops else 0)


def _width(model: nnx.Module, size: tuple[int, int]) -> int:
    """Width of the features of images of this size; raises UserError where the model is not resized to it."""
    graphdef, weights = nnx.split(model)
    image = jax.ShapeDtypeStruct((1, *size, model.channels), jnp.uint8)
    features = jax.eval_shape(lambda w, x: nnx.merge(graphdef, w).resized(size).features(x), weights, image)
    return features.shape[-1]


def unit(x: jax.Array, axis: int = -1) -> jax.Array:
    """The same directions, of length 1."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(axis, keepdims=True), 1e-12))
