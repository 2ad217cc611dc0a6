"""Models by the paper's names: `ViT-B/16` is size B with patches of 16 pixels.

`MODELS` lists the names; `list_models("*L/16*")` shows some with their sizes.
"""

import fnmatch
import inspect
import re
from collections.abc import Callable
from functools import partial

from flax import nnx

from vit_jax.errors import UserError, nearest
from vit_jax.models.model_card import ModelCard, abstract, count_multiply_adds, count_parameters
from vit_jax.models.resnet import BiT
from vit_jax.models.vit import ViT

# B, L and H: table 1 of the ViT paper, b: its figure 4, with every width halved; Ti and S: "How to
# train your ViT?" (Steiner et al., 2022); the others: "Scaling Vision Transformers" (Zhai et al., 2022)
# and "Getting ViT in Shape" (Alabdulmohsin et al., 2023), by big_vision's names.
SIZES = {
    "mu": dict(dim=32, depth=1, hidden=128, heads=2),
    "Ti": dict(dim=192, depth=12, hidden=768, heads=3),
    "S": dict(dim=384, depth=12, hidden=1536, heads=6),
    "b": dict(dim=384, depth=12, hidden=1536, heads=12),
    "M": dict(dim=512, depth=12, hidden=2048, heads=8),
    "B": dict(dim=768, depth=12, hidden=3072, heads=12),
    "L": dict(dim=1024, depth=24, hidden=4096, heads=16),
    "So400m": dict(dim=1152, depth=27, hidden=4304, heads=16),
    "H": dict(dim=1280, depth=32, hidden=5120, heads=16),
    "g": dict(dim=1408, depth=40, hidden=6144, heads=16),
    "G": dict(dim=1664, depth=48, hidden=8192, heads=16),
    "e": dict(dim=1792, depth=56, hidden=15360, heads=16),
}

# The ResNet before a hybrid's Transformer, by what its name says. The number after the slash is all
# of its down-sampling, except for R+ViT-Ti/16, which patches of 8 features bring to 32.
HYBRIDS = {
    ("R50", 32): dict(resnet_blocks=(3, 4, 6, 3), patch_size=1),
    ("R50", 16): dict(resnet_blocks=(3, 4, 9), patch_size=1),
    ("R26", 32): dict(resnet_blocks=(2, 2, 2, 2), patch_size=1),
    ("R", 16): dict(resnet_blocks=(), patch_size=8),
}

BIT_BLOCKS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3), "200": (3, 24, 36, 3)}

MODELS = (
    *("ViT-mu/16", "ViT-Ti/32", "ViT-Ti/16", "ViT-Ti/8", "ViT-S/32", "ViT-S/16", "ViT-S/14", "ViT-S/8"),
    *("ViT-b/32", "ViT-M/16", "ViT-B/32", "ViT-B/16", "ViT-B/14", "ViT-B/8"),
    *("ViT-L/32", "ViT-L/16", "ViT-L/14", "ViT-So400m/14", "ViT-H/32", "ViT-H/16", "ViT-H/14"),
    *("ViT-g/16", "ViT-g/14", "ViT-G/16", "ViT-G/14", "ViT-e/14"),
    *("R50+ViT-B/32", "R50+ViT-B/16", "R50+ViT-L/32", "R50+ViT-L/16"),
    *("R+ViT-Ti/16", "R26+ViT-S/32", "R26+ViT-B/32"),
    *(f"BiT-{name}" for name in ("R50x1", "R50x2", "R50x3", "R101x1", "R101x3")),
    *(f"BiT-{name}" for name in ("R152x1", "R152x2", "R152x4", "R200x3")),
    *("Axial-ViT-B/32", "Axial-ViT-B/16", "AxialResNet50"),
)

_SOURCES = {
    "paper": "Dosovitskiy et al., 2021 (ViT)",
    "augreg": "Steiner et al., 2022 (AugReg)",
    "scaling": "Zhai et al., 2022 (Scaling ViT)",
    "shape": "Alabdulmohsin et al., 2023 (SoViT)",
    "bit": "Kolesnikov et al., 2020 (BiT)",
}


