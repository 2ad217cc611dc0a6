"""Models by the paper's names: `ViT-B/16` is size B with patches of 16 pixels."""

import re
from collections.abc import Callable
from functools import partial

from flax import nnx

from vit_jax.errors import UserError, nearest
from vit_jax.models.vit import ViT

# B, L and H: table 1 of the ViT paper; Ti and S: "How to train your ViT?" (Steiner et al., 2022);
# g and G: "Scaling Vision Transformers" (Zhai et al., 2022).
SIZES = {
    "Ti": dict(dim=192, depth=12, hidden=768, heads=3),
    "S": dict(dim=384, depth=12, hidden=1536, heads=6),
    "B": dict(dim=768, depth=12, hidden=3072, heads=12),
    "L": dict(dim=1024, depth=24, hidden=4096, heads=16),
    "H": dict(dim=1280, depth=32, hidden=5120, heads=16),
    "g": dict(dim=1408, depth=40, hidden=6144, heads=16),
    "G": dict(dim=1664, depth=48, hidden=8192, heads=16),
}

MODELS = tuple(f"ViT-{size}/{patch}" for size in SIZES for patch in (8, 14, 16, 32))


def model_factory(
    name: str, *, num_classes: int, image_size: int | tuple[int, int], **overrides
) -> Callable[..., ViT]:
    """What builds the named model when it is called with `rngs=nnx.Rngs(...)`.

    Args:
      name: `ViT-<size>/<patch>`: any size of `SIZES` with any patch size in pixels.
      num_classes: width of the head.
      image_size: pixels, or (height, width).
      **overrides: any other argument of `ViT`, over what the name says.

    Raises:
      UserError: an unknown name.
    """
    parsed = re.fullmatch(r"ViT-(\w+)/(\d+)", name)
    if parsed is None or parsed[1] not in SIZES or int(parsed[2]) == 0:
        raise UserError(f"unknown model {name!r} (model.name); {nearest(name, MODELS)}")
    values = SIZES[parsed[1]] | dict(patch_size=int(parsed[2])) | overrides
    return partial(ViT, num_classes=num_classes, image_size=image_size, **values)


def create_model(name: str, *, num_classes: int = 1000, image_size=224, seed: int = 0, **overrides) -> ViT:
    """The named model with freshly initialised parameters; arguments as for `model_factory`."""
    build = model_factory(name, num_classes=num_classes, image_size=image_size, **overrides)
    return build(rngs=nnx.Rngs(seed))
