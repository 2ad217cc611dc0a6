"""A head for object detection: it predicts proposals, and a decoder refines them.

The head is a DETR (Carion et al., 2005.12872) in the two-stage form of Deformable DETR (Zhu et al.,
2010.04159), with plain attention, no anchors and no non-maximum suppression. First the head
predicts a class and a box at each position of a feature pyramid. The positions with the highest
class scores are the proposals. They become the queries of the decoder, and each decoder layer
refines the boxes of the queries.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models import initializers
from vit_jax.models.attention import attend
from vit_jax.models.dense.neck import NormedConv, make_neck, places_of
from vit_jax.models.dense.pyramid import pyramid, widths_of
from vit_jax.models.image_model import ImageModel
from vit_jax.models.layers import numbered
from vit_jax.options.objective import DetectionOptions

HEAD_DIM = 32  # Number of channels of an attention head.
PRIOR = 0.01  # Initial probability of a class at a position.
SMALLEST = 0.05  # Initial side of a box at the finest level, relative to the image.
TEMPERATURE = 10000.0  # Temperature of the sine embeddings of boxes.


class DetectionHead(nnx.Module):
    """Head that predicts boxes and class scores of a fixed number of objects.

    Args:
      dim: width of the feature pyramid and of the decoder.
      queries: number of predicted objects; at most the number of positions of the pyramid.
      depth: number of decoder layers. 0: there is no decoder, and the head predicts the proposals.
      masks: also predict a mask of each object.
      frozen: True if the model is not trained. The model then runs without dropout.
    """

    def __init__(
        self,
        model: ImageModel,
        num_classes: int,
        *,
        dim: int,
        queries: int,
        depth: int,
        masks: bool = False,
        frozen: bool = False,
        rngs: nnx.Rngs,
    ):
        self.queries, self.frozen = queries, frozen
        channels = widths_of(model)
        self.neck = make_neck(channels, dim, rngs=rngs)
        levels = 4 if len(channels) == 1 else len(channels)
        self.level_embedding = nnx.Embed(levels, dim, rngs=rngs)
        self.propose = Predictor(dim, num_classes, rngs=rngs)
        self.query_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.layers = numbered(DecoderLayer(dim, num_classes, rngs=rngs) for _ in range(depth))
        self.masks = MaskBranch(dim, rngs=rngs) if masks else None

    def __call__(
        self, model: ImageModel, images: jax.Array, rngs: nnx.Rngs | None = None, state: Any = None
    ) -> dict[str, jax.Array]:
        """Returns the proposals, and the predictions after each decoder layer.

        Returns:
          A dictionary of float32 arrays. Index 0 of an axis of length `1 + depth` selects the
          proposals, and index i the predictions after decoder layer i.

          - `classes`: class logits, `[1 + depth, batch, queries, classes]`.
          - `boxes`: centre x, centre y, width and height, relative to the image, `[1 + depth,
            batch, queries, 4]`.
          - `pixels`, only with masks: embeddings of pixels, `[batch, rows, columns, dim]`.
          - `masks`, only with masks: embeddings of queries, `[1 + depth, batch, queries, dim]`. The
            dot product of a query's and a pixel's embedding is the mask logit.
        """
        stages = pyramid(model, images, None if self.frozen else rngs)
        levels = self.neck([stage.astype(jnp.float32) for stage in stages])
        memory, centres, numbers = places_of(levels)
        sides = SMALLEST * 2.0 ** jnp.stack([numbers, numbers], axis=-1)
        boxes = jnp.concatenate([centres, sides], axis=-1)
        positions = embedded(boxes, memory.shape[-1]) + self.level_embedding(numbers)
        classes, boxes = self.propose(
            memory, jnp.broadcast_to(boxes, (memory.shape[0], *boxes.shape))
        )
        _, best = jax.lax.top_k(classes.max(-1), min(self.queries, classes.shape[1]))

        def chosen(x):
            return jnp.take_along_axis(x, best[..., None], axis=1)

        predicted = [(chosen(classes), chosen(boxes))]
        x = self.query_norm(jax.lax.stop_gradient(chosen(memory)))
        queries = [x]
        for layer in self.layers.values():
            boxes = jax.lax.stop_gradient(predicted[-1][1])
            x, prediction = layer(x, boxes, memory, positions)
            queries.append(x)
            predicted.append(prediction)
        classes, boxes = map(jnp.stack, zip(*predicted, strict=True))
        outputs = {"classes": classes, "boxes": boxes}
        if self.masks is not None:
            outputs |= {
                "masks": self.masks.of_queries(jnp.stack(queries)),
                "pixels": self.masks.of_pixels(levels[0]),
            }
        return outputs


def detection_head(
    options: DetectionOptions,
    model: ImageModel,
    num_classes: int,
    *,
    frozen: bool = False,
    rngs: nnx.Rngs,
) -> DetectionHead:
    """Returns the detection head that a config selects.

    The model may contain shapes in place of arrays.
    """
    sizes: dict[str, Any] = dict(dim=options.dim, queries=options.queries, depth=options.depth)
    sizes["masks"] = options.masks
    return DetectionHead(model, num_classes, **sizes, frozen=frozen, rngs=rngs)


class Predictor(nnx.Module):
    """Predicts class logits and boxes; a box is predicted as an offset to a reference box."""

    def __init__(self, dim: int, num_classes: int, *, rngs: nnx.Rngs):
        prior = nnx.initializers.constant(jnp.log(PRIOR / (1 - PRIOR)))
        self.classes = nnx.Linear(
            dim, num_classes, kernel_init=initializers.lecun(), bias_init=prior, rngs=rngs
        )
        self.hidden = nnx.List([nnx.Linear(dim, dim, rngs=rngs) for _ in range(2)])
        self.boxes = nnx.Linear(dim, 4, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array, boxes: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns logits `[batch, queries, classes]` and boxes `[batch, queries, 4]` in [0, 1].

        Args:
          x: `[batch, queries, dim]`.
          boxes: reference boxes, `[batch, queries, 4]`.
        """
        changes = x
        for layer in self.hidden:
            changes = nnx.relu(layer(changes))
        return self.classes(x), nnx.sigmoid(self.boxes(changes) + logit(boxes))