def model_factory(
    name: str, *, num_classes: int, image_size: int | tuple[int, int], **overrides
) -> Callable[..., nnx.Module]:
    """What builds the named model when it is called with `rngs=nnx.Rngs(...)`.

    Args:
      name: one of `MODELS`, or another of their pattern: any size of `SIZES` with any patch size,
        any hybrid of `HYBRIDS` with any size, any BiT width.
      num_classes: width of the head; 0 for no head.
      image_size: pixels, or (height, width).
      **overrides: any other argument of `ViT` or `BiT`, over what the name says.

    Raises:
      UserError: an unknown name, or an argument that the model does not have.
    """
    model, values = _parse(name)
    known = inspect.signature(model.__init__).parameters.keys() - {"self", "rngs"}
    for key in overrides:
        if key not in known:
            raise UserError(f"{name} has no argument {key!r} (model.{key}); {nearest(key, known)}")
    return partial(model, num_classes=num_classes, image_size=image_size, **(values | overrides))


def create_model(
    name: str, *, num_classes: int = 1000, image_size=224, seed: int = 0, **overrides
) -> nnx.Module:
    """The named model with freshly initialised parameters; arguments as for `model_factory`."""
    build = model_factory(name, num_classes=num_classes, image_size=image_size, **overrides)
    return build(rngs=nnx.Rngs(seed))


class Names(tuple):
    """Names of models that print as their cards, one line each."""

    def __repr__(self):
        return "\n".join(str(model_card(name)) for name in self)


def list_models(pattern: str = "*") -> Names:
    """The names that match, such as `*L/16*`; shown, they are cards with sizes, costs and sources."""
    return Names(name for name in MODELS if fnmatch.fnmatchcase(name, pattern))


def model_card(name: str, *, num_classes: int = 1000, image_size=224, **overrides) -> ModelCard:
    """Parameters, cost and source of a model; arguments as for `model_factory`. Nothing is allocated."""
    model = abstract(model_factory(name, num_classes=num_classes, image_size=image_size, **overrides))
    return ModelCard(
        name=name,
        parameters=count_parameters(model),
        multiply_adds=count_multiply_adds(model),
        tokens=getattr(model, "tokens", None),
        image_size=model.image_size,
        source=_source(name),
    )


def _parse(name: str) -> tuple[type, dict]:
    """The class that a name stands for, and its arguments."""
    vit = re.fullmatch(r"(Axial-)?(?:(R\d*)\+)?ViT-(\w+)/(\d+)", name)
    bit = re.fullmatch(r"BiT-R(\d+)x([1-9]\d*)", name)
    if vit and vit[3] in SIZES and int(vit[4]):
        axial, resnet, size, patch = vit[1], vit[2], vit[3], int(vit[4])
        trunk = HYBRIDS.get((resnet, patch)) if resnet else dict(patch_size=patch)
        if trunk and not (axial and resnet):
            return ViT, SIZES[size] | trunk | (dict(attention="axial", pooling="gap") if axial else {})
    elif bit and bit[1] in BIT_BLOCKS:
        return BiT, dict(resnet_blocks=BIT_BLOCKS[bit[1]], resnet_width=int(bit[2]))
    elif name == "AxialResNet50":
        return BiT, dict(resnet_blocks=BIT_BLOCKS["50"], axial=True)
    raise UserError(f"unknown model {name!r} (model.name); {nearest(name, MODELS)}")


def _source(name: str) -> str:
    if name.startswith("BiT"):
        return _SOURCES["bit"]
    if name.startswith(("R+", "R26")) or re.match(r"ViT-(Ti|S)/", name):
        return _SOURCES["augreg"]
    if name.startswith("ViT-So400m"):
        return _SOURCES["shape"]
    if re.match(r"ViT-(mu|M|g|G|e)/", name):
        return _SOURCES["scaling"]
    return _SOURCES["paper"]
