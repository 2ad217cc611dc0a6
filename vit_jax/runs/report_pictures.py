"""Pictures for a run's report: attention maps of test images, and reconstructions."""

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
MOST_BYTES = 2**30  # Maximum memory of attention weights.
LEAST_SIDE = 64  # Minimum side of an image in pixels; smaller images are enlarged.
SIDE, GAP = 160, 4  # Minimum side of an image in a sheet, and gap between images, in pixels.
MOST_PICTURES = 6
MOST_HEADS = 6

# Captions of the attention pictures by file name. The report shows the pictures in this order, the
# tallest picture first.
SEEN = {
    "heads.png": "Attention of the last layer, a row for each head",
    "rollout.png": "Attention rollout over test images",
    "tokens.png": "Patches of the last layer, their three principal components as colours",
    "distance.svg": "Mean attention distance of each head",
}


def attention_figures(
    graphdef: nnx.GraphDef, params: dict, mesh: Mesh, images: Sequence[np.ndarray]
) -> dict[str, bytes]:
    """Draws attention maps, patch colours and attention distances for some images.

    The attention maps show attention rollout and the last layer's attention, from the class token
    or from the patches. The patch colours show the principal components of the last layer's
    patches. The attention distance of a head is the mean distance between a patch and the patches
    that it attends to, weighted by attention and averaged over patches and images.

    All processes of a run must call this.

    Returns:
      Contents of the files that `SEEN` lists, by file name. Empty: the model has no full attention,
      the attention weights of one image exceed 1 GiB, or the attention weights are not finite.
    """
    # Imported here, because importing Matplotlib would slow down the start of each run.
    from vit_jax.inspection import figures

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
    # If the run has diverged, the attention weights are not finite, and nothing can be drawn.
    if not all(np.isfinite(weights).all() for weights in attention):
        return {}
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
    """Returns a PNG with images in rows and gaps between them; small images are enlarged."""
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
    """Returns a PNG with three rows: the images, and the two pictures of `Objective.pictures`.

    For masked image modelling, the two pictures are the image without masked patches, and the
    prediction. For other objectives, they are target and prediction.
    """
    times = max(1, LEAST_SIDE // images.shape[2])
    large = images.repeat(times, axis=2).repeat(times, axis=3)
    framed = np.pad(large, ((0, 0), (0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255)
    return _png(np.concatenate([np.concatenate(row, axis=1) for row in framed]))


def kept_pictures(folder: Path) -> dict[str, bytes]:
    """Returns a sample of the pictures in `folder` by step, the newest picture first."""
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
