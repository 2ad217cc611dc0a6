"""Helpers of masking objectives: images as patches, random orders, gather and scatter."""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.models.image_model import TokenModel
from vit_jax.options.run import RunOptions
from vit_jax.training.objectives.objective import check_self_supervised


def check_hides_patches(config: RunOptions, model: nnx.Module, does: str = "hides") -> None:
    """Raises UserError if the model or the config does not support hidden patches.

    Args:
      does: verb for the error message, such as `hides`.
    """
    check_self_supervised(config)
    name = config.objective.name
    if not isinstance(model, TokenModel) or not model.embeds_pixels:
        raise UserError(
            f"config.objective.name={name!r} {does} patches of pixels; the model must be a ViT, "
            "not a hybrid or a ResNet, whose features depend on several patches"
        )
    if not model.pools_plainly:
        raise UserError(
            f"config.objective.name={name!r} trains nothing behind the encoder: it needs "
            "model.pooling='cls' or 'gap', model.pre_logits=False and model.fc_norm=False"
        )


def patchify(images: jax.Array, patch: int) -> jax.Array:
    """Converts images `[batch, height, width, channels]` to patches in raster order.

    The result is `[batch, patches, patch * patch * channels]`.
    """
    batch, height, width, channels = images.shape
    grid = images.reshape(batch, height // patch, patch, width // patch, patch, channels)
    return grid.swapaxes(2, 3).reshape(batch, -1, patch * patch * channels)


def unpatchify(patches: jax.Array, grid: tuple[int, int], patch: int) -> jax.Array:
    """Converts patches `[batch, patches, patch * patch * channels]` back to images."""
    rows, columns = grid
    pixels = patches.reshape(len(patches), rows, columns, patch, patch, -1)
    return pixels.swapaxes(2, 3).reshape(len(patches), rows * patch, columns * patch, -1)


def shuffled(keys: jax.Array, patches: int) -> jax.Array:
    """Returns a uniformly random order of the patches of each image, `[batch, patches]`."""
    noise = jax.vmap(lambda key: jax.random.uniform(key, (patches,)))(keys)
    return jnp.argsort(noise, axis=1)


def split_keys(keys: jax.Array, count: int) -> jax.Array:
    """Splits the random key of each image into `count` keys, `[count, batch]`."""
    return jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys)


def pick(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Gathers tokens of each image: `x[i, positions[i]]` for image i, `[batch, picked, dim]`.

    Args:
      x: tokens, `[batch, tokens, dim]`.
      positions: positions of the tokens to gather, `[batch, picked]`.
    """
    return jnp.take_along_axis(x, positions[..., None], axis=1)


def put(x: jax.Array, positions: jax.Array, rows: jax.Array) -> jax.Array:
    """Replaces tokens of each image: `x[i, positions[i]] = rows[i]` for image i.

    Args:
      x: tokens, `[batch, tokens, dim]`.
      positions: positions of the tokens to replace, `[batch, picked]`.
      rows: the new tokens, `[batch, picked, dim]`.
    """
    # `vmap` maps over images. If the batch axis were indexed instead, XLA would copy tokens between
    # devices.
    return jax.vmap(lambda x, at, rows: x.at[at].set(rows))(x, positions, rows.astype(x.dtype))
