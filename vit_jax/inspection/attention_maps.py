"""Attention rollout and attention distance of a model (ViT paper: sections 4.5, D.7 and D.8).

Attention weights are from `model(images, capture=("attention",))`: `[batch, heads, tokens, tokens]`
for each layer, with rows that sum to 1.
"""

from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.image_model import ImageModel, TokenModel


def check_attends(model: ImageModel) -> None:
    """Raises UserError for a model without full attention between its patches."""
    if not isinstance(model, TokenModel):
        raise UserError(
            f"a {type(model).__name__} has no attention among all patches, for which rollout "
            f"and distance are defined; in Python model(images, capture={model.captures}) returns "
            "its intermediate outputs"
        )
    if not model.attends_fully:
        raise UserError(
            f"rollout and distance are not defined for {model.options.attention} attention "
            "(model.attention): its patches do not all attend to one another"
        )
    if model.grid == (1, 1):
        raise UserError("the model has one patch: there is no attention between patches")


def rollout(attention: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Computes attention rollout (Abnar & Zuidema, 2020).

    Row i of a result estimates the share of each input token in token i. For each layer, heads are
    averaged, the identity is added for the residual connection, and rows are normalized to the sum
    1. Then the matrices of the layers are multiplied.

    Returns:
      For each layer the rollout up to this layer, float32 `[batch, tokens, tokens]`, with rows that
      sum to 1. The last element is the rollout of the whole model.
    """
    rolled, product = [], None
    for weights in attention:
        mean = np.asarray(weights, np.float64).mean(axis=1)
        mixed = (mean + np.eye(mean.shape[-1])) / 2
        product = mixed if product is None else mixed @ product
        rolled.append(product.astype(np.float32))
    return rolled


def of_patches(model: TokenModel, rolled: np.ndarray) -> np.ndarray:
    """Converts attention rollout to a map: each patch's share in the classification head's input.

    The input of the classification head is the class token, or the mean of the patches.

    Args:
      rolled: a result of `rollout`, `[batch, tokens, tokens]`.

    Returns:
      `[batch, rows, columns]`, with sum 1 for each image.
    """
    patches = model.patch_tokens
    by_class_token = model.options.pooling == "cls"
    seen = rolled[:, 0, patches] if by_class_token else rolled[:, patches, patches].mean(axis=1)
    seen = seen / np.maximum(seen.sum(axis=-1, keepdims=True), 1e-12)
    return seen.reshape(-1, *model.grid)


def attention_distance(model: TokenModel, attention: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the mean attention distance of each head, in pixels.

    The attention distance of a patch is the mean of the distances from this patch to all patches,
    weighted by the attention of this patch to them. The result is averaged over patches and images.
    Other tokens, such as the class token, are excluded. The attention of a patch to all patches is
    normalized to the sum 1.

    Returns:
      float64 `[layers, heads]`.
    """
    rows, columns = model.grid
    patches = model.patch_tokens
    sides = np.array(model.image_size) / np.array(model.grid)
    places = np.stack(np.unravel_index(np.arange(rows * columns), (rows, columns)), -1)
    apart = np.linalg.norm((places[:, None] - places[None]) * sides, axis=-1)
    distances = []
    for weights in attention:
        among = np.asarray(weights, np.float64)[:, :, patches, patches]
        among = among / np.maximum(among.sum(axis=-1, keepdims=True), 1e-12)
        distances.append((among * apart).sum(axis=-1).mean(axis=(0, 2)))
    return np.stack(distances)
