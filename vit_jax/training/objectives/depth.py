"""Monocular depth: a head predicts the distance of each pixel in metres."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.data.dense_fields import depth_field
from vit_jax.data.fields import DEPTH, Field
from vit_jax.evaluation.dense_metrics import DELTA
from vit_jax.models.dense.batch_norm import initial_statistics, updated_statistics
from vit_jax.models.dense.depth import DepthHead, depth_head
from vit_jax.models.dense.palette import coloured_depth, depth_legend
from vit_jax.models.dense.pyramid import resized
from vit_jax.options.objective import DepthOptions
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.objective import (
    EVALUATION,
    Batch,
    ImageScores,
    Loss,
    Objective,
    StepContext,
    check_self_supervised,
)

STATISTICS = "statistics"  # State: running mean and variance of the head's batch norms.
EPSILON = 1e-3  # Metres that are added to a depth before its logarithm.
MEAN_WEIGHT = 0.15  # Weight of the squared mean log error.
STRIDES = (1, 2, 4, 6)  # The gradient loss uses every pixel, every 2nd, every 4th and every 6th.


class Depth(Objective):
    """Depth estimation by a head on the model's tokens, as in DINOv2's and DINOv3's evaluation.

    The loss is the scale-invariant error of the logarithm of depth (`scale_invariant_losses`).
    Optionally a loss of the error's gradients is added (`gradient_losses`). Both are computed for
    each image, so they do not depend on the number of devices and micro-batches. The authors of
    DINOv2 and DINOv3 instead compute one loss over all pixels of the two images on a GPU.

    Pixels of unknown depth and pixels beyond `options.max_depth` are ignored.
    """

    section = "depth"
    made_by = ("head", "layers", "class_token", "normalize", "dim", "bins")
    carried = (STATISTICS,)
    metrics: ClassVar = {"rmse": "number", "delta1": "share", "known_pixels": "share"}
    split_metrics: ClassVar = {"rmse": "number", "abs_rel": "number", "delta1": "share"}
    picture_rows = "original, true depth, predicted depth"

    def __init__(self, options: DepthOptions, head: DepthHead):
        self.head = head
        self.nearest, self.farthest = options.min_depth, options.max_depth
        self.gradient_weight, self.scale_steps = options.gradient_weight, options.scale_steps

    @staticmethod
    def sees_length(config: RunOptions) -> bool:
        return False

    @staticmethod
    def fields(config: RunOptions) -> tuple[Field, ...]:
        return (depth_field(config.data.image_size),)

    @classmethod
    def make(cls, config: RunOptions, model: Any, steps: int, rngs: nnx.Rngs) -> "Depth":
        check_self_supervised(config, all_trained=False)
        frozen = config.finetune.train == "head"
        return cls(config.depth, depth_head(config.depth, model, frozen=frozen, rngs=rngs))

    def initial_state(self, params: dict) -> dict[str, Any]:
        statistics = initial_statistics(self.head)
        return {STATISTICS: statistics} if statistics else {}

    def update_state(self, state: dict, params: dict, aux: dict, update: jax.Array) -> dict:
        return {name: updated_statistics(old, aux) for name, old in state.items()}

    def __call__(self, model: Any, batch: Batch, context: StepContext = EVALUATION) -> Loss:
        """Returns the loss and the metrics of each image.

        `Loss.outputs` contains the errors of each image (`depth_errors`). In evaluation
        `over_split` computes their means over the images of a split.

        Args:
          batch: `image`, and `depth` float32 `[batch, height, width]` in metres, 0 if unknown.
        """
        true = batch[DEPTH]
        outputs = self.head(model, batch["image"], context.rngs, context.state.get(STATISTICS))
        predicted = resized(self.head.scores(outputs), true.shape[1:])[..., 0]
        known = (true > 0) & (true <= self.farthest)
        training = context.rngs is not None
        scale_only = training & (jnp.asarray(context.update) <= self.scale_steps)
        errors = jnp.where(known, jnp.log(predicted + EPSILON) - jnp.log(true + EPSILON), 0)
        losses = scale_invariant_losses(errors, known, scale_only)
        if self.gradient_weight:
            losses += self.gradient_weight * gradient_losses(errors, known)
        metrics = depth_errors(predicted, true, known)
        return Loss(
            losses,
            {name: metrics[name] for name in self.metrics},
            aux=outputs["moments"],
            outputs=metrics,
        )

    def pictures(
        self, model: Any, batch: Batch, context: StepContext = EVALUATION
    ) -> tuple[jax.Array, jax.Array]:
        """Returns pictures of the true and of the predicted depth, in [0, 255].

        Each is `[batch, height, width, 3]`. Colours stand for depth; pixels of unknown depth are
        black. The colour scale spans the range of the image's true depth.
        """
        true = batch[DEPTH]
        outputs = self.head(model, batch["image"], None, context.state.get(STATISTICS))
        predicted = resized(self.head.scores(outputs), true.shape[1:])[..., 0]
        known = (true > 0) & (true <= self.farthest)
        nearest = jnp.where(known, true, self.farthest).min((1, 2), keepdims=True)
        farthest = jnp.where(known, true, 0).max((1, 2), keepdims=True)
        colours = coloured_depth(true, nearest, farthest) * known[..., None]
        return colours, coloured_depth(predicted, nearest, farthest)

    def over_split(self, outputs: dict[str, np.ndarray]) -> dict[str, float]:
        """Returns the means of the depth errors over the split's images (Eigen et al. 2014).

        Images without known pixels are ignored.

        Args:
          outputs: the values of `depth_errors`, each `[images]`.
        """
        known = outputs["known_pixels"] > 0
        if not known.any():
            return dict.fromkeys(self.split_metrics, 0.0)
        return {name: float(outputs[name][known].mean()) for name in self.split_metrics}

    def image_scores(self, outputs: dict[str, np.ndarray]) -> ImageScores:
        """Returns the RMSE of each image in metres."""
        errors = np.where(outputs["known_pixels"] > 0, outputs["rmse"], np.nan)
        return ImageScores("RMSE", errors, "{:.3f} m", highest=True)

    def legend(self, outputs: dict[str, np.ndarray], class_names: Sequence[str]) -> dict[str, str]:
        return depth_legend()

    @staticmethod
    def summary(config: RunOptions) -> str:
        options = config.depth
        return f"depths from {options.min_depth:g} to {options.max_depth:g} metres"

    def warning(self, means: dict[str, float], update: int) -> str | None:
        if means["known_pixels"] > 0:
            return None
        return (
            f"no pixel has a depth above 0 and up to config.depth.max_depth = {self.farthest:g} "
            "metres, so nothing is learned: check config.data.depth_scale (metres of a unit of the "
            "depth maps) and config.depth.max_depth"
        )


def _means(values: jax.Array, known: jax.Array) -> jax.Array:
    """Returns the mean of each image's values over its known pixels, `[batch]`.

    The result is 0 for an image without known pixels. `values` and the bool `known` are
    `[batch, height, width]`.
    """
    return jnp.where(known, values, 0).sum((1, 2)) / jnp.maximum(known.sum((1, 2)), 1)


def _roots(values: jax.Array) -> jax.Array:
    """Returns square roots. Unlike `jnp.sqrt`, the gradient at 0 is 0 and not infinite."""
    positive = values > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, values, 1)), 0)


def scale_invariant_losses(
    errors: jax.Array, known: jax.Array, scale_only: jax.Array | bool = False
) -> jax.Array:
    """Returns the scale-invariant loss of each image, `[batch]` (DINOv2's SigLoss, AdaBins).

    The loss is sqrt(variance of the errors + 0.15 * (mean error)^2).

    Args:
      errors: log(predicted depth) - log(true depth) of each pixel, `[batch, height, width]`.
      known: False for pixels to ignore, bool `[batch, height, width]`.
      scale_only: True: the variance is omitted, so only the mean error counts.
    """
    mean, count = _means(errors, known), known.sum((1, 2))
    squares = jnp.where(known, (errors - mean[:, None, None]) ** 2, 0).sum((1, 2))
    variance = squares / jnp.maximum(count - 1, 1)
    return _roots(jnp.where(scale_only, 0, variance) + MEAN_WEIGHT * mean**2)


def gradient_losses(errors: jax.Array, known: jax.Array) -> jax.Array:
    """Returns the gradient loss of each image, `[batch]` (DINOv3's GradientLogLoss, MegaDepth).

    The loss is a sum over four resolutions: every pixel, every 2nd, every 4th and every 6th. At
    each resolution the loss is the sum of |errors[i] - errors[i + 2]| along rows and columns, over
    pairs of known pixels. The sum is divided by the number of known pixels at this resolution.

    Args:
      errors: log(predicted depth) - log(true depth) of each pixel, `[batch, height, width]`; 0 for
        unknown pixels.
      known: False for pixels to ignore, bool `[batch, height, width]`.
    """
    total = jnp.zeros(len(errors))
    for stride in STRIDES:
        x, mask = errors[:, ::stride, ::stride], known[:, ::stride, ::stride]
        down = jnp.abs(x[:, :-2] - x[:, 2:]) * (mask[:, :-2] & mask[:, 2:])
        right = jnp.abs(x[:, :, :-2] - x[:, :, 2:]) * (mask[:, :, :-2] & mask[:, :, 2:])
        total += (down.sum((1, 2)) + right.sum((1, 2))) / jnp.maximum(mask.sum((1, 2)), 1)
    return total


def depth_errors(predicted: jax.Array, true: jax.Array, known: jax.Array) -> dict[str, jax.Array]:
    """Returns `rmse`, `abs_rel`, `delta1` and the share of `known_pixels` of each image, `[batch]`.

    The errors are defined in `vit_jax.evaluation.dense_metrics.DepthMetrics`. For an image without
    known pixels the errors are 0.
    """
    true = jnp.where(known, true, 1)
    ratio = jnp.maximum(predicted / true, true / predicted)
    return {
        "rmse": _roots(_means((predicted - true) ** 2, known)),
        "abs_rel": _means(jnp.abs(predicted - true) / true, known),
        "delta1": _means(ratio < DELTA, known),
        "known_pixels": known.mean((1, 2)),
    }


OBJECTIVE = Depth
