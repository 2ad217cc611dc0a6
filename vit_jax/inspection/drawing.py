"""All figures of a model in a folder, on one page."""

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
    """All figures of a ViT into the folder `out`.

    Args:
      images: uint8 `[images, height, width, channels]`.
      layers, heads: also rollout after each layer, and each head of the last.
    """
    found = look(model, images, batch_size)
    arrays, drawn, undefined = {"images": images}, {}, {}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}") from error

    def draw(name: str, caption: str, make: Callable[[], tuple[dict, object]]) -> None:
        """A figure into the folder and its arrays among the others."""
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
        seen = found["rollout"][:, -1]
        overlays = [figures.overlay(image, weights) for image, weights in zip(images, seen, strict=True)]
        return {"rollout": seen}, figures.pairs(images, overlays, names)

    def distance():
        check_attends(model)
        return {"distance": found["distance"]}, figures.distance_dots(found["distance"])

    def positions():
        similarity = embeddings.position_similarity(model)
        return {"position_similarity": similarity}, figures.similarity_tiles(similarity)

    def filters():
        components = embeddings.filters(model)
        return {"filters": components}, figures.tiles(components, 7)

    def colours():
        coloured = embeddings.token_colours(model, found["tokens"])
        return {"token_colours": coloured}, figures.pairs(images, list(coloured), names)

    def each(kind: str, caption: str, part: str, maps: np.ndarray) -> None:
        """A figure for each image, of its maps."""
        for number, (name, image, own) in enumerate(zip(names, images, maps, strict=True)):
            overlays = [figures.overlay(image, weights) for weights in own]
            titles = [f"{part} {index + 1}" for index in range(len(own))]
            made = {kind: maps}, figures.tiles(overlays, 6, titles)
            draw(f"{kind}_{number}", f"{caption}: {name}", lambda made=made: made)

    draw("rollout", "Attention rollout: how much of each patch the output sees", rolled_out)
    if layers and "rollout" in found:
        each("layers", "Rollout after each layer", "layer", found["rollout"])
    if heads and "heads" in found:
        each("heads", "The last layer's attention, each head", "head", found["heads"])
    draw("distance", "Mean attention distance of each head", distance)
    draw("positions", "Similarity of position embeddings", positions)
    draw("filters", "Principal components of the patch embedding's filters", filters)
    draw("tokens", "The last layer's tokens: their three principal components as colours", colours)
    np.savez_compressed(out / "arrays.npz", **arrays)
    pictures = [picture(caption, f"{name}.png") for name, caption in drawn.items()]
    missing = [remark(f"{caption}: {reason}") for caption, reason in undefined.items()]
    print(write_page(out / "index.html", title, [Section("", "".join(pictures + missing))]))


def look(model, images: np.ndarray, batch_size: int) -> dict[str, np.ndarray]:
    """What a ViT computes on the way, over all images: the last layer's `tokens`, and of full attention the
    heads' `distance`, `[layers, heads]`, `rollout`, `[images, layers, rows, columns]`, and what each of the
    last layer's `heads` sees, `[images, heads, rows, columns]`."""
    graphdef, params = nnx.split(model)
    capture = ("attention", "tokens") if model.attends_fully else ("tokens",)

    @jax.jit
    def captured(params, batch):
        return nnx.merge(graphdef, params)(batch, capture=capture)[1]

    distance, found = 0, {"tokens": [], "rollout": [], "heads": []}
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        seen = jax.device_get(captured(params, batch))
        found["tokens"].append(seen["tokens"][-1])
        if attention := seen.get("attention"):
            distance += attention_distance(model, attention) * len(batch) / len(images)
            found["rollout"].append(np.stack([of_patches(model, x) for x in rollout(attention)], axis=1))
            heads = np.moveaxis(attention[-1], 1, 0)
            found["heads"].append(np.stack([of_patches(model, head) for head in heads], axis=1))
        if sys.stderr.isatty():
            done = start + len(batch)
            end = "\n" if done == len(images) else ""
            print(f"\r{done}/{len(images)} images", end=end, file=sys.stderr, flush=True)
    found = {name: np.concatenate(parts) for name, parts in found.items() if parts}
    return found | ({"distance": distance} if "rollout" in found else {})
