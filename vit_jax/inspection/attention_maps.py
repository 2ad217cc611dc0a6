"""Attention rollout and attention distance of a model (paper, section 4.5 and appendix D.7, D.8).

Attention weights are those that `model(images, capture=("attention",))` returns: for each layer
`[batch, heads, tokens, tokens]`, whose rows sum to 1.
"""

from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.image_model import ImageModel, TokenModel


def check_attends(model: ImageModel) -> None:
    """Raises UserError for a model whose patches do not all attend to one another."""
    if not isinstance(model, TokenModel):
        raise UserError(
            f"a {type(model).__name__} has no attention among all patches, by which rollout and "
            f"distance are defined; in Python model(images, capture={model.captures}) gives what "
            "it computes on the way"
        )
    if not model.attends_fully:
        raise UserError(
            "rollout and distance are not defined for axial attention, which sees lines only"
        )
    if model.grid == (1, 1):
        raise UserError("the model has one patch: there is nowhere else to look")


def rollout(attention: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Attention rollout (Abnar & Zuidema, 2020): how much of each input token is in each token of a
    layer.

    Heads are averaged, the identity is added for the residual connection, rows are normalised to 1,
    and the layers' matrices are multiplied.

    Returns:
      float32 `[batch, tokens, tokens]` for each layer, whose rows sum to 1; the last is the
      model's.
    """
    rolled, product = [], None
    for weights in attention:
        mean = np.asarray(weights, np.float64).mean(axis=1)
        mixed = (mean + np.eye(mean.shape[-1])) / 2
        product = mixed if product is None else mixed @ product
        rolled.append(product.astype(np.float32))
    return rolled


def of_patches(model: TokenModel, rolled: np.ndarray) -> np.ndarray:
    """The share of each patch in the head's token, as images `[batch, rows, columns]` that sum to
    1.

    It is the class token; where the head averages the patches, it is their average.
    """
    patches = model.patch_tokens
    seen = (
        rolled[:, 0, patches]
        if model.options.pooling == "cls"
        else rolled[:, patches, patches].mean(axis=1)
    )
    seen = seen / np.maximum(seen.sum(axis=-1, keepdims=True), 1e-12)
    return seen.reshape(-1, *model.grid)


def attention_distance(model: TokenModel, attention: Sequence[np.ndarray]) -> np.ndarray:
    """Mean attention distance: pixels between a patch and those it attends to, weighted by the
    attention.

    It is averaged over patches and images. Neither rows nor columns of the other tokens count; rows
    are normalised anew.

    Returns:
      float64 `[layers, heads]`.
    """
    rows, columns = model.grid
    patches = model.patch_tokens
    sides = np.array(model.image_size) / np.array(model.grid)
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1).reshape(
        -1, 2
    )
    apart = np.linalg.norm((places[:, None] - places[None]) * sides, axis=-1)
    distances = []
    for weights in attention:
        among = np.asarray(weights, np.float64)[:, :, patches, patches]
        among = among / np.maximum(among.sum(axis=-1, keepdims=True), 1e-12)
        distances.append((among * apart).sum(axis=-1).mean(axis=(0, 2)))
    return np.stack(distances)
