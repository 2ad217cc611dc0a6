"""The values that a config can have: each one's default, type, bounds and meaning.

A file that reads values of the config declares them in a dict `OPTIONS`; `vit_jax/config.py` collects all of
them. A rule says what a single value may be, in the words of an error.
"""

import ast
import functools
import math
import operator
import re
import sys
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from pathlib import Path
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


SHARE = number(least=0, most=1)
RATE = number(least=0, below=1)
SPLIT = text(r"\S.*", "a split such as 'train' or 'train[:90%]'")


class Option(NamedTuple):
    """One value of a config, declared in the file that reads it, in a dict `OPTIONS` by its dotted key.

    Attributes:
      default: that of the paper's pre-training (section 4.1, table 3) on the embedded digits. Where it is
        None, None is allowed.
      rule: its type and bounds.
      about: what it means.
      operational: a run may go on with another one, since training does not see it.
      optional: None is allowed although the default is another.
      fits: takes the value and the whole config; says what the value must be beside the others, or nothing
        where it is so.
      needs: takes the whole config; returns the condition under which the option is read, or an empty text if
        it holds. A value that is not read and not the default is rejected.
      smoke: in a config's two-step version; None: as in the config.
    """

    default: Any
    rule: Rule
    about: str
    operational: bool = False
    optional: bool = False
    fits: Callable[[Any, Any], str] | None = None
    needs: Callable[[Any], str] | None = None
    smoke: Any = None


def unless(holds: bool, words: str) -> str:
    """The words for `Option.fits`, or nothing where the value holds."""
    return "" if holds else words


def only_with(key: str, *values: Any) -> Callable[[Any], str]:
    """Makes an `Option.needs`: the option at `key` has one of these values, or any but None, 0 and empty."""

    def missing(config: Any) -> str:
        value = functools.reduce(operator.getitem, key.split("."), config)
        words = f"{key}={' or '.join(map(repr, values))}" if values else key
        return unless(value in values if values else bool(value), f"{words}, and it is {value!r}")

    return missing


_OBJECTIVES = {"classification"}  # With all that have an option: the objectives that there are.


def of_objectives(*names: str, also: str = "") -> Callable[[Any], str]:
    """Makes an `Option.needs` of the objectives that read it; one that a program hands in may read all.

    Args:
      also: the key of an option that must not be None, 0 or empty.
    """
    _OBJECTIVES.update(names)

    def missing(config: Any) -> str:
        if config.objective.name not in _OBJECTIVES:
            return ""
        return only_with("objective.name", *names)(config) or (also and only_with(also)(config))

    return missing


class _Names(dict):
    """The names of a file, each defined when it is asked for; the file as a whole is not run."""

    def __init__(self, path: Path, tree: ast.Module):
        super().__init__(__name__=path.stem)
        self._path = path
        self._nodes = {name: node for node in tree.body for name in _defined(node)}

    def __missing__(self, name: str) -> Any:
        node = self._nodes[name]  # KeyError: Python looks among its own names.
        exec(compile(ast.Module([node], []), self._path, "exec"), self)
        return self[name]


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [
            name.id
            for target in node.targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        ]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []


def read_options(path: Path) -> dict[str, Option]:
    """The `OPTIONS` that a file of the package declares; empty where it has none.

    Only what they are made of is run, not the file: the libraries that it imports take seconds, and a
    config is read in a tenth of one. So they may use the file's constants and light imports.
    """
    text = path.read_text()
    declares = re.search(r"^OPTIONS\b", text, re.MULTILINE)
    return _Names(path, ast.parse(text))["OPTIONS"] if declares else {}
