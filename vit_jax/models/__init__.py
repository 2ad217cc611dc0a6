"""Models by their names in the papers: `ViT-B/16` is size B with patches of 16 pixels.

`MODELS` is a tuple of the names, and `FAMILIES` a tuple of the model families.
`list_models("*ViT-L/16")` returns the names that match a pattern. In a Python shell the result
prints a line for each model, with the model's size.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Literal, TypeVar, overload

from vit_jax.errors import UserError, nearest
from vit_jax.models.family import Axes, Family, match_axes
from vit_jax.models.host_rngs import host_rngs
from vit_jax.models.image_model import About, ImageModel
from vit_jax.models.model_card import ModelCard, abstract, count_multiply_adds, count_parameters
from vit_jax.options.model import ImageOptions, make_options
from vit_jax.options.option import options_of
from vit_jax.published.cards import all_figures
from vit_jax.published.unheld import refuse_unheld
from vit_jax.published.weights import Weights, all_weights, timm_hint

Key = TypeVar("Key")
WILDCARDS = {"*", "?", "["}

# Modules of this folder that define a `FAMILY`, in the order of `MODELS`.
FAMILIES: tuple[Family, ...] = tuple(
    import_module(f"{__name__}.{module}").FAMILY
    for module in ("vit", "resnet", "convnext", "swin", "dall_e")
)
MODELS = tuple(name for family in FAMILIES for name in family.names)


def family_of(model: ImageModel | type[ImageModel] | ImageOptions) -> Family:
    """Returns the `Family` that a model belongs to; all ViTs, for example, are one family.

    Args:
      model: a model, a model class such as `ViT`, or a model's options.
    """
    if isinstance(model, ImageOptions):
        return next(family for family in FAMILIES if family.model.options_type is type(model))
    kind = model if isinstance(model, type) else type(model)
    return next(family for family in FAMILIES if family.model is kind)


def parse_name(name: str) -> tuple[Family, dict]:
    """Returns the family of a model name, and the model arguments that the name implies.

    For example, `ViT-B/16` implies `dim=768` and `patch_size=16`.

    Raises:
      UserError: the name is unknown. For a published model that is not supported, the message lists
        the missing features.
    """
    for family in FAMILIES:
        if (values := family.parse(name)) is not None:
            return family, values
    refuse_unheld(name)
    raise UserError(
        f"unknown model {name!r} (model.name); {timm_hint(name) or nearest(name, MODELS)}"
    )


def takes(name: str, argument: str) -> bool:
    """Returns True if the model with this name has an argument named `argument`."""
    return argument in options_of(parse_name(name)[0].model.options_type)


def logical_axes(path: str, rank: int) -> Axes | None:
    """Returns the names of a parameter's axes for sharding, such as `dim` and `mlp_dim`.

    The result is None for an unknown path. All model families use the same parameter paths for the
    same layers. Therefore the function also works for the layers of training objectives.

    Args:
      path: path of the parameter, such as `blocks/00/mlp/fc1/kernel`. Only the end of the path is
        compared with the known paths.
    """
    return match_axes((entry for family in FAMILIES for entry in family.axes), path, rank)


def is_undecayed(path: str) -> bool:
    """Returns True if any model family excludes parameters with this path from weight decay."""
    return any(re.search(rf"(^|/){end}$", path) for family in FAMILIES for end in family.undecayed)


def model_options(
    name: str, *, num_classes: int, image_size: int | tuple[int, int], **overrides: Any
) -> ImageOptions:
    """Returns the options of the named model.

    Args:
      name: one of `MODELS`, or a similar name: a ViT size with any patch size, a hybrid with any
        ViT size, or a BiT with any width factor.
      num_classes: width of the head; 0: no head.
      image_size: pixels, or (height, width).
      **overrides: further options of the model; they replace the values that the name implies.

    Raises:
      UserError: the name is unknown, an override is not an argument of the model, or a value is
        invalid.
    """
    family, values = parse_name(name)
    sizes = dict(num_classes=num_classes, image_size=image_size)
    return make_options(family.model.options_type, sizes | values | overrides)


def stored_options(options: ImageOptions) -> dict[str, Any]:
    """Returns all options of a model as a dictionary, with the family's name under `class`."""
    return {"class": family_of(options).name} | dataclasses.asdict(options)


