"""Draws all figures of a model into a folder, and writes an HTML page that shows them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from vit_jax.errors import UserError
from vit_jax.inspection import embeddings, figures, page_charts
from vit_jax.inspection.attention_maps import check_attends
from vit_jax.inspection.html_page import inline, render, write_text
from vit_jax.inspection.intermediates import Intermediates, compute_intermediates
from vit_jax.inspection.map_sheet import LayerMaps, MapSheets, map_sheets
from vit_jax.inspection.viewer import viewer
from vit_jax.models.image_model import ImageModel

COMPONENTS = "their three principal components as colours"


class FigureFolder:
    """Saves figures as PNGs in a folder.

    Attributes:
      captions: caption of each saved figure, by name.
      arrays: arrays that the figures show, by name.
      undefined: reasons why figures cannot be drawn, by caption.

    Raises:
      UserError: the folder cannot be created.
    """

    def __init__(self, path: Path):
        self.path = path
        self.captions: dict[str, str] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.undefined: dict[str, str] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {path}: {error.strerror}") from error

    def save(self, name: str, caption: str, figure: Figure, **arrays: np.ndarray) -> None:
        """Saves a figure as `NAME.png`, and remembers the arrays that it shows."""
        figure.savefig(self.path / f"{name}.png", dpi=110)
        self.captions[name] = caption
        self.arrays |= arrays
        print(f"{self.path / name}.png  {caption}")

    def skip(self, caption: str, reason: str) -> None:
        """Prints why a figure is not drawn, and remembers it for the page."""
        self.undefined[caption] = reason
        print(f"{caption}: not defined: {reason}")


def draw_all(
    model: ImageModel,
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

    A figure that is not defined for the model is skipped, and the reason is printed.

    Args:
      images: uint8 `[images, height, width, 3]`.
      source: text below the title, such as the source of the model.
      layers: also draw the rollout after each layer.
      heads: also draw each head of the last layer.
    """
    results = compute_intermediates(model, images, batch_size)
    folder = FigureFolder(out)
    folder.arrays["images"] = images
    _draw_attention(folder, model, results, images, names, layers, heads)
    _draw_weights(folder, model)
    coloured = _draw_features(folder, model, results, images, names)
    maps = _layer_maps(results)
    folder.arrays |= {f"attention_{layer.number}": layer.heads for layer in maps}
    np.savez_compressed(out / "arrays.npz", **folder.arrays)
    sheets = map_sheets(maps) if maps else None
    page = render(
        "figures.html",
        title=title,
        source=source,
        about=_about(model, sheets) if sheets else "",
        viewer=viewer(images, names, sheets, coloured),
        drawn=_page_figures(folder),
        undefined=folder.undefined,
    )
    print(write_text(out / "index.html", page))


def _draw_attention(
    folder: FigureFolder,
    model: ImageModel,
    results: Intermediates,
    images: np.ndarray,
    names: Sequence[str],
    layers: bool,
    heads: bool,
) -> None:
    """Draws attention rollout and the mean attention distance."""
    captions = {
        "rollout": "Attention rollout: contribution of each patch to the output",
        "distance": "Mean attention distance of each head",
    }
    try:
        check_attends(model)
    except UserError as error:
        for caption in captions.values():
            folder.skip(caption, str(error))
        return
    last = results.rollout[:, -1]
    overlays = [figures.heat_map(*pair) for pair in zip(images, last, strict=True)]
    figure = figures.pairs(images, overlays, names)
    folder.save("rollout", captions["rollout"], figure, rollout=last)
    # For each image one figure, with a tile for each layer or head.
    tiled = {}
    if layers:
        tiled["layers"] = ("Rollout after each layer", "layer", results.rollout)
    if heads:
        tiled["heads"] = ("The last layer's attention, each head", "head", results.attention[:, -1])
    for kind, (caption, tile, maps) in tiled.items():
        for number, (name, image, weights) in enumerate(zip(names, images, maps, strict=True)):
            overlays = [figures.heat_map(image, each) for each in weights]
            titles = [f"{tile} {index}" for index in range(1, len(weights) + 1)]
            figure = figures.tiles(overlays, 6, titles)
            folder.save(f"{kind}_{number}", f"{caption}: {name}", figure, **{kind: maps})
    figure = figures.distance_dots(results.distance)
    folder.save("distance", captions["distance"], figure, distance=results.distance)


