"""A value that a job chooses by itself, with its reason."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """A value of the config that was chosen.

    Attributes:
      key: of the config, dotted.
      value: of the option.
      reason: the reason for the value, in a few words.
    """

    key: str
    value: Any
    reason: str

    @property
    def flag(self) -> str:
        """The flag that gives this value on the command line."""
        return (
            f"--config.{self.key}={self.value!r}" if self.value != "" else f"--config.{self.key}="
        )


def in_words(choices: Iterable[Choice], own: Mapping[str, Any]) -> list[str]:
    """Returns a line for each choice: its flag and its reason.

    Args:
      own: the user's values by key, which hold in place of what was chosen.
    """
    rows = [
        (Choice(choice.key, own[choice.key], "yours").flag, "yours")
        if choice.key in own
        else (choice.flag, choice.reason)
        for choice in choices
    ]
    width = min(48, max((len(flag) for flag, _ in rows), default=0))
    return [f"  {flag:<{width}}  {reason}" for flag, reason in rows]
