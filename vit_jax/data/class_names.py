"""Classes of a model and of a data set, or of two data sets, matched by their names."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.errors import UserError

SHOWN = 3  # Renamed classes in a note.


class Match(NamedTuple):
    """The classes of a data set among those of a model.

    Attributes:
      order: the model's class number for each class number of the data, int `[classes]`.
      note: a note for the user on the match; empty if the names are the same.
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
    named = [has_names(names) for names in (model, data)]
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


def has_names(class_names: Sequence[str]) -> bool:
    """True unless the class names are 0, 1, 2 and so on, as where a data set has only numbers."""
    return any(name != str(number) for number, name in enumerate(class_names))


def numbers_by_name(
    own: Sequence[str], class_names: Sequence[str], used: Collection[int]
) -> dict[int, int] | None:
    """Returns a data set's class numbers in another's numbering, matched by name; None for the same ones.

    Numbers stay where one of the two has no names.

    Args:
      own: class names of the data set.
      class_names: class names of the training data.
      used: classes of the data set that have an example.

    Raises:
      UserError: a used class is not among `class_names`, or a name occurs twice.
    """
    own, class_names = tuple(own), tuple(class_names)
    if own == class_names or not (has_names(own) and has_names(class_names)):
        return None
    for names in (own, class_names):
        for name, count in Counter(names).most_common(1):
            if count > 1:
                raise UserError(
                    f"classes cannot be matched by name with the training data's: {name!r} occurs twice"
                )
    number = {name: label for label, name in enumerate(class_names)}
    if unknown := [own[label] for label in sorted(used) if label < len(own) and own[label] not in number]:
        raise UserError(
            f"classes that the training data do not have: {shortened(unknown)}; training has: "
            f"{shortened(class_names)}"
        )
    return {label: number[name] for label, name in enumerate(own) if name in number}


def shortened(names: Sequence[str], most: int = 12) -> str:
    """Returns the names, or the first and last few of many."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most // 2])}, ..., {', '.join(names[-(most // 4) :])}"


def _key(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())
