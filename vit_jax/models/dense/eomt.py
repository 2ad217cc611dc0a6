"""EoMT: segmentation by queries in the last layers of a plain ViT (Kerssies et al., 2503.19108)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.dense.batch_norm import Moments
from vit_jax.models.dense.pyramid import resized
from vit_jax.models.depthwise import depthwise
from vit_jax.models.image_model import ImageModel, TokenModel
from vit_jax.models.layers import GELUS


class Masking(NamedTuple):
    """Random choice of the queries that attend only within their own predicted masks.

    Attributes:
      probabilities: probability that a query is restricted to its mask, in each layer with queries,
        `[layers]`.
      draws: uniform random numbers in [0, 1), `[batch, layers, queries]`. A query is restricted in
        a layer if its number is smaller than the layer's probability.
    """

    probabilities: jax.Array
    draws: jax.Array


class Upscale(nnx.Module):
    """Doubles the sides of a feature map: transposed convolution, depthwise convolution, norm."""

    def __init__(self, dim: int, *, dtype, rngs: nnx.Rngs):
        drawn = initializers.uniform(0.5 * dim**-0.5)  # PyTorch's default.
        self.expand = nnx.LinearGeneral(
            dim, (2, 2, dim), kernel_init=drawn, bias_init=drawn, dtype=dtype, rngs=rngs
        )
        self.kernel = nnx.Param(initializers.uniform(1 / 3)(rngs.params(), (3, 3, 1, dim)))
        self.norm = nnx.LayerNorm(dim, epsilon=1e-6, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, height, width, dim]` to `[batch, 2 height, 2 width, dim]`."""
        batch, height, width, dim = x.shape
        x = self.expand(x).transpose(0, 1, 3, 2, 4, 5).reshape(batch, 2 * height, 2 * width, dim)
        return self.norm(depthwise(GELUS["erf"](x), self.kernel[...].astype(x.dtype)))


