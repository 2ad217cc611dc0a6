"""What a trained model sees of some test images, for its report."""

import io
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.inspection.attention import attention_distance, check_attends, of_patches, rollout
from vit_jax.models.layers import normalize, placing
from vit_jax.parallel.mesh import replicated

MOST_IMAGES = 6
MOST_BYTES = 2**30  # Of attention weights.


def attention_figures(
    graphdef: nnx.GraphDef, params: dict, mesh: Mesh, images: Sequence[np.ndarray]
) -> dict[str, bytes]:
    """PNGs by caption: rollout over the first images, and the heads' distances.

    Empty for a model without full attention, or with so much of it that one image's would take a GiB. All
    processes of a run call this.
    """
    from vit_jax.inspection import figures  # Matplotlib, for which no run should wait at its start.

    model = nnx.merge(graphdef, params)
    try:
        check_attends(model)
    except UserError:
        return {}
    images = images[: min(MOST_IMAGES, MOST_BYTES // (4 * model.depth * model.heads * model.tokens**2))]
    if not len(images):
        return {}

    def captured(params, batch):
        with placing(lambda name, x: x, mesh.devices.flat[0].platform):
            return nnx.merge(graphdef, params)(normalize(batch), capture=("attention",))[1]["attention"]

    attention = jax.device_get(jax.jit(captured, out_shardings=replicated(mesh))(params, np.stack(images)))
    seen = of_patches(model, rollout(attention)[-1])
    overlays = [figures.overlay(image, weights) for image, weights in zip(images, seen, strict=True)]
    drawn = {
        "Attention rollout over test images": figures.tiles([*images, *overlays], len(images)),
        "Mean attention distance of each head": figures.distance_dots(attention_distance(model, attention)),
    }
    pictures = {}
    for caption, figure in drawn.items():
        encoded = io.BytesIO()
        figure.savefig(encoded, format="png", dpi=110, metadata={"Software": None})
        pictures[caption] = encoded.getvalue()
    return pictures
