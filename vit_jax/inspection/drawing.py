"""Draws all figures of a model into a folder, and a page that shows them."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.inspection import embeddings, figures
from vit_jax.inspection.attention_maps import attention_distance, check_attends, of_patches, rollout
from vit_jax.inspection.html_page import Section, picture, remark, write_page


def draw_all(
    model,
    names: Sequence[str],
    images: np.ndarray,
    out: Path,
    title: str,
    layers: bool = False,
    heads: bool = False,
    batch_size: int = 8,
) -> None:
    """Draws all figures of a ViT into the folder `out`.

    Args:
      images: uint8 `[images, height, width, channels]`.
      layers, heads: draw also rollout after each layer, and each head of the last.
    """
    seen = look(model, images, batch_size)
    arrays, drawn, undefined = {"images": images}, {}, {}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}") from error

    def draw(name: str, caption: str, make: Callable[[], tuple[dict, object]]) -> None:
        """Writes a figure into the folder and puts its arrays among the others."""
        try:
            values, figure = make()
        except UserError as error:
            undefined[caption] = str(error)
            print(f"{caption}: not defined: {error}")
            return
        arrays.update(values)
        figure.savefig(out / f"{name}.png", dpi=110)
        drawn[name] = caption
        print(f"{out / name}.png  {caption}")

    def rolled_out():
        check_attends(model)
        last = seen["rollout"][:, -1]
        overlays = [figures.overlay(image, weights) for image, weights in zip(images, last, strict=True)]
        return {"rollout": last}, figures.pairs(images, overlays, names)

    def distance():
        check_attends(model)
        return {"distance": seen["distance"]}, figures.distance_dots(seen["distance"])

    def positions():
        similarity = embeddings.position_similarity(model)
        return {"position_similarity": similarity}, figures.similarity_tiles(similarity)

    def filters():
        components = embeddings.filters(model)
        return {"filters": components}, figures.tiles(components, 7)

    def colours():
        coloured = embeddings.token_colours(model, seen["tokens"])
        return {"token_colours": coloured}, figures.pairs(images, list(coloured), names)

    def draw_each(kind: str, caption: str, title: str, maps: np.ndarray) -> None:
        """Draws a figure for each image: its maps."""
        for number, (name, image, weights) in enumerate(zip(names, images, maps, strict=True)):
            overlays = [figures.overlay(image, each) for each in weights]
            titles = [f"{title} {index + 1}" for index in range(len(weights))]
            made = {kind: maps}, figures.tiles(overlays, 6, titles)
            draw(f"{kind}_{number}", f"{caption}: {name}", lambda made=made: made)

    draw("rollout", "Attention rollout: how much of each patch the output sees", rolled_out)
    if layers and "rollout" in seen:
        draw_each("layers", "Rollout after each layer", "layer", seen["rollout"])
    if heads and "heads" in seen:
        draw_each("heads", "The last layer's attention, each head", "head", seen["heads"])
    draw("distance", "Mean attention distance of each head", distance)
    draw("positions", "Similarity of position embeddings", positions)
    draw("filters", "Principal components of the patch embedding's filters", filters)
    draw("tokens", "The last layer's tokens: their three principal components as colours", colours)
    np.savez_compressed(out / "arrays.npz", **arrays)
    pictures = [picture(caption, f"{name}.png") for name, caption in drawn.items()]
    missing = [remark(f"{caption}: {reason}") for caption, reason in undefined.items()]
    print(write_page(out / "index.html", title, [Section("", "".join(pictures + missing))]))


def look(model, images: np.ndarray, batch_size: int) -> dict[str, np.ndarray]:
    """Captures what a ViT computes on the way, over all images.

    Returns:
      `tokens` of the last layer, `[images, tokens, dim]`. With full attention also `distance`
      `[layers, heads]`, `rollout` `[images, layers, rows, columns]`, and what each of the last layer's
      `heads` sees, `[images, heads, rows, columns]`.
    """
    graphdef, params = nnx.split(model)
    capture = ("attention", "tokens") if model.attends_fully else ("tokens",)

    @jax.jit
    def captured(params, batch):
        return nnx.merge(graphdef, params)(batch, capture=capture)[1]

    distance, parts = 0, {"tokens": [], "rollout": [], "heads": []}
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        captures = jax.device_get(captured(params, batch))
        parts["tokens"].append(captures["tokens"][-1])
        if attention := captures.get("attention"):
            distance += attention_distance(model, attention) * len(batch) / len(images)
            parts["rollout"].append(np.stack([of_patches(model, x) for x in rollout(attention)], axis=1))
            heads = np.moveaxis(attention[-1], 1, 0)
            parts["heads"].append(np.stack([of_patches(model, head) for head in heads], axis=1))
        if sys.stderr.isatty():
            done = start + len(batch)
            end = "\n" if done == len(images) else ""
            print(f"\r{done}/{len(images)} images", end=end, file=sys.stderr, flush=True)
    seen = {name: np.concatenate(arrays) for name, arrays in parts.items() if arrays}
    return seen | ({"distance": distance} if "rollout" in seen else {})