def read_options(stored: Mapping[str, Any]) -> ImageOptions:
    """Inverts `stored_options`; options that are missing in the dictionary get their defaults.

    Raises:
      UserError: the family is unknown, or an option is unknown or invalid.
    """
    values = dict(stored)
    name = values.pop("class", None)
    family = next((family for family in FAMILIES if family.name == name), None)
    if family is None:
        raise UserError(f"unknown model class {name!r}")
    return make_options(family.model.options_type, values)


def model_factory(
    name: str, *, num_classes: int, image_size: int | tuple[int, int], **overrides: Any
) -> Callable[..., ImageModel]:
    """Returns a function that builds the named model.

    The function is called as `build(rngs=nnx.Rngs(...))`. See `model_options` for the arguments.
    """
    options = model_options(name, num_classes=num_classes, image_size=image_size, **overrides)
    return partial(family_of(options).model, options)


def create_model(
    name: str,
    *,
    num_classes: int = 1000,
    image_size: int | tuple[int, int] = 224,
    seed: int = 0,
    **overrides: Any,
) -> ImageModel:
    """Returns the named model with random parameters; see `model_options` for the arguments."""
    build = model_factory(name, num_classes=num_classes, image_size=image_size, **overrides)
    model = build(rngs=host_rngs(seed))
    model.about = About(name)
    return model


class Names(tuple[str, ...]):
    """A tuple of model names. Its `repr` is a table with one line (a model card) for each model."""

    def __repr__(self):
        return "\n".join(str(_card_of(name)) for name in self)


class Listed(tuple[Weights, ...]):
    """A tuple of published weights. Its `repr` has one line for each entry."""

    def __repr__(self):
        return "\n".join(map(str, self))


@overload
def list_models(pattern: str = "*", *, pretrained: Literal[False] = False) -> Names: ...


@overload
def list_models(pattern: str = "*", *, pretrained: Literal[True]) -> Listed: ...


def list_models(pattern: str = "*", *, pretrained: bool = False) -> Names | Listed:
    """Returns the model names that match a pattern such as `*ViT-L/16`.

    The returned tuple prints as model cards, one line for each model. A pattern without `*`, `?` or
    `[` is the name of one model, and may be any name that `create_model` accepts. Case is
    ignored in patterns that match nothing otherwise.

    Args:
      pattern: pattern of model names. If `pretrained` is True, the pattern may also match the tag
        or the repository of published weights. For example, `*deit*` matches DeiT's repositories.
      pretrained: return the published `Weights` of these models instead of their names.
        `load_model(name, pretrained=tag)` loads such weights.

    Raises:
      UserError: a name without wildcards is unknown.
    """
    if pretrained:
        texts = {
            weights: (weights.model, weights.tag, weights.repository) for weights in all_weights()
        }
        return Listed(_matching(texts, pattern))
    names = Names(_matching({name: (name,) for name in MODELS}, pattern))
    if not names and not WILDCARDS & {*pattern}:
        parse_name(pattern)
        return Names([pattern])
    return names


def _matching(texts: Mapping[Key, Iterable[str]], pattern: str) -> list[Key]:
    """Returns the keys with a text that matches a pattern.

    If there is none, and the pattern has wildcards, case is ignored. Names without wildcards may
    differ only in case: `ViT-b/16` is smaller than `ViT-B/16`.
    """

    def found(change: Callable[[str], str]) -> list[Key]:
        return [
            key
            for key, names in texts.items()
            if any(fnmatch.fnmatchcase(change(name), change(pattern)) for name in names)
        ]

    return found(str) or (found(str.lower) if WILDCARDS & {*pattern} else [])


def _card_of(name: str) -> ModelCard:
    """Returns a model's card; the values of a model in `MODELS` are read from a stored table."""
    if (figures := all_figures().get(name)) is None:
        return model_card(name)
    source = parse_name(name)[0].source(name)
    return ModelCard(name=name, **figures._asdict(), image_size=(224, 224), source=source)


def model_card(
    name: str, *, num_classes: int = 1000, image_size: int | tuple[int, int] = 224, **overrides: Any
) -> ModelCard:
    """Returns a model's sizes, multiply-adds and the publication that introduced the model.

    The parameters are counted without allocating them. See `model_options` for the arguments.
    """
    if takes(name, "scan"):
        # A scan traces one layer only.
        overrides = dict(scan=True) | overrides
    model = abstract(
        model_factory(name, num_classes=num_classes, image_size=image_size, **overrides)
    )
    return ModelCard(
        name=name,
        parameters=count_parameters(model),
        multiply_adds=count_multiply_adds(model),
        tokens=getattr(model, "tokens", None),
        image_size=model.image_size,
        source=parse_name(name)[0].source(name),
    )
