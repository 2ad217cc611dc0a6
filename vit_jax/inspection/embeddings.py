"""Learned filters, position embeddings and tokens of a model (ViT paper, figure 7)."""

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.image_model import ImageModel, TokenModel


def position_similarity(model: TokenModel) -> np.ndarray:
    """Returns the cosine similarity between the position embeddings of all patches.

    Returns:
      float64 `[rows, columns, rows, columns]`. The first two axes are the grid position of one
      patch, the last two axes the grid position of the other patch.

    Raises:
      UserError: the model has no position embedding per patch, or only one patch.
    """
    if not isinstance(model, TokenModel) or model.position_embedding is None:
        raise UserError(
            "the model has no position embedding for each patch: there is no similarity to show"
        )
    if model.options.position_at == "every":
        raise UserError("the model has position embeddings of each layer, not one of each patch")
    if model.grid == (1, 1):
        raise UserError("the model has one patch: there are no positions to compare")
    table = np.asarray(model.position_embedding(), np.float64)[0]
    table = table[model.patch_tokens]
    unit = table / np.maximum(np.linalg.norm(table, axis=-1, keepdims=True), 1e-12)
    return (unit @ unit.T).reshape(*model.grid, *model.grid)


def filters(model: ImageModel, count: int = 28) -> np.ndarray:
    """Returns principal components of the first layer's filters.

    The mean filter is not subtracted. The components are in descending order of their singular
    values. In each component, the value with the largest magnitude is made positive by the choice
    of the sign. Then the component is scaled to 0 ... 1.

    Returns:
      float64 `[count, height, width, channels]`.
    """
    kernel = np.asarray(model.pixel_kernel, np.float64)
    *shape, dim = kernel.shape
    components, _, _ = np.linalg.svd(kernel.reshape(-1, dim), full_matrices=False)
    components = components.T[:count]
    largest = np.abs(components).argmax(axis=1)
    components = components * np.sign(components[np.arange(len(components)), largest])[:, None]
    low, high = components.min(axis=1, keepdims=True), components.max(axis=1, keepdims=True)
    return ((components - low) / np.maximum(high - low, 1e-12)).reshape(-1, *shape)


def token_colours(model: TokenModel, tokens: np.ndarray) -> np.ndarray:
    """Returns the `colours` of patch tokens, float64 `[batch, rows, columns, 3]`.

    Args:
      tokens: tokens of one layer from `capture=("tokens",)`, `[batch, tokens, dim]`.
    """
    patches = np.asarray(tokens)[:, model.patch_tokens]
    return colours(patches.reshape(len(patches), *model.grid, -1))


def colours(features: np.ndarray) -> np.ndarray:
    """Returns the colours of features: three principal components as RGB in 0 ... 1.

    The components are computed over all images.

    Args:
      features: `[batch, rows, columns, dim]`.

    Returns:
      float64 `[batch, rows, columns, 3]`.
    """
    flat = np.asarray(features, np.float64).reshape(-1, features.shape[-1])
    flat = flat - flat.mean(axis=0)
    _, _, components = np.linalg.svd(flat, full_matrices=False)
    found = np.zeros((len(flat), 3))
    found[:, : min(3, len(components))] = flat @ components[:3].T
    low, high = np.quantile(found, [0.01, 0.99], axis=0)
    found = np.clip((found - low) / np.maximum(high - low, 1e-12), 0, 1)
    return found.reshape(*features.shape[:3], 3)
