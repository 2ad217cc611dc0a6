"""The linear head of DINOv2's and DINOv3's segmentation probes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models import initializers
from vit_jax.models.dense.batch_norm import BatchNorm, Moments, Statistics
from vit_jax.models.dense.pyramid import pyramid, widths_of
from vit_jax.models.dropout import drop
from vit_jax.models.image_model import ImageModel


class LinearHead(nnx.Module):
    """Dropout of whole channels, batch norm, and a linear layer at each feature map position.

    The head reads the normalized patches of a ViT, or the last stage of a model with stages.
    Dropout comes before the norm, as in DINOv3's `eval/segmentation/models/heads/linear_head.py`.
    """

    def __init__(
        self,
        model: ImageModel,
        num_classes: int,
        *,
        dropout: float = 0.1,
        frozen: bool = False,
        rngs: nnx.Rngs,
    ):
        channels = widths_of(model)[-1]
        self.dropout, self.frozen = dropout, frozen
        self.norm = BatchNorm("norm", channels)
        self.classifier = nnx.Linear(
            channels, num_classes, kernel_init=initializers.normal(0.01), rngs=rngs
        )

    def __call__(
        self,
        model: ImageModel,
        images: jax.Array,
        rngs: nnx.Rngs | None = None,
        state: Moments | None = None,
    ) -> dict[str, Any]:
        """Returns a dictionary with the key `scores`: float32 `[batch, rows, columns, classes]`.

        In training the dictionary also contains `moments`, the statistics of the batch norm.
        """
        statistics = Statistics(state if rngs is None else None)
        x = pyramid(model, images, None if self.frozen else rngs)[-1]
        x = drop(x, self.dropout, rngs, (x.shape[0], 1, 1, x.shape[-1]))
        x = self.norm(x.astype(jnp.float32), statistics)
        return {"scores": self.classifier(x), "moments": statistics.moments}

    def scores(self, outputs: dict[str, Any]) -> jax.Array:
        """Returns the score of each class, float32 `[batch, rows, columns, classes]`."""
        return outputs["scores"]