class DecoderLayer(nnx.Module):
    """A decoder layer: pre-norm self-attention, cross-attention, MLP, and a `Predictor`."""

    def __init__(self, dim: int, num_classes: int, *, rngs: nnx.Rngs):
        self.position = nnx.List([nnx.Linear(dim, dim, rngs=rngs) for _ in range(2)])
        self.norms = nnx.List([nnx.LayerNorm(dim, rngs=rngs) for _ in range(4)])
        self.among = PlacedAttention(dim, rngs=rngs)
        self.across = PlacedAttention(dim, rngs=rngs)
        self.mlp = nnx.List(
            [nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.Linear(4 * dim, dim, rngs=rngs)]
        )
        self.predict = Predictor(dim, num_classes, rngs=rngs)

    def __call__(
        self, x: jax.Array, boxes: jax.Array, memory: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns the queries after this layer, and their class logits and boxes.

        Args:
          x: queries, `[batch, queries, dim]`.
          boxes: the queries' boxes before this layer, `[batch, queries, 4]`.
          memory: features of all positions of the pyramid, `[batch, positions, dim]`.
          positions: position embeddings of these positions, `[positions, dim]`.
        """
        first, second = self.position
        query_positions = second(nnx.relu(first(embedded(boxes, x.shape[-1]))))
        y = self.norms[0](x)
        x = x + self.among(y + query_positions, y + query_positions, y)
        x = x + self.across(self.norms[1](x) + query_positions, memory + positions, memory)
        x = x + self.mlp[1](nnx.relu(self.mlp[0](self.norms[2](x))))
        return x, self.predict(self.norms[3](x), boxes)


class MaskBranch(nnx.Module):
    """Computes embeddings of pixels and of queries; their dot products are mask logits.

    This is Mask DINO's mask branch (Li et al., 2206.02777). The embeddings of the queries are
    divided by sqrt(dim); therefore the initial mask probabilities are close to 0.5.
    """

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.smooth = NormedConv(dim, dim, 3, rngs=rngs)
        self.pixels = nnx.Linear(dim, dim, kernel_init=initializers.lecun(), rngs=rngs)
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.mlp = nnx.List([nnx.Linear(dim, dim, rngs=rngs) for _ in range(3)])

    def of_pixels(self, finest: jax.Array) -> jax.Array:
        """Maps the finest level of the feature pyramid to pixel embeddings.

        The input and the output have the shape `[batch, rows, columns, dim]`.
        """
        return self.pixels(nnx.relu(self.smooth(finest)))

    def of_queries(self, x: jax.Array) -> jax.Array:
        """Maps queries, `[..., dim]`, to mask embeddings of the same shape."""
        x = self.norm(x)
        for number, layer in enumerate(self.mlp):
            x = layer(nnx.relu(x) if number else x)
        return x * x.shape[-1] ** -0.5


class PlacedAttention(nnx.Module):
    """Multi-head attention for inputs with position embeddings.

    The position embeddings have already been added to the queries and the keys. Nothing has been
    added to the values.
    """

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        heads = max(1, dim // HEAD_DIM), min(HEAD_DIM, dim)
        values = dict(kernel_init=initializers.xavier(), rngs=rngs)
        self.query, self.key, self.value = (
            nnx.LinearGeneral(dim, heads, **values) for _ in range(3)
        )
        self.out = nnx.LinearGeneral(heads, dim, axis=(-2, -1), **values)

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        """Computes attention of queries `[batch, queries, dim]` to keys `[batch, keys, dim]`.

        The outputs are `[batch, queries, dim]`.
        """
        return self.out(attend(self.query(query), self.key(key), self.value(value)))


def embedded(boxes: jax.Array, dim: int) -> jax.Array:
    """Returns sine embeddings of boxes, `[..., dim]`.

    Each of a box's four coordinates is embedded in a quarter of the channels.
    """
    count = dim // 8
    frequencies = 2 * jnp.pi / TEMPERATURE ** (jnp.arange(count) / count)
    angles = boxes[..., None] * frequencies
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return waves.reshape(*boxes.shape[:-1], 8 * count)


def logit(shares: jax.Array) -> jax.Array:
    """Inverts the sigmoid; inputs are clipped to [1e-5, 1 - 1e-5]."""
    shares = shares.clip(1e-5, 1 - 1e-5)
    return jnp.log(shares) - jnp.log1p(-shares)
