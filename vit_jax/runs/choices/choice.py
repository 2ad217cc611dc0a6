"""One automatic setting of a run, with its reason."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """Automatic setting of one config value.

    Attributes:
      key: dotted key in the config.
      value: value of the option.
      reason: the reason for the value, in a few words.
    """

    key: str
    value: Any
    reason: str

    @property
    def flag(self) -> str:
        """The command-line flag that sets this value."""
        return (
            f"--config.{self.key}={self.value!r}" if self.value != "" else f"--config.{self.key}="
        )


def in_words(choices: Iterable[Choice], user_values: Mapping[str, Any]) -> list[str]:
    """Returns a line for each choice: the flag and the reason.

    Args:
      choices: the automatic settings.
      user_values: values that the user has set, by key. They replace the automatic settings.
    """
    rows = [
        (Choice(choice.key, user_values[choice.key], "yours").flag, "yours")
        if choice.key in user_values
        else (choice.flag, choice.reason)
        for choice in choices
    ]
    width = min(48, max((len(flag) for flag, _ in rows), default=0))
    return [f"  {flag:<{width}}  {reason}" for flag, reason in rows]
