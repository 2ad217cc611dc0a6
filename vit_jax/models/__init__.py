"""Models by their papers' names: `ViT-B/16` is size B with patches of 16 pixels.

`MODELS` lists the names; `list_models("*ViT-L/16")` shows some with their sizes. `FAMILIES` lists
the families that the names are of.
"""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Literal, overload

from flax import nnx

from vit_jax.errors import UserError, nearest
from vit_jax.models.family import Axes, Family, match_axes
from vit_jax.models.image_model import About, ImageModel
from vit_jax.models.model_card import ModelCard, abstract, count_multiply_adds, count_parameters
from vit_jax.options.model import ImageOptions, make_options
from vit_jax.options.option import options_of
from vit_jax.published.cards import all_figures
from vit_jax.published.unheld import refuse_unheld
from vit_jax.published.weights import Weights, all_weights

# The modules of this folder that hold a `FAMILY`, in the order in which their models are listed.
FAMILIES: tuple[Family, ...] = tuple(
    import_module(f"{__name__}.{module}").FAMILY
    for module in (
        "vit",
        "resnet",
        "convnext",
        "swin",
        "dall_e",
    )
)
MODELS = tuple(name for family in FAMILIES for name in family.names)


def family_of(model: ImageModel | type[ImageModel] | ImageOptions) -> Family:
    """Returns the family of a model, of a class of models, or of a model's options."""
    if isinstance(model, ImageOptions):
        return next(family for family in FAMILIES if family.model.options_type is type(model))
    kind = model if isinstance(model, type) else type(model)
    return next(family for family in FAMILIES if family.model is kind)


def parse_name(name: str) -> tuple[Family, dict]:
    """The family that a name is of, and the arguments that it stands for.

    Raises:
      UserError: no family has such a name; of published models that are not read it says what they
        have.
    """
    for family in FAMILIES:
        if (values := family.parse(name)) is not None:
            return family, values
    refuse_unheld(name)
    raise UserError(f"unknown model {name!r} (model.name); {nearest(name, MODELS)}")


def takes(name: str, argument: str) -> bool:
    """Returns True where the named model has such an argument."""
    return argument in known_arguments(parse_name(name)[0].model)


def known_arguments(model: type[ImageModel]) -> set[str]:
    """Returns the names of all arguments of a class of models."""
    return {*options_of(model.options_type)}


def logical_axes(path: str, rank: int) -> Axes | None:
    """The logical axes of a parameter of so many axes, by the end of its path, or None.

    An end of a path means the same in all families, so that an objective's layers have them too.
    """
    return match_axes((entry for family in FAMILIES for entry in family.axes), path, rank)


def is_undecayed(path: str) -> bool:
    """True for a parameter that its family keeps out of weight decay, by the end of its path."""
    return any(re.search(rf"(^|/){end}$", path) for family in FAMILIES for end in family.undecayed)


def model_options(
    name: str, *, num_classes: int, image_size: int | tuple[int, int], **overrides: Any
) -> ImageOptions:
    """Returns the options of the named model.

    Args:
      name: one of `MODELS`, or another of their pattern: any size with any patch size, any hybrid
        with any size, any BiT width.
      num_classes: width of the head; 0 for no head.
      image_size: pixels, or (height, width).
      **overrides: other fields of the family's options, in place of the name's values.

    Raises:
      UserError: the name is unknown, or the model has no such argument, or not with this value.
    """
    family, values = parse_name(name)
    known = known_arguments(family.model)
    for key in overrides:
        if key not in known:
            raise UserError(f"{name} has no argument {key!r} (model.{key}); {nearest(key, known)}")
    sizes = dict(num_classes=num_classes, image_size=image_size)
    return make_options(family.model.options_type, sizes | values | overrides)


def stored_options(options: ImageOptions) -> dict[str, Any]:
    """Returns a model's options as manifests contain them: the family's name, `class`, and all."""
    return {"class": family_of(options).name} | dataclasses.asdict(options)


def read_options(stored: Mapping[str, Any]) -> ImageOptions:
    """Returns the options that `stored_options` returned; missing ones get their defaults.

    Raises:
      UserError: there is no such family, or an option is unknown or invalid.
    """
    values = dict(stored)
    name = values.pop("class", None)
    family = next((family for family in FAMILIES if family.name == name), None)
    if family is None:
        raise UserError(f"it names no class of models, but {name!r}")
    return make_options(family.model.options_type, values)


def model_factory(
    name: str, *, num_classes: int, image_size: int | tuple[int, int], **overrides: Any
) -> Callable[..., ImageModel]:
    """Returns the function that builds the named model from `rngs=nnx.Rngs(...)`.

    Arguments as for `model_options`.
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
    """Returns the named model with random parameters; arguments as for `model_options`."""
    build = model_factory(name, num_classes=num_classes, image_size=image_size, **overrides)
    model = build(rngs=nnx.Rngs(seed))
    model.about = About(name)
    return model


class Names(tuple[str, ...]):
    """Names of models that print as their cards, one line each."""

    def __repr__(self):
        return "\n".join(str(_card_of(name)) for name in self)


class Listed(tuple[Weights, ...]):
    """Published weights that print one line each."""

    def __repr__(self):
        return "\n".join(map(str, self))


@overload
def list_models(pattern: str = "*", *, pretrained: Literal[False] = False) -> Names: ...


@overload
def list_models(pattern: str = "*", *, pretrained: Literal[True]) -> Listed: ...


def list_models(pattern: str = "*", *, pretrained: bool = False) -> Names | Listed:
    """The names that match, such as `*ViT-L/16`; shown, they are cards with sizes, costs and
    sources.

    A name without `*`, `?` or `[` may be any that `create_model` takes, as `ViT-b/16` is.

    Args:
      pretrained: in place of names the `Weights` that are published for them, which
        `load_model(name, pretrained=tag)` loads; the pattern may match the tag or the repository
        too, as `*deit*` does.

    Raises:
      UserError: such a name is of no model.
    """
    if pretrained:
        return Listed(
            found
            for found in all_weights()
            if any(
                fnmatch.fnmatchcase(text, pattern)
                for text in (found.model, found.tag, found.repository)
            )
        )
    found = Names(name for name in MODELS if fnmatch.fnmatchcase(name, pattern))
    if not found and not set("*?[") & set(pattern):
        parse_name(pattern)
        return Names([pattern])
    return found


def _card_of(name: str) -> ModelCard:
    """The same as `model_card(name)`, which is not computed for the listed models."""
    if (figures := all_figures().get(name)) is None:
        return model_card(name)
    source = parse_name(name)[0].source(name)
    return ModelCard(name=name, **figures._asdict(), image_size=(224, 224), source=source)


def model_card(
    name: str, *, num_classes: int = 1000, image_size: int | tuple[int, int] = 224, **overrides: Any
) -> ModelCard:
    """Parameters, cost and source of a model; arguments as for `model_options`. Nothing is
    allocated.
    """
    if takes(name, "scan"):
        overrides = dict(scan=True) | overrides  # One layer is traced for all.
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
