"""Computes the intermediate results of a model for images, such as attention and tokens."""

import sys
from dataclasses import dataclass, field

import jax
import numpy as np
from flax import nnx

from vit_jax.inspection.attention_maps import attention_distance, of_patches, rollout
from vit_jax.models.image_model import ImageModel, TokenModel


@dataclass(frozen=True)
class Intermediates:
    """Intermediate results of a model for all images.

    A model that outputs tokens, such as ViT, has `tokens`. If it has several patches, which all
    attend to one another, it also has `attention`, `rollout` and `distance`. A model with stages,
    such as Swin, has `stages`.

    Attributes:
      tokens: tokens of the last layer, `[images, tokens, dim]`.
      attention: attention map of each head, `[images, layers, heads, rows, columns]`.
      rollout: attention rollout up to each layer, `[images, layers, rows, columns]`.
      distance: mean attention distance in pixels, `[layers, heads]`.
      stages: features of each stage, `[images, rows, columns, channels]`.
      attended: attention maps of each block with window attention, `[images, rows, columns,
        heads]`.
    """

    tokens: np.ndarray | None = None
    attention: np.ndarray | None = None
    rollout: np.ndarray | None = None
    distance: np.ndarray | None = None
    stages: list[np.ndarray] = field(default_factory=list)
    attended: list[np.ndarray] = field(default_factory=list)


def compute_intermediates(model: ImageModel, images: np.ndarray, batch_size: int) -> Intermediates:
    """Computes the intermediate results of a model for images `[images, height, width, 3]`."""
    if isinstance(model, TokenModel):
        return _of_tokens(model, images, batch_size)
    return _of_stages(model, images, batch_size)


def _of_tokens(model: TokenModel, images: np.ndarray, batch_size: int) -> Intermediates:
    graphdef, params = nnx.split(model)
    attends = model.attends_fully and model.grid != (1, 1)
    capture = ("attention", "tokens") if attends else ("tokens",)

    @jax.jit
    def captured(params, batch):
        return nnx.merge(graphdef, params)(batch, capture=capture)[1]

    tokens, attention, rolled, distance = [], [], [], 0
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        captures = jax.device_get(captured(params, batch))
        tokens.append(captures["tokens"][-1])
        if layers := captures.get("attention"):
            distance += attention_distance(model, layers) * len(batch) / len(images)
            attention.append(np.stack([_head_maps(model, layer) for layer in layers], axis=1))
            rolled.append(np.stack([of_patches(model, x) for x in rollout(layers)], axis=1))
        _print_progress(start + len(batch), len(images))
    if not attention:
        return Intermediates(np.concatenate(tokens))
    return Intermediates(
        np.concatenate(tokens), np.concatenate(attention), np.concatenate(rolled), distance
    )


def _head_maps(model: TokenModel, attention: np.ndarray) -> np.ndarray:
    """Returns the attention map of each head of a layer, `[batch, heads, rows, columns]`."""
    return np.stack([of_patches(model, head) for head in np.moveaxis(attention, 1, 0)], axis=1)


def _of_stages(model: ImageModel, images: np.ndarray, batch_size: int) -> Intermediates:
    graphdef, params = nnx.split(model)
    capture = ("attended",) if "attended" in model.captures else ()

    @jax.jit
    def captured(params, batch):
        model = nnx.merge(graphdef, params)
        with model.capturing(capture) as found:
            stages = model.features(batch, dense=True)
        return list(stages), found.get("attended", [])

    parts = []
    for start in range(0, len(images), batch_size):
        parts.append(jax.device_get(captured(params, images[start : start + batch_size])))
        _print_progress(start + batch_size, len(images))
    stages, attended = jax.tree.map(lambda *each: np.concatenate(each), *parts)
    return Intermediates(stages=stages, attended=attended)


def _print_progress(done: int, count: int) -> None:
    """Prints the number of finished images, such as `8/32 images`, if stderr is a terminal."""
    if sys.stderr.isatty():
        end = "" if done < count else "\n"
        print(f"\r{min(done, count)}/{count} images", end=end, file=sys.stderr, flush=True)
