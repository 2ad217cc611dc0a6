"""Draws all figures of a model into a folder, and writes an HTML page that shows them."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from vit_jax.errors import UserError
from vit_jax.inspection import embeddings, figures, page_charts
from vit_jax.inspection.attention_maps import attention_distance, check_attends, of_patches, rollout
from vit_jax.inspection.html_page import inline, render, write_text
from vit_jax.inspection.map_sheet import LayerMaps, MapSheets, map_sheets
from vit_jax.inspection.viewer import viewer
from vit_jax.models.image_model import TokenModel


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}") from error


def draw_all(
    model,
    names: Sequence[str],
    images: np.ndarray,
    out: Path,
    title: str,
    source: str,
    layers: bool = False,
    heads: bool = False,
    batch_size: int = 8,
) -> None:
    """Draws all figures of a model into the folder `out`.

    Args:
      images: uint8 `[images, height, width, channels]`.
      source: text below the title, such as the source of the model.
      layers: also draw the rollout after each layer.
      heads: also draw each head of the last layer.
    """
    seen = look(model, images, batch_size)
    arrays, drawn, undefined = {"images": images}, {}, {}
    _make_folder(out)

    def draw(name: str, caption: str, make: Callable[[], tuple[dict, object]]) -> None:
        """Creates a figure and saves it as `NAME.png` in the folder `out`.

        `make` returns the figure's data, by name, and the figure. If `make` raises UserError, the
        figure is skipped, and the message is printed.
        """
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
        overlays = [figures.heat_map(*pair) for pair in zip(images, last, strict=True)]
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

    def colours(name: str, coloured: np.ndarray) -> Callable[[], tuple[dict, object]]:
        return lambda: ({name: coloured}, figures.pairs(images, list(coloured), names))

    def draw_each(kind: str, caption: str, title: str, maps: np.ndarray) -> None:
        """Draws a figure for each image, with all attention maps of the image as tiles."""
        for number, (name, image, weights) in enumerate(zip(names, images, maps, strict=True)):
            overlays = [figures.heat_map(image, each) for each in weights]
            titles = [f"{title} {index + 1}" for index in range(len(weights))]
            made = {kind: maps}, figures.tiles(overlays, 6, titles)
            draw(f"{kind}_{number}", f"{caption}: {name}", lambda made=made: made)

    draw("rollout", "Attention rollout: contribution of each patch to the output", rolled_out)
    if layers and "rollout" in seen:
        draw_each("layers", "Rollout after each layer", "layer", seen["rollout"])
    if heads and "attention" in seen:
        last = seen["attention"][:, -1]
        draw_each("heads", "The last layer's attention, each head", "head", last)
    draw("distance", "Mean attention distance of each head", distance)
    draw("filters", "Principal components of the first layer's filters", filters)
    draw("positions", "Similarity of position embeddings", positions)
    components = "their three principal components as colours"
    if "tokens" in seen:
        made = colours("token_colours", embeddings.token_colours(model, seen["tokens"]))
        draw("tokens", f"The last layer's tokens: {components}", made)
    for stage, features in enumerate(seen.get("stages", ()), start=1):
        made = colours(f"stage_{stage}_colours", embeddings.colours(features))
        draw(f"stage_{stage}", f"The features of stage {stage}: {components}", made)
    maps = _layer_maps(seen) if "rollout" in arrays or "attended" in seen else []
    arrays |= {f"attention_{layer.number}": layer.heads for layer in maps}
    np.savez_compressed(out / "arrays.npz", **arrays)
    page = {"title": title, "source": source, "undefined": undefined}
    page["drawn"] = _pictures(out, drawn, arrays)
    sheets = map_sheets(maps) if maps else None
    page["viewer"] = viewer(images, names, sheets, _colours(arrays, seen))
    page["about"] = _about(model, sheets)
    print(write_text(out / "index.html", render("figures.html", **page)))


def _about(model, sheets: MapSheets | None) -> str:
    """Returns a text about the meaning of bright areas, and about layers that are not on the page.

    Args:
      sheets: the attention maps on the page. None: the page has no maps, and the text is empty.
    """
    if sheets is None:
        return ""
    by_class_token = getattr(model.options, "pooling", "") == "cls"
    whose = "the class token attends" if by_class_token else "the patches attend"
    whose = whose if sheets.rollout else "the places of a window attend"
    kept, count = len(sheets.rows), sheets.rows[-1].number
    fewer = f" {kept} of {count} layers are on this page, all of them in arrays.npz."
    fewer = "" if kept == count else fewer
    return f"Bright is what {whose} to, relative to the brightest place of the map.{fewer}"


def _pictures(out: Path, drawn: dict[str, str], arrays: dict[str, np.ndarray]) -> list[dict]:
    """Returns captions and images of figures for the end of the page, such as filters."""

    def distances(axes):
        figures.draw_distances(axes, arrays["distance"])

    shown = []
    for name, caption in drawn.items():
        if name == "distance":
            svg = page_charts.draw("", distances, caption, 5.4)
            shown.append({"caption": caption, "svg": svg})
        elif name not in ("rollout", "tokens") and not name.startswith("stage_"):
            source = inline((out / f"{name}.png").read_bytes())
            shown.append({"caption": caption, "svg": "", "source": source})
    return shown


def _layer_maps(seen: dict) -> list[LayerMaps]:
    """Returns the attention maps of each layer; an empty list if the model has none."""
    if "attention" in seen:
        by_layer = (np.moveaxis(seen[name], 1, 0) for name in ("attention", "rollout"))
        pairs = zip(*by_layer, strict=True)
        return [LayerMaps(number, *pair) for number, pair in enumerate(pairs, start=1)]
    attended = enumerate(seen.get("attended", ()), start=1)
    return [LayerMaps(number, np.moveaxis(maps, -1, 1)) for number, maps in attended]


def _colours(arrays: dict[str, np.ndarray], seen: dict) -> dict[str, np.ndarray]:
    """Returns images of the model's features, with three principal components as RGB, by caption.

    A model that outputs tokens, such as ViT, has one item, for its last layer. A model with stages,
    such as Swin, has an item for each stage, in descending order. `arrays` are those of all
    figures, and `seen` is the result of `look`.
    """
    if "token_colours" in arrays:
        return {"tokens as colours": arrays["token_colours"]}
    stages = range(len(seen.get("stages", ())), 0, -1)
    return {f"stage {stage} as colours": arrays[f"stage_{stage}_colours"] for stage in stages}


def look(model, images: np.ndarray, batch_size: int) -> dict:
    """Computes the intermediate results of a model for all images.

    Returns:
      A dict. For a model that outputs tokens, such as ViT, it is the result of `look_at_tokens`.
      For a model with stages, such as Swin, it has two items:

      - `stages`: list of the features of each stage, `[images, rows, columns, channels]`.
      - `attended`: list of the attention maps of each block, `[images, rows, columns, heads]`.
        Empty for models without window attention.
    """
    if isinstance(model, TokenModel):
        return look_at_tokens(model, images, batch_size)
    graphdef, params = nnx.split(model)
    capture = ("attended",) if "attended" in model.captures else ()

    @jax.jit
    def captured(params, batch):
        model = nnx.merge(graphdef, params)
        with model.capturing(capture) as found:
            stages = model.features(batch, dense=True)
        return {"stages": list(stages), "attended": found.get("attended", [])}

    parts = []
    for start in range(0, len(images), batch_size):
        parts.append(jax.device_get(captured(params, images[start : start + batch_size])))
        _say_progress(start + batch_size, len(images))
    return jax.tree.map(lambda *each: np.concatenate(each), *parts)


def _say_progress(done: int, count: int) -> None:
    """Prints the number of finished images, such as `8/32 images`, if stderr is a terminal."""
    if sys.stderr.isatty():
        end = "" if done < count else "\n"
        print(f"\r{min(done, count)}/{count} images", end=end, file=sys.stderr, flush=True)


def look_at_tokens(model: TokenModel, images: np.ndarray, batch_size: int) -> dict[str, np.ndarray]:
    """Computes the intermediate results of a model that outputs tokens, for all images.

    Returns:
      A dict with these items. Models without full attention have only `tokens`.

      - `tokens`: tokens of the last layer, `[images, tokens, dim]`.
      - `distance`: mean attention distance in pixels, `[layers, heads]`.
      - `rollout`: attention rollout up to each layer, `[images, layers, rows, columns]`.
      - `attention`: attention map of each head, `[images, layers, heads, rows, columns]`.
    """
    graphdef, params = nnx.split(model)
    capture = ("attention", "tokens") if model.attends_fully else ("tokens",)

    @jax.jit
    def captured(params, batch):
        return nnx.merge(graphdef, params)(batch, capture=capture)[1]

    distance, parts = 0, {"tokens": [], "rollout": [], "attention": []}
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        captures = jax.device_get(captured(params, batch))
        parts["tokens"].append(captures["tokens"][-1])
        if attention := captures.get("attention"):
            distance += attention_distance(model, attention) * len(batch) / len(images)
            layers = [np.moveaxis(layer, 1, 0) for layer in attention]
            heads = [np.stack([of_patches(model, x) for x in layer], axis=1) for layer in layers]
            rolled = [of_patches(model, x) for x in rollout(attention)]
            parts["rollout"].append(np.stack(rolled, axis=1))
            parts["attention"].append(np.stack(heads, axis=1))
        _say_progress(start + len(batch), len(images))
    seen = {name: np.concatenate(arrays) for name, arrays in parts.items() if arrays}
    return seen | ({"distance": distance} if "rollout" in seen else {})
