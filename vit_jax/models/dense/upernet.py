"""UPerNet (Xiao et al., 2018): pyramid pooling and a feature pyramid on a model with stages."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.dense.batch_norm import BatchNorm, Moments, Statistics
from vit_jax.models.dense.pyramid import pyramid, resized, widths_of
from vit_jax.models.dropout import drop
from vit_jax.models.image_model import ImageModel, TokenModel

POOLS = (1, 2, 3, 6)  # Pyramid pooling averages over grids of 1x1, 2x2, 3x3 and 6x6 bins.


class ConvNorm(nnx.Module):
    """A convolution without a bias, followed by a batch norm and a ReLU.

    `name` is the key of the batch norm in `Statistics`, and `side` the side of the convolution's
    kernel.
    """

    def __init__(self, name: str, inputs: int, outputs: int, side: int, *, dtype, rngs: nnx.Rngs):
        # Kaiming initialization by fan-out, as in mmcv's ConvModule.
        std = math.sqrt(2 / (outputs * side**2))
        self.conv = nnx.Conv(
            inputs,
            outputs,
            kernel_size=(side, side),
            use_bias=False,
            kernel_init=initializers.normal(std),
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = BatchNorm(name, outputs)

    def __call__(self, x: jax.Array, statistics: Statistics) -> jax.Array:
        """Maps `[batch, height, width, inputs]` to `[batch, height, width, outputs]`."""
        return nnx.relu(self.norm(self.conv(x), statistics))


class UPerNet(nnx.Module):
    """UPerNet with an auxiliary fully convolutional head, as in mmsegmentation.

    The features of each stage are layer-normalized first, as in the segmentation code of the Swin
    and ConvNeXt authors. The scores have the resolution of the first stage.

    Args:
      model: a model with stages, such as Swin or ConvNeXt; the auxiliary head reads the
        second-to-last stage.
      dim: number of channels of the head.
      auxiliary_dim: number of channels of the auxiliary head.
      dropout: dropout rate of channels before the classifiers.
      frozen: True if the model is not trained. The model then runs without dropout.

    Raises:
      UserError: the model has no stages.
    """

    def __init__(
        self,
        model: ImageModel,
        num_classes: int,
        *,
        dim: int = 512,
        auxiliary_dim: int = 256,
        dropout: float = 0.1,
        frozen: bool = False,
        rngs: nnx.Rngs,
    ):
        if isinstance(model, TokenModel) or len(widths := widths_of(model)) < 2:
            raise UserError(
                f"config.segmentation.head='upernet' reads the stages of a pyramid, and a "
                f"{type(model).__name__} has one; use Swin or ConvNeXt, or "
                "config.segmentation.head='eomt' or 'linear'"
            )
        self.dropout, self.frozen, last = dropout, frozen, len(widths) - 1
        dtype = jnp.dtype(model.options.dtype)

        def conv(name, inputs, outputs, side):
            return ConvNorm(name, inputs, outputs, side, dtype=dtype, rngs=rngs)

        def classifier(inputs):
            return nnx.Linear(inputs, num_classes, kernel_init=initializers.normal(0.01), rngs=rngs)

        self.stage_norms = nnx.List(
            [nnx.LayerNorm(width, epsilon=1e-5, dtype=dtype, rngs=rngs) for width in widths]
        )
        self.pooled = nnx.List([conv(f"pooled_{side}", widths[-1], dim, 1) for side in POOLS])
        self.bottleneck = conv("bottleneck", widths[-1] + len(POOLS) * dim, dim, 3)
        self.lateral = nnx.List(
            [conv(f"lateral_{i}", width, dim, 1) for i, width in enumerate(widths[:-1])]
        )
        self.smooth = nnx.List([conv(f"smooth_{i}", dim, dim, 3) for i in range(last)])
        self.fused = conv("fused", len(widths) * dim, dim, 3)
        self.classifier = classifier(dim)
        self.auxiliary = conv("auxiliary", widths[-2], auxiliary_dim, 3)
        self.auxiliary_classifier = classifier(auxiliary_dim)

    def __call__(
        self,
        model: ImageModel,
        images: jax.Array,
        rngs: nnx.Rngs | None = None,
        state: Moments | None = None,
    ) -> dict[str, Any]:
        """Returns a dictionary with the key `scores`: float32 `[batch, rows, columns, classes]`.

        In training the dictionary also contains `auxiliary`, the scores of the auxiliary head, and
        `moments`, the statistics of the batch norms.
        """
        stages = pyramid(model, images, None if self.frozen else rngs)
        stages = [norm(x) for norm, x in zip(self.stage_norms, stages, strict=True)]
        statistics = Statistics(state if rngs is None else None)
        scores = self.classifier(self._dropped(self.decode(stages, statistics), rngs))
        if rngs is None:
            return {"scores": scores}
        x = self._dropped(self.auxiliary(stages[-2], statistics), rngs)
        auxiliary = self.auxiliary_classifier(x)
        return {"scores": scores, "auxiliary": auxiliary, "moments": statistics.moments}

    def decode(self, stages: Sequence[jax.Array], statistics: Statistics) -> jax.Array:
        """Fuses all stages to `[batch, rows, columns, dim]`, with the first stage's resolution."""
        top = stages[-1]
        context = [
            resized(conv(pool(top, side), statistics), top.shape[1:3])
            for conv, side in zip(self.pooled, POOLS, strict=True)
        ]
        levels = [conv(x, statistics) for conv, x in zip(self.lateral, stages[:-1], strict=True)]
        levels.append(self.bottleneck(jnp.concatenate([top, *context], -1), statistics))
        for level in range(len(levels) - 1, 0, -1):
            levels[level - 1] += resized(levels[level], levels[level - 1].shape[1:3])
        smooth = [conv(x, statistics) for conv, x in zip(self.smooth, levels[:-1], strict=True)]
        size = smooth[0].shape[1:3]
        every = [resized(x, size) for x in (*smooth, levels[-1])]
        return self.fused(jnp.concatenate(every, -1), statistics)

    def _dropped(self, x: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        """Drops whole channels in training; the result is float32."""
        return drop(x.astype(jnp.float32), self.dropout, rngs, (x.shape[0], 1, 1, x.shape[-1]))

    def scores(self, outputs: dict[str, Any]) -> jax.Array:
        """Returns the score of each class, float32 `[batch, rows, columns, classes]`."""
        return outputs["scores"]


def pool(x: jax.Array, side: int) -> jax.Array:
    """Averages `[batch, height, width, channels]` over a grid of `side` by `side` bins.

    As in PyTorch's adaptive pooling, bins overlap where `side` does not divide the size.
    """

    def bins(length: int) -> np.ndarray:
        index, place = np.arange(side)[:, None], np.arange(length)
        inside = (place >= index * length // side) & (place < -(-(index + 1) * length // side))
        return (inside / inside.sum(1, keepdims=True)).astype(np.float32)

    rows, columns = (jnp.asarray(bins(length), x.dtype) for length in x.shape[1:3])
    return jnp.einsum("rh,cw,bhwd->brcd", rows, columns, x)
