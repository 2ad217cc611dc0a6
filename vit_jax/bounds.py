"""Rules that a single value keeps: its type and its bounds, with the words that an error says."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """A type with bounds.

    Attributes:
      kind: the type that a config declares for the value.
      words: completes "must be ...".
      holds: tells whether a value that is not None keeps the rule.
    """

    kind: type
    words: str
    holds: Callable[[Any], bool]


def whole(least: int, most: int = 2**31 - 1) -> Rule:
    """A whole number from `least` to `most`."""
    words = (
        f"a whole number, {least} or above"
        if most == 2**31 - 1
        else f"a whole number from {least} to {most:,}"
    )
    return Rule(int, words, lambda x: _is_whole(x) and least <= x <= most)


def number(
    least: float = -math.inf, most: float = math.inf, above: float = -math.inf, below: float = math.inf
) -> Rule:
    """A finite number within bounds that belong to it (`least`, `most`) or do not (`above`, `below`)."""
    low = f"{least:g} or above" if least > -math.inf else f"above {above:g}" if above > -math.inf else ""
    high = f"at most {most:g}" if most < math.inf else f"below {below:g}" if below < math.inf else ""
    words = "a finite number" + "".join(f", {part}" for part in (low, high) if part)

    def holds(x):
        return _is_number(x) and least <= x <= most and above < x < below

    return Rule(float, words, holds)


def flag() -> Rule:
    """True or False."""
    return Rule(bool, "True or False", lambda x: isinstance(x, bool))


def text(pattern: str = ".*", words: str = "a text") -> Rule:
    """A text that matches a pattern as a whole."""
    return Rule(str, words, lambda x: isinstance(x, str) and re.fullmatch(pattern, x, re.DOTALL) is not None)


def one_of(*choices: str) -> Rule:
    """One of some words."""
    return Rule(str, " or ".join(choices), lambda x: isinstance(x, str) and x in choices)


def several(
    rule: Rule,
    count: int | None = None,
    least: int = 0,
    ascending: bool = False,
    different: bool = False,
    words: str | None = None,
) -> Rule:
    """A tuple of values that keep a rule.

    Args:
      count: how many there are, exactly; else `least` or more.
      ascending: none is below the one before it.
      different: no value stands twice.
      words: in place of those made from the rule.
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
    """A value that keeps one of several rules; declared as the first one's type."""
    words = ", or ".join(rule.words for rule in rules)
    return Rule(rules[0].kind, words, lambda x: any(rule.holds(x) for rule in rules))


def _is_whole(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and abs(x) <= sys.float_info.max
