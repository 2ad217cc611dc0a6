"""Automatic settings of a run, with their reasons."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from vit_jax.config import with_values
from vit_jax.options.run import RunOptions


class Choice(NamedTuple):
    """Automatic setting of one config value."""

    key: str  # Dotted key in the config.
    value: Any  # Value of the option.
    reason: str  # The reason for the value, in a few words.

    @property
    def flag(self) -> str:
        """The command-line flag that sets this value."""
        return f"--config.{self.key}=" + ("" if self.value == "" else f"{self.value!r}")


class Settings:
    """Options of a run, to which automatic settings are added one after the other.

    A later setting can depend on earlier settings, which are then in `options`.

    Args:
      options: options as the user and the config's file have set them, with `data.path`.
      user_keys: keys of the values that the user has set. They keep the user's values, except
        `data.path`, which a more specific path may replace.

    Attributes:
      options: the options with all settings that were added.
      choices: the added settings, including those that the user's values replace.
    """

    def __init__(self, options: RunOptions, user_keys: Collection[str]):
        self.options, self.choices = options, []
        self.user_keys = {*user_keys} - {"data.path"}

    def add(self, choices: Iterable[Choice]) -> None:
        """Adds automatic settings."""
        self.choices += choices
        free = {one.key: one.value for one in choices if one.key not in self.user_keys}
        self.options = with_values(self.options, free)


def in_words(choices: Iterable[Choice], user_values: Mapping[str, Any]) -> list[str]:
    """Returns a line with flag and reason for each choice, or the user's value in its place."""
    rows = [
        (Choice(choice.key, user_values[choice.key], "yours").flag, "yours")
        if choice.key in user_values
        else (choice.flag, choice.reason)
        for choice in choices
    ]
    width = min(48, max((len(flag) for flag, _ in rows), default=0))
    return [f"  {flag:<{width}}  {reason}" for flag, reason in rows]
