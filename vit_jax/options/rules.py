"""Rules for single values: a type, a check of its bounds, and words for the error message."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """The type of a value with its bounds."""

    kind: type  # The declared type of the value.
    words: str  # Description of valid values, which completes "must be ..." in error messages.
    # Called with a value that is not None; returns True if it is valid.
    holds: Callable[[Any], bool]


def whole(least: int, most: int = 2**31 - 1) -> Rule:
    """Returns the rule for a whole number from `least` to `most`."""
    words = f"a whole number from {least} to {most:,}"
    if most == 2**31 - 1:
        words = f"a whole number, {least} or above"
    return Rule(int, words, lambda x: _is_whole(x) and least <= x <= most)


def number(
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> Rule:
    """Returns the rule for a number: `least`, `most` inclusive, `above`, `below` exclusive."""
    words = "a finite number"
    if least > -math.inf:
        words += f", {least:g} or above"
    elif above > -math.inf:
        words += f", above {above:g}"
    if most < math.inf:
        words += f", at most {most:g}"
    elif below < math.inf:
        words += f", below {below:g}"

    def holds(x):
        return _is_number(x) and least <= x <= most and above < x < below

    return Rule(float, words, holds)


def flag() -> Rule:
    """Returns the rule for True or False."""
    return Rule(bool, "True or False", lambda x: isinstance(x, bool))


def text(pattern: str = ".*", words: str = "a text") -> Rule:
    """Returns the rule for a string that fully matches a pattern."""
    return Rule(
        str, words, lambda x: isinstance(x, str) and re.fullmatch(pattern, x, re.DOTALL) is not None
    )


def one_of(*choices: str) -> Rule:
    """Returns the rule for one of several strings."""
    return Rule(str, " or ".join(choices), lambda x: isinstance(x, str) and x in choices)


def several(
    rule: Rule,
    count: int | None = None,
    least: int = 0,
    ascending: bool = False,
    different: bool = False,
    words: str | None = None,
) -> Rule:
    """Returns the rule for a tuple of valid values.

    Args:
      rule: rule for each value.
      count: exact length; None: `least` or more.
      ascending: no value is below the previous one.
      different: no value is repeated.
      words: replaces the generated words.
    """

    def holds(x):
        if not isinstance(x, Sequence) or isinstance(x, str | bytes) or not all(map(rule.holds, x)):
            return False
        right_count = len(x) == count if count is not None else len(x) >= least
        in_order = not ascending or list(x) == sorted(x)
        return right_count and in_order and not (different and len(set(x)) < len(x))

    amount = f"{count}" if count is not None else f"{least} or more" if least else "any number of"
    many = f"a tuple of {amount} values"
    order = ", ascending" if ascending else ", all different" if different else ""
    return Rule(tuple, words or f"{many}{order}, each {rule.words}", holds)


def either(*rules: Rule) -> Rule:
    """Returns the rule for a value valid under any of the rules; its type is the first one's."""
    words = ", or ".join(rule.words for rule in rules)
    return Rule(rules[0].kind, words, lambda x: any(rule.holds(x) for rule in rules))


def or_none(rule: Rule) -> Rule:
    """Returns the rule that accepts None, too."""
    return rule._replace(holds=lambda x: x is None or rule.holds(x))


def _is_whole(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


SHARE = number(least=0, most=1)
RATE = number(least=0, below=1)
SPLIT = text(r"\S.*", "a split such as 'train' or 'train[:90%]'")
