"""Classes of a model and of a data set, or of two data sets, matched by their names."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError

SHOWN = 3  # Renamed classes in a note.


class Match(NamedTuple):
    """The classes of a data set among those of a model.

    Attributes:
      order: by the data's number of a class the model's, int `[classes]`.
      note: what somebody should check about the match, in words; empty where the names are the same.
    """

    order: np.ndarray
    note: str = ""

    @property
    def reordered(self) -> bool:
        """Classes have other numbers in the data than in the model."""
        return not np.array_equal(self.order, np.arange(len(self.order)))


def match_classes(model: Sequence[str], data: Sequence[str], place: str) -> Match:
    """Matches the classes of a model with as many of a data set, by their names.

    Names are compared without case, `_` and `-`. Where one side has no names, or they have none in common,
    classes are matched by number. Names that stay at their number while others do not are renamed classes.

    Args:
      model, data: names of all classes, by number; numbers or nothing where they are not known.
      place: the model, in words.

    Raises:
      UserError: some names are the same, at other numbers, and others are not.
    """
    same = np.arange(len(data))
    if tuple(model) == tuple(data):
        return Match(same)
    theirs, ours = ([_key(name) for name in names] for names in (model, data))
    number = {name: k for k, name in enumerate(theirs)}
    if len(number) == len(theirs) and sorted(theirs) == sorted(ours):
        order = np.array([number[name] for name in ours])
        by_name = f"{place} has the data's classes in another order: they are matched by name"
        return Match(order, "" if np.array_equal(order, same) else by_name)
    named = [any(name != str(k) for k, name in enumerate(names)) for names in (model, data)]
    if not any(named):
        return Match(same)
    if not all(named):
        lacks = "the data give" if named[0] else f"{place} gives"
        return Match(same, f"{lacks} no names of classes: they are matched by number")
    for k, name in enumerate(ours):
        if name != theirs[k] and name in number:
            raise UserError(
                f"the classes of {place} are not the data's: its class {k} is {model[k]!r}, of the data "
                f"{data[k]!r}, which is its class {number[name]}"
            )
    renamed = [k for k in same.tolist() if theirs[k] != ours[k]]
    pairs = ", ".join(f"{model[k]!r} is {data[k]!r} here" for k in renamed[:SHOWN])
    more = f" and {len(renamed) - SHOWN:,} more" if len(renamed) > SHOWN else ""
    return Match(same, f"{place} has other names of classes, which are matched by number: {pairs}{more}")


def _key(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())
