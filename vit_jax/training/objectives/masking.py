"""Patches as rows of pixels, and which of an image's patches a self-supervised objective hides."""

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.models.image_model import TokenModel
from vit_jax.training.objectives.objective import check_self_supervised


def check_hides_patches(config: ConfigDict, model: nnx.Module, does: str = "hides") -> None:
    """Raises UserError where no patches of this model can be hidden, or the config's values do not
    fit.

    Args:
      does: in a word, what else an objective does with patches of pixels.
    """
    check_self_supervised(config)
    name = config.objective.name
    if not isinstance(model, TokenModel) or not model.embeds_pixels:
        raise UserError(
            f"config.objective.name={name!r} {does} patches of pixels; the model must be a ViT, "
            "not a hybrid or a ResNet, whose features see beyond a patch"
        )
    if not model.pools_plainly:
        raise UserError(
            f"config.objective.name={name!r} trains nothing behind the encoder: it needs "
            "model.pooling='cls' or 'gap', model.pre_logits=False and model.fc_norm=False"
        )


def patchify(images: jax.Array, patch: int) -> jax.Array:
    """`[batch, height, width, channels]` to `[batch, patches, patch * patch * channels]`, in raster
    order.
    """
    batch, height, width, channels = images.shape
    grid = images.reshape(batch, height // patch, patch, width // patch, patch, channels)
    return grid.swapaxes(2, 3).reshape(batch, -1, patch * patch * channels)


def unpatchify(patches: jax.Array, grid: tuple[int, int], patch: int) -> jax.Array:
    """The images again, from `[batch, patches, patch * patch * channels]`."""
    rows, columns = grid
    pixels = patches.reshape(len(patches), rows, columns, patch, patch, -1)
    return pixels.swapaxes(2, 3).reshape(len(patches), rows * patch, columns * patch, -1)


def shuffled(keys: jax.Array, patches: int) -> jax.Array:
    """A random order of the patches of each image, `[batch, patches]`; every order is as likely."""
    noise = jax.vmap(lambda key: jax.random.uniform(key, (patches,)))(keys)
    return jnp.argsort(noise, axis=1)


def pick(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows of each image, `[batch, tokens, dim]` at `[batch, picked]` to `[batch, picked, dim]`."""
    return jnp.take_along_axis(x, positions[..., None], axis=1)


def put(x: jax.Array, positions: jax.Array, rows: jax.Array) -> jax.Array:
    """`x` with other rows at these positions of each image; what `pick` reads."""
    # Image by image: of indices into the batch XLA does not see that devices need no others' rows.
    return jax.vmap(lambda x, at, rows: x.at[at].set(rows))(x, positions, rows.astype(x.dtype))
