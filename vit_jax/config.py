"""Configs of training runs. Their values are the options in `vit_jax.options`.

A file in `configs/` calls `base_config()`, changes values for its experiment, and returns the
config through `choose(config, argument)`. docs/config.md lists all values. An unknown key raises
an error.
"""

import dataclasses
import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from vit_jax.errors import UserError, nearest
from vit_jax.options.objective import OBJECTIVE_NAMES
from vit_jax.options.option import Option, all_options, sections_of, title_of
from vit_jax.options.run import RunOptions

if TYPE_CHECKING:
    from vit_jax.config_types import TypedConfig

# All options of a config by dotted key, and the title of each section. The section "" is the top
# level.
VALUES: dict[str, Option] = dict(all_options(RunOptions))
SECTIONS = {
    name: title_of(kind) for name, kind in {"": RunOptions, **sections_of(RunOptions)}.items()
}

# Values that may change when a run is resumed, because they do not affect the result of training.
OPERATIONAL = {key for key, value in VALUES.items() if value.operational}


# Name of an attribute that a config and each of its sections have: the keys set by the user.
_GIVEN = "_given"

# Maps the old key of a renamed value to the new key (CHANGELOG.md). Not listed are options that
# only moved from the section `objective` to the section of one objective: `_new_names` finds them
# by their names.
RENAMED = {
    "model.deviation": "model.std",
    "model.head_deviation": "model.head_std",
    "model.hidden": "model.mlp_dim",
    "objective.distillation": "distillation.kind",
    "objective.distillation_share": "distillation.teacher_weight",
    "objective.distillation_temperature": "distillation.temperature",
    "objective.code_temperature": "dvae.temperature",
    "objective.code_temperature_end": "dvae.temperature_end",
    "objective.code_temperature_steps": "dvae.temperature_steps",
    "objective.divergence_weight": "dvae.kl_weight",
    "objective.divergence_steps": "dvae.kl_steps",
}


class ConfigMistake(UserError, AttributeError, KeyError, TypeError):
    """Error: a config key is unknown, or a value has the wrong type."""

    def __str__(self):
        return self.args[0]  # `KeyError.__str__` would put the message in quotes.