class EoMT(nnx.Module):
    """Queries in the last layers of a ViT; each query predicts a class and a mask.

    During training the attention of a query is randomly restricted to the query's own predicted
    mask. The probability of this restriction falls to 0 in the course of training, in one layer
    after the other. Therefore a trained model needs no masks for its attention. The queries have no
    position embeddings.

    Args:
      model: a ViT.
      num_classes: number of classes. The class "no object", which a query may also predict, is not
        counted.
      layers: number of layers, at the end of the encoder, that process the queries.
      frozen: True if the model is not trained. The model then runs without dropout.

    Raises:
      UserError: the model is no plain ViT, or has fewer layers than `layers`.
    """

    def __init__(
        self,
        model: Any,
        num_classes: int,
        *,
        queries: int = 100,
        layers: int = 4,
        frozen: bool = False,
        rngs: nnx.Rngs,
    ):
        check_takes_queries(model, layers)
        dim, dtype = model.dim, jnp.dtype(model.options.dtype)
        self.layers, self.frozen = layers, frozen
        self.queries = nnx.Param(initializers.normal(1.0)(rngs.params(), (queries, dim)))

        def dense(outputs):
            return nnx.Linear(
                dim,
                outputs,
                kernel_init=initializers.torch_convolution(),
                bias_init=initializers.uniform(dim**-0.5),
                dtype=dtype,
                rngs=rngs,
            )

        self.classifier = dense(num_classes + 1)
        self.mask_mlp = nnx.List([dense(dim) for _ in range(3)])
        doublings = max(1, int(math.log2(model.patch_size)) - 2)
        self.upscale = nnx.List([Upscale(dim, dtype=dtype, rngs=rngs) for _ in range(doublings)])

    def __call__(
        self,
        model: Any,
        images: jax.Array,
        rngs: nnx.Rngs | None = None,
        state: Moments | None = None,
        masking: Masking | None = None,
    ) -> dict[str, Any]:
        """Returns float32 logits of masks and classes.

        Without `masking` there is one prediction, after the last layer. With `masking` there is
        also a prediction before each layer with queries; the predictions are in the order of the
        layers.

        Args:
          masking: choice of the queries that attend only within their predicted masks, in training.
            None: no query is restricted.

        Returns:
          A dictionary of two arrays.

          - `masks`: mask logits, `[predictions, batch, queries, rows, columns]`.
          - `classes`: class logits, `[predictions, batch, queries, classes + 1]`; the last class is
            "no object".
        """
        encoder_rngs, predictions = None if self.frozen else rngs, []

        def mask(number: int, x: jax.Array) -> jax.Array | None:
            if masking is None:
                return None
            predictions.append(self.predict(model, x))
            within = resized(jnp.moveaxis(predictions[-1][0], 1, -1), model.grid) > 0
            within = jnp.moveaxis(within.reshape(x.shape[0], -1, within.shape[-1]), 1, -1)
            free = masking.draws[:, number] >= masking.probabilities[number]
            full = jnp.ones((x.shape[0], within.shape[1], x.shape[1]), bool)
            return full.at[:, :, model.patch_tokens].set(within | free[..., None])

        x = model.assemble(model.patches(images), encoder_rngs)
        queries = jnp.broadcast_to(self.queries[...], (x.shape[0], *self.queries.shape))
        x = model.encode_with(x, queries, self.layers, mask, encoder_rngs)
        predictions.append(self.predict(model, x))
        masks, classes = (jnp.stack(part) for part in zip(*predictions, strict=True))
        return {"masks": masks, "classes": classes}

    def predict(self, model: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns float32 logits of masks and classes from tokens before the final norm.

        Args:
          x: `[batch, tokens + queries, dim]`.

        Returns:
          Mask logits, `[batch, queries, rows, columns]`, and class logits, `[batch, queries,
          classes + 1]`.
        """
        x = x if model.norm is None else model.norm(x)
        queries = x[:, -self.queries.shape[0] :]
        features = x[:, model.patch_tokens].reshape(x.shape[0], *model.grid, -1)
        for step in self.upscale:
            features = step(features)
        embedding = queries
        for number, layer in enumerate(self.mask_mlp):
            embedding = layer(GELUS["erf"](embedding) if number else embedding)
        masks = jnp.einsum(
            "bqd,bhwd->bqhw", embedding, features, preferred_element_type=jnp.float32
        )
        return masks, self.classifier(queries).astype(jnp.float32)

    def scores(self, outputs: dict[str, Any]) -> jax.Array:
        """Returns the class scores of each mask pixel, float32 `[batch, rows, columns, classes]`.

        The score of a class is the sum, over all queries, of the query's mask probability times its
        class probability.
        """
        masks, classes = outputs["masks"][-1], outputs["classes"][-1]
        shares = jax.nn.softmax(classes)[..., :-1]
        return jnp.einsum("bqhw,bqc->bhwc", jax.nn.sigmoid(masks), shares)


def check_takes_queries(model: ImageModel, layers: int) -> None:
    """Raises UserError if the last layers of a model cannot process additional query tokens."""
    if not isinstance(model, TokenModel) or not model.takes_queries:
        raise UserError(
            "config.segmentation.head='eomt' adds queries to a plain ViT, without "
            "model.position='relative' or 'bias', axial attention and model.depth_by='subset', "
            f"and this {type(model).__name__} is none; use another model, or "
            "config.segmentation.head='upernet' (pyramids) or 'linear'"
        )
    if layers > model.depth:
        raise UserError(
            f"config.segmentation.query_layers = {layers} must be at most the model's "
            f"{model.depth} layers"
        )


def mask_probabilities(
    update: jax.Array | int, starts: Sequence[float], ends: Sequence[float], steps: int
) -> jax.Array:
    """Returns the probability of masked attention in each layer with queries, `[layers]`.

    The probability falls from 1 to 0 polynomially, with power 0.9, as in the authors' code.

    Args:
      update: number of the training step, counted from 1.
      starts: for each layer, the share of the training run (0 to 1) at which its probability begins
        to fall.
      ends: for each layer, the share of the training run at which its probability reaches 0.
      steps: number of steps of the training run.
    """
    start, end = (jnp.round(jnp.asarray(x, jnp.float32) * steps) for x in (starts, ends))
    progress = (update - 1 - start) / jnp.maximum(end - start, 1)
    # The gradient of x ** 0.9 is infinite at x = 0, but no gradient is computed here.
    return (1 - jnp.clip(progress, 0, 1)) ** 0.9
