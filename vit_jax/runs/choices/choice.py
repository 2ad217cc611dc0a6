"""One automatic setting of a job, with its reason."""

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
        """The flag that sets this value on the command line."""
        return (
            f"--config.{self.key}={self.value!r}" if self.value != "" else f"--config.{self.key}="
        )


def in_words(choices: Iterable[Choice], own: Mapping[str, Any]) -> list[str]:
    """Returns a line for each choice: its flag and its reason.

    Args:
      own: the user's values by key, which replace the automatic ones.
    """
    rows = [
        (Choice(choice.key, own[choice.key], "yours").flag, "yours")
        if choice.key in own
        else (choice.flag, choice.reason)
        for choice in choices
    ]
    width = min(48, max((len(flag) for flag, _ in rows), default=0))
    return [f"  {flag:<{width}}  {reason}" for flag, reason in rows]