class Config(ConfigDict):
    """A config, or a section of a config. Error messages are one line and name the nearest key."""

    def __getitem__(self, key: str) -> Any:
        try:
            return super().__getitem__(key)
        except KeyError:
            raise ConfigMistake(unknown_key(self._dotted(key))) from None

    def __setitem__(self, key: str, value: Any) -> None:
        try:
            super().__setitem__(key, value)
        except KeyError:
            raise ConfigMistake(unknown_key(self._dotted(key))) from None
        except TypeError:
            raise ConfigMistake(self._wrong_type(self._dotted(key), value)) from None
        self.__dict__.setdefault(_GIVEN, set()).add(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python and libraries test whether such attributes exist.
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except AttributeError as error:
            raise error.args[0] if isinstance(error.args[0], ConfigMistake) else error from None

    def copy_and_resolve_references(
        self, visit_map: dict[int, ConfigDict] | None = None
    ) -> "Config":
        """Returns a copy in which references (`FieldReference`) are replaced by their values.

        The copy keeps the record of the keys that the user has set.
        """
        copied = super().copy_and_resolve_references(visit_map)
        copied.__dict__[_GIVEN] = {*self.__dict__.get(_GIVEN, ())}
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__[_GIVEN] = {*state.get(_GIVEN, ())}

    def update_from_flattened_dict(
        self, flattened_dict: Mapping[str, Any], strip_prefix: str = ""
    ) -> None:
        """Sets values by their dotted keys, such as `optimizer.learning_rate`."""
        try:
            super().update_from_flattened_dict(flattened_dict, strip_prefix)
        except ConfigMistake:
            raise
        except KeyError:  # A section does not exist.
            keys = (self._dotted(key.removeprefix(strip_prefix)) for key in flattened_dict)
            raise ConfigMistake(
                unknown_key(next(key for key in keys if key not in VALUES))
            ) from None

    def _dotted(self, key: str) -> str:
        """Returns the dotted form of a key of this section: `optimizer.clip_norm` for `clip_norm`.

        A section does not store its own name. The name is found by the section's set of keys. Keys
        of the top level do not change.
        """
        names = {*self.keys()}
        section = next(
            (section for section in SECTIONS if section and names == _names(section)), ""
        )
        return f"{section}.{key}" if section else key

    def _wrong_type(self, key: str, value: Any) -> str:
        if key in VALUES:
            option = VALUES[key]
            none = "None or " if option.default is None or option.optional else ""
            return f"config.{key} is {value!r} and must be {none}{option.rule.words}"
        return (
            f"config.{key} is a section, not a value: set config.{key}.{min(_names(key))} or "
            "others of it"
        )


def given_keys(config: ConfigDict) -> set[str]:
    """Returns the dotted keys of values that the user has set.

    These are all keys that were set after the config's file or `base_config` returned.
    """
    keys = set()
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            keys |= {f"{key}.{name}" for name in given_keys(value)}
        elif key in config.__dict__.get(_GIVEN, ()):
            keys.add(key)
    return keys


def as_made(config: ConfigDict) -> None:
    """Marks all values as not set by the user. Called when a config's file returns the config."""
    config.__dict__.pop(_GIVEN, None)
    for value in config.values():
        if isinstance(value, ConfigDict):
            as_made(value)


def _names(section: str) -> set[str]:
    return {key.rpartition(".")[2] for key in VALUES if key.rpartition(".")[0] == section}


def base_config() -> "TypedConfig":
    """Returns a config with default values. It is locked: unknown keys raise an error."""
    config = Config()
    for key, value in VALUES.items():
        *parts, name = key.split(".")
        part = config
        for inner in parts:
            if inner not in part:
                part[inner] = Config()
            part = part[inner]
        part[name] = placeholder(value.rule.kind) if value.default is None else value.default
    as_made(config)
    return cast("TypedConfig", config.lock())


# Names of config arguments that must be whole numbers: `steps` in `composed:steps=100`.
WHOLE_NUMBERS = {"decoder", "epochs", "images", "side", "size", "steps", "window"}


def named_values(argument: str | None, **defaults: str) -> tuple[dict[str, str], str]:
    """Splits the argument of a config, such as `model=ViT-S/16,smoke`.

    Args:
      defaults: all allowed names with their default values.

    Returns:
      The values by name, and the part without `name=value`, such as `smoke`, for `choose`.

    Raises:
      UserError: a name is unknown, or a value is not a whole number where it must be one.
    """
    values, rest = dict(defaults), []
    for part in (argument or "").split(","):
        name, equals, value = part.partition("=")
        if not equals:
            rest.append(part)
        elif name not in defaults:
            raise UserError(f"unknown config argument {name!r}; {nearest(name, defaults)}")
        elif name in WHOLE_NUMBERS and value and not value.isdecimal():
            raise UserError(f"the config argument {name}={value} must be a whole number")
        else:
            values[name] = value
    return values, ",".join(rest)


def chosen_teacher(named: str, argument: str | None, default: str | None = None) -> str | None:
    """Returns the checkpoint of the teacher model for a config with a teacher.

    Args:
      named: the teacher that the user has named; empty: not named.
      argument: text after the colon in `--config=FILE.py:ARGUMENT`. If it is `smoke` and the user
        has named no teacher, the teacher is `random`.
      default: the teacher in all other cases.
    """
    return named or ("random" if argument == "smoke" else default)


def choose(config: ConfigDict, argument: str | None) -> ConfigDict:
    """Returns the config. The argument `smoke` changes it to two steps on synthetic images."""
    if not argument:
        return config
    if argument != "smoke":
        raise UserError(f"unknown config argument {argument!r}; supported: smoke")
    from vit_jax.models import parse_name  # It imports JAX, which would slow down `--help`.

    config.update(dict(steps=2, batch_size=16, log_every=1, evaluate_every=2))
    config.model.name = config.model.name or "ViT-B/16"
    config.checkpoint.every = 2
    # Few-shot, k-NN and suite evaluations are disabled, because their data sets may be missing.
    config.fewshot.every = config.knn.every = 0
    config.evaluate.suites = ()
    family, values = parse_name(config.model.name)
    chosen = {
        name: value for name, value in config.model.items() if value is not None and name != "name"
    }
    small = family.smallest(values | chosen)
    size = small.pop("image_size")
    config.model.update(small)
    config.data.update(dict(source="synthetic", image_size=size, test_resize=size * 5 // 4))
    config.data.update(
        dict(train_split="train", test_split="test", dev_split=config.data.dev_split and "dev")
    )
    config.data.num_classes = 10
    config.dino.local_size = size // 2
    config.optimizer.warmup_steps = 1
    smaller = {key: option.smoke for key, option in VALUES.items() if option.smoke is not None}
    config.update_from_flattened_dict(smaller)
    needless = unread(run_options(config))
    config.update_from_flattened_dict({key: VALUES[key].default for key in needless})
    return config


def unknown_key(key: str) -> str:
    """Returns the error message for an unknown key, such as `optimizer.lr`."""
    if not isinstance(key, str):
        return (
            f"config key {key!r} is of type {type(key).__name__}, and must be a string such as "
            "'steps'"
        )
    bare = key.removeprefix("config.")
    if bare in VALUES:
        return f"unknown config key {key!r}; did you mean {bare!r}?"
    if new := _new_names(bare):
        return f"unknown config key {key!r}: it is now {' or '.join(map(repr, new))}"
    if key in SECTIONS:
        first = next(known for known in VALUES if known.startswith(f"{key}."))
        return (
            f"config key {key!r} is a section: give each of its values by itself, such as {first!r}"
        )
    return f"unknown config key {key!r}; {_similar_keys(key)}"


def _similar_keys(key: str) -> str:
    """Returns a text with keys similar to an unknown key, for an error message."""
    section, _, name = key.rpartition(".")
    if section:
        inside = [key.rpartition(".")[2] for key in VALUES if key.startswith(f"{section}.")]
        if inside:
            return f"in config.{section}: {nearest(name, inside)}"
        if close := difflib.get_close_matches(section, SECTIONS, n=1):
            right = f"{close[0]}.{name}"
            return f"did you mean {(right if right in VALUES else close[0])!r}?"
    known = [*VALUES, *SECTIONS, *(key.rpartition(".")[2] for key in VALUES)]
    if close := difflib.get_close_matches(key, known, n=1):
        return f"did you mean {close[0]!r}?"
    return "docs/config.md lists all of them"


def _new_names(key: str) -> list[str]:
    """Returns the new names of a key that was renamed or moved."""
    if key in RENAMED:
        return [RENAMED[key]]
    section, _, name = key.partition(".")
    moved = [f"{objective}.{name}" for objective in OBJECTIVE_NAMES if section == "objective"]
    return [new for new in moved if new in VALUES]


def check_values(values: Mapping[str, Any]) -> None:
    """Raises UserError if dotted keys are unknown or missing, or if a value is out of bounds."""
    for key in values.keys() - VALUES.keys():
        raise UserError(unknown_key(key))
    for key in VALUES.keys() - values.keys():
        raise UserError(
            f"config key {key!r} is missing: start the config from vit_jax.config.base_config()"
        )
    for key, value in VALUES.items():
        if values[key] is None:
            _require(value.default is None or value.optional, key, None, value.rule.words)
        else:
            _require(value.rule.holds(values[key]), key, values[key], value.rule.words)


def check(
    config: ConfigDict, handed_in: bool = False, file: ConfigDict | None = None
) -> RunOptions:
    """Checks a config, and returns it as typed options.

    Args:
      handed_in: True: a program has passed its own objective class, which may use the options of
        all objectives.
      file: the config as its file has returned it, before changes by the user. If such a change
        makes an unchanged value of the file ineffective, no error is raised. None: the config is
        not from a file.

    Raises:
      UserError: a key is unknown, a value is invalid, or a changed value has no effect.
    """
    check_values(dict(leaves(config)))
    options = run_options(config)
    check_options(options, handed_in, file and run_options(file))
    return options


def check_options(
    options: RunOptions, handed_in: bool = False, file: RunOptions | None = None
) -> None:
    """Raises UserError for values that are inconsistent, and for changed values without effect.

    Args:
      options: options whose values `check_values` has accepted.
      handed_in: True: a program has passed its own objective class, which may use the options of
        all objectives.
      file: the options as the config's file has returned them. An ineffective value of the file
        is accepted if the user has not changed it. None: the config is not from a file.
    """
    for key in VALUES:
        check_fits(options, key)
    values = dict(leaves(options))
    in_file = {} if file is None else dict(leaves(file))
    unread_in_file = {} if file is None else unread(file)
    for key, needs in unread(options).items():
        value = values[key]
        kept = key in in_file and key not in unread_in_file and in_file[key] == value
        of_objective = key.split(".")[0] in ("objective", *OBJECTIVE_NAMES)
        if not (kept or (handed_in and of_objective)):
            raise UserError(
                f"config.{key} is {value!r}, which has no effect in this run: it needs {needs}; "
                f"otherwise leave it at {VALUES[key].default!r}"
            )


def unread(options: RunOptions) -> dict[str, str]:
    """Finds values that differ from their defaults, but have no effect.

    Returns:
      For each such value, by dotted key: the condition under which it would have an effect.
    """
    changed = [key for key, value in leaves(options) if value != VALUES[key].default]
    needed = {key: needs(options) for key in changed if (needs := VALUES[key].requires)}
    return {key: words for key, words in needed.items() if words}


def check_fits(options: RunOptions, key: str) -> None:
    """Raises UserError if a value is inconsistent with other options."""
    if validate := VALUES[key].validate:
        value = value_at(options, key)
        words = validate(value, options)
        _require(not words, key, value, words)


def leaves(config: ConfigDict | RunOptions) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for all values of a config or of typed options."""
    items = config.items() if isinstance(config, ConfigDict) else vars(config).items()
    for key, value in items:
        if isinstance(value, ConfigDict) or dataclasses.is_dataclass(value):
            yield from ((f"{key}.{name}", inner) for name, inner in leaves(value))
        else:
            yield key, value


def value_at(options: RunOptions, key: str) -> Any:
    """Returns the value with a dotted key, such as `optimizer.learning_rate`."""
    return functools.reduce(getattr, key.split("."), options)


def run_options(config: ConfigDict) -> RunOptions:
    """Converts a config to typed options, `RunOptions`."""

    def converted(kind: type, section: ConfigDict) -> Any:
        sections, values = sections_of(kind), {}
        for name, value in section.items():
            if name in sections:
                value = converted(sections[name], value)
            elif isinstance(value, list):  # JSON has lists in place of tuples.
                value = tuple(value)
            values[name] = value
        return kind(**values)

    return converted(RunOptions, config)


def with_values(options: RunOptions, values: Mapping[str, Any]) -> RunOptions:
    """Returns options with other values, which are given by their dotted keys."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    top = sections.pop("", {})
    changed = {
        section: dataclasses.replace(getattr(options, section), **inner)
        for section, inner in sections.items()
    }
    return dataclasses.replace(options, **top, **changed)


def to_json(options: RunOptions) -> str:
    """Returns the options as JSON for `from_json`. The order of keys is preserved."""
    return json.dumps(dataclasses.asdict(options), indent=2)


def from_json(text: str) -> RunOptions:
    """Returns the options that `to_json` has written.

    Options that did not exist when the text was written have their defaults.

    Raises:
      ConfigMistake: a key is unknown, or a value has the wrong type.
    """
    config = base_config()
    config.update(json.loads(text))
    return run_options(config)


def differences(saved: str, options: RunOptions) -> list[str]:
    """Returns the changes that prevent a run from being resumed, each as `key: saved -> new`.

    Args:
      saved: the run's options as JSON.
    """
    earlier = from_json(saved)
    # Saved values without effect are ignored, because earlier versions accepted them.
    ignored = OPERATIONAL | unread(earlier).keys()
    old, new = dict(leaves(earlier)), dict(leaves(options))
    return [
        f"{key}: {old[key]} -> {new[key]}"
        for key in sorted(old)
        if key not in ignored and old[key] != new[key]
    ]


def _require(holds: bool, key: str, value: Any, words: str) -> None:
    if not holds:
        raise UserError(f"config.{key} is {value!r} and must be {words}")
