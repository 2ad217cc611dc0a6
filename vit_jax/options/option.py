"""Options: fields of frozen dataclasses, each with default, rule and help text."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, dataclass_transform

from vit_jax.options.rules import Rule

_OPTION, _SECTION, _REQUIRES = "option", "section", "requires"  # Keys in a field's metadata.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one value of a config.

    Attributes:
      default: default value. The defaults of all options are those of the paper's pre-training
        (section 4.1, table 3), on the embedded digits. If the default is None, None is a valid
        value.
      rule: type and bounds of the value.
      help: description of the option.
      operational: the value may change when a run is resumed, because training does not depend on
        it.
      optional: None is a valid value although it is not the default.
      validate: function that compares the value with other values of the config. It returns words
        that complete "must be ...", or an empty string if the value is valid.
      requires: function that checks whether a config uses the option. It returns the condition that
        is not met, or an empty string if the option is used. An option that is not used must have
        its default value.
      smoke: value in the version `:smoke` of a config, which trains for two steps. None: the value
        does not change.
    """

    default: Any
    rule: Rule
    help: str
    operational: bool = False
    optional: bool = False
    validate: Callable[[Any, Any], str] | None = None
    requires: Callable[[Any], str] | None = None
    smoke: Any = None


def option(default: Any, rule: Rule, help: str, **properties: Any) -> Any:
    """Returns a dataclass field for one value. The arguments are attributes of `Option`."""
    declared = Option(default=default, rule=rule, help=help, **properties)
    return dataclasses.field(default=default, metadata={_OPTION: declared})


def section(kind: type, requires: Callable[[Any], str] | None = None) -> Any:
    """Returns a field for a nested section, whose options share the attribute `requires`."""
    metadata = {_SECTION: kind, _REQUIRES: requires}
    return dataclasses.field(default_factory=kind, metadata=metadata)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, section))
def options(kind: type) -> type:
    """Converts a class of options to a frozen dataclass with keyword-only fields.

    The section `Attributes` of its docstring is generated from the fields' help texts and defaults.
    """
    made = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
    lines = [_described(field) for field in dataclasses.fields(made) if _OPTION in field.metadata]
    made.__doc__ = "\n".join([f"{made.__doc__}\n\nAttributes:", *lines])
    return made


def _described(field: dataclasses.Field) -> str:
    """Returns the line of a docstring that describes an option."""
    default = "" if field.default is dataclasses.MISSING else f" Default: {field.default!r}."
    return f"  {field.name}: {field.metadata[_OPTION].help}{default}"


def title_of(kind: type) -> str:
    """Returns the first line of a class's docstring."""
    return (kind.__doc__ or "").partition("\n")[0]


def options_of(kind: type) -> dict[str, Option]:
    """Returns the options of a class, without its sections, by name."""
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata[_OPTION] for field in fields if _OPTION in field.metadata}


def sections_of(kind: type) -> dict[str, type]:
    """Returns the classes of a class's sections, by name."""
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata[_SECTION] for field in fields if _SECTION in field.metadata}


def all_options(kind: type) -> Iterator[tuple[str, Option]]:
    """Yields (dotted key, option) for each option of a class, including those of its sections."""
    yield from options_of(kind).items()
    for field in dataclasses.fields(kind):
        if _SECTION in field.metadata:
            for key, nested in all_options(field.metadata[_SECTION]):
                yield f"{field.name}.{key}", _in_section(nested, field.metadata[_REQUIRES])


def _in_section(declared: Option, condition: Callable[[Any], str] | None) -> Option:
    """Returns a copy of an option that is used and validated only if its section is used."""
    if condition is None:
        return declared

    def requires(config: Any) -> str:
        return condition(config) or (declared.requires(config) if declared.requires else "")

    def validate(value: Any, config: Any) -> str:
        return declared.validate(value, config) if not condition(config) else ""

    return dataclasses.replace(
        declared, requires=requires, validate=validate if declared.validate else None
    )


def unless(holds: bool, words: str) -> str:
    """Returns an empty string if the value is valid (`holds`), else the words."""
    return "" if holds else words


def only_with(key: str, *values: Any) -> Callable[[Any], str]:
    """Returns an `Option.requires`: the option at `key` must have one of these values.

    Without values it must not be None, 0 or empty.
    """

    def missing(config: Any) -> str:
        value = functools.reduce(getattr, key.split("."), config)
        words = f"{key}={' or '.join(map(repr, values))}" if values else key
        return unless(value in values if values else bool(value), f"{words}, and it is {value!r}")

    return missing
