"""Pictures for a run's report: what a model sees of some test images, or predicts in them."""

import io
from collections.abc import Sequence
from pathlib import Path

import cv2
import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.inspection import page_charts
from vit_jax.inspection.attention_maps import attention_distance, check_attends, of_patches, rollout
from vit_jax.inspection.embeddings import token_colours
from vit_jax.models.layers import placing
from vit_jax.parallel.mesh import replicated

MOST_IMAGES = 6
MOST_BYTES = 2**30  # Of attention weights.
LEAST_SIDE = 64  # Pixels: smaller images are shown larger.
SIDE, GAP = 160, 4  # Pixels of an image in a sheet, at least, and between two.
MOST_PICTURES = 6
MOST_HEADS = 6

# Of a run's pictures of what the model sees, by the files' names: the tallest first, a column of
# the page.
SEEN = {
    "heads.png": "Attention of the last layer, a row for each head",
    "rollout.png": "Attention rollout over test images",
    "tokens.png": "Patches of the last layer, their three principal components as colours",
    "distance.svg": "Mean attention distance of each head",
}


def attention_figures(
    graphdef: nnx.GraphDef, params: dict, mesh: Mesh, images: Sequence[np.ndarray]
) -> dict[str, bytes]:
    """The files of `SEEN`: over the first images rollout, the class token's or the patches'
    attention in the last layer, and the last patches' principal components as colours; and the
    heads' distances.

    Empty for a model without full attention, with so much of it that one image's would take a GiB,
    or whose attention is not finite. All processes of a run call this.
    """
    from vit_jax.inspection import figures  # Matplotlib, for which no run should wait at its start.

    model = nnx.merge(graphdef, params)
    try:
        check_attends(model)
    except UserError:
        return {}
    images = images[
        : min(MOST_IMAGES, MOST_BYTES // (4 * model.depth * model.heads * model.tokens**2))
    ]
    if not len(images):
        return {}

    def captured(params, batch):
        with placing(lambda name, x: x, mesh.devices.flat[0].platform):
            return nnx.merge(graphdef, params)(batch, capture=("attention", "tokens"), whole=True)[
                1
            ]

    found = jax.device_get(
        jax.jit(captured, out_shardings=replicated(mesh))(params, np.stack(images))
    )
    attention = found["attention"]
    if not all(np.isfinite(weights).all() for weights in attention):
        return {}  # Of a run that diverged.
    seen = of_patches(model, rollout(attention)[-1])
    overlays = [
        figures.heat_map(image, weights) for image, weights in zip(images, seen, strict=True)
    ]
    heads = [
        of_patches(model, attention[-1][:, head]) for head in range(min(model.heads, MOST_HEADS))
    ]
    of_heads = [
        figures.heat_map(*pair) for head in heads for pair in zip(images, head, strict=True)
    ]
    coloured = (255 * token_colours(model, found["tokens"][-1])).round().astype(np.uint8)
    distances = attention_distance(model, attention)
    return {
        "rollout.png": sheet([*images, *overlays], len(images)),
        "heads.png": sheet(of_heads, len(images)),
        "tokens.png": sheet([*images, *coloured], len(images)),
        "distance.svg": page_charts.draw(
            "", lambda axes: figures.draw_distances(axes, distances), SEEN["distance.svg"], 5.4
        ).encode(),
    }


def sheet(images: Sequence[np.ndarray], columns: int) -> bytes:
    """A PNG of images in rows, each as large as the first or a few times as large, with gaps
    between.
    """
    height, width = images[0].shape[:2]
    times = max(1, -(-SIDE // max(height, width)))
    height, width = times * height, times * width
    rows = -(-len(images) // columns)
    page = np.zeros((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 4), np.uint8)
    for number, image in enumerate(images):
        top, left = (height + GAP) * (number // columns), (width + GAP) * (number % columns)
        large = cv2.resize(image, (width, height), interpolation=cv2.INTER_NEAREST)
        page[top : top + height, left : left + width, :3] = large
        page[top : top + height, left : left + width, 3] = 255
    return _png(page)


def reconstruction_picture(images: np.ndarray) -> bytes:
    """A PNG of the rows original, visible and predicted, from `Evaluator.pictures`."""
    times = max(1, LEAST_SIDE // images.shape[2])
    large = images.repeat(times, axis=2).repeat(times, axis=3)
    framed = np.pad(large, ((0, 0), (0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255)
    return _png(np.concatenate([np.concatenate(row, axis=1) for row in framed]))


def kept_pictures(folder: Path) -> dict[str, bytes]:
    """The pictures in `folder`, named by their step: the newest first, the others spread over the
    run.
    """
    files = sorted(folder.glob("*.png"), key=lambda file: int(file.stem), reverse=True)
    chosen = sorted(
        {round(i) for i in np.linspace(0, len(files) - 1, min(len(files), MOST_PICTURES))}
    )
    return {f"step {int(files[i].stem):,}": files[i].read_bytes() for i in chosen}


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()
