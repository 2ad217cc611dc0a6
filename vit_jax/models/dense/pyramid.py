"""Dense features of any image model, as a list with one array for each stage."""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models.image_model import ImageModel, TokenModel


def pyramid(model: ImageModel, images: jax.Array, rngs: nnx.Rngs | None = None) -> list[jax.Array]:
    """Returns the dense features of each stage, `[batch, rows, columns, channels]`, finest first.

    For a ViT the list contains only one array: the normalized patches of the last layer.
    """
    found = model.features(images, rngs, dense=True)
    return found if isinstance(found, list) else [found]


def widths_of(model: ImageModel) -> tuple[int, ...]:
    """Returns the number of channels of each array that `pyramid` returns.

    The model may contain shapes in place of arrays.
    """
    if isinstance(model, TokenModel):
        return (model.dim,)
    image = jax.ShapeDtypeStruct((1, *model.image_size, model.channels), jnp.uint8)
    graphdef, params = nnx.split(model)
    shapes = jax.eval_shape(
        lambda params, images: pyramid(nnx.merge(graphdef, params), images), params, image
    )
    return tuple(stage.shape[-1] for stage in shapes)


def resized(scores: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Resizes `[batch, rows, columns, classes]` bilinearly to `[batch, *size, classes]`.

    The result equals PyTorch's `interpolate(mode="bilinear", align_corners=False)`.
    """
    shape = (scores.shape[0], *size, scores.shape[-1])
    return jax.image.resize(scores, shape, "linear", antialias=False)