def _draw_weights(folder: FigureFolder, model: ImageModel) -> None:
    """Draws the first layer's filters and the similarity of position embeddings."""
    filters = embeddings.filters(model)
    caption = "Principal components of the first layer's filters"
    folder.save("filters", caption, figures.tiles(filters, 7), filters=filters)
    caption = "Similarity of position embeddings"
    try:
        similarity = embeddings.position_similarity(model)
    except UserError as error:
        folder.skip(caption, str(error))
        return
    figure = figures.similarity_tiles(similarity)
    folder.save("positions", caption, figure, position_similarity=similarity)


def _draw_features(
    folder: FigureFolder,
    model: ImageModel,
    results: Intermediates,
    images: np.ndarray,
    names: Sequence[str],
) -> dict[str, np.ndarray]:
    """Draws the features of the last layer, or of each stage, as colours.

    Returns:
      The colours by caption for the page, `[images, rows, columns, 3]` in 0 ... 1; stages in
      descending order.
    """
    if results.tokens is not None:
        colours = embeddings.token_colours(model, results.tokens)
        figure = figures.pairs(images, list(colours), names)
        caption = f"The last layer's tokens: {COMPONENTS}"
        folder.save("tokens", caption, figure, token_colours=colours)
        return {"tokens as colours": colours}
    coloured = {}
    for stage, features in enumerate(results.stages, start=1):
        colours = embeddings.colours(features)
        figure = figures.pairs(images, list(colours), names)
        caption = f"The features of stage {stage}: {COMPONENTS}"
        folder.save(f"stage_{stage}", caption, figure, **{f"stage_{stage}_colours": colours})
        coloured[f"stage {stage} as colours"] = colours
    return dict(reversed(coloured.items()))


def _layer_maps(results: Intermediates) -> list[LayerMaps]:
    """Returns the attention maps of each layer; an empty list if the model has none."""
    if results.attention is not None:
        by_layer = (np.moveaxis(maps, 1, 0) for maps in (results.attention, results.rollout))
        pairs = zip(*by_layer, strict=True)
        return [LayerMaps(number, *pair) for number, pair in enumerate(pairs, start=1)]
    attended = enumerate(results.attended, start=1)
    return [LayerMaps(number, np.moveaxis(maps, -1, 1)) for number, maps in attended]


def _about(model: ImageModel, sheets: MapSheets) -> str:
    """Explains the attention maps on the page, and states if it does not show all layers."""
    if not sheets.rollout:
        attention = "the places of a window attend"
    elif model.options.pooling == "cls":
        attention = "the class token attends"
    else:
        attention = "the patches attend"
    text = f"Bright is what {attention} to, relative to the brightest place of the map."
    kept, count = len(sheets.rows), sheets.rows[-1].number
    if kept < count:
        text += f" {kept} of {count} layers are on this page, all of them in arrays.npz."
    return text


def _page_figures(folder: FigureFolder) -> list[dict]:
    """Returns captions and images of the figures that the page does not show as overlays."""

    def distances(axes):
        figures.draw_distances(axes, folder.arrays["distance"])

    shown = []
    for name, caption in folder.captions.items():
        if name == "distance":
            svg = page_charts.draw("", distances, caption, 5.4)
            shown.append({"caption": caption, "svg": svg})
        elif name not in ("rollout", "tokens") and not name.startswith("stage_"):
            source = inline((folder.path / f"{name}.png").read_bytes())
            shown.append({"caption": caption, "svg": "", "source": source})
    return shown
